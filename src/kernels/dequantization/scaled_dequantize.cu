// Small floats times the scales of their groups.
//
// Memory-bound.  A thread takes kVectors times eight neighbours of a row (fewer at its end), all loads under way before the first
// is used; neighbours in a warp are neighbours in a row.
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/fp8.cuh"
#include "cuda/nvfp4.cuh"
#include "cuda/streaming.cuh"
#include "cuda/vec.cuh"
#include "dequantization/scaled_dequantize.h"

namespace pykv {
namespace {

constexpr int kThreads = 256, kVectors = 4, kSize = 8;

struct Plan {
  Divider vectors_per_row, rows, group_rows, group_columns;
  uint32_t num_vectors;
  bool codes_aligned, output_aligned, streamed;
  bool one_scale;     // for all of a vector
  bool eight_scales;  // of columns, that lie side by side
};

template <SmallFloat kCodes>
struct Codes {
  static constexpr KvFormat kFormat = kCodes == SmallFloat::kE5M2 ? KvFormat::kE5M2 : KvFormat::kE4M3;
  static constexpr int kBytes = kSize;
  uint32_t words[2];

  __device__ void floats(float (&x)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const float2 pair = fp8x2_to_float2<kFormat>(static_cast<uint16_t>(words[i / 4] >> (i % 4 * 8)));
      x[i] = pair.x, x[i + 1] = pair.y;
    }
  }
};

template <>
struct Codes<SmallFloat::kE2M1> {
  static constexpr int kBytes = kSize / 2;
  uint32_t words[1];

  __device__ void floats(float (&x)[kSize]) const {
    uint32_t halves[4];
    e2m1x8_to_halves(words[0], halves);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = word_to_floats<half>(halves[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
};

template <class Codes>
__device__ Codes load_codes(const uint8_t* from, int count, bool aligned) {
  Vec<uint8_t, Codes::kBytes> bytes;
  const int given = count * Codes::kBytes / kSize;
  if (aligned && given == Codes::kBytes) {
    bytes = load_vec<decltype(bytes)>(from);
  } else {
    bytes = load_some<decltype(bytes)>(from, given);
  }
  Codes codes;
  __builtin_memcpy(&codes, &bytes, sizeof codes);
  return codes;
}

// The scale at a place as it lies there, and its value.
__device__ uint32_t load_scale(const ScaledDequantizeArgs& args, int64_t at) {
  if (args.scale_is == GroupScale::kNumber) return 0;
  if (args.scale_is == GroupScale::kFloat) return static_cast<const uint32_t*>(args.scales)[at];
  return static_cast<const uint8_t*>(args.scales)[at];
}
__device__ float scale_of(const ScaledDequantizeArgs& args, uint32_t code, float number) {
  if (args.scale_is == GroupScale::kNumber) return number;
  if (args.scale_is == GroupScale::kFloat) return __uint_as_float(code);
  if (args.scale_is == GroupScale::kE4M3) return fp8_to_float<KvFormat::kE4M3>(static_cast<uint8_t>(code)) / number;
  return __uint_as_float(code == 255 ? 0x7fc00000u : code == 0 ? 0x00400000u : code << 23);
}

template <class T>
__device__ void store_values(T* to, const float (&x)[kSize], int count, const Plan& plan) {
  constexpr int kOnce = kPackSize<T> < kSize ? kPackSize<T> : kSize;
#pragma unroll
  for (int first = 0; first < kSize; first += kOnce) {
    Vec<float, kOnce> v;
#pragma unroll
    for (int i = 0; i < kOnce; ++i) v[i] = x[first + i];
    const Vec<T, kOnce> rounded = round_to<T>(v);
    if (plan.output_aligned && count == kSize) {
      store_vec(to + first, rounded, plan.streamed);
    } else {
      store_some(to + first, rounded, count - first);
    }
  }
}

template <class T, SmallFloat kCodes>
__global__ void __launch_bounds__(kThreads)
    scaled_dequantize_kernel(const __grid_constant__ ScaledDequantizeArgs args, const __grid_constant__ Plan plan) {
  using Own = Codes<kCodes>;
  begin_dependent();
  const uint32_t first = blockIdx.x * (kThreads * kVectors) + threadIdx.x;
  const auto place_of = [&](uint32_t matrix, uint32_t row, int64_t column) {
    return args.scale_at(matrix, plan.group_rows.quotient(static_cast<int>(row)),
                         plan.group_columns.quotient(static_cast<int>(column)));
  };
  Own codes[kVectors];
  uint32_t matrices[kVectors], rows[kVectors], places[kVectors], scales[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t n = min(first + i * kThreads, plan.num_vectors - 1);
    matrices[i] = plan.rows(plan.vectors_per_row(n, places[i]), rows[i]);
    const int64_t column = static_cast<int64_t>(places[i]) * kSize, left = args.columns - column;
    codes[i] = load_codes<Own>(args.codes + matrices[i] * args.code_matrix + rows[i] * args.code_row +
                                   static_cast<int64_t>(places[i]) * Own::kBytes,
                               left < kSize ? static_cast<int>(left) : kSize, plan.codes_aligned);
    scales[i] = plan.one_scale ? load_scale(args, place_of(matrices[i], rows[i], column)) : 0;
  }
  const float number = args.number;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (first + i * kThreads >= plan.num_vectors) break;
    const int64_t column = static_cast<int64_t>(places[i]) * kSize, left = args.columns - column;
    const int count = left < kSize ? static_cast<int>(left) : kSize;
    float x[kSize];
    codes[i].floats(x);
    if (plan.one_scale) {
      const float scale = scale_of(args, scales[i], number);
#pragma unroll
      for (int e = 0; e < kSize; ++e) x[e] *= scale;
    } else {  // groups of few columns have scales in fp32
      const auto* const of = static_cast<const float*>(args.scales);
      if (plan.eight_scales && count == kSize) {
        const float* const from = of + place_of(matrices[i], rows[i], column);
        const auto four = load_vec<Vec<float, 4>>(from), more = load_vec<Vec<float, 4>>(from + 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] *= four[e], x[e + 4] *= more[e];
      } else {
#pragma unroll
        for (int e = 0; e < kSize; ++e)
          if (e < count) x[e] *= of[place_of(matrices[i], rows[i], column + e)];
      }
    }
    store_values(static_cast<T*>(args.output) + matrices[i] * args.output_matrix + rows[i] * args.output_row + column,
                 x, count, plan);
  }
}

template <class T, SmallFloat kCodes>
void launch_kernel(const ScaledDequantizeArgs& args, const Launch& launch) {
  constexpr int64_t kBytes = Codes<kCodes>::kBytes, kItem = sizeof(T);
  const int64_t across = (args.columns + kSize - 1) / kSize;
  constexpr int64_t kMost = INT32_MAX - kThreads * kVectors;
  if (args.columns > INT32_MAX || across > kMost / args.rows || across * args.rows > kMost / args.matrices)
    fail(PYKV_NOT_IMPLEMENTED, "input: 2^31 vectors of %d elements in one call are not supported", kSize);
  const int64_t total = across * args.rows * args.matrices;
  const Plan plan{
      Divider(across),
      Divider(args.rows),
      Divider(args.group_rows),
      Divider(args.group_columns),
      static_cast<uint32_t>(total),
      is_aligned(kBytes, args.codes, {args.code_row, args.code_matrix}),
      is_aligned(16, args.output, {args.output_row * kItem, args.output_matrix * kItem}),
      is_streamed(total * kSize * kItem),
      args.scale_is == GroupScale::kNumber || args.group_columns % kSize == 0 || args.group_columns >= args.columns,
      args.group_columns == 1 && args.scale_column == 1 &&
          is_aligned(16, args.scales, {args.scale_row * 4, args.scale_matrix * 4})};
  constexpr int64_t kTile = kThreads * kVectors;
  launch_dependent(scaled_dequantize_kernel<T, kCodes>, static_cast<uint32_t>((total + kTile - 1) / kTile), kThreads,
                   launch, "scaled_dequantize", args, plan);
}

}  // namespace

void scaled_dequantize_cuda(const ScaledDequantizeArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T> {
    switch (args.codes_are) {
      case SmallFloat::kE4M3:
        return launch_kernel<T, SmallFloat::kE4M3>(args, launch);
      case SmallFloat::kE5M2:
        return launch_kernel<T, SmallFloat::kE5M2>(args, launch);
      case SmallFloat::kE2M1:
        return launch_kernel<T, SmallFloat::kE2M1>(args, launch);
    }
  });
}

}  // namespace pykv
