// x' = x * cos - y * sin,  y' = y * cos + x * sin  for the pairs of each head, in fp32, rounded once.
//
// Memory-bound: the floor is the rotated part of every head moved once in and once out.  A thread owns kSize pairs of the
// rotary dimension (two vectors of kSize elements) in kHeads heads at a time: it reads its cosines and sines once for all
// heads, and has loaded the vectors of kHeads heads before the position, and what the position points to, have arrived.
// Where a position costs much to find out, a thread of a large call has at least two rounds of heads (mrope of 65536 tokens,
// 32 + 8 heads, on an H200: 341 us instead of 371).
// Threads run along x over the rotary dimension, y over the heads of query and key in one count, z over tokens.  In small
// calls the heads of a token are spread over blocks, so that all loads come at once; what is then left is the chain of
// position, angles and rotation, whose memory is fetched while the kernel before still runs.
#include <algorithm>

#include "cuda/dependent.cuh"
#include "cuda/rotation.cuh"
#include "cuda/streaming.cuh"
#include "rotary/rotary_embedding.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // of an SM, at least: few registers, many loads under way

__device__ int64_t token_of_thread() { return int64_t{blockIdx.x} * blockDim.z + threadIdx.z; }

// The angles of a token that has one position.  kShifted: and an offset.
template <bool kShifted>
class OnePosition {
 public:
  static constexpr int kLeastRounds = 1;
  static constexpr uint32_t kEarlyBlocks = 1024;
  // Before the wait.  `at`: where the token's (first) position is.
  __device__ static void prefetch(const RotaryEmbeddingArgs& args, int64_t at, int i) {
    if (!kShifted && threadIdx.y == 0) prefetch_angles(args.rotation, at, i);
  }
  __device__ OnePosition(const RotaryEmbeddingArgs& args, int64_t at, int64_t token)
      : load_(args.rotation.positions, at),
        offset_(kShifted ? args.offsets : args.rotation.positions, kShifted ? token * args.offsets.stride : at) {}
  // Those from frequency `i` on; false where there are none.
  template <int kSize>
  __device__ bool take(Angles<kSize>& angles, const RotaryEmbeddingArgs& args, int i, bool there,
                       const Reporter& report) {
    const Rotation& rotation = args.rotation;
    if (!there || i >= rotation.rotary_dim / 2) return false;
    int64_t position = load_.wait(rotation.positions.is_int64);
    if constexpr (kShifted)
      position = static_cast<int64_t>(static_cast<uint64_t>(position) +
                                      static_cast<uint64_t>(offset_.wait(args.offsets.is_int64)));
    if (position < 0 || position >= rotation.max_position) {
      if (threadIdx.x == 0 && threadIdx.y == 0) report(position, rotation.max_position);
      return false;
    }
    angles = load_angles<kSize>(rotation, position, i);
    return true;
  }

 private:
  PositionLoad load_, offset_;
};

// The angles of a token that has several positions, of which each thread needs one: its frequencies are of the same axis.
// Neighbouring lanes, as many as a head has vectors, look at one position each and trade what they saw.
template <int kSize>
class OneOfPositions {
 public:
  static constexpr int kLeastRounds = 2;
  static constexpr uint32_t kEarlyBlocks = 256;  // of several tokens: 4096 tokens, 32 + 8 heads, 23.3 us, by 512 23.7
  static bool fits(const RotaryEmbeddingArgs& args) {
    const RotaryAxes& axes = args.axes;
    const int64_t lanes = args.rotation.rotary_dim / 2 / kSize;
    bool whole = true;
    for (int k = 0, end = 0; k + 1 < axes.count; ++k) whole &= (end += axes.sizes[k]) % kSize == 0;
    return whole && !axes.on_device.data && !axes.interleaved && args.rotation.max_position <= INT32_MAX &&
           lanes >= axes.count && lanes <= 32 && (lanes & (lanes - 1)) == 0;
  }
  __device__ static void prefetch(const RotaryEmbeddingArgs& args, int64_t at, int i) {
    if (threadIdx.y == 0) prefetch_angles(args.rotation, at + axis_of(args.axes, i) * args.axes.stride, i);
  }
  __device__ OneOfPositions(const RotaryEmbeddingArgs& args, int64_t at, int64_t)
      : load_(args.rotation.positions, at + min(static_cast<int>(threadIdx.x), args.axes.count - 1) * args.axes.stride),
        lane_(first_lane() + axis_of(args.axes, threadIdx.x * kSize)) {}
  __device__ bool take(Angles<kSize>& angles, const RotaryEmbeddingArgs& args, int i, bool there,
                       const Reporter& report) {
    const int64_t seen = load_.wait(args.rotation.positions.is_int64), end = args.rotation.max_position;
    const bool outside = there && (seen < 0 || seen >= end);
    if (outside && threadIdx.y == 0) report(seen, end);
    const int position = __shfl_sync(0xffffffffu, static_cast<int>(seen), lane_);
    const uint32_t any_outside = __ballot_sync(0xffffffffu, outside) >> first_lane() & ((2u << (blockDim.x - 1)) - 1);
    if (!there || any_outside) return false;
    angles = load_angles<kSize>(args.rotation, position, i);
    return true;
  }

 private:
  // Of a frequency, where the sizes lie in a row, in the arguments.
  __device__ static int axis_of(const RotaryAxes& axes, int frequency) {
    int axis = 0, end = 0;
#pragma unroll
    for (int k = 0; k + 1 < RotaryAxes::kMost; ++k) {
      end += axes.sizes[k];
      axis += k + 1 < axes.count && frequency >= end;
    }
    return axis;
  }
  __device__ static uint32_t first_lane() { return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x % 32; }
  PositionLoad load_;
  uint32_t lane_;
};

// The angles of a token that has several positions.  Each frequency is looked up once, by one of the token's threads; they
// trade them, and whether all positions are inside, through shared memory.
class ManyPositions {
 public:
  static constexpr int kLeastRounds = 1;
  static constexpr uint32_t kEarlyBlocks = 1024;
  __device__ static void prefetch(const RotaryEmbeddingArgs& args, int64_t at, int i) {
    const int axis = threadIdx.y;
    if (axis < args.axes.count) prefetch_angles(args.rotation, at + axis * args.axes.stride, i);
  }
  __device__ ManyPositions(const RotaryEmbeddingArgs&, int64_t at, int64_t) : at_(at) {}
  template <int kSize>
  __device__ bool take(Angles<kSize>& angles, const RotaryEmbeddingArgs& args, int i, bool there,
                       const Reporter& report) {
    __shared__ Vec<float, kSize> shared[2][kThreads];
    __shared__ Vec<uint8_t, RotaryAxes::kMost> valid[kThreads];
    const Rotation& rotation = args.rotation;
    const int vectors = blockDim.x, threads = vectors * blockDim.y, thread = threadIdx.y * vectors + threadIdx.x;
    const int first = i - static_cast<int>(threadIdx.x) * kSize;  // frequency of the block
    const int end = min(vectors * kSize, static_cast<int>(rotation.rotary_dim) / 2 - first);
    const auto position = [&](int axis) { return rotation.positions[at_ + axis * args.axes.stride]; };
    if (first > 0) __syncthreads();  // what was there is read
    for (int j = thread; there && j < end; j += threads) {
      const int64_t at = position(args.axes(first + j));
      if (at < 0 || at >= rotation.max_position) continue;
      const Angles<1> one = load_angles<1>(rotation, at, first + j);
      reinterpret_cast<float*>(shared[0] + threadIdx.z * vectors)[j] = one.cosines[0];
      reinterpret_cast<float*>(shared[1] + threadIdx.z * vectors)[j] = one.sines[0];
    }
    for (int axis = threads - 1 - thread; axis < RotaryAxes::kMost; axis += threads) {  // not by those who gather
      const int64_t at = there && axis < args.axes.count ? position(axis) : 0;
      const bool inside = at >= 0 && at < rotation.max_position;
      if (!inside) report(at, rotation.max_position);
      reinterpret_cast<uint8_t*>(valid + threadIdx.z)[axis] = inside;
    }
    __syncthreads();
    angles = {shared[0][threadIdx.z * vectors + threadIdx.x], shared[1][threadIdx.z * vectors + threadIdx.x]};
    return there && i < first + end && valid[threadIdx.z].words[0] == 0x01010101u;
  }

 private:
  int64_t at_;
};

template <class T, int kSize, bool kNeox, int kHeads, class Positions>
__global__ __launch_bounds__(kThreads,
                             kBlocks) void rotary_embedding_kernel(const __grid_constant__ RotaryEmbeddingArgs all_args,
                                                                   bool streamed, Reporter report) {
  using V = Vec<T, kSize>;
  const Rotation& args = all_args.rotation;
  const int64_t t = token_of_thread();
  const bool there = t < args.num_tokens;
  const int64_t b = args.seq == args.num_tokens ? 0 : t / args.seq, s = t - b * args.seq;
  const int64_t at = there ? b * args.position_batch + s * args.position_token : 0;

  const int half_dim = static_cast<int>(args.rotary_dim) / 2;
  const int num_query_heads = static_cast<int>(args.query.num_heads);
  const int num_heads = num_query_heads + static_cast<int>(args.key.num_heads);
  T* const query = static_cast<T*>(args.query.data) + b * args.query.batch + s * args.query.token;
  T* const key = static_cast<T*>(args.key.data) + b * args.key.batch + s * args.key.token;
  const auto head_at = [&](int h) {
    const bool of_query = h < num_query_heads;
    return (of_query ? query : key) +
           (of_query ? h : h - num_query_heads) * (of_query ? args.query.head : args.key.head);
  };
  const auto low_of = [&](int i) { return kNeox ? i : 2 * i; };
  const auto high_of = [&](int i) { return kNeox ? half_dim + i : 2 * i + kSize; };

  T* heads[kHeads];
  const auto find_heads = [&](int first) {
#pragma unroll
    for (int k = 0; k < kHeads; ++k) heads[k] = head_at(first + k * static_cast<int>(blockDim.y));
  };
  const auto has_head = [&](int first, int k) { return first + k * static_cast<int>(blockDim.y) < num_heads; };
  const int first_head = blockIdx.y * blockDim.y + threadIdx.y;
  find_heads(first_head);
  if (const int i = threadIdx.x * kSize; comes_early(Positions::kEarlyBlocks) && there && i < half_dim) {
    Positions::prefetch(all_args, at, i);
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      if (!has_head(first_head, k)) continue;
      prefetch(heads[k] + low_of(i));
      prefetch(heads[k] + high_of(i));
    }
  }
  begin_dependent();

  Positions positions(all_args, at, there ? t : 0);
  for (int i = threadIdx.x * kSize; i - static_cast<int>(threadIdx.x) * kSize < half_dim; i += blockDim.x * kSize) {
    const bool inside = there && i < half_dim;
    const int low = low_of(i), high = high_of(i);
    Angles<kSize> angles;
    int first = first_head;
    do {
      V v[kHeads][2];
      find_heads(first);
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        if (inside && has_head(first, k)) {
          v[k][0] = load_vec<V>(heads[k] + low);
          v[k][1] = load_vec<V>(heads[k] + high);
        }
      }
      if (first == first_head) {
        if (!positions.take(angles, all_args, i, there, report)) break;
#pragma unroll
        for (int j = 0; j < kSize; ++j) angles.sines[j] = args.inverse ? -angles.sines[j] : angles.sines[j];
      }
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        if (!has_head(first, k)) continue;
        rotate<kNeox>(v[k][0], v[k][1], angles);
        store_vec(heads[k] + low, v[k][0], streamed);
        store_vec(heads[k] + high, v[k][1], streamed);
      }
      first += blockDim.y * kHeads;
    } while (gridDim.y == 1 && first < num_heads);
  }
}

template <class T, int kSize, class Positions>
void run(const RotaryEmbeddingArgs& all_args, const Launch& launch) {
  const Rotation& args = all_args.rotation;
  const int64_t vectors = args.rotary_dim / 2 / kSize, heads = args.query.num_heads + args.key.num_heads;
  const bool streamed = is_streamed(heads * args.num_tokens * args.rotary_dim * int64_t{sizeof(T)});
  const auto start = [&]<bool kNeox, int kHeads>(int most_threads, bool over_blocks) {
    dim3 block, grid;
    block.x = static_cast<unsigned>(std::min<int64_t>(vectors, most_threads));
    const int64_t threads = (heads + kHeads - 1) / kHeads, most = most_threads / block.x;
    const int64_t least = over_blocks ? 1 : std::min<int64_t>(Positions::kLeastRounds, threads);
    const int64_t rounds = std::max((threads + most - 1) / most, least);
    block.y = static_cast<unsigned>((threads + rounds - 1) / rounds);  // none idle in the last round
    block.z = std::min(most_threads / (block.x * block.y), 64u);
    const int64_t blocks = (args.num_tokens + block.z - 1) / block.z;
    if (blocks > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "positions: at most 2^31 - 1 tokens are supported");
    grid.x = static_cast<unsigned>(blocks);
    if (over_blocks) grid.y = static_cast<unsigned>(rounds);
    launch_dependent(rotary_embedding_kernel<T, kSize, kNeox, kHeads, Positions>, grid, block, launch,
                     "rotary_embedding", all_args, streamed, launch.reporter(args.report));
  };
  // What does not fill the chip is spread over as many threads as possible, all loads at once.
  const bool fills = vectors * heads * args.num_tokens > int64_t{num_sms(launch.device)} * 1024;
  dispatch_bool(args.is_neox, [&]<bool kNeox>() {
    if (fills) {
      start.template operator()<kNeox, 2>(kThreads, false);
    } else {
      start.template operator()<kNeox, 1>(kThreads / 2, true);
    }
  });
}

bool fits(const Rotation& args, int count) {
  const int64_t size = static_cast<int64_t>(size_of(args.dtype));
  return angles_fit(args, count) && heads_fit(args.query, size, count) && heads_fit(args.key, size, count);
}

template <class T, class Positions>
void run_in_vectors(const RotaryEmbeddingArgs& args, const Launch& launch) {
  const Rotation& r = args.rotation;
  if (fits(r, kPackSize<T>)) {
    run<T, kPackSize<T>, Positions>(args, launch);
  } else if (fits(r, kPackSize<T> / 2)) {
    run<T, kPackSize<T> / 2, Positions>(args, launch);
  } else {
    run<T, 1, Positions>(args, launch);
  }
}

}  // namespace

void rotary_embedding_cuda(const RotaryEmbeddingArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.rotation.dtype, [&]<class T>() {
    if (args.is_plain()) {
      run_in_vectors<T, OnePosition<false>>(args, launch);
    } else if (args.axes.count == 1) {
      run_in_vectors<T, OnePosition<true>>(args, launch);
    } else if (constexpr int kSize = kPackSize<T>; fits(args.rotation, kSize) && OneOfPositions<kSize>::fits(args)) {
      run<T, kSize, OneOfPositions<kSize>>(args, launch);
    } else {
      run_in_vectors<T, ManyPositions>(args, launch);
    }
  });
}

}  // namespace pykv
