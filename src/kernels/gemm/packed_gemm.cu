// y^T = w x^T, with the weight as first operand of mma.m16n8k16: one token is padded to 8, not to 16 or 64.
//
// Eight warps of a block share 16 kBlocks rows of the weight and 8 kTiles tokens, each for an eighth of the columns: what is
// summed in which order depends on the number of columns alone.  A lane copies what it wants itself, codes and x, to a place
// of its own in a ring in shared memory, by asynchronous copies some tiles ahead, and no warp waits for another before the
// end.
#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"
#include "cuda/divider.cuh"
#include "cuda/vec.cuh"
#include "gemm/packed_codes.cuh"
#include "gemm/packed_epilogue.cuh"
#include "gemm/packed_gemm.h"
#include "gemm/packed_gemm_many.h"
#include "gemm/tile_map.cuh"

namespace pykv {
namespace packed_gemm_few {  // not an unnamed one, whose members the compiler would report where code for sm_90a lacks

constexpr int kSegments = 8, kThreads = 32 * kSegments;
[[maybe_unused]] constexpr int kUnit = PackedWeight::kUnit;
constexpr int kRingBytes = 96 << 10;  // with a table, as much as all GPUs since sm_80 have for a block

template <class T, CodeKind kKind, int kBlocks_, int kTiles_>
struct Shape {
  using Element = T;
  using Code = Codes<T, kKind>;
  static constexpr int kBlocks = kBlocks_, kTiles = kTiles_, kPairs = kBlocks / 2;
  static constexpr int kRows = 16 * kBlocks, kTokens = 8 * kTiles;
  static constexpr int kCodeBytes = 16 * kBlocks * Code::kPlanes, kXBytes = 32 * kTiles;  // of a lane and a stage
  static constexpr int kStageBytes = kThreads * (kCodeBytes + kXBytes);
  static constexpr int kMostStages = kRingBytes / kStageBytes, kStages = kMostStages > 6 ? 6 : kMostStages;
  static constexpr int kPitch = kRows + 4;  // of the totals of a token: lanes of a warp meet all banks
  static constexpr int kTotalBytes = kSegments * kTokens * kPitch * 4;
  static constexpr int kSharedBytes = kStages * kStageBytes > kTotalBytes ? kStages * kStageBytes : kTotalBytes;
  static constexpr bool kHasTable = kKind == CodeKind::kTable16, kMayAdd = is_integer(kKind);  // minima
  static_assert(kStages >= 2);
};

struct Problem {
  PackedGemmArgs a;
  Divider groups_by, tokens_by;  // columns of a group, tiles of tokens
  int steps;                     // of 16 columns that are scaled together: 1, 2 or 4
  bool whole_words;              // x: four neighbours can be copied at once
  TileRows rows;
};

// One lane's part of x: 4 columns of each of 4 steps, for a token of each tile.
template <class S>
class Tokens {
  using T = typename S::Element;

 public:
  __device__ Tokens(const Problem& p, int64_t first, int lane, int64_t shift) : p_(p), c_(lane % 4) {
    if (p.a.weight.columns)
      columns_ = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(p.a.weight.columns) + shift);
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) {
      const int64_t row = TileRows::row_of_out(p.a.map, first + t * 8 + lane / 4, p.a.num_rows);
      row_[t] = row >= 0 ? static_cast<const T*>(p.a.x) + p.rows.row_of_x(p.a.map, row) * p.a.x_stride : nullptr;
    }
  }

  // at: of the lane, in bytes of shared memory; kThreads * 8 more for each step
  __device__ void load(uint32_t at, int64_t unit) const {
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t to = at + (t * 4 + j) * kThreads * 8;
        const int64_t column = unit * kUnit + 16 * j + 4 * c_;
        if (p_.whole_words) {
          const bool inside = row_[t] && column < p_.a.weight.k;
          cp_async_small<8>(to, inside ? row_[t] + column : static_cast<const T*>(p_.a.x), inside);
        } else {
          load_one_by_one(to, row_[t], column);
        }
      }
  }

 private:
  __device__ void load_one_by_one(uint32_t to, const T* row, int64_t column) const {
    const PackedWeight& w = p_.a.weight;
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int64_t from = column + i;
      if (columns_) from = __ldg(columns_ + from);
      const bool inside = row && from >= 0 && from < w.k;
      bits[i] = inside ? __ldg(reinterpret_cast<const unsigned short*>(row) + from * p_.a.x_step) : 0;
    }
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(bits[0] | bits[1] << 16),
                 "r"(bits[2] | bits[3] << 16)
                 : "memory");
  }

  const Problem& p_;
  int c_;
  const int32_t* columns_ = nullptr;
  const T* row_[S::kTiles];
};

// A warp's sums, over its segment.
template <class S>
class Segment {
  using T = typename S::Element;
  using Code = typename S::Code;

 public:
  float total[S::kBlocks][S::kTiles][4] = {};

  // shift: bytes from p.a.weight to the one that is meant
  __device__ Segment(const Problem& p, int64_t row_tile, int64_t first_token, const uint32_t* table, uint32_t ring,
                     int64_t shift)
      : p_(p), w_(p.a.weight), table_(table), tokens_(p, first_token, threadIdx.x % 32, shift), shift_(shift) {
    const int lane = threadIdx.x % 32;
    global_ = __ldg(reinterpret_cast<const float*>(w_.data + shift + PackedWeight::kGlobalScaleAt)) * Code::kUnit;
    codes_at_ = ring + threadIdx.x * 16;
    x_at_ = ring + S::kStages * kThreads * S::kCodeBytes + threadIdx.x * 8;
    const int64_t pairs = w_.padded_n() / 32;
#pragma unroll
    for (int i = 0; i < S::kPairs; ++i) {
      const int64_t pair = min(row_tile * S::kPairs + i, pairs - 1);  // rows from there on are not stored
      factors_at_[i] = pair * w_.groups() * 32 + lane / 4 * 4;
      supers_at_[i] = pair * ((w_.padded_k + 255) / 256) * 32 + lane / 4 * 4;
      const int64_t block_bytes = w_.padded_k / kUnit * Code::kPlanes * 512;
      codes_[i] = w_.codes + shift + pair * 2 * block_bytes + (lane % 4 * 8 + lane / 4) * 16;
    }
  }

  __device__ void run() {
    const int units = static_cast<int>(w_.padded_k / kUnit), segment = threadIdx.x / 32;
    const int begin = static_cast<int>(int64_t{units} * segment / kSegments);
    const int end = static_cast<int>(int64_t{units} * (segment + 1) / kSegments);
    if (begin < end) load_next_factors(begin * kUnit);
#pragma unroll
    for (int s = 0; s < S::kStages - 1; ++s) copy(begin + s, end, s);
    int stage = 0;
    for (int unit = begin; unit < end; ++unit) {
      cp_async_wait<S::kStages - 2>();
      const int ahead = unit + S::kStages - 1;
      copy(ahead, end, stage == 0 ? S::kStages - 1 : stage - 1);
      multiply(unit, end, stage);
      if (++stage == S::kStages) stage = 0;
    }
    cp_async_wait<0>();
  }

 private:
  __device__ void copy(int unit, int end, int stage) const {
    if (unit < end) {
      const int64_t block_bytes = w_.padded_k / kUnit * Code::kPlanes * 512;
#pragma unroll
      for (int r = 0; r < S::kBlocks; ++r)
#pragma unroll
        for (int plane = 0; plane < Code::kPlanes; ++plane)
          cp_async_16_once(codes_at_ + ((stage * S::kBlocks + r) * Code::kPlanes + plane) * kThreads * 16,
                           codes_[r / 2] + r % 2 * block_bytes + (int64_t{unit} * Code::kPlanes + plane) * 512);
      tokens_.load(x_at_ + stage * kThreads * S::kXBytes, unit);
    }
    cp_async_commit();
  }

  __device__ void multiply(int unit, int end, int stage) {
    uint4 words[S::kBlocks][Code::kPlanes];
#pragma unroll
    for (int r = 0; r < S::kBlocks; ++r)
#pragma unroll
      for (int plane = 0; plane < Code::kPlanes; ++plane)
        words[r][plane] =
            load_shared_16(codes_at_ + ((stage * S::kBlocks + r) * Code::kPlanes + plane) * kThreads * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint2 x[S::kTiles];
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t)
        x[t] = load_shared_8(x_at_ + stage * kThreads * S::kXBytes + (t * 4 + j) * kThreads * 8);
#pragma unroll
      for (int r = 0; r < S::kBlocks; ++r) {
        uint32_t a[4];
        Code::fragment(a, words[r], j, table_);
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) mma_16x8x16<T>(sum_[r][t], a, x[t].x, x[t].y);
      }
      if (S::kMayAdd && w_.minima) {
        constexpr uint32_t kOnes = kIsHalf<T> ? 0x3c003c00u : 0x3f803f80u;
        constexpr uint32_t kAll[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) mma_16x8x16<T>(sum_of_x_[t], kAll, x[t].x, x[t].y);
      }
      if (((j + 1) & (p_.steps - 1)) == 0) {
        add_scaled();
        const int next = unit * kUnit + 16 * (j + 1);
        if (next < end * kUnit) load_next_factors(next);
      }
    }
  }

  __device__ void load_next_factors(int column) {
    const int64_t group = p_.groups_by.quotient(column), block = column / 256;
#pragma unroll
    for (int i = 0; i < S::kPairs; ++i) {
      load_factors_of_group(raw_[i], w_, factors_at_[i] + group * 32, shift_);
      load_factors_of_block(raw_[i], w_, supers_at_[i] + block * 32, shift_);
    }
  }

  __device__ void add_scaled() {
#pragma unroll
    for (int pair = 0; pair < S::kPairs; ++pair) {
      float scales[4], minima[4] = {};
      scales_of(scales, raw_[pair], w_.scales_kind);
#pragma unroll
      for (int i = 0; i < 4; ++i) scales[i] *= global_;
      if (S::kMayAdd && w_.minima) minima_of(minima, raw_[pair], w_.minima_kind, w_.offset, scales);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& to = total[2 * pair + i / 2][t][i % 2 * 2 + e];
            float& sum = sum_[2 * pair + i / 2][t][i % 2 * 2 + e];
            to = fmaf(scales[i], sum, to);
            if (S::kMayAdd && w_.minima) to = fmaf(minima[i], sum_of_x_[t][e], to);
            sum = 0.0f;
          }
    }
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum_of_x_[t][e] = 0.0f;
  }

  const Problem& p_;
  const PackedWeight& w_;
  const uint32_t* table_;
  Tokens<S> tokens_;
  int64_t shift_;
  float global_;
  uint32_t codes_at_, x_at_;
  const uint8_t* codes_[S::kPairs];
  int64_t factors_at_[S::kPairs], supers_at_[S::kPairs];
  RawFactors raw_[S::kPairs];
  float sum_[S::kBlocks][S::kTiles][4] = {}, sum_of_x_[S::kTiles][4] = {};
};

template <class S>
__global__ void __launch_bounds__(kThreads, S::kTiles == 1 ? 2 : 1)
    packed_gemm_kernel(const __grid_constant__ Problem p) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)  // which has packed_gemm_sm90.cu
  using T = typename S::Element;
  extern __shared__ uint4 ring[];
  __shared__ uint32_t table[S::kHasTable ? 256 : 1];
  begin_dependent();
  uint32_t token_tile;
  const uint32_t row_tile = p.tokens_by(blockIdx.x, token_tile);  // tiles of the same rows come one after another
  const int64_t first_row = int64_t{row_tile} * S::kRows, first_token = int64_t{token_tile} * S::kTokens;
  int32_t weight = 0;
  if (p.a.map.rows) {
    weight = p.a.map.weight_at(first_token, p.rows.tiles_of_block.quotient(static_cast<int>(token_tile)));
    if (weight < 0) return;
  }
  const int64_t shift = weight * p.a.map.weight_stride;
  if constexpr (S::kHasTable) {
    const auto* numbers = reinterpret_cast<const float*>(p.a.weight.data + shift + PackedWeight::kTableAt);
    table[threadIdx.x] = pack_pair<T>(__ldg(numbers + threadIdx.x % 16), __ldg(numbers + threadIdx.x / 16));
    __syncthreads();
  }
  auto* const totals = reinterpret_cast<float*>(ring);  // [segment][token][row]
  const int lane = threadIdx.x % 32;
  {
    Segment<S> segment(p, row_tile, first_token, table, shared_address(ring), shift);
    segment.run();
    __syncthreads();  // all have done with the ring
    float* const own = totals + threadIdx.x / 32 * S::kTokens * S::kPitch;
#pragma unroll
    for (int r = 0; r < S::kBlocks; ++r)
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          own[(t * 8 + lane % 4 * 2 + e % 2) * S::kPitch + r * 16 + e / 2 * 8 + lane / 4] = segment.total[r][t][e];
  }
  __syncthreads();

  const auto* const bias =
      p.a.bias ? static_cast<const T*>(p.a.bias) + weight * p.a.map.bias_stride : static_cast<const T*>(nullptr);
  if (p.a.epilogue.any) {
#pragma unroll 1
    for (int i = threadIdx.x; i < S::kTokens * S::kRows / 4; i += kThreads) {
      const int token = i / (S::kRows / 4), row = i % (S::kRows / 4) * 4;
      const int64_t at = TileRows::row_of_out(p.a.map, first_token + token, p.a.num_rows), n = first_row + row;
      if (at < 0 || n >= p.a.weight.n) continue;
      float4 sum = *reinterpret_cast<const float4*>(totals + token * S::kPitch + row);
#pragma unroll
      for (int s = 1; s < kSegments; ++s) {
        const float4 more = *reinterpret_cast<const float4*>(totals + (s * S::kTokens + token) * S::kPitch + row);
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
      }
      const int rows = static_cast<int>(min(p.a.weight.n - n, int64_t{4}));
      finish_four<T>(p.a.epilogue, bias, sum, at, n, rows, p.a.out, p.a.out_stride);
    }
    return;
  }
#pragma unroll 2
  for (int i = threadIdx.x; i < S::kTokens * S::kRows; i += kThreads) {
    const int token = i / S::kRows, row = i % S::kRows;
    const int64_t at = TileRows::row_of_out(p.a.map, first_token + token, p.a.num_rows), n = first_row + row;
    if (at < 0 || n >= p.a.weight.n) continue;
    float sum = totals[token * S::kPitch + row];
#pragma unroll
    for (int s = 1; s < kSegments; ++s) sum += totals[(s * S::kTokens + token) * S::kPitch + row];
    if (bias) sum += to_float(bias[n]);
    if (p.a.map.factors) sum *= p.a.map.factor_of(at);
    static_cast<T*>(p.a.out)[at * p.a.out_stride + n] = from_float<T>(sum);
  }
#endif
}

template <class T, CodeKind kKind, int kBlocks, int kTiles>
void launch_shape(const PackedGemmArgs& args, const Launch& launch) {
  using S = Shape<T, kKind, kBlocks, kTiles>;
  const TileMap& map = args.map;
  const int64_t token_tiles =
      map.rows ? map.num_blocks * (map.block_size / S::kTokens) : (args.num_rows + S::kTokens - 1) / S::kTokens;
  const int64_t blocks = (args.weight.n + S::kRows - 1) / S::kRows * token_tiles;
  if (blocks > INT32_MAX) fail(PYKV_VALUE_ERROR, "x: has too many rows: %lld", static_cast<long long>(args.num_rows));
  const bool whole_words = !args.weight.columns && args.x_step == 1 && args.weight.k % 4 == 0 &&
                           args.x_stride % 4 == 0 && reinterpret_cast<uintptr_t>(args.x) % 8 == 0;
  const Problem p{args,        Divider(args.weight.group_size), Divider(token_tiles), args.weight.steps_of_a_group(),
                  whole_words, TileRows(map, S::kTokens)};
  launch_dependent_shared(packed_gemm_kernel<S>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), S::kSharedBytes,
                          launch, "packed_gemm", p);
}

template <class T, CodeKind kKind>
void launch_kind(const PackedGemmArgs& args, const Launch& launch) {
  const TileMap& map = args.map;
  const int64_t tokens = map.rows ? map.block_size & -map.block_size : args.num_rows;  // of a tile
  const auto with_rows = [&]<int kBlocks>() {
    if (tokens <= 8) return launch_shape<T, kKind, kBlocks, 1>(args, launch);
    if (tokens <= 16) return launch_shape<T, kKind, kBlocks, 2>(args, launch);
    launch_shape<T, kKind, kBlocks, 4>(args, launch);
  };
  if constexpr (Codes<T, kKind>::kPlanes == 1) {
    // Higher tiles read x less often; lower ones occupy more multiprocessors.
    const int64_t rows = args.weight.n * (map.rows ? map.num_blocks : 1);
    if (rows * 10 >= int64_t{num_sms(launch.device)} * 64 * 9) return with_rows.template operator()<4>();
  }
  with_rows.template operator()<2>();
}

}  // namespace packed_gemm_few

void packed_gemm_cuda(const PackedGemmArgs& args, const Launch& launch) {
  using packed_gemm_few::launch_kind;
  if (has_warpgroups(launch.device)) return packed_gemm_sm90_cuda(args, launch);
  if (packed_gemm_is_of_many(args, launch.device)) return packed_gemm_many_cuda(args, launch);
  dispatch<half, bf16>(args.dtype, [&]<class T>() {
    switch (args.weight.codes_kind) {
      case CodeKind::kUint4:
        return launch_kind<T, CodeKind::kUint4>(args, launch);
      case CodeKind::kUint8:
        return launch_kind<T, CodeKind::kUint8>(args, launch);
      case CodeKind::kE4M3:
        return launch_kind<T, CodeKind::kE4M3>(args, launch);
      default:
        return launch_kind<T, CodeKind::kTable16>(args, launch);
    }
  });
}

}  // namespace pykv
