// A layer of few pairs, where neither bytes nor products are what takes the time but kernels that wait for one another.  So there is no
// map, for each pair is a tile of its own, and there are two kernels: rows of x through w1 and the activation; then through w2, and
// the sum of a token's pairs.  Experts of several pairs are read again, from the L2.
//
// A warp has 16 rows of a weight and a part of the columns.  It loads codes of four stages of 128 columns to registers at once, as they
// lie in memory, so that an SM has some 100 KB under way and no ring to wait for.  The second kernel loads its first codes before
// it waits for the first one's results.
//
// What is added when is as in packed_gemm_few_sm90.cu: a row of out has the same bits as with more pairs.
//
// One token of Qwen3 30B (8 of 128 experts) on an H200: 13.8 us, where a plain read of its weights takes 6.2 and two empty kernels 1.5.
#include <algorithm>

#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/silu.cuh"
#include "gemm/packed_codes.cuh"
#include "gemm/packed_gemm_few_sm90.h"
#include "moe/few_pairs.cuh"
#include "moe/few_pairs.h"

namespace pykv {
namespace few_pairs {

constexpr int kColumns = 128, kAtOnce = 4;  // of a stage; stages that are loaded at once
constexpr int kMostWarps = 16;              // of the second kernel
constexpr int64_t kMostShared = 200 << 10;

// kNone: sums of groups are scaled.  kSubtracted: and zero points are subtracted from codes.  kFolded: codes are scaled as they are
// decoded (Folding).
enum class Scaling { kNone, kSubtracted, kFolded };

// One of the two weights.
struct Weight {
  PackedWeight packed;
  const void* bias;
  int64_t weight_stride, bias_stride;  // bytes, elements
  int units, groups, stages, segments;
  int stages_of_group;  // 1 where groups are smaller
  int steps;            // of 16 columns that are scaled together: 2 or 8

  __device__ int begin(int segment) const { return stages * segment / segments; }
};

struct Plan {
  Weight first, second;
  PairExperts experts;
  SumRowsArgs sum;
  const void* x;
  void* activated;
  const float* factors;  // of pairs, for the first product; null: 1
  int64_t x_stride, factors_token_stride, factors_stride;
  int64_t inner;
  int top_k, warps, parts;  // warps of a block of the second kernel; of a pair: parts of the columns of w2
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

__device__ inline uint4 load_codes(const uint8_t* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// Codes and factors of some stages of a warp's rows, and their products with a row of x.
// kSteps: of 16 columns that are scaled together.
template <class T, Scaling kScaling, int kSteps>
class Rows {
  using Code = Codes<T, CodeKind::kUint4>;
  using Folds = Folding<T, CodeKind::kUint4, Fold::kHalf>;
  static constexpr bool kSubtracts = kScaling == Scaling::kSubtracted, kFolds = kScaling == Scaling::kFolded;

 public:
  // What sums are to be multiplied by.
  static constexpr float kUnit = kFolds ? Folds::kUnit : 1.0f;

  float total[4] = {};  // the first column of a fragment has the one row of x: [0] and [2] of lanes 4 g

  // row_block: of 16 rows
  __device__ Rows(const Weight& w, int32_t expert, int row_block) : w_(w) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const int64_t shift = expert * w.weight_stride;
    const PackedWeight& p = w.packed;
    codes_ = p.codes + shift + int64_t{row_block} * w.units * 512 + (8 * c + g) * 16;
    const int64_t place = int64_t{row_block / 2} * w.groups * 32 + g * 4 + row_block % 2 * 2;
    scales_ = p.scales + shift + place * bytes_of(p.scales_kind);
    if constexpr (kSubtracts) minima_ = p.minima + shift + place;
    global_ = __ldg(reinterpret_cast<const float*>(p.data + shift + PackedWeight::kGlobalScaleAt)) * Code::kUnit;
  }

  __device__ __forceinline__ void load(int stage, int end) {
    constexpr int kItems = 8 / kSteps;
    const int bytes = bytes_of(w_.packed.scales_kind);
    // Of the groups of a stage a lane has one, and those of its row exchange them.
    int group = kItems == 1 ? stage / w_.stages_of_group : stage * kItems + threadIdx.x % kItems;
    int left = kItems == 1 ? w_.stages_of_group - stage % w_.stages_of_group : 1;  // stages
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (stage + s >= end) continue;
      words_[s][0] = load_codes(codes_ + (stage + s) * 1024);
      words_[s][1] = load_codes(codes_ + (stage + s) * 1024 + 512);
      const uint8_t* const scale = scales_ + group * 32 * bytes;
      if (bytes == 4) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(scale));
        scale_[s][0] = two.x;
        scale_[s][1] = two.y;
      } else {
        scale_[s][0] = __ldg(reinterpret_cast<const uint32_t*>(scale));
      }
      if constexpr (kSubtracts) minimum_[s] = __ldg(reinterpret_cast<const uint16_t*>(minima_ + group * 32));
      if (--left == 0) {
        group += kItems;
        left = kItems == 1 ? w_.stages_of_group : 1;
      }
    }
  }

  // x: of stage s of those that were loaded, in shared memory
  __device__ __forceinline__ void multiply(int s, const uint2* x) {
    x += threadIdx.x % 4;
    float2 scale = scale_of(s);
    scale = make_float2(scale.x * global_, scale.y * global_);
    uint32_t folded = 0;
    if constexpr (kFolds)
      folded = pack_pair<T>(scale.x * Folds::of_scale(0), scale.y * Folds::of_scale(1));
    else
      scale.y *= Code::kOfSecond;
    uint32_t zeros[2];
    if constexpr (kSubtracts) {
      const int more = 8 - static_cast<int>(w_.packed.offset);  // what a code is above the base
      zeros[0] = Code::zero_of(0, (minimum_[s] & 0xffu) + more);
      zeros[1] = Code::zero_of(1, (minimum_[s] >> 8) + more);
    }
    float sum[4];
    uint32_t now[2];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int item = j / kSteps;
      if (j % kSteps == 0) {
        if constexpr (!kFolds) sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
        if constexpr (kFolds) {
          now[0] = kSteps == 8 ? folded : __shfl_sync(~0u, folded, item, 4);
          now[1] = Folds::middle(now[0]);
        }
        if constexpr (kSubtracts)
#pragma unroll
          for (int i = 0; i < 2; ++i) now[i] = kSteps == 8 ? zeros[i] : __shfl_sync(~0u, zeros[i], item, 4);
      }
      const uint4(&words)[1] = reinterpret_cast<const uint4(&)[1]>(words_[s][j / 4]);
      uint32_t a[4];
      if constexpr (kFolds) {
        Folds::fragment(a, words, j % 4, now[0], now[1]);
      } else if constexpr (kSubtracts) {
        Code::fragment_less(a, words, j % 4, now);
      } else {
        Code::fragment_in_place(a, words, j % 4);
      }
      const uint2 of_x = x[j * 4];
      mma_16x8x16<T>(kFolds ? total : sum, a, of_x.x, of_x.y);
      if (kFolds || (j + 1) % kSteps != 0) continue;
      const float first = kSteps == 8 ? scale.x : __shfl_sync(~0u, scale.x, item, 4);
      const float second = kSteps == 8 ? scale.y : __shfl_sync(~0u, scale.y, item, 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] = fmaf(i / 2 ? second : first, sum[i], total[i]);
    }
  }

 private:
  __device__ float2 scale_of(int s) const {
    if (bytes_of(w_.packed.scales_kind) == 4)
      return make_float2(__uint_as_float(scale_[s][0]), __uint_as_float(scale_[s][1]));
    const float2 halves = unpack_pair<half>(scale_[s][0]), others = unpack_pair<bf16>(scale_[s][0]);
    return w_.packed.scales_kind == ScaleKind::kF16 ? halves : others;
  }

  const Weight& w_;
  const uint8_t *codes_, *scales_, *minima_;
  float global_;
  uint4 words_[kAtOnce][2];
  uint32_t scale_[kAtOnce][2], minimum_[kAtOnce];
};

// Leaves a warp's sums of a segment in shared memory, [16].
template <class R>
__device__ void keep(float* to, R& rows) {
  float (&total)[4] = rows.total;
  const int lane = threadIdx.x % 32;
  if (lane % 4 == 0) {
    to[lane / 4] = R::kUnit * total[0];
    to[lane / 4 + 8] = R::kUnit * total[2];
  }
  total[0] = total[1] = total[2] = total[3] = 0.0f;
}

// The sum over all segments, [segment][16], biased, multiplied and rounded.
template <class T>
__device__ T result(const Weight& w, const float* sums, int32_t expert, int64_t row, float factor) {
  float sum = sums[0];
  for (int s = 1; s < w.segments; ++s) sum += sums[s * kRows];
  sum += w.bias ? to_float(static_cast<const T*>(w.bias)[expert * w.bias_stride + row]) : 0.0f;
  return from_float<T>(sum * factor);
}

// Rows that lie one behind another to shared memory, each padded with zeros to whole stages.
template <class T>
__device__ void copy_rows(uint4* to, const void* from, int64_t k, int stages, int rows) {
  const int chunks = stages * (kColumns / 8), inside = static_cast<int>(k / 8);
  for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
    const int row = rows == 1 ? 0 : i / chunks, chunk = i - row * chunks;
    const bool there = chunk < inside;
    cp_async_16(shared_address(to + i), static_cast<const T*>(from) + row * k + (there ? chunk * 8 : 0), there);
  }
  cp_async_commit();
}
#endif

// A block has 16 columns of the activation of a pair: warps have rows of gates or of ups, and a segment of the columns.
template <class T, Scaling kScaling, int kSteps>
__global__ void __launch_bounds__(256, 3) first_kernel(const __grid_constant__ Plan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 x[];
  __shared__ float sums[2][4][kRows];
  const Weight& w = p.first;
  const int is_up = threadIdx.x / 32 % 2, segment = threadIdx.x / 64, pair = blockIdx.y;
  const int token = pair / p.top_k, choice = pair - token * p.top_k, begin = w.begin(segment),
            end = w.begin(segment + 1);
  const int row_block = static_cast<int>(blockIdx.x + is_up * (p.inner / kRows));
  begin_dependent();
  copy_rows<T>(x, static_cast<const T*>(p.x) + token * p.x_stride, w.packed.k, w.stages, 1);
  const int32_t expert = p.experts(token, choice, blockIdx.x == 0 && threadIdx.x == 0);
  Rows<T, kScaling, kSteps> rows(w, max(expert, 0), row_block);
  if (expert >= 0) rows.load(begin, end);
  cp_async_wait<0>();
  if (expert < 0) return;
  __syncthreads();
#pragma unroll 1
  for (int stage = begin; stage < end; stage += kAtOnce) {
    if (stage != begin) rows.load(stage, end);
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s)
      if (stage + s < end) rows.multiply(s, reinterpret_cast<const uint2*>(x) + (stage + s) * (kColumns / 4));
  }
  keep(sums[is_up][segment], rows);
  __syncthreads();
  if (threadIdx.x >= kRows) return;
  const int64_t column = int64_t{blockIdx.x} * kRows + threadIdx.x;
  const float factor = p.factors ? p.factors[token * p.factors_token_stride + choice * p.factors_stride] : 1.0f;
  Vec<T, 1> halves[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    halves[i][0] = result<T>(w, sums[i][0] + threadIdx.x, expert, i * p.inner + column, factor);
  static_cast<T*>(p.activated)[pair * p.inner + column] = silu_and_mul(halves[0], halves[1])[0];
#endif
}

// A block has 16 columns of a token's row of out: warps have a pair each, and a part of the columns.
template <class T, Scaling kScaling, int kSteps>
__global__ void __launch_bounds__(kMostWarps * 32, 1) second_kernel(const __grid_constant__ Plan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 activated[];
  __shared__ float sums[kMostChoices][4][kRows];
  __shared__ T results[kMostChoices][kRows];
  __shared__ Choices choices;
  const Weight& w = p.second;
  const int row_block = blockIdx.x, warp = threadIdx.x / 32, at_once = p.warps / p.parts, part = warp % p.parts;
  const int64_t token = blockIdx.y;
  const int each = w.segments / p.parts, begin = w.begin(part * each), end = w.begin((part + 1) * each);
  const int64_t n = int64_t{row_block} * kRows + threadIdx.x % kRows;
  // The kernel before has waited for ids, and has not written them.
  int choice = warp / p.parts;
  int32_t expert = choice < p.top_k ? p.experts(token, choice, false) : -1;
  bool waits = true;
  do {
    Rows<T, kScaling, kSteps> rows(w, max(expert, 0), row_block);
    if (expert >= 0) rows.load(begin, end);
    if (waits) {
      choices.load(p.experts, p.sum, token);
      begin_dependent();
      copy_rows<T>(activated, static_cast<const T*>(p.activated) + token * p.top_k * p.inner, p.inner, w.stages,
                   p.top_k);
      cp_async_wait<0>();
      __syncthreads();
      waits = false;
    }
    if (expert >= 0) {
      const uint2* const x = reinterpret_cast<const uint2*>(activated) + choice * w.stages * (kColumns / 4);
      int segment = part * each, segment_end = w.begin(segment + 1);
#pragma unroll 1
      for (int stage = begin; stage < end; stage += kAtOnce) {
        if (stage != begin) rows.load(stage, end);
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
          if (stage + s >= end) continue;
          rows.multiply(s, x + (stage + s) * (kColumns / 4));
          if (stage + s + 1 == segment_end) {
            keep(sums[choice][segment], rows);
            segment_end = w.begin(++segment + 1);
          }
        }
      }
    }
    choice += at_once;
    expert = choice < p.top_k ? choices.experts[choice] : -1;
  } while (choice < p.top_k);
  __syncthreads();
  for (int i = threadIdx.x; i < p.top_k * kRows; i += p.warps * 32) {
    const int of = i / kRows;
    const int32_t its = choices.experts[of];
    if (its >= 0) results[of][i % kRows] = result<T>(w, sums[of][0] + i % kRows, its, n, 1.0f);
  }
  __syncthreads();
  if (threadIdx.x >= kRows) return;
  choices.write_sum<T>(p.sum, results, token, n);
#endif
}

bool make_weight(Weight& weight, const PackedGemmArgs& args, const Launch& launch) {
  const PackedWeight& w = args.weight;
  if (w.codes_kind != CodeKind::kUint4 || w.scales_kind > ScaleKind::kF32 || w.columns || w.k == 0 || w.k % 8 != 0 ||
      w.n % kRows != 0 || w.padded_k % kColumns != 0 || w.padded_k > (1 << 16) ||
      (w.group_size % kColumns != 0 && w.group_size != 32))
    return false;
  weight = {.packed = w,
            .bias = args.bias,
            .weight_stride = args.map.weight_stride,
            .bias_stride = args.map.bias_stride,
            .units = static_cast<int>(w.padded_k / PackedWeight::kUnit),
            .groups = static_cast<int>(w.groups()),
            .stages = static_cast<int>(w.padded_k / kColumns),
            .segments = packed_gemm_sm90::segments_of(w, num_sms(launch.device)),
            .stages_of_group = static_cast<int>(std::max<int64_t>(w.group_size / kColumns, 1)),
            .steps = static_cast<int>(std::min<int64_t>(w.group_size, kColumns) / 16)};
  return weight.stages >= weight.segments;
}

template <class T, Scaling kScaling, int kSteps>
void launch_kernels(const Plan& p, const FusedMoeArgs& args, const Launch& launch) {
  const auto pairs = static_cast<unsigned>(args.sort.num_pairs), tokens = static_cast<unsigned>(args.sum.num_tokens);
  const size_t x_bytes = static_cast<size_t>(p.first.stages) * kColumns * 2;
  launch_dependent_shared(first_kernel<T, kScaling, kSteps>, dim3(static_cast<unsigned>(p.inner / kRows), pairs),
                          dim3(64 * static_cast<unsigned>(p.first.segments)), x_bytes, launch, "fused_moe", p);
  const size_t rows_bytes = static_cast<size_t>(p.second.stages) * kColumns * 2 * p.top_k;
  launch_dependent_shared(second_kernel<T, kScaling, kSteps>,
                          dim3(static_cast<unsigned>(args.sum.width / kRows), tokens),
                          dim3(static_cast<unsigned>(p.warps) * 32), rows_bytes, launch, "fused_moe", p);
}

}  // namespace few_pairs

bool few_pairs_cuda(const FusedMoeArgs& args, const Launch& launch) {
  using namespace few_pairs;
  const SortPairsArgs& sort = args.sort;
  const PackedGemmArgs &first = args.first.packed, &second = args.second.packed;
  if (!are_few(sort) || !args.first.is_packed || !args.second.is_packed ||
      args.activation->gated_cuda != silu_and_mul_cuda || args.gated.width % kRows != 0 ||
      first.weight.minima_kind != second.weight.minima_kind || !has_warpgroups(launch.device) ||
      !is_aligned(16, first.x, {sort.num_tokens > 1 ? first.x_stride * 2 : 0}))
    return false;
  Plan p{};
  if (!make_weight(p.first, first, launch) || !make_weight(p.second, second, launch) || p.first.steps != p.second.steps)
    return false;
  if (std::max<int64_t>(p.first.stages, p.second.stages * sort.top_k) * kColumns * 2 > kMostShared) return false;
  p.experts = PairExperts(sort, launch);
  p.sum = args.sum;
  p.x = first.x;
  p.x_stride = first.x_stride;
  p.activated = args.gated.result;
  p.inner = args.gated.width;
  p.factors = first.map.factors;
  p.factors_token_stride = first.map.factors_token_stride;
  p.factors_stride = first.map.factors_stride;
  p.top_k = static_cast<int>(sort.top_k);
  p.parts = p.second.segments;
  p.warps = sort.num_tokens == 1 ? kMostWarps : kMostWarps / 2;  // two blocks of an SM
  while (p.parts > 1 && p.parts * p.top_k > p.warps) p.parts /= 2;
  // Of longer rows a warp would load more than twice, with nothing to do meanwhile.
  if (std::max(p.first.stages / p.first.segments, p.second.stages / p.parts) > 2 * kAtOnce) return false;
  bool was_launched = false;
  dispatch<half, bf16>(first.dtype, [&]<class T>() {
    const MinimumKind minima = first.weight.minima_kind;
    was_launched = minima == MinimumKind::kNone || minima == MinimumKind::kZero;
    const bool folds = is_folded<T>(first.weight, true);
    was_launched &= folds == is_folded<T>(second.weight, true);
    if (!was_launched) return;
    const auto launch_steps = [&]<int kSteps>() {
      if (minima == MinimumKind::kZero) return launch_kernels<T, Scaling::kSubtracted, kSteps>(p, args, launch);
      if constexpr (!kIsHalf<T>)
        if (folds) return launch_kernels<T, Scaling::kFolded, kSteps>(p, args, launch);
      launch_kernels<T, Scaling::kNone, kSteps>(p, args, launch);
    };
    if (p.first.steps == 8)
      launch_steps.template operator()<8>();
    else
      launch_steps.template operator()<2>();
  });
  return was_launched;
}

}  // namespace pykv
