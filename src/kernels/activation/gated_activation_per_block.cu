// out = quantise(y / s),  y = silu(gate) * up in fp32,  s = clamp(max |y| / 448 or 127) for each block of a row.
//
// Memory-bound: the floor is each byte of input and out moved once.  A block of neighbours belongs to up to 32 lanes of a
// warp, each with kVectors vectors of kSize elements of both halves, all loaded before the first is used and kept until
// the scale is known.  Blocks too large for that are computed twice.
#include <bit>

#include "activation/activations.cuh"
#include "activation/gated_activation_per_block.h"
#include "activation/row_tiles.cuh"
#include "cuda/dependent.cuh"
#include "cuda/quantise.cuh"

namespace pykv {
namespace {

// x / scale, correctly rounded wherever a code depends on it, for one scale and many numbers.
class Divisor {
 public:
  // An infinite scale makes every finite number 0 and infinity NaN.
  __device__ explicit Divisor(float scale)
      : scale_(scale < INFINITY ? scale : 1.0f), reciprocal_(scale < INFINITY ? 1.0f / scale : 0.0f) {}
  __device__ float divide(float x) const {
    const float q = x * reciprocal_;
    return fabsf(q) < 0x1p20f ? fmaf(fmaf(-q, scale_, x), reciprocal_, q) : q;
  }

 private:
  float scale_, reciprocal_;
};

template <class T, DType kFormat, int kSize, int kVectors>
__global__ __launch_bounds__(kTileThreads) void gated_activation_per_block_kernel(
    const __grid_constant__ GatedActivationPerBlockArgs args, unsigned tiles, int lane_bits) {
  using V = Vec<T, kSize>;
  begin_dependent();
  const int64_t row = int64_t{blockIdx.x / tiles} * blockDim.y + threadIdx.y;
  const int64_t group = int64_t{blockIdx.x % tiles} * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
  const int lanes = 1 << lane_bits, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t first = group * args.group_size;
  // threads without a block stay: their warp finds its maxima with all lanes
  const bool there = row < args.num_rows && first < args.width;
  const int64_t vectors = there ? args.group_size / kSize : 0;
  const T* gate = static_cast<const T*>(args.input) + (there ? args.input_rows.offset(row) + first : 0);
  const T* up = gate + args.width;

  float largest = 0.0f;
  const auto multiply = [&](const V& a, const V& b) {
    auto y = to_floats(a);
    const auto factor = to_floats(b);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      y[i] = silu(y[i]) * factor[i];
      largest = fmaxf(largest, fabsf(y[i]));
    }
    return y;
  };
  V a[kVectors], b[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (lane + k * lanes < vectors) {
      a[k] = load_vec<V>(gate + (lane + k * lanes) * kSize);
      b[k] = load_vec<V>(up + (lane + k * lanes) * kSize);
    }
  Vec<float, kSize> y[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (lane + k * lanes < vectors) y[k] = multiply(a[k], b[k]);
  const int64_t rest = lane + int64_t{kVectors} * lanes;
  const auto computed = [&](int64_t v) { return multiply(load_vec<V>(gate + v * kSize), load_vec<V>(up + v * kSize)); };
  for (int64_t v = rest; v < vectors; v += lanes) computed(v);

  for (int distance = lanes / 2; distance > 0; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  if (!there) return;
  const float scale = fmaxf(fminf(largest / args.largest(), args.most), args.least());
  if (lane == 0) args.scales[row * args.scales_row + group * args.scales_group] = scale;

  const Divisor divisor(scale);
  uint8_t* out = static_cast<uint8_t*>(args.out) + args.out_rows.offset(row) + first;
  const auto store = [&](int64_t v, Vec<float, kSize> q) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) q[i] = divisor.divide(q[i]);
    store_vec(out + v * kSize, quantise<kFormat>(q));
  };
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (lane + k * lanes < vectors) store(lane + k * lanes, y[k]);
  for (int64_t v = rest; v < vectors; v += lanes) store(v, computed(v));
}

template <class T, DType kFormat, int kSize>
void run(const GatedActivationPerBlockArgs& args, const Launch& launch) {
  const int64_t vectors = args.group_size / kSize;
  const int lanes = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(vectors < 32 ? vectors : 32)));
  const RowTiles tiles = row_tiles(args.width / args.group_size * lanes, args.num_rows, kTileThreads);
  const auto start = [&]<int kVectors>() {
    launch_dependent(gated_activation_per_block_kernel<T, kFormat, kSize, kVectors>, tiles.blocks, tiles.block, launch,
                     "silu_and_mul_per_block_quant", args, tiles.tiles, std::countr_zero(static_cast<unsigned>(lanes)));
  };
  if (vectors <= lanes) {
    start.template operator()<1>();
  } else {
    start.template operator()<kSize == 1 ? 4 : 2>();
  }
}

// Whether vectors of `bytes` of input divide a block and are aligned in every row of both arrays.
bool fits(const GatedActivationPerBlockArgs& args, int64_t bytes) {
  const int64_t size = static_cast<int64_t>(size_of(args.dtype));
  return rows_aligned(bytes, args.input, args.input_rows, size) &&
         rows_aligned(bytes / size, args.out, args.out_rows, 1) && args.group_size * size % bytes == 0;
}

template <class T, DType kFormat>
void run_in_vectors(const GatedActivationPerBlockArgs& args, const Launch& launch) {
  if (fits(args, kAccessBytes)) {
    run<T, kFormat, kPackSize<T>>(args, launch);
  } else {
    run<T, kFormat, 1>(args, launch);
  }
}

}  // namespace

void gated_activation_per_block_cuda(const GatedActivationPerBlockArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    if (args.out_dtype == DType::kInt8) {
      run_in_vectors<T, DType::kInt8>(args, launch);
    } else {
      run_in_vectors<T, DType::kFloat8E4M3>(args, launch);
    }
  });
}

}  // namespace pykv
