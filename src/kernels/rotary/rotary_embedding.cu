// x' = x * cos - y * sin,  y' = y * cos + x * sin  for the pairs of each head, in fp32, rounded once.
//
// Memory-bound: the floor is the rotated part of every head moved once in and once out.  A thread owns kSize pairs of the
// rotary dimension (two vectors of kSize elements) in kHeads heads at a time: it reads its cosines and sines once for all
// heads, and has loaded the vectors of kHeads heads before the position, and what the position points to, have arrived.
// Threads run along x over the rotary dimension, y over the heads of query and key in one count, z over tokens.
#include <algorithm>

#include "cuda/dependent.cuh"
#include "cuda/rotation.cuh"
#include "rotary/rotary_embedding.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;

// The position of a token, on its way.
class OnePosition {
 public:
  static constexpr int kBlocks = 4;  // of an SM, at least: few registers, many loads under way
  __device__ OnePosition(const RotaryEmbeddingArgs& args, int64_t b, int64_t s)
      : load_(args.rotation.positions, b * args.rotation.position_batch + s * args.rotation.position_token) {}
  // Its angles from frequency `i` on; false where it lies outside the cache.
  template <int kSize>
  __device__ bool angles(Angles<kSize>& angles, const RotaryEmbeddingArgs& args, int i, const Reporter& report) {
    const Rotation& rotation = args.rotation;
    const int64_t position = load_.wait(rotation.positions.is_int64);
    if (position < 0 || position >= rotation.max_position) {
      if (threadIdx.x == 0 && threadIdx.y == 0) report(position, rotation.max_position);
      return false;
    }
    angles = load_angles<kSize>(rotation, position, i);
    return true;
  }

 private:
  PositionLoad load_;
};

// The positions of a token along several axes, or with an offset.
class ManyPositions {
 public:
  static constexpr int kBlocks = 3;
  __device__ ManyPositions(const RotaryEmbeddingArgs& args, int64_t b, int64_t s) : axes_(args.axes) {
#pragma unroll
    for (int axis = 0; axis < RotaryAxes::kMost; ++axis)
      if (axis < axes_.count) {
        positions_[axis] = args.position(axis, b, s);
        if (axes_.on_device.data) axes_.sizes[axis] = static_cast<int>(axes_.on_device[axis]);
      }
  }
  template <int kSize>
  __device__ bool angles(Angles<kSize>& angles, const RotaryEmbeddingArgs& args, int i, const Reporter& report) {
    const Rotation& rotation = args.rotation;
#pragma unroll
    for (int axis = 0; axis < RotaryAxes::kMost; ++axis)
      if (axis < axes_.count && (positions_[axis] < 0 || positions_[axis] >= rotation.max_position)) {
        if (threadIdx.x == 0 && threadIdx.y == 0) report(positions_[axis], rotation.max_position);
        return false;
      }
    int axes[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) axes[j] = axes_(i + j);
#pragma unroll
    for (int axis = 0; axis < RotaryAxes::kMost; ++axis) {
      bool wanted = false;
#pragma unroll
      for (int j = 0; j < kSize; ++j) wanted |= axes[j] == axis;
      if (!wanted) continue;
      const Angles<kSize> own = load_angles<kSize>(rotation, positions_[axis], i);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        angles.cosines[j] = axes[j] == axis ? own.cosines[j] : angles.cosines[j];
        angles.sines[j] = axes[j] == axis ? own.sines[j] : angles.sines[j];
      }
    }
    return true;
  }

 private:
  RotaryAxes axes_;
  int64_t positions_[RotaryAxes::kMost] = {};
};

template <class T, int kSize, bool kNeox, int kHeads, class Positions>
__global__ __launch_bounds__(kThreads, Positions::kBlocks) void rotary_embedding_kernel(
    const __grid_constant__ RotaryEmbeddingArgs all_args, Reporter report) {
  using V = Vec<T, kSize>;
  const Rotation& args = all_args.rotation;
  begin_dependent();
  const int64_t t = int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
  if (t >= args.num_tokens) return;
  const int64_t b = args.seq == args.num_tokens ? 0 : t / args.seq, s = t - b * args.seq;
  Positions positions(all_args, b, s);

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

  for (int i = threadIdx.x * kSize; i < half_dim; i += blockDim.x * kSize) {
    const int low = kNeox ? i : 2 * i, high = kNeox ? half_dim + i : 2 * i + kSize;
    Angles<kSize> angles;
    bool have_angles = false;
    for (int first = threadIdx.y; first < num_heads; first += blockDim.y * kHeads) {
      T* heads[kHeads];
      V v[kHeads][2];
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        const int h = first + k * static_cast<int>(blockDim.y);
        heads[k] = head_at(h);
        if (h < num_heads) {
          v[k][0] = load_vec<V>(heads[k] + low);
          v[k][1] = load_vec<V>(heads[k] + high);
        }
      }
      if (!have_angles) {
        if (!positions.angles(angles, all_args, i, report)) return;
#pragma unroll
        for (int j = 0; j < kSize; ++j) angles.sines[j] = args.inverse ? -angles.sines[j] : angles.sines[j];
        have_angles = true;
      }
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        if (first + k * static_cast<int>(blockDim.y) >= num_heads) continue;
        rotate<kNeox>(v[k][0], v[k][1], angles);
        store_vec(heads[k] + low, v[k][0]);
        store_vec(heads[k] + high, v[k][1]);
      }
    }
  }
}

template <class T, int kSize, class Positions>
void run(const RotaryEmbeddingArgs& all_args, const Launch& launch) {
  const Rotation& args = all_args.rotation;
  const int64_t vectors = args.rotary_dim / 2 / kSize, heads = args.query.num_heads + args.key.num_heads;
  const auto start = [&]<bool kNeox, int kHeads>() {
    dim3 block;
    block.x = static_cast<unsigned>(std::min<int64_t>(vectors, kThreads));
    block.y = static_cast<unsigned>(std::min<int64_t>((heads + kHeads - 1) / kHeads, kThreads / block.x));
    block.z = std::min(kThreads / (block.x * block.y), 64u);
    const int64_t blocks = (args.num_tokens + block.z - 1) / block.z;
    if (blocks > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "positions: at most 2^31 - 1 tokens are supported");
    launch_dependent(rotary_embedding_kernel<T, kSize, kNeox, kHeads, Positions>, static_cast<unsigned>(blocks), block,
                     launch, "rotary_embedding", all_args, launch.reporter(args.report));
  };
  // What does not fill the chip is spread over as many threads as possible.
  const bool fills = vectors * heads * args.num_tokens > int64_t{num_sms(launch.device)} * 1024;
  dispatch_bool(args.is_neox, [&]<bool kNeox>() {
    if (fills) {
      start.template operator()<kNeox, 2>();
    } else {
      start.template operator()<kNeox, 1>();
    }
  });
}

bool fits(const Rotation& args, int count) {
  const int64_t size = static_cast<int64_t>(size_of(args.dtype));
  return angles_fit(args, count) && heads_fit(args.query, size, count) && heads_fit(args.key, size, count);
}

template <class T, class Positions>
void run_in_vectors(const RotaryEmbeddingArgs& args, const Launch& launch) {
  if (fits(args.rotation, kPackSize<T>)) {
    run<T, kPackSize<T>, Positions>(args, launch);
  } else if (fits(args.rotation, kPackSize<T> / 2)) {
    run<T, kPackSize<T> / 2, Positions>(args, launch);
  } else {
    run<T, 1, Positions>(args, launch);
  }
}

}  // namespace

void rotary_embedding_cuda(const RotaryEmbeddingArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.rotation.dtype, [&]<class T>() {
    if (args.is_plain()) {
      run_in_vectors<T, OnePosition>(args, launch);
    } else {
      run_in_vectors<T, ManyPositions>(args, launch);
    }
  });
}

}  // namespace pykv
