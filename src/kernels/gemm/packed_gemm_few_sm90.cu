// packed_gemm of up to eight tokens on Hopper, where reading the weight is all there is to wait for.
//
// A warp has 16 rows of the weight and a segment of the columns to itself: it copies stages of 128 columns, codes and factors as they
// are stored, into a ring of its own in shared memory, some stages ahead, and waits for nobody.  So all SMs have the same number of
// warps, whatever the shape, and nothing is handed over before the end, when the sums of segments are added.
//
// x lies in shared memory, all of it.  Four neighbours of x are what a lane's codes of a step stand for (packed_weight.h), so that
// products of a step are summed in another order of its 16 columns than packed_gemm_sm90.cu does it: the matrix units do not tell, and
// a row of out has the same bits.
//
// int4 with groups of 128, one token on an H200: 4096 x 4096 6.6 us (9.1 by packed_gemm_sm90.cu), 4096 x 14336 14.9 (22.0).
#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/divider.cuh"
#include "gemm/packed_codes.cuh"
#include "gemm/packed_epilogue.cuh"
#include "gemm/packed_gemm_few_sm90.h"

namespace pykv {
namespace packed_gemm_few {

constexpr int kColumns = 128, kTokens = 8, kDepth = 4;  // of a stage; at most; stages of a ring
constexpr int kMostWarps = 16, kShared = 226 << 10;     // of a block

// Zero points are subtracted as codes are decoded; scales and minima of Q4_K multiply and are added (Folded).
enum class Minima { kNone, kSubtracted, kFolded };

struct Problem {
  PackedWeight weight;
  const void *x, *bias;
  void* out;
  Epilogue epilogue;
  int64_t x_stride, out_stride;
  Divider groups_by;                          // columns of a group
  int tokens, units, groups, blocks, stages;  // blocks: of 256 columns
  int segments, row_blocks, each;             // blocks of 16 rows; such of a block of threads
  int x_pitch;                                // bytes
};

template <class T, CodeKind kKind, Minima kMinima>
struct Shape {
  using Element = T;
  using Code = Codes<T, kKind>;
  static constexpr bool kSubtracts = kMinima == Minima::kSubtracted, kFolds = kMinima == Minima::kFolded;
  // Of 16 rows a warp has half of each 32 factors.  Of Q4_K: scales of four groups, minima, those of 256 columns; of others: up to 128
  // bytes of scales, zero points.
  static constexpr int kCodeBytes = Code::kPlanes * 1024, kMinimaAt = kCodeBytes + 128, kSupersAt = kMinimaAt + 128,
                       kLowsAt = kSupersAt + 64;
  static constexpr int kStageBytes = kFolds ? kLowsAt + 64 : kMinimaAt + (kSubtracts ? 32 : 0);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// What a warp copies of its rows.
template <class S>
class Feed {
 public:
  __device__ Feed(const Problem& p, int block, int begin, int end, uint32_t ring)
      : p_(p), ring_(ring + lane() * 16), i_(begin), end_(end) {
    const PackedWeight& w = p.weight;
    codes_ = w.codes + (int64_t{block} * p.units + 2 * begin) * (S::kCodeBytes / 2) + lane() * 16;
    const int64_t band = block / 2;
    if constexpr (S::kFolds) {
      if (lane() < 16) {
        factors_ = (lane() < 8 ? w.scales : w.minima) + band * p.groups * 32 + lane() % 8 * 16;
      } else if (lane() < 24) {
        factors_ = (lane() < 20 ? w.supers : w.lows) + band * p.blocks * 64 + lane() % 4 * 16;
      }
      of_stage_ = lane() < 16 ? 128 : 32;  // of 256 columns: half of 64
    } else {
      const int bytes = bytes_of(w.scales_kind);
      if (lane() < 2 * bytes) {
        factors_ = w.scales + band * p.groups * 32 * bytes + lane() * 16;
        of_stage_ = 32 * bytes;
      } else if (S::kSubtracts && lane() / 2 == 4) {
        factors_ = w.minima + band * p.groups * 32 + lane() % 2 * 16;
        of_stage_ = 32;
      }
    }
  }

  // The next stage to a place of the ring; nothing where there is none.
  __device__ void next(int slot) {
    if (i_ < end_) {
      const uint32_t to = ring_ + slot * S::kStageBytes;
#pragma unroll
      for (int n = 0; n < S::kCodeBytes / 512; ++n)
        cp_async_16_once(to + n * 512, codes_ + n * 512, n < S::Code::kPlanes || 2 * i_ + 1 < p_.units);
      codes_ += S::kCodeBytes;
      if (factors_) {
        int64_t at;
        if constexpr (S::kFolds) {
          at = of_stage_ == 128 ? i_ * 128 : i_ / 2 * 64;
        } else {
          at = int64_t{p_.groups_by.quotient(i_ * kColumns)} * of_stage_;
        }
        cp_async_16(to + S::kCodeBytes, factors_ + at);
      }
      ++i_;
    }
    cp_async_commit();
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  const Problem& p_;
  const uint32_t ring_;
  const uint8_t *codes_, *factors_ = nullptr;
  int i_, of_stage_ = 0;
  const int end_;
};

// Rows of x, and zeros behind them.
template <class T>
__device__ void copy_x(const Problem& p, uint32_t to) {
  const int chunks = p.stages * (kColumns / 8), inside = static_cast<int>(p.weight.k / 8);
  for (int t = 0; t < p.tokens; ++t)
    for (int i = threadIdx.x; i < chunks; i += blockDim.x)
      cp_async_16(to + t * p.x_pitch + i * 16, static_cast<const T*>(p.x) + t * p.x_stride + (i < inside ? i * 8 : 0),
                  i < inside);
}

template <class S>
class Multiplier {
  using T = typename S::Element;
  using Code = typename S::Code;

 public:
  float total[4] = {};

  // row_block: of the warp; x: of its first stage
  __device__ Multiplier(const Problem& p, int row_block, uint32_t x)
      : p_(p),
        place_((threadIdx.x % 32 / 4 * 2 + row_block % 2) * 2),
        x_(x + min(static_cast<int>(threadIdx.x % 32 / 4), p.tokens - 1) * p.x_pitch + threadIdx.x % 4 * 8),
        global_(__ldg(reinterpret_cast<const float*>(p.weight.data + PackedWeight::kGlobalScaleAt)) * Code::kUnit) {}

  // What is read of a stage: then its place may be filled again.
  __device__ void load(uint32_t stage) {
    const uint32_t lane = threadIdx.x % 32, c = lane % 4;
#pragma unroll
    for (int n = 0; n < 2 * Code::kPlanes; ++n)
      words_[n / Code::kPlanes][n % Code::kPlanes] = load_shared_16(stage + n * 512 + (8 * c + lane / 4) * 16);
    if constexpr (S::kFolds) {
      const Folded<T> folded(load_shared_4(stage + S::kSupersAt + place_ * 2),
                             load_shared_4(stage + S::kLowsAt + place_ * 2), global_, p_.weight.offset);
      const uint32_t at = stage + S::kCodeBytes + c * 32 + place_;
      const uint32_t scales = load_shared_2(at), minima = load_shared_2(at + S::kMinimaAt - S::kCodeBytes);
      scale_ = folded.unit();
      pairs_[0] = folded.pair(scales, minima, false);
      pairs_[1] = folded.pair(scales, minima, true);
    } else {
      RawFactors raw[1];
      const uint32_t at = stage + S::kCodeBytes;
      const int bytes = bytes_of(p_.weight.scales_kind);
      if (bytes == 2) {
        raw[0].scale[0] = load_shared_4(at + place_ * 2);
      } else if (bytes == 4) {
        const uint2 two = load_shared_8(at + place_ * 4);
        raw[0].scale[0] = two.x;
        raw[0].scale[1] = two.y;
      } else {
        raw[0].scale[0] = load_shared_2(at + place_);
      }
      float scales[1][2];
      scales_of(scales, raw, p_.weight.scales_kind);
      scale_ = make_float2(scales[0][0] * global_, scales[0][1] * global_);
      if constexpr (S::kSubtracts) {
        const uint32_t z = load_shared_2(stage + S::kMinimaAt + place_);
        pairs_[0] = zero_of(0, z & 0xffu);
        pairs_[1] = zero_of(1, z >> 8);
      }
    }
  }

  __device__ void multiply() {
    uint2 x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = load_shared_8(x_ + j * 32);
    x_ += kColumns * 2;
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint32_t a[4];
      decode(a, j);
      mma_16x8x16<T>(sum, a, x[j].x, x[j].y);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = fmaf(i / 2 ? scale_.y : scale_.x, sum[i], total[i]);
  }

 private:
  __device__ void decode(uint32_t (&a)[4], int j) const {
    const auto& words = words_[j / 4];
    if constexpr (S::kFolds) {
      const int from = threadIdx.x % 32 / 4 * 4 + j / 2;  // the lane that has this group's
      Code::fragment_folded(a, words, j % 4, __shfl_sync(~0u, pairs_[0], from), __shfl_sync(~0u, pairs_[1], from));
    } else if constexpr (S::kSubtracts) {
      Code::fragment_less(a, words, j % 4, pairs_);
    } else {
      Code::fragment(a, words, j % 4, nullptr);
    }
  }
  // A zero point of what a code is above the base, as what codes of a row are the bits of.
  __device__ uint32_t zero_of(int row, uint32_t octet) const {
    return Code::base(row) + (octet + 8 - static_cast<int>(p_.weight.offset)) * Code::one(row);
  }

  const Problem& p_;
  const int place_;  // of its two rows among the factors of 32
  uint32_t x_;
  const float global_;
  uint4 words_[2][Code::kPlanes];
  float2 scale_;
  uint32_t pairs_[2] = {};
};

// Adds up the sums [block of rows][segment][token][16] of segments, and writes rows of out.
template <class T>
__device__ void write(const Problem& p, uint32_t sums) {
  for (int i = threadIdx.x; i < p.tokens * p.each * 4; i += blockDim.x) {
    const int own = i / 4 % p.each, token = i / 4 / p.each, row_block = static_cast<int>(blockIdx.x) * p.each + own;
    const int64_t n = int64_t{row_block} * 16 + i % 4 * 4;
    const int rows = static_cast<int>(min(p.weight.n - n, int64_t{4}));
    if (rows <= 0) continue;
    float4 sum{};
    for (int s = 0; s < p.segments; ++s) {
      const float4 v = load_shared_float4(sums + ((own * p.segments + s) * kTokens + token) * 64 + i % 4 * 16);
      sum = s == 0 ? v : make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    finish_four<T>(p.epilogue, static_cast<const T*>(p.bias), sum, token, n, rows, p.out, p.out_stride);
  }
}
#endif

template <class S>
__global__ void __launch_bounds__(kMostWarps * 32, 1) packed_gemm_few_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, segment = warp % p.segments;
  const int row_block = min(static_cast<int>(blockIdx.x) * p.each + warp / p.segments, p.row_blocks - 1);
  const int begin = p.stages * segment / p.segments, end = p.stages * (segment + 1) / p.segments;
  const uint32_t x = shared_address(shared), ring = x + p.tokens * p.x_pitch + warp * kDepth * S::kStageBytes;
  begin_dependent();
  copy_x<typename S::Element>(p, x);
  cp_async_commit();
  Feed<S> feed(p, row_block, begin, end, ring);
#pragma unroll 1
  for (int slot = 0; slot < kDepth; ++slot) feed.next(slot);
  Multiplier<S> multiplier(p, row_block, x + begin * kColumns * 2);
  cp_async_wait<kDepth>();
  __syncthreads();
  int slot = 0;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    cp_async_wait<kDepth - 1>();
    __syncwarp();
    multiplier.load(ring + slot * S::kStageBytes);
    __syncwarp();
    feed.next(slot);
    if (++slot == kDepth) slot = 0;
    multiplier.multiply();
  }
  __syncthreads();  // all have done with x
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = threadIdx.x % 4 * 2 + i % 2, row = threadIdx.x % 32 / 4 + i / 2 * 8;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(x + ((warp * kTokens + token) * 16 + row) * 4),
                 "f"(multiplier.total[i])
                 : "memory");
  }
  __syncthreads();
  write<typename S::Element>(p, x);
#endif
}

template <class S>
bool launch_shape(const PackedGemmArgs& args, int segments, const Launch& launch) {
  const PackedWeight& w = args.weight;
  const int64_t row_blocks = (w.n + 15) / 16, sms = num_sms(launch.device);
  Problem p{.weight = w,
            .x = args.x,
            .bias = args.bias,
            .out = args.out,
            .epilogue = args.epilogue,
            .x_stride = args.x_stride,
            .out_stride = args.out_stride,
            .groups_by = Divider(w.group_size),
            .tokens = static_cast<int>(args.num_rows),
            .units = static_cast<int>(w.padded_k / PackedWeight::kUnit),
            .groups = static_cast<int>(w.groups()),
            .blocks = static_cast<int>((w.padded_k + 255) / 256),
            .stages = static_cast<int>((w.padded_k + kColumns - 1) / kColumns),
            .segments = segments,
            .row_blocks = static_cast<int>(row_blocks),
            .each = static_cast<int>((row_blocks + sms - 1) / sms),
            .x_pitch = 0};
  p.x_pitch = p.stages * kColumns * 2 + 32;  // so that lanes of neighbouring tokens read from other banks
  while (p.each * segments > kMostWarps) p.each = (p.each + 1) / 2;
  const int warps = p.each * segments;
  int bytes = p.tokens * p.x_pitch + warps * kDepth * S::kStageBytes;
  if (bytes > kShared) return false;
  if (bytes < warps * kTokens * 64) bytes = warps * kTokens * 64;
  launch_dependent_shared(packed_gemm_few_kernel<S>, dim3(static_cast<unsigned>((row_blocks + p.each - 1) / p.each)),
                          dim3(static_cast<unsigned>(warps * 32)), static_cast<size_t>(bytes), launch, "packed_gemm",
                          p);
  return true;
}

}  // namespace packed_gemm_few

bool packed_gemm_few_sm90(const PackedGemmArgs& args, int segments, const Launch& launch) {
  using namespace packed_gemm_few;
  const PackedWeight& w = args.weight;
  // Where packed_gemm_sm90.cu has a block for most SMs it is as quick, and with some tokens quicker: here each warp reads all of x.
  const int64_t row_tiles = (w.n + 127) / 128, sms = num_sms(launch.device);
  if (args.num_rows > (row_tiles * 3 <= sms ? kTokens : row_tiles * 2 > sms ? 2 : 0)) return false;
  const bool is_plain = args.x_step == 1 && w.k % 8 == 0 && (args.num_rows == 1 || args.x_stride % 8 == 0) && w.k > 0 &&
                        w.k < (1 << 16) && reinterpret_cast<uintptr_t>(args.x) % 16 == 0;
  const bool folds = is_folded(w) && w.padded_k % kColumns == 0;
  const bool subtracts = w.codes_kind == CodeKind::kUint4 && w.minima_kind == MinimumKind::kZero;
  const bool has_groups =
      w.group_size % kColumns == 0 && !has_supers(w.scales_kind) && (subtracts || w.minima_kind == MinimumKind::kNone);
  if (args.map.rows || w.columns || !is_plain || !(folds || has_groups)) return false;
  bool was_launched = false;
  dispatch<half, bf16>(args.dtype, [&]<class T>() {
    const auto run = [&]<CodeKind kKind, Minima kMinima>() {
      was_launched = launch_shape<Shape<T, kKind, kMinima>>(args, segments, launch);
    };
    if (folds) return run.template operator()<CodeKind::kUint4, Minima::kFolded>();
    if (subtracts) return run.template operator()<CodeKind::kUint4, Minima::kSubtracted>();
    if (w.codes_kind == CodeKind::kUint4) return run.template operator()<CodeKind::kUint4, Minima::kNone>();
    if (w.codes_kind == CodeKind::kUint8) return run.template operator()<CodeKind::kUint8, Minima::kNone>();
    if (w.codes_kind == CodeKind::kE4M3) return run.template operator()<CodeKind::kE4M3, Minima::kNone>();
  });
  return was_launched;
}

}  // namespace pykv
