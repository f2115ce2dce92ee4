// result = R_T( R_T(activation(gate)) * up ), the activation in fp32.  What an op does with its pairs is a functor (below).
//
// Memory-bound: the floor is each byte of input and result moved once.  A block takes blockDim.y rows, threads side by
// side along a row, each with kVectors vectors of kSize elements of both halves, all loaded before the first is used.
// With its activation an element costs some 12 to 30 instructions (situ: 80) of the 43 that the chip can issue while memory
// delivers one.
//
// Such a functor is made from the args by each thread and has
//   kInterleaved       a row is gate, up, gate, up, ... instead of two halves
//   kRounded           whether the activation is rounded to T before the product
//   kPlain             whether the product is activated * (up + 0) and nothing else: 16-bit numbers by pairs then
//   activation(gate)
//   product(activated, up)
//
// What becomes of the products is another (Rounded, Quantised).
#pragma once

#include <cfloat>

#include "activation/activations.cuh"
#include "activation/gated_activation.h"
#include "activation/row_tiles.cuh"
#include "cuda/dependent.cuh"
#include "cuda/pairs.cuh"
#include "cuda/quantise.cuh"
#include "cuda/vec.cuh"

namespace pykv {
namespace {

// The common case: two halves, a plain product.  up + 0 is up, but -0 counts as 0.
struct Halves {
  static constexpr bool kInterleaved = false, kRounded = true, kPlain = true;
  __device__ float product(float activated, float up) const { return activated * (up + 0.0f); }
};

// From the first and the second half of 2 * kSize numbers to those in even and those in odd places.
template <int kSize>
__device__ void take_apart(Vec<float, kSize>& x, Vec<float, kSize>& y) {
  float all[2 * kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    all[i] = x[i];
    all[kSize + i] = y[i];
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    x[i] = all[2 * i];
    y[i] = all[2 * i + 1];
  }
}

template <class T>
struct Rounded {
  using Element = T;
  __device__ explicit Rounded(const GatedActivationArgs&) {}
  template <int kSize>
  __device__ Vec<T, kSize> operator()(const Vec<T, kSize>& products) const {
    return products;
  }
};

// quantise(product * (1 / scale))
template <class T, DType kFormat>
struct Quantised {
  using Element = uint8_t;
  float inverse;
  __device__ explicit Quantised(const GatedActivationArgs& args) : inverse(1.0f / args.scale) {}
  template <int kSize>
  __device__ Vec<uint8_t, kSize> operator()(const Vec<T, kSize>& products) const {
    const auto scaled = [this](Vec<float, kSize> x) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] *= inverse;
      return x;
    };
    if constexpr (kFormat == DType::kFloat8E4M3 && kInWords<uint8_t, kSize>) {
      if (inverse > 0.0f && inverse <= FLT_MAX) return quantise_pairs(products, false, scaled);
    }
    return quantise<kFormat>(scaled(to_floats(products)));
  }
};
template <class T>
using InE4M3 = Quantised<T, DType::kFloat8E4M3>;
template <class T>
using InInt8 = Quantised<T, DType::kInt8>;

template <class T, template <class> class Op, template <class> class Result, int kSize, int kVectors>
__global__ __launch_bounds__(kTileThreads) void gated_activation_kernel(
    const __grid_constant__ GatedActivationArgs args, Divider tiles) {
  using V = Vec<T, kSize>;
  constexpr bool kInterleaved = Op<T>::kInterleaved;
  const TilePart<kSize, kVectors> part(tiles, args.num_rows, args.width);
  const int step = kInterleaved ? 2 * part.step : part.step;
  const T* input = static_cast<const T*>(args.input) + args.input_rows.offset(part.row);
  const T* first = input + (kInterleaved ? 2 * part.first : args.gate + part.first);
  const T* second = kInterleaved ? first + kSize : input + args.up + part.first;
  auto* result =
      static_cast<typename Result<T>::Element*>(args.result) + args.result_rows.offset(part.row) + part.first;
  if (comes_early()) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (part.has(k)) {
        prefetch(first + k * step);
        prefetch(second + k * step);
      }
  }
  have_ready(result);
  begin_dependent();
  if (part.end > 0 && !args.mask.has(part.row)) return;

  V a[kVectors], b[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (part.has(k)) {
      a[k] = load_vec<V>(first + k * step);
      b[k] = load_vec<V>(second + k * step);
    }
  const Op<T> op(args);
  const Result<T> make_result(args);
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (part.has(k)) {
      auto x = to_floats(a[k]), y = to_floats(b[k]);
      if constexpr (kInterleaved) take_apart(x, y);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] = op.activation(x[i]);
      V product;
      if constexpr (kInWords<T, kSize> && Op<T>::kRounded && Op<T>::kPlain) {
        product = round_to<T>(x);
#pragma unroll
        for (int i = 0; i < kSize / 2; ++i)
          product.words[i] = multiply_pairs<T>(product.words[i], plus_zero<T>(b[k].words[i]));
      } else {
        if constexpr (Op<T>::kRounded) x = to_floats(round_to<T>(x));
#pragma unroll
        for (int i = 0; i < kSize; ++i) x[i] = op.product(x[i], y[i]);
        product = round_to<T>(x);
      }
      store_vec(result + k * part.step, make_result(product));
    }
}

// The widest vectors that are aligned in every row of both arrays, and divide a row.
template <template <class> class Op, template <class> class Result = Rounded>
void run_in_vectors(const char* op, const GatedActivationArgs& args, const Launch& launch) {
  const int64_t size = static_cast<int64_t>(size_of(args.dtype)),
                result_size = static_cast<int64_t>(size_of(args.result_dtype));
  const auto aligned = [&](int64_t bytes) {
    return rows_aligned(bytes, args.input, args.input_rows, size) &&
           rows_aligned(bytes * result_size / size, args.result, args.result_rows, result_size) &&
           args.width * size % bytes == 0;
  };
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    // Codes take longer to make: by smaller blocks the last of them end sooner (4096 x 4096 on an H200: 21.5 -> 20.7 us).
    constexpr int kThreads = sizeof(typename Result<T>::Element) < sizeof(T) ? kTileThreads / 2 : kTileThreads;
    tile_rows<T, kThreads>(aligned, args.width, args.num_rows, launch.device,
                           [&]<int kSize, int kVectors>(RowTiles tiles) {
                             launch_dependent(gated_activation_kernel<T, Op, Result, kSize, kVectors>, tiles.blocks,
                                              tiles.block, launch, op, args, tiles.tiles);
                           });
  });
}

}  // namespace
}  // namespace pykv
