// packed_gemm for many rows of x: a block computes 128 rows of the weight times 64 or 128 tokens, so that each code is decoded
// for many of them.
//
// It walks the same segments of columns that packed_gemm.cu gives to its warps, one after another, with the same
// instruction and the same order of additions: a row of out has the same bits from both.
#include "cuda/device.h"
#include "gemm/packed_gemm_many.cuh"

namespace pykv {
namespace packed_gemm_many {  // not an unnamed one, whose members the compiler would report where code for sm_90a lacks

using Problem = ManyRows;
[[maybe_unused]] constexpr int kSegments = Problem::kSegments, kUnit = Problem::kUnit, kBands = Problem::kBands;
constexpr int kRows = Problem::kRows;
constexpr int kThreads = 256, kStages = 3, kPitch = Problem::kPitch;

// Warps are kBands by two: 32 rows times half of the tokens each.
template <class T, CodeKind kKind, int kTokens_>
struct Shape {
  using Element = T;
  using Code = Codes<T, kKind>;
  static constexpr bool kHasTable = kKind == CodeKind::kTable16;
  static constexpr int kTokens = kTokens_, kTiles = kTokens / 16;  // of 8 tokens, of a warp
  // A stage.  x: lines of a token, in which the 32 bytes of step j stand at place j XOR token % 4.
  static constexpr int kCodesAt = kTokens * kUnit * 2, kFactorsAt = kCodesAt + kRows / 16 * Code::kPlanes * 512;
  static constexpr int kStageBytes = kFactorsAt + FactorFeed::kBytes;
  static constexpr int kSumsOfXAt = kStages * kStageBytes;           // [2][step][token]
  static constexpr int kWholeAt = kSumsOfXAt + 2 * 4 * kTokens * 4;  // sums of all segments so far
  static constexpr int kWholeFloats = kThreads * kTiles * 8;
  static_assert(kTokens * kPitch * 4 <= kWholeAt);
  static constexpr int kSharedBytes = kWholeAt + kWholeFloats * 4;
};

// Copies what a block wants for a unit of columns to a stage; each thread has its part.
template <class S>
class Feed {
  using T = typename S::Element;
  using Code = typename S::Code;

 public:
  __device__ Feed(const Problem& p, int64_t row_tile, int64_t first_token, int64_t shift)
      : p_(p), w_(p.weight), row_tile_(row_tile), shift_(shift) {
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < kTokenRows; ++i) x_[i] = p.tokens.of_x<T>(first_token + thread / 8 + 32 * i);
    const int64_t blocks = w_.padded_n() / 16;
#pragma unroll
    for (int i = 0; i < Code::kPlanes; ++i) {
      const int part = thread / 32 + 8 * i, lane = thread % 32;
      const int64_t block = min(row_tile * (kRows / 16) + part / Code::kPlanes, blocks - 1);  // later ones: not stored
      codes_[i] = w_.codes + shift + block * (w_.padded_k / kUnit) * Code::kPlanes * 512 + part % Code::kPlanes * 512 +
                  (lane % 4 * 8 + lane / 4) * 16;
    }
  }

  __device__ void copy(uint32_t stage, int unit) const {
#pragma unroll
    for (int i = 0; i < Code::kPlanes; ++i)
      cp_async_16(stage + S::kCodesAt + (i * kThreads + threadIdx.x) * 16,
                  codes_[i] + int64_t{unit} * Code::kPlanes * 512);
    copy_x(stage, unit);
    FactorFeed::copy(p_, stage + S::kFactorsAt, row_tile_, unit, threadIdx.x % 128, threadIdx.x >= 128, shift_);
  }

 private:
  static constexpr int kTokenRows = S::kTokens / 32;

  __device__ void copy_x(uint32_t stage, int unit) const {
    const int token = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const int64_t column = int64_t{unit} * kUnit + chunk * 8;
    const uint32_t to = stage + token * 128 + ((chunk / 2 ^ token % 4) * 2 + chunk % 2) * 16;
#pragma unroll
    for (int i = 0; i < kTokenRows; ++i) {
      if (p_.whole_chunks) {
        const bool inside = x_[i] && column < w_.k;
        cp_async_16(to + i * 32 * 128, inside ? x_[i] + column : static_cast<const T*>(p_.tokens.x), inside);
      } else {
        uint32_t pairs[4];
        p_.load_one_by_one<T, 8>(pairs, x_[i], column, shift_);
        store_shared(to + i * 32 * 128, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
      }
    }
  }

  const Problem& p_;
  const PackedWeight& w_;
  const T* x_[kTokenRows];
  const uint8_t* codes_[Code::kPlanes];
  int64_t row_tile_, shift_;
};

// A warp's sums.
template <class S>
class Sums {
  using T = typename S::Element;
  using Code = typename S::Code;

 public:
  float total[2][S::kTiles][4] = {};  // over a segment; in the end over all

  __device__ Sums(const Problem& p, const uint32_t* table, uint8_t* shared, int64_t shift)
      : p_(p), w_(p.weight), table_(table), shared_(shared), whole_(reinterpret_cast<float*>(shared + S::kWholeAt)) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    band_ = warp % kBands;
    first_token_ = warp / kBands * (S::kTokens / 2);
    global_ = __ldg(reinterpret_cast<const float*>(w_.data + shift + PackedWeight::kGlobalScaleAt)) * Code::kUnit;
    x_at_ = (first_token_ + lane / 4) * 128 + lane % 4 * 8;
    step_place_ = lane / 4 % 4 * 32;
  }

  __device__ void multiply(uint32_t stage, int parity) {
    const int lane = threadIdx.x % 32;
    uint4 words[2][Code::kPlanes];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int plane = 0; plane < Code::kPlanes; ++plane)
        words[r][plane] =
            load_shared_16(stage + S::kCodesAt + ((band_ * 2 + r) * Code::kPlanes + plane) * 512 + lane * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint2 x[S::kTiles];
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) x[t] = x_of(stage, t, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t a[4];
        Code::fragment(a, words[r], j, table_);
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) mma_16x8x16<T>(sum_[r][t], a, x[t].x, x[t].y);
      }
      if (((j + 1) & (p_.steps - 1)) == 0) add_scaled(stage, parity, j + 1 - p_.steps);
    }
  }

  // Sums of x over each group of the unit, which minima multiply: the warps of a half share its tokens.
  __device__ void sum_x(uint32_t stage, int parity) const {
    constexpr uint32_t kOnes = kIsHalf<T> ? 0x3c003c00u : 0x3f803f80u;
    constexpr uint32_t kAll[4] = {kOnes, kOnes, kOnes, kOnes};
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < S::kTiles / kBands; ++i) {
      const int tile = band_ * (S::kTiles / kBands) + i;
      float sum[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2 x = x_of(stage, tile, j);
        mma_16x8x16<T>(sum, kAll, x.x, x.y);
        if (((j + 1) & (p_.steps - 1)) == 0) {
          if (lane < 4) *sums_of_x(parity, j + 1 - p_.steps, tile) = make_float2(sum[0], sum[1]);
#pragma unroll
          for (float& s : sum) s = 0.0f;
        }
      }
    }
  }

  // Adds those of a segment to those of the segments before.
  __device__ void join(int segment) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float &own = whole_[i * kThreads + threadIdx.x], &mine = of(i);
      const float sum = segment == 0 ? mine : own + mine;
      if (segment < kSegments - 1) own = sum;
      mine = segment < kSegments - 1 ? 0.0f : sum;
    }
  }

  // To [token][row], for all threads of the block.
  __device__ void store(float* to) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          to[(first_token_ + t * 8 + lane % 4 * 2 + e % 2) * kPitch + band_ * 32 + r * 16 + e / 2 * 8 + lane / 4] =
              total[r][t][e];
  }

 private:
  static constexpr int kCount = 8 * S::kTiles;

  __device__ float& of(int i) { return total[i / (4 * S::kTiles)][i / 4 % S::kTiles][i % 4]; }

  __device__ uint2 x_of(uint32_t stage, int tile, int j) const {
    return load_shared_8(stage + x_at_ + tile * 8 * 128 + (j * 32 ^ step_place_));
  }
  __device__ float2* sums_of_x(int parity, int step, int tile) const {
    auto* const sums = reinterpret_cast<float*>(shared_ + S::kSumsOfXAt);
    return reinterpret_cast<float2*>(sums + (parity * 4 + step) * S::kTokens + first_token_ + tile * 8 +
                                     threadIdx.x % 4 * 2);
  }

  __device__ void add_scaled(uint32_t stage, int parity, int step) {
    RawFactors raw;
    const uint32_t factors = stage + S::kFactorsAt, place = (band_ * 4 + step) * 128;
    const int quad = threadIdx.x % 32 / 4 * 4;
    load_four_shared(raw.scale, factors + FactorFeed::kScalesAt + place, quad, bytes_of(w_.scales_kind));
    if (w_.supers) load_super_shared(raw.super, factors + FactorFeed::kSupersAt + band_ * 64, quad);
    if (w_.minima)
      load_four_shared(raw.minimum, factors + FactorFeed::kMinimaAt + place, quad, bytes_of(w_.minima_kind));
    if (w_.lows) load_super_shared(raw.low, factors + FactorFeed::kLowsAt + band_ * 64, quad);
    float scales[4], minima[4] = {};
    scales_of(scales, raw, w_.scales_kind);
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i] *= global_;
    if (w_.minima) minima_of(minima, raw, w_.minima_kind, w_.offset, scales);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int half_row = 0; half_row < 2; ++half_row) {
        const float scale = scales[r * 2 + half_row], minimum = minima[r * 2 + half_row];
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
          for (int e = 2 * half_row; e < 2 * half_row + 2; ++e) {
            total[r][t][e] = fmaf(scale, sum_[r][t][e], total[r][t][e]);
            sum_[r][t][e] = 0.0f;
          }
        if (!w_.minima) continue;
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) {
          const float2 of_x = *sums_of_x(parity, step, t);
          total[r][t][2 * half_row] = fmaf(minimum, of_x.x, total[r][t][2 * half_row]);
          total[r][t][2 * half_row + 1] = fmaf(minimum, of_x.y, total[r][t][2 * half_row + 1]);
        }
      }
  }

  const Problem& p_;
  const PackedWeight& w_;
  const uint32_t* table_;
  uint8_t* shared_;
  float* whole_;
  float global_;
  int band_, first_token_;
  uint32_t x_at_, step_place_;
  float sum_[2][S::kTiles][4] = {};
};

template <class S>
__global__ void __launch_bounds__(kThreads, S::kTokens == 64 ? 2 : 1)
    packed_gemm_many_kernel(const __grid_constant__ Problem p) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)  // which has packed_gemm_sm90.cu
  using T = typename S::Element;
  extern __shared__ uint4 memory[];
  __shared__ uint32_t table[S::kHasTable ? 256 : 1];
  begin_dependent();
  int64_t row_tile, token_tile;
  p.place(blockIdx.x, row_tile, token_tile);
  const int32_t weight = p.weight_of(token_tile, S::kTokens);
  if (weight < 0) return;
  const int64_t shift = weight * p.tokens.map.weight_stride;
  if constexpr (S::kHasTable) {
    const auto* numbers = reinterpret_cast<const float*>(p.weight.data + shift + PackedWeight::kTableAt);
    table[threadIdx.x] = pack_pair<T>(__ldg(numbers + threadIdx.x % 16), __ldg(numbers + threadIdx.x / 16));
  }
  const int64_t first_token = token_tile * S::kTokens;
  auto* const shared = reinterpret_cast<uint8_t*>(memory);
  const uint32_t ring = shared_address(memory);
  const int units = static_cast<int>(p.weight.padded_k / kUnit);
  {
    const Feed<S> feed(p, row_tile, first_token, shift);
    Sums<S> sums(p, table, shared, shift);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < units) feed.copy(ring + s * S::kStageBytes, s);
      cp_async_commit();
    }
    const bool has_minima = p.weight.minima;
    if (has_minima) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      if (units > 0) sums.sum_x(ring, 0);
    }
    int segment = 0;
    const auto join_what_ends_at = [&](int unit) {
      for (; segment < kSegments && units * (segment + 1) / kSegments == unit; ++segment) sums.join(segment);
    };
    join_what_ends_at(0);
    uint32_t stage = ring, next = ring + S::kStageBytes, free = ring + (kStages - 1) * S::kStageBytes;
    for (int unit = 0; unit < units; ++unit) {
      if (has_minima)
        cp_async_wait<kStages - 3>();  // the next one, too
      else
        cp_async_wait<kStages - 2>();
      __syncthreads();
      if (unit + kStages - 1 < units) feed.copy(free, unit + kStages - 1);
      cp_async_commit();
      if (has_minima && unit + 1 < units) sums.sum_x(next, (unit + 1) & 1);
      sums.multiply(stage, unit & 1);
      join_what_ends_at(unit + 1);
      free = stage;
      stage = next;
      next = next == ring + (kStages - 1) * S::kStageBytes ? ring : next + S::kStageBytes;
    }
    cp_async_wait<0>();
    __syncthreads();  // all have done with the ring
    sums.store(reinterpret_cast<float*>(shared));
  }
  __syncthreads();
  p.write<T>(reinterpret_cast<const float*>(shared), row_tile * kRows, first_token, S::kTokens, kThreads, weight);
#endif
}

template <class T, CodeKind kKind, int kTokens>
void launch_shape(const PackedGemmArgs& args, const Launch& launch) {
  using S = Shape<T, kKind, kTokens>;
  with_many_rows(args, kTokens, [&](const Problem& p, dim3 blocks) {
    launch_dependent_shared(packed_gemm_many_kernel<S>, blocks, dim3(kThreads), S::kSharedBytes, launch, "packed_gemm",
                            p);
  });
}

template <class T, CodeKind kKind>
void launch_kind(const PackedGemmArgs& args, const Launch& launch, bool large) {
  if (large) return launch_shape<T, kKind, 128>(args, launch);
  launch_shape<T, kKind, 64>(args, launch);
}

int shared_bytes_of_block(int device) {
  int bytes = 0;
  cuda_check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory size");
  return bytes;
}

}  // namespace packed_gemm_many

bool packed_gemm_is_of_many(const PackedGemmArgs& args, int device) {
  using packed_gemm_many::kRows;
  if (args.map.rows) return args.map.block_size % 64 == 0;
  if (args.num_rows <= 32) return false;
  const int64_t tiles = (args.weight.n + kRows - 1) / kRows * ((args.num_rows + 63) / 64);
  return tiles * 2 >= num_sms(device) || args.num_rows >= 256;
}

void packed_gemm_many_cuda(const PackedGemmArgs& args, const Launch& launch) {
  using namespace packed_gemm_many;
  // The larger tile takes more shared memory than some GPUs have; and no multiprocessor is to be without a block.
  const int sms = num_sms(launch.device);
  const int64_t row_tiles = (args.weight.n + kRows - 1) / kRows;
  const bool fills = args.map.rows ? args.map.block_size % 128 == 0
                                   : row_tiles * ((args.num_rows + 127) / 128) * 10 >= int64_t{sms} * 9;
  const bool large = fills && shared_bytes_of_block(launch.device) >= Shape<half, CodeKind::kUint8, 128>::kSharedBytes;
  dispatch<half, bf16>(args.dtype, [&]<class T>() {
    switch (args.weight.codes_kind) {
      case CodeKind::kUint4:
        return launch_kind<T, CodeKind::kUint4>(args, launch, large);
      case CodeKind::kUint8:
        return launch_kind<T, CodeKind::kUint8>(args, launch, large);
      case CodeKind::kE4M3:
        return launch_kind<T, CodeKind::kE4M3>(args, launch, large);
      default:
        return launch_kind<T, CodeKind::kTable16>(args, launch, large);
    }
  });
}

}  // namespace pykv
