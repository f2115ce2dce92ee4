// out = quantise(y * (1 / s)),  y = R_T(R_T(silu(gate)) * up),  s = clamp(max |y| / 448 or 127) for each block of a row.
//
// Memory-bound: the floor is each byte of input and out moved once.  A block of neighbours belongs to up to 32 lanes of a
// warp, each with kVectors vectors of kSize elements of both halves, all loaded before the first is used and kept until
// the scale is known.  Blocks too large for that are computed twice.  While memory delivers an element of 16 bits, an H200
// issues some 35 instructions, fewer when it runs into the limit of its power; an element costs 16, and a thread some 180
// more for its addresses and its scale.
#include <bit>

#include "activation/gated_activation_per_block.h"
#include "activation/row_tiles.cuh"
#include "cuda/dependent.cuh"
#include "cuda/largest.cuh"
#include "cuda/quantise.cuh"
#include "cuda/silu.cuh"

namespace pykv {
namespace {

// Blocks of an SM, at least: else the compiler puts the last load behind what is done with the first.  10 where more would spill.
constexpr int kThreads = 128;
constexpr int blocks_of_sm(bool whole) { return whole ? 12 : 10; }

// kWhole: the lanes of a block have kVectors vectors each, and it has no others.
template <class T, DType kFormat, int kSize, int kVectors, bool kWhole>
__global__ __launch_bounds__(kThreads, blocks_of_sm(kWhole)) void gated_activation_per_block_kernel(
    const __grid_constant__ GatedActivationPerBlockArgs args, Divider tiles, int lane_bits) {
  using V = Vec<T, kSize>;
  uint32_t tile;
  int64_t row = int64_t{tiles(blockIdx.x, tile)} * blockDim.y + threadIdx.y;
  int64_t group = int64_t{tile} * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
  // Threads without a block stay, since their warp finds its maxima with all lanes: they read another's, and store nothing.
  const bool there = row < args.num_rows && group * args.group_size < args.width;
  if (!there) row = group = 0;
  const int64_t first = group * args.group_size;
  const int lanes = 1 << lane_bits, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int vectors = static_cast<int>(args.group_size / kSize);
  const T* gate = static_cast<const T*>(args.input) + (args.input_rows.offset(row) + first);
  const T* up = gate + args.width;
  uint8_t* out = static_cast<uint8_t*>(args.out) + (args.out_rows.offset(row) + first);
  float* scale_to = args.scales + (row * args.scales_row + group * args.scales_group);
  const auto has = [&](int k) { return kWhole || lane + k * lanes < vectors; };
  const auto element = [&](int k) {
    const int vector = lane + k * lanes;
    return (kWhole ? vector : min(vector, vectors - 1)) * kSize;
  };
  if (comes_early()) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      prefetch(gate + element(k));
      prefetch(up + element(k));
    }
  }
  have_ready(out);
  have_ready(scale_to);
  begin_dependent();

  V a[kVectors], b[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    a[k] = load_vec_in_order<V>(gate + element(k));
    b[k] = load_vec_in_order<V>(up + element(k));
  }
  float largest = 0.0f;
  const auto multiply = [&](const V& a, const V& b) {
    const V product = silu_and_mul(a, b);
    largest = fmaxf(largest, largest_of(product));
    return product;
  };
  V y[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) y[k] = multiply(a[k], b[k]);
  const auto computed = [&](int k) { return multiply(load_vec<V>(gate + element(k)), load_vec<V>(up + element(k))); };
  for (int k = kVectors; !kWhole && has(k); ++k) computed(k);

  for (int distance = lanes / 2; distance > 0; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  if (!there) return;
  const float scale = fmaxf(fminf(largest / args.largest(), args.most), args.least());
  if (lane == 0) *scale_to = scale;

  const float factor = factor_of(scale);
  const auto store = [&](int k, const V& product) {
    constexpr CodeKind kKind = kFormat == DType::kInt8 ? CodeKind::kInt8 : CodeKind::kE4M3;
    store_vec(out + element(k), codes_times(kKind, product, factor, !(factor > 0.0f)));
  };
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (has(k)) store(k, y[k]);
  for (int k = kVectors; !kWhole && has(k); ++k) store(k, computed(k));
}

template <class T, DType kFormat, int kSize>
void run(const GatedActivationPerBlockArgs& args, const Launch& launch) {
  constexpr int kVectors = kSize == 1 ? 4 : 2;
  if (args.group_size > INT32_MAX / 2) fail(PYKV_NOT_IMPLEMENTED, "group_size: more than 2^30 is not supported");
  const int64_t vectors = args.group_size / kSize, wanted = (vectors + kVectors - 1) / kVectors;
  const int lanes = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(wanted < 32 ? wanted : 32)));
  const RowTiles tiles = row_tiles(args.width / args.group_size * lanes, args.num_rows, kThreads);
  const auto start = [&](auto kernel) {
    launch_dependent(kernel, tiles.blocks, tiles.block, launch, "silu_and_mul_per_block_quant", args, tiles.tiles,
                     std::countr_zero(static_cast<unsigned>(lanes)));
  };
  if constexpr (kSize > 1) {
    if (vectors == lanes * kVectors) return start(gated_activation_per_block_kernel<T, kFormat, kSize, kVectors, true>);
  }
  start(gated_activation_per_block_kernel<T, kFormat, kSize, kVectors, false>);
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
