// As few_pairs.cu, of weights and activations in float8_e4m3fn with scales of blocks of 128.  Each block of threads makes codes of what
// it multiplies itself: of x, then of the activation.
//
// Products are those of scaled_mm_sm90.cuh, in the same order, so that a row of out has the same bits.  A row of codes is one of the 64
// rows of the first operand; another eight blocks of the same row are its neighbours, and of the products with all of them one is
// wanted.  Sums of blocks lie in shared memory before they are scaled and added in their order.
//
// One token of Qwen3 30B (8 of 128 experts) on an H200: 18.4 us; by five kernels and a map it was 29.3.
#include <algorithm>

#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/wgmma8.cuh"
#include "moe/block_codes.cuh"
#include "moe/few_pairs.cuh"
#include "moe/few_pairs.h"

namespace pykv {
namespace few_pairs {

constexpr int kBlock = ScaledMmArgs::kBlock;
constexpr int kPart = 4, kParts = 4;   // blocks of w1 that are waited for together; such under way
constexpr int kFirstRows = 2 * kRows;  // of w1: gates and ups
constexpr int kSecondGroups = 4;       // warpgroups
constexpr int kSecondAtOnce = 6;       // blocks of w2 that are multiplied at once
constexpr int kSecondThreads = 128 * kSecondGroups;
constexpr int64_t kMostShared = 216 << 10;

struct QuantisedPlan {
  ScaledMmArgs first, second;
  PairExperts experts;
  SumRowsArgs sum;
  ScaleRule rule;
  const void* x;
  void* activated;
  const float* factors;  // of pairs, which scales of x are multiplied by; null: 1
  int64_t x_stride, factors_token_stride, factors_stride;
  int inner, top_k, first_blocks, second_blocks;
};

constexpr int codes_bytes(int blocks) {
  return (blocks + 7) / 8 * 1024;
}  // of a row: lines of 128, eight of which are a tile

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Makes codes of whole blocks, which lie one behind another, in shared memory, by all threads of a block: eight elements a lane, 16
// lanes a block.
template <class T, int kThreads>
class Encoder {
  static constexpr int kAhead = 2;  // loads under way

 public:
  __device__ Encoder(const T* from, int blocks) : from_(from), blocks_(blocks) { load(threadIdx.x); }

  // codes(block, of_row): where its row's begin, and which block of the row it is; 0: it is not wanted.
  template <class Place>
  __device__ void run(const ScaleRule& rule, float* scales, float factor, Place&& codes) {
#pragma unroll 1
    for (int first = threadIdx.x; first / 32 * 32 < blocks_ * kLanesOfBlock;) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) encode(loaded_[i], first + i * kThreads, rule, scales, factor, codes);
      first += kAhead * kThreads;
      load(first);
    }
  }

 private:
  __device__ void load(int first) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int n = first + i * kThreads;
      if (n < blocks_ * kLanesOfBlock) loaded_[i] = load_vec_in_order<Pack<T>>(from_ + n * 8);
    }
  }

  template <class Place>
  __device__ void encode(const Pack<T>& loaded, int n, const ScaleRule& rule, float* scales, float factor,
                         Place& codes) const {
    const int block = n / kLanesOfBlock, lane = n % kLanesOfBlock;
    GroupScale scale;
    const auto eight = block_codes<QuantCode::kE4M3>(rule, INFINITY, loaded, scale);
    if (block >= blocks_) return;
    int of_row = 0;
    const uint32_t row = codes(block, of_row);
    if (row == 0) return;
    const int line = of_row % 8;
    const uint32_t to = row + of_row / 8 * 1024 + line * kBlock + ((lane / 2 ^ line) << 4) + lane % 2 * 8;
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(eight.words[0]), "r"(eight.words[1]) : "memory");
    if (lane == 0) scales[block] = __uint_as_float(scale.stored) * factor;
  }

  const T* const from_;
  const int blocks_;
  Pack<T> loaded_[kAhead] = {};
};

// Where the scales of a row of the weight begin.
__device__ inline const float* scales_of(const ScaledMmArgs& a, int32_t expert, int64_t n) {
  return static_cast<const float*>(a.b_scales.data) + expert * a.b_scales.group + n / kBlock * a.b_scales.along;
}

// 16 bytes of a line of a tile of blocks, as wgmma wants them.
__device__ inline uint32_t place(int line, int chunk) { return line * kBlock + ((chunk ^ line % 8) << 4); }

// The sums of block `of` of a row of codes with kColumns rows of a weight, to shared memory.
template <int kColumns>
__device__ void keep(const float (&sum)[kColumns / 2], int of, float* to) {
  const uint32_t at = shared_address(to) + threadIdx.x % 4 * 8;
  const uint32_t line = threadIdx.x % 128 / 4;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n)  // not by an index, for which sums would lie in memory
    asm volatile("{.reg .pred p; setp.eq.u32 p, %3, %4; @p st.shared.v2.f32 [%0], {%1, %2};}" ::"r"(at + n * 32),
                 "f"(sum[4 * n]), "f"(sum[4 * n + 1]), "r"(line), "r"(of % 8)
                 : "memory");
}

template <int kColumns>
__device__ void multiply(float (&sum)[kColumns / 2], uint32_t codes, int of, uint32_t weight) {
  const uint64_t a = wgmma_matrix(codes + of / 8 * 1024, 1024), b = wgmma_matrix(weight, 1024);
#pragma unroll
  for (int step = 0; step < 4; ++step)
    Wgmma8<float, kColumns>::ss(sum, wgmma_further(a, 32 * step), wgmma_further(b, 32 * step), step > 0);
}

// The sum over blocks of k, scaled, biased and rounded.
template <class T>
__device__ T result(const ScaledMmArgs& a, const float* sums, int pitch, const float* x_scales, const float* scales,
                    int32_t expert, int64_t n, int blocks) {
  float total = 0;
#pragma unroll 4
  for (int i = 0; i < blocks; ++i) total = fmaf(x_scales[i] * scales[i], sums[i * pitch], total);
  if (a.bias) total += to_float(static_cast<const T*>(a.bias)[expert * a.bias_group + n]);
  return from_float<T>(total);
}
#endif

// A block of threads has 16 columns of the activation of a pair: a warpgroup multiplies while what comes later is copied.
template <class T>
__global__ void __launch_bounds__(128, 3) first_w8a8_kernel(const __grid_constant__ QuantisedPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t unaligned[];
  constexpr int kTile = kFirstRows * kBlock;  // bytes of a block
  const uint32_t codes = (shared_address(unaligned) + 1023) / 1024 * 1024;
  const int blocks = p.first_blocks;
  const uint32_t ring = codes + codes_bytes(blocks);
  auto* const sums = reinterpret_cast<float*>(unaligned + (ring - shared_address(unaligned)) + kParts * kPart * kTile);
  float *const x_scales = sums + blocks * kFirstRows, *const scales = x_scales + blocks;  // of x; of gates, of ups
  const int pair = blockIdx.y, token = pair / p.top_k, choice = pair - token * p.top_k;
  const int line = threadIdx.x / 8, chunk = threadIdx.x % 8;  // and the up that belongs to it
  begin_dependent();
  Encoder<T, 128> encoder(static_cast<const T*>(p.x) + token * p.x_stride, blocks);
  const float factor = p.factors ? p.factors[token * p.factors_token_stride + choice * p.factors_stride] : 1.0f;
  const int32_t expert = p.experts(token, choice, blockIdx.x == 0 && threadIdx.x == 0);
  if (expert < 0) return;
  const uint8_t* const gate =
      p.first.b + expert * p.first.b_group + (int64_t{blockIdx.x} * kRows + line) * p.first.b_along_n + chunk * 16;
  const uint8_t* const up = gate + p.inner * p.first.b_along_n;
  const auto copy_part = [&](int part) {
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const int block = part * kPart + i;
      const uint32_t to = ring + (part % kParts * kPart + i) * kTile + place(line, chunk);
      if (block >= blocks) continue;
      cp_async_16_once(to, gate + block * kBlock);
      cp_async_16_once(to + kRows * kBlock, up + block * kBlock);
    }
    cp_async_commit();
  };
  for (int i = threadIdx.x; i < 2 * blocks; i += 128) {
    const int is_up = i >= blocks, n = static_cast<int>(blockIdx.x) * kRows + is_up * p.inner;
    const float* const from = scales_of(p.first, expert, n) + (i - is_up * blocks) * p.first.b_scales.block;
    cp_async_small<4>(shared_address(scales + i), from, true);
  }
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) copy_part(part);
  encoder.run(p.rule, x_scales, factor, [&](int block, int& of_row) {
    of_row = block;
    return codes;
  });
#pragma unroll 1
  for (int part = 0; part * kPart < blocks; ++part) {
    cp_async_wait<kParts - 1>();
    fence_async_proxy();
    __syncthreads();
    float sum[kPart][kFirstRows / 2];
    const int first = part * kPart;
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < kPart; ++i)
      multiply<kFirstRows>(sum[i], codes, min(first + i, blocks - 1), ring + (part % kParts * kPart + i) * kTile);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      wgmma_pin(sum[i]);
      if (first + i < blocks) keep<kFirstRows>(sum[i], first + i, sums + (first + i) * kFirstRows);
    }
    __syncthreads();
    copy_part(part + kParts);
  }
  if (threadIdx.x >= kFirstRows) return;
  const int lane = threadIdx.x, column = static_cast<int>(blockIdx.x) * kRows + lane % kRows;
  Vec<T, 1> own, other;
  own[0] = result<T>(p.first, sums + lane, kFirstRows, x_scales, scales + lane / kRows * blocks, expert,
                     column + lane / kRows * p.inner, blocks);
  other[0] = from_float<T>(__shfl_down_sync(~0u, to_float(own[0]), kRows));
  if (lane < kRows) static_cast<T*>(p.activated)[int64_t{pair} * p.inner + column] = silu_and_mul(own, other)[0];
#endif
}

// A block of threads has 16 columns of a token's row of out.  It asks for all it wants of the weights before it waits for the
// kernel before.
template <class T>
__global__ void __launch_bounds__(kSecondThreads, 1) second_w8a8_kernel(const __grid_constant__ QuantisedPlan p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t unaligned[];
  constexpr int kTile = kRows * kBlock;
  __shared__ T results[kMostChoices][kRows];
  __shared__ Choices choices;
  const int blocks = p.second_blocks, of_row = codes_bytes(blocks);
  const uint32_t codes = (shared_address(unaligned) + 1023) / 1024 * 1024, ring = codes + p.top_k * of_row;
  auto* const sums =
      reinterpret_cast<float*>(unaligned + (ring - shared_address(unaligned)) + p.top_k * blocks * kTile);
  float *const x_scales = sums + p.top_k * blocks * kRows, *const scales = x_scales + p.top_k * blocks;
  const int64_t token = blockIdx.y, first_row = int64_t{blockIdx.x} * kRows;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
  // The kernel before has waited for ids, and has not written them.
  {
    const int line = thread / 8, chunk = thread % 8;
#pragma unroll 1
    for (int choice = group; choice < p.top_k; choice += kSecondGroups) {
      const int32_t expert = p.experts(token, choice, false);
      if (expert < 0) continue;
      const uint8_t* const from =
          p.second.b + expert * p.second.b_group + (first_row + line) * p.second.b_along_n + chunk * 16;
      const uint32_t to = ring + choice * blocks * kTile + place(line, chunk);
#pragma unroll 6
      for (int i = 0; i < blocks; ++i) cp_async_16_once(to + i * kTile, from + i * kBlock);
      const float* const own = scales_of(p.second, expert, first_row);
      for (int i = thread; i < blocks; i += 128)
        cp_async_small<4>(shared_address(scales + choice * blocks + i), own + i * p.second.b_scales.block, true);
    }
    cp_async_commit();
  }
  choices.load(p.experts, p.sum, token);
  begin_dependent();
  Encoder<T, kSecondThreads> encoder(static_cast<const T*>(p.activated) + token * p.top_k * p.inner, p.top_k * blocks);
  __syncthreads();  // choices are there
  encoder.run(p.rule, x_scales, 1.0f, [&](int block, int& within) {
    const int choice = block / blocks;
    within = block - choice * blocks;
    return choices.experts[choice] >= 0 ? codes + choice * of_row : 0;
  });
  cp_async_wait<0>();
  fence_async_proxy();
  __syncthreads();
#pragma unroll 1
  for (int choice = group; choice < p.top_k; choice += kSecondGroups) {
    if (choices.experts[choice] < 0) continue;
#pragma unroll 1
    for (int first = 0; first < blocks; first += kSecondAtOnce) {
      float sum[kSecondAtOnce][kRows / 2];
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < kSecondAtOnce; ++i) {
        const int block = min(first + i, blocks - 1);
        multiply<kRows>(sum[i], codes + choice * of_row, block, ring + (choice * blocks + block) * kTile);
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kSecondAtOnce; ++i) {
        wgmma_pin(sum[i]);
        if (first + i < blocks) keep<kRows>(sum[i], first + i, sums + (choice * blocks + first + i) * kRows);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.top_k * kRows; i += kSecondThreads) {
    const int choice = i / kRows, row = i % kRows;
    const int32_t expert = choices.experts[choice];
    if (expert >= 0)
      results[choice][row] =
          result<T>(p.second, sums + choice * blocks * kRows + row, kRows, x_scales + choice * blocks,
                    scales + choice * blocks, expert, first_row + row, blocks);
  }
  __syncthreads();
  if (threadIdx.x < kRows) choices.write_sum<T>(p.sum, results, token, first_row + threadIdx.x);
#endif
}

// Of weights that are copied in whole chunks.
bool is_in_chunks(const ScaledMmArgs& a) {
  return a.b_along_k == 1 && a.k % kBlock == 0 && is_aligned(16, a.b, {a.b_along_n, a.b_group}) && a.b_along_n >= 0;
}

template <class T>
bool launch_kernels(const QuantisedPlan& p, const Launch& launch) {
  const int64_t codes = 1024 + codes_bytes(p.first_blocks), of_row = codes_bytes(p.second_blocks);
  const int64_t first_bytes =
      codes + kParts * kPart * kFirstRows * kBlock + int64_t{p.first_blocks} * (kFirstRows + 3) * 4;
  // The first operand of a product is 64 lines, of which eight are there.
  const int64_t second_bytes =
      1024 + p.top_k * of_row +
      std::max<int64_t>(p.top_k * p.second_blocks * (kRows * kBlock + (kRows + 2) * 4), 64 * kBlock);
  if (first_bytes > kMostShared || second_bytes > kMostShared) return false;
  const auto tokens = static_cast<unsigned>(p.sum.num_tokens), pairs = tokens * static_cast<unsigned>(p.top_k);
  launch_dependent_shared(first_w8a8_kernel<T>, dim3(static_cast<unsigned>(p.inner / kRows), pairs), dim3(128),
                          static_cast<size_t>(first_bytes), launch, "fused_moe", p);
  launch_dependent_shared(second_w8a8_kernel<T>, dim3(static_cast<unsigned>(p.sum.width / kRows), tokens),
                          dim3(kSecondThreads), static_cast<size_t>(second_bytes), launch, "fused_moe", p);
  return true;
}

}  // namespace few_pairs

bool few_pairs_w8a8_cuda(const QuantisedMoeArgs& args, const Launch& launch) {
  using namespace few_pairs;
  const SortPairsArgs& sort = args.sort;
  const GroupQuantArgs& coder = args.first_coder.groups;
  const ScaledMmArgs &first = args.first, &second = args.second;
  const bool in_order = coder.input_rows.stride0 >= 0 && is_aligned(16, coder.input, {coder.input_rows.stride0 * 2});
  if (!are_few(sort) || first.is_int8 || !args.in_blocks || !args.activates_in_coder() ||
      !has_warpgroups(launch.device) || !in_order || !is_in_chunks(first) || !is_in_chunks(second) ||
      args.sum.width % kRows != 0 || std::max(first.k, second.k) > (1 << 16))
    return false;
  QuantisedPlan p{};
  p.first = first;
  p.second = second;
  p.experts = PairExperts(sort, launch);
  p.sum = args.sum;
  p.rule = coder.rule;
  p.x = coder.input;
  p.x_stride = coder.input_rows.stride0;
  p.activated = args.gated.result;
  p.factors = args.records.factors;
  p.factors_token_stride = args.records.factors_token_stride;
  p.factors_stride = args.records.factors_stride;
  p.inner = static_cast<int>(second.k);
  p.top_k = static_cast<int>(sort.top_k);
  p.first_blocks = static_cast<int>(first.blocks());
  p.second_blocks = static_cast<int>(second.blocks());
  bool was_launched = false;
  dispatch<half, bf16>(coder.dtype, [&]<class T>() { was_launched = launch_kernels<T>(p, launch); });
  return was_launched;
}

}  // namespace pykv
