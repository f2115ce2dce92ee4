// Five copies of each query head, rotated at five positions, and each key head rotated at one; fp32, rounded once.
//
// Memory-bound: the floor is query read once, five copies written, key moved once in and once out.  A thread owns kSize
// pairs of the rotary dimension (two vectors of kSize elements) of a head, and keeps them while it writes one copy after the
// other; the angles of the next copy are on their way meanwhile.  Threads run along x over the rotary dimension, y over the
// heads of query and key in one count, z over tokens; heads of tokens to come are sent for meanwhile.  In small calls the
// copies are made by blocks of their own.
#include <algorithm>

#include "cuda/ahead.cuh"
#include "cuda/dependent.cuh"
#include "cuda/rotation.cuh"
#include "cuda/streaming.cuh"
#include "rotary/dual_chunk_rotary_embedding.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;

// kSpread: a block makes one of the copies.
template <class T, int kSize, bool kNeox, bool kSpread>
__global__ __launch_bounds__(kThreads, 3) void dual_chunk_rotary_embedding_kernel(
    const __grid_constant__ DualChunkRotaryEmbeddingArgs args, uint32_t ahead, bool streamed, Reporter report) {
  using V = Vec<T, kSize>;
  const Rotation& rotation = args.rotation;
  const int64_t t = int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
  const bool there = t < rotation.num_tokens;
  const int half_dim = static_cast<int>(rotation.rotary_dim) / 2;
  const int num_query_heads = static_cast<int>(args.query.num_heads);
  const int first_copy = kSpread ? static_cast<int>(blockIdx.z) : 0;
  const int num_heads = num_query_heads + (first_copy == 0 ? static_cast<int>(rotation.key.num_heads) : 0);
  T* const query = static_cast<T*>(args.query.data) + t * args.query.token;
  T* const key = static_cast<T*>(rotation.key.data) + t * rotation.key.token;
  T* const out = static_cast<T*>(args.out.data) + t * args.out.token;
  const auto head_at = [&](int h) {
    return h < num_query_heads ? query + h * args.query.head : key + (h - num_query_heads) * rotation.key.head;
  };
  const auto low_of = [&](int i) { return kNeox ? i : 2 * i; };
  const auto high_of = [&](int i) { return kNeox ? half_dim + i : 2 * i + kSize; };
  const int first_head = blockIdx.y * blockDim.y + threadIdx.y, heads_at_once = blockDim.y * gridDim.y;
  if (const int i = threadIdx.x * kSize; comes_early() && there && i < half_dim && first_head < num_heads) {
    prefetch(head_at(first_head) + low_of(i));
    prefetch(head_at(first_head) + high_of(i));
  }
  begin_dependent();
  if (!there) return;
  if constexpr (!kSpread && kSize == kPackSize<T>) {
    const auto send_for = [&](const T* row, const RotaryHeads& heads) {
      if (heads.num_heads > 0 && heads.head == args.head_size)
        prefetch_row(row + ahead * heads.token, static_cast<uint32_t>(heads.num_heads * args.head_size * sizeof(T)));
    };
    if (threadIdx.x == 0 && threadIdx.y == 0 && t + ahead < rotation.num_tokens) {
      send_for(query, args.query);
      send_for(key, rotation.key);
    }
  }

  PositionLoad load(rotation.positions, t * rotation.position_token);
  int64_t own = -1;  // not known yet
  const auto find_own = [&] {
    const int64_t position = args.shifted(load.wait(rotation.positions.is_int64), t);
    own = position < 0 ? position : args.chunks.own(position);
    const int64_t last = position < 0 ? position : args.chunks.last(own);
    const bool inside = last >= 0 && last < rotation.max_position;
    if (!inside && threadIdx.x == 0 && threadIdx.y == 0) report(last, rotation.max_position);
    return inside;
  };
  for (int i = threadIdx.x * kSize; i < half_dim; i += blockDim.x * kSize) {
    const int low = low_of(i), high = high_of(i);
    for (int h = first_head; h < num_heads; h += heads_at_once) {
      const T* const head = head_at(h);
      const V given[2] = {load_vec_in_order<V>(head + low), load_vec_in_order<V>(head + high)};
      if (own < 0 && !find_own()) return;
      Angles<kSize> angles = load_angles<kSize>(rotation, args.chunks.of_copy(first_copy, own), i);
      const bool of_query = h < num_query_heads;
      T* to = of_query ? out + first_copy * args.copy + h * args.out.head : head_at(h);
#pragma unroll 1
      for (int copy = 0;; to += args.copy) {
        V v[2] = {given[0], given[1]};
        rotate<kNeox>(v[0], v[1], angles);
        const bool more = !kSpread && of_query && ++copy < DualChunks::kCopies;
        if (more) angles = load_angles<kSize>(rotation, args.chunks.of_copy(copy, own), i);
        store_vec(to + low, v[0], streamed);
        store_vec(to + high, v[1], streamed);
        if (!more) break;
      }
    }
  }

  // what lies behind the rotary dimension
  if (first_copy > 0 || (own < 0 && !find_own())) return;
  const int rest = (static_cast<int>(args.head_size) - 2 * half_dim) / kSize;
  for (int n = first_head * blockDim.x + threadIdx.x; n < num_query_heads * rest; n += blockDim.x * heads_at_once) {
    const int h = n / rest, at = 2 * half_dim + (n - h * rest) * kSize;
    const V v = load_vec<V>(head_at(h) + at);
#pragma unroll
    for (int copy = 0; copy < DualChunks::kCopies; ++copy)
      store_vec(out + copy * args.copy + h * args.out.head + at, v);
  }
}

template <class T, int kSize>
void run(const DualChunkRotaryEmbeddingArgs& args, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  const int64_t vectors = std::max<int64_t>(rotation.rotary_dim / 2 / kSize, 1);
  const int64_t heads = args.query.num_heads + rotation.key.num_heads;
  // What does not fill the chip is spread over more blocks.
  const bool fills = vectors * heads * rotation.num_tokens > int64_t{num_sms(launch.device)} * 1024;
  const int most_threads = fills ? kThreads : kThreads / 4;
  dim3 block, grid;
  block.x = static_cast<unsigned>(std::min<int64_t>(vectors, most_threads));
  const int64_t most = most_threads / block.x, rounds = (heads + most - 1) / most;
  block.y = static_cast<unsigned>((heads + rounds - 1) / rounds);  // none idle in the last round
  block.z = std::min(most_threads / (block.x * block.y), 64u);
  const int64_t blocks = (rotation.num_tokens + block.z - 1) / block.z;
  if (blocks > INT32_MAX || heads > INT32_MAX / args.head_size)
    fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 tokens, and elements of each, are supported");
  grid.x = static_cast<unsigned>(blocks);
  if (!fills) {
    grid.y = static_cast<unsigned>(rounds);
    grid.z = DualChunks::kCopies;
  }
  const bool streamed = is_streamed(DualChunks::kCopies * args.query.num_heads * rotation.num_tokens * args.head_size *
                                    int64_t{sizeof(T)});
  const uint32_t ahead = rows_ahead(2 * heads * args.head_size * int64_t{sizeof(T)});  // beside what is written
  dispatch_bool(rotation.is_neox, [&]<bool kNeox>() {
    const auto start = [&](auto kernel) {
      launch_dependent(kernel, grid, block, launch, "dual_chunk_rotary_embedding", args, ahead, streamed,
                       launch.reporter(rotation.report));
    };
    fills ? start(dual_chunk_rotary_embedding_kernel<T, kSize, kNeox, false>)
          : start(dual_chunk_rotary_embedding_kernel<T, kSize, kNeox, true>);
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
