// The merge of merge_attn_states.h.
//
// Memory-bound: the floor is each byte of the parts and of the output moved once.  A row (token, head) belongs to some
// neighbouring lanes of one warp, a power of two, each with a pack of 16 bytes.  Such a group has loaded the packs and the lse
// of kParts parts before it uses any; every lane weighs the parts for itself.  Two parts want small blocks with little to do:
// with two packs for each lane and blocks of 256 an H200 takes 28.6 us for 4096 tokens of 32 heads, not 25.9.
// Lse lie side by side for the tokens of a head: a block of many rows with up to 4 parts has kTile tokens of some heads,
// and reads each sector of them once (4 parts of 4096 tokens on an H200: 40.8 us, not 48.8).
// Where there are more parts, a group goes on with the next ones; where there are few rows, several groups of a block share
// one instead, and add up what they have through shared memory.  Both add in the same order, and else their number depends
// on that of the parts alone: the bits of a row do not depend on the batch.
// All threads of a row have read its lse before one of them writes the merged one: output_lse may be one of the inputs.
#include <algorithm>

#include "attention/merge_attn_states.h"
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/fp8.cuh"
#include "cuda/vec.cuh"

namespace pykv {
namespace {

constexpr int kThreads = 256;  // at most
constexpr int kTile = 8;       // tokens: as many lse of a head as a sector of memory holds

// v as E4M3, or in a dtype.
template <int kSize>
__device__ void store_row_part(uint8_t* to, const Vec<float, kSize>& v, float scale) {
  const Quotient one(1.0f);
  if constexpr (kSize == 1) {
    *to = to_fp8<KvFormat::kE4M3>(v[0] * scale, one);
  } else {
    Vec<uint32_t, kSize / 4> codes;
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      const uint32_t words[4] = {__float_as_uint(v[i] * scale), __float_as_uint(v[i + 1] * scale),
                                 __float_as_uint(v[i + 2] * scale), __float_as_uint(v[i + 3] * scale)};
      codes[i / 4] = to_fp8x4<KvFormat::kE4M3, float>(words, one);
    }
    store_vec(to, codes);
  }
}
template <class T, int kSize>
__device__ void store_row_part(T* to, const Vec<float, kSize>& v, float) {
  store_vec(to, round_to<T>(v));
}

// In the dtype that only the call knows.
__device__ void store_element(const MergeAttnStatesArgs& a, uint32_t token, uint32_t head, int d,
                              const Vec<float, 1>& v, float scale) {
  const auto store = [&]<class Out>() { store_row_part(a.output.row<Out>(token, head) + d, v, scale); };
  if (a.output_dtype == DType::kFloat32) return store.operator()<float>();
  if (a.output_dtype == DType::kFloat16) return store.operator()<half>();
  if (a.output_dtype == DType::kBFloat16) return store.operator()<bf16>();
  store.operator()<uint8_t>();  // E4M3
}

// exp and log of what they are wanted for here: weights of 1 and less, and sums of these.
__device__ float weight_of(float difference) {
  float weight;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(difference * 1.44269504f));
  return weight;
}

// kSize: elements of an access; where it is one, Out is void: any.  Lanes of a group: 1 << lanes_log2.  Groups of a row:
// 1 << groups_log2 with kMany, which takes any number of parts; else one, and at most kParts.
template <class T, class Out, int kSize, int kParts, bool kMany>
__global__ __launch_bounds__(kThreads) void merge_kernel(const __grid_constant__ MergeAttnStatesArgs a, Divider by_head,
                                                         bool tiled, int lanes_log2, int groups_log2) {
  using V = Vec<T, kSize>;
  constexpr bool kAnyOut = std::is_void_v<Out>;
  constexpr bool kPair = kParts == 2;  // two parts, wherever they are
  constexpr bool kTiles = !kMany && kParts <= 4;
  const int groups = kMany ? 1 << groups_log2 : 1, lanes = 1 << lanes_log2;
  const int lane = threadIdx.x & (lanes - 1), group = threadIdx.x >> lanes_log2 & (groups - 1);
  const int threads_log2 = kMany ? lanes_log2 + groups_log2 : lanes_log2;               // of a row
  const uint32_t rows = blockDim.x >> threads_log2, row = threadIdx.x >> threads_log2;  // of the block
  uint32_t head, token;
  bool there;
  if (kTiles && tiled) {
    const uint32_t heads = rows / kTile;
    token = by_head(blockIdx.x, head) * kTile + row / heads;
    head = head * heads + row % heads;
    there = token < a.num_tokens;
    if (!there) token = 0;
  } else {
    const uint32_t index = blockIdx.x * rows + row;
    there = index < static_cast<uint32_t>(a.num_tokens) * a.num_heads;
    token = by_head(there ? index : 0, head);
  }
  const bool has_context = token < a.context_tokens;

  // Of part `first + k`: whether it is looked at, and where it is.
  const T* from[kPair ? 2 : 1];
  const float* lse_from[kPair ? 2 : 1];
#pragma unroll
  for (int k = 0; k < (kPair ? 2 : 1); ++k) {
    from[k] = a.outputs[k].row<const T>(token, head) + lane * kSize;
    lse_from[k] = &a.lses[k].at(token, head);
  }
  const auto exists = [&](int first, int k) {
    return there && first + k < a.num_parts && (k > 0 || !kPair || has_context);
  };
  const auto pack_at = [&](int first, int k, int d) {
    return (kPair ? from[k] : from[0] + (first + k) * a.output_part) + d;
  };
  const auto lse_at = [&](int first, int k) { return kPair ? lse_from[k] : lse_from[0] + (first + k) * a.lse_part; };
  // Whether this lane has a pack behind element `d0`.
  const auto in_head = [&](int d0) { return d0 + lane * kSize < a.head_size; };

  const int mine = group * kParts, step = groups * kParts;  // the first part of this group, and parts at a time
  if (comes_early()) {
#pragma unroll
    for (int k = 0; k < kParts; ++k)
      if (exists(mine, k)) {
        if (lane == 0) prefetch(lse_at(mine, k));
        if (in_head(0)) prefetch(pack_at(mine, k, 0));
      }
  }
  begin_dependent();

  V x[kParts];
  float lse[kParts];
  const auto load_lse = [&](int first) {
#pragma unroll
    for (int k = 0; k < kParts; ++k) lse[k] = exists(first, k) ? *lse_at(first, k) : -INFINITY;
  };
  const auto load_packs = [&](int first, int d0) {
#pragma unroll
    for (int k = 0; k < kParts; ++k)
      if (exists(first, k) && in_head(d0)) x[k] = load_vec_in_order<V>(pack_at(first, k, d0));
  };
  load_lse(mine);
  load_packs(mine, 0);
  const bool narrows = kAnyOut ? a.output_dtype == DType::kFloat8E4M3 : std::is_same_v<Out, uint8_t>;
  const float scale = narrows ? 1.0f / a.output_scale : 1.0f;

  const float last = lse[kParts - 1];
  // of the groups of the block, and of the threads
  __shared__ float tops[kMany ? kThreads : 1], totals[kMany ? kThreads : 1], sums[kMany ? kThreads * kSize : 1];
  const int first_group = static_cast<int>(threadIdx.x >> lanes_log2) - group;  // of this row
  float top = -INFINITY, total = 0.0f;
  bool is_number = true;  // of the lse of two parts, each: a part whose lse is NaN has seen something
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    top = fmaxf(top, seen(lse[k]));
    if (kPair) is_number = is_number && !isnan(lse[k]);
  }
  if constexpr (kMany) {
    for (int first = mine + step; first < a.num_parts; first += step)
#pragma unroll
      for (int k = 0; k < kParts; ++k) top = fmaxf(top, exists(first, k) ? seen(*lse_at(first, k)) : -INFINITY);
    if (groups > 1) {
      tops[first_group + group] = top;
      __syncthreads();
#pragma unroll 8
      for (int g = 0; g < groups; ++g) top = fmaxf(top, tops[first_group + g]);
    }
  }
  const bool copies_first = kPair && has_context && a.copies_empty && top == -INFINITY && is_number;
  if (copies_first) lse[0] = 0.0f;
  if (!has_context) lse[kParts - 1] = top = 0.0f;
  const float base = top == -INFINITY ? 0.0f : top;
  const int width = kSize << lanes_log2;  // elements at a time
  using Stored = std::conditional_t<kAnyOut, char, Out>;
  [[maybe_unused]] Stored* const out = a.output.row<Stored>(token, head);
  for (int d0 = 0; d0 < a.head_size; d0 += width) {
    // kParts parts at a time are added up, and then their sums: in this order, whoever does it.  Begins with what leaves a
    // zero of either sign as it is.
    Vec<float, kSize> sum;
    total = 0.0f;
    for (int first = mine; first == mine || (kMany && first < a.num_parts); first += step) {
      if (d0 > 0 || (kMany && first > mine)) load_packs(first, d0);
      if (kMany && (d0 > 0 || first > mine)) load_lse(first);
      Vec<float, kSize> few;
      float few_weights = 0.0f;
#pragma unroll
      for (int i = 0; i < kSize; ++i) few[i] = -0.0f;
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        const float weight = weight_of(seen(lse[k]) - base);
        few_weights += weight;
        if (seen(lse[k]) == -INFINITY) continue;  // such a part may hold anything
        const auto v = to_floats(x[k]);
#pragma unroll
        for (int i = 0; i < kSize; ++i) few[i] = fmaf(v[i], weight, few[i]);
      }
      total += few_weights;
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] = first == mine ? few[i] : sum[i] + few[i];
    }

    if (kMany && groups > 1) {
      if (d0 > 0) __syncthreads();  // what was there is read
      totals[first_group + group] = total;
#pragma unroll
      for (int i = 0; i < kSize; ++i) sums[(first_group + group) * width + lane * kSize + i] = sum[i];
      __syncthreads();
      total = 0.0f;
#pragma unroll 8
      for (int g = 0; g < groups; ++g) total += totals[first_group + g];
    }
    const float factor = total == 0.0f ? -0.0f : __fdividef(1.0f, total);
    if (kMany && groups > 1) {
      for (int e = group << lanes_log2 | lane; there && e < min(width, a.head_size - d0); e += groups << lanes_log2) {
        Vec<float, 1> v;
        v[0] = -0.0f;
#pragma unroll 8
        for (int g = 0; g < groups; ++g) v[0] += sums[(first_group + g) * width + e];
        v[0] *= factor;
        if constexpr (kAnyOut) {
          store_element(a, token, head, d0 + e, v, scale);
        } else {
          store_row_part(out + d0 + e, v, scale);
        }
      }
    } else if (there && in_head(d0)) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] *= factor;
      if constexpr (kAnyOut) {
        store_element(a, token, head, d0 + lane, sum, scale);
      } else {
        store_row_part(out + d0 + lane * kSize, sum, scale);
      }
    }
  }

  if (!a.output_lse.data) return;
  if constexpr (kMany) {  // all threads of the row have read its lse
    __syncthreads();
  } else {
    __syncwarp();
  }
  if (there && group == 0 && lane == 0)
    a.output_lse.at(token, head) = !has_context   ? last
                                   : copies_first ? -INFINITY
                                                  : base + __logf(total);  // log 0 = -inf
}

template <class T, class Out, int kSize>
void run(const MergeAttnStatesArgs& args, const Launch& launch) {
  const int64_t num_rows = args.num_tokens * args.num_heads;
  if (num_rows > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 rows (tokens x heads) are supported");
  // What does not fill the chip is spread over as much of it as possible.
  const bool fills = num_rows * args.head_size > int64_t{num_sms(launch.device)} * 1024 * kSize;
  const auto start = [&]<int kParts, bool kMany>() {
    int lanes_log2 = 0, groups_log2 = 0, threads = fills && kParts > 2 ? kThreads : kThreads / 2;
    while (lanes_log2 < 5 && kSize << lanes_log2 < args.head_size) ++lanes_log2;
    if (kMany) {
      threads = kThreads;
      // as many groups as there are parts to add up first, where a block holds them: they give the same bits as one group
      while (threads >> (lanes_log2 + groups_log2) > 1 && kParts << groups_log2 < args.num_parts) ++groups_log2;
      if (fills && kParts << groups_log2 >= args.num_parts) groups_log2 = 0;
    }
    const int64_t rows = threads >> (lanes_log2 + groups_log2), heads = rows / kTile;  // of a block, of a tile
    const bool tiled = !kMany && kParts <= 4 && fills && heads > 0 && args.num_heads % heads == 0;
    const int64_t blocks =
        tiled ? (args.num_tokens + kTile - 1) / kTile * (args.num_heads / heads) : (num_rows + rows - 1) / rows;
    launch_dependent(merge_kernel<T, Out, kSize, kParts, kMany>, static_cast<unsigned>(blocks), threads, launch,
                     "merge_attn_states", args, Divider(tiled ? args.num_heads / heads : args.num_heads), tiled,
                     lanes_log2, groups_log2);
  };
  if (args.num_parts > 8 || (kSize == 1 && args.num_parts > 2)) {
    start.template operator()<4, true>();
  } else if (kSize == 1 || args.num_parts <= 2) {
    start.template operator()<2, false>();
  } else if constexpr (kSize > 1) {
    if (args.num_parts <= 4) {
      start.template operator()<4, false>();
    } else {
      start.template operator()<8, false>();
    }
  }
}

// Whether all rows consist of whole, aligned packs.
template <class T, class Out>
bool in_packs(const MergeAttnStatesArgs& a) {
  constexpr int64_t kSize = kPackSize<T>, kIn = sizeof(T), kOut = sizeof(Out);
  const auto aligned = [](int64_t bytes, const PartialOutput& x, int64_t size) {
    return is_aligned(bytes, x.data, {x.token * size, x.head * size});
  };
  return a.head_size % kSize == 0 && aligned(kAccessBytes, a.outputs[0], kIn) &&
         aligned(kAccessBytes, a.outputs[1], kIn) && a.output_part % kSize == 0 &&
         aligned(kSize * kOut, a.output, kOut);
}

}  // namespace

void merge_attn_states_cuda(const MergeAttnStatesArgs& args, const Launch& launch) {
  dispatch_merge<float, half, bf16, uint8_t>(args, [&]<class T, class Out> {
    if (in_packs<T, Out>(args)) {
      run<T, Out, kPackSize<T>>(args, launch);
    } else {
      run<T, void, 1>(args, launch);
    }
  });
}

}  // namespace pykv
