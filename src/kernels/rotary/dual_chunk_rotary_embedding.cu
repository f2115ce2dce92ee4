// Five copies of each query head, rotated at five positions, and each key head rotated at one; fp32, rounded once.
//
// Memory-bound: the floor is query read once, five copies written, key moved once in and once out.  A thread takes two
// vectors of kSize elements of a head, pairs or what lies behind the rotary dimension, and writes them five times; angles
// come from L1, where the threads of a token meet.  Threads run along x over the vectors of all heads, y over tokens.
#include <algorithm>

#include "cuda/dependent.cuh"
#include "cuda/rotation.cuh"
#include "rotary/dual_chunk_rotary_embedding.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;

template <class T, int kSize, bool kNeox>
__global__ __launch_bounds__(kThreads) void dual_chunk_rotary_embedding_kernel(
    const __grid_constant__ DualChunkRotaryEmbeddingArgs args, Reporter report) {
  using V = Vec<T, kSize>;
  begin_dependent();
  const Rotation& rotation = args.rotation;
  const int64_t t = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (t >= rotation.num_tokens) return;
  const int64_t position = args.position(0, t);
  const int64_t own = position < 0 ? position : args.chunks.own(position);
  const int64_t last = own < 0 ? own : args.chunks.last(own);
  if (last < 0 || last >= rotation.max_position) {
    if (threadIdx.x == 0) report(last, rotation.max_position);
    return;
  }

  const int half_dim = static_cast<int>(rotation.rotary_dim) / 2, pairs = half_dim / kSize;
  const int rest = (static_cast<int>(args.head_size) - 2 * half_dim) / kSize, items = pairs + rest;
  const int num_query_heads = static_cast<int>(args.query.num_heads);
  const int num_items = (num_query_heads + static_cast<int>(rotation.key.num_heads)) * items;
  for (int n = threadIdx.x; n < num_items; n += blockDim.x) {
    const int h = n / items, item = n - h * items;
    const bool of_query = h < num_query_heads;
    const RotaryHeads& heads = of_query ? args.query : rotation.key;
    T* head = static_cast<T*>(heads.data) + t * heads.token + (of_query ? h : h - num_query_heads) * heads.head;
    T* copy = static_cast<T*>(args.out.data) + t * args.out.token + h * args.out.head;
    if (item >= pairs) {
      if (!of_query) continue;
      const int at = 2 * half_dim + (item - pairs) * kSize;
      const V v = load_vec<V>(head + at);
#pragma unroll
      for (int k = 0; k < DualChunks::kCopies; ++k) store_vec(copy + k * args.copy + at, v);
      continue;
    }
    const int i = item * kSize, low = kNeox ? i : 2 * i, high = kNeox ? half_dim + i : 2 * i + kSize;
    const V given[2] = {load_vec<V>(head + low), load_vec<V>(head + high)};
    const auto rotate_to = [&](T* to, int64_t at) {
      V v[2] = {given[0], given[1]};
      rotate<kNeox>(v[0], v[1], load_angles<kSize>(rotation, at, i));
      store_vec(to + low, v[0]);
      store_vec(to + high, v[1]);
    };
    if (of_query) {
#pragma unroll 1
      for (int k = 0; k < DualChunks::kCopies; ++k) rotate_to(copy + k * args.copy, args.chunks.of_copy(k, own));
    } else {
      rotate_to(head, own);
    }
  }
}

template <class T, int kSize>
void run(const DualChunkRotaryEmbeddingArgs& args, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  const int64_t items = (args.query.num_heads + rotation.key.num_heads) * (args.head_size / kSize);
  dim3 block;
  block.x = static_cast<unsigned>(std::min<int64_t>((items + 31) / 32 * 32, kThreads));
  block.y = kThreads / block.x;
  const int64_t blocks = (rotation.num_tokens + block.y - 1) / block.y;
  if (blocks > INT32_MAX || items > INT32_MAX)
    fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 tokens, and elements of each, are supported");
  dispatch_bool(rotation.is_neox, [&]<bool kNeox>() {
    launch_dependent(dual_chunk_rotary_embedding_kernel<T, kSize, kNeox>, static_cast<unsigned>(blocks), block, launch,
                     "dual_chunk_rotary_embedding", args, launch.reporter(rotation.report));
  });
}

bool fits(const DualChunkRotaryEmbeddingArgs& args, int count) {
  const int64_t size = static_cast<int64_t>(size_of(args.rotation.dtype));
  return angles_fit(args.rotation, count) && args.head_size % count == 0 && args.copy % count == 0 &&
         heads_fit(args.query, size, count) && heads_fit(args.out, size, count) &&
         heads_fit(args.rotation.key, size, count);
}

}  // namespace

void dual_chunk_rotary_embedding_cuda(const DualChunkRotaryEmbeddingArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.rotation.dtype, [&]<class T>() {
    if (fits(args, kPackSize<T>)) {
      run<T, kPackSize<T>>(args, launch);
    } else {
      run<T, 1>(args, launch);
    }
  });
}

}  // namespace pykv
