// Packed integers to floats: (code - zero) * scale, rounded once.
//
// Memory-bound, four fifths of it stores.  A thread takes the rows of a few words (of GPTQ four columns of them, of AWQ eight rows
// of one), loads them at once, and zeros and scales where the group changes.  Neighbours in a warp are neighbours in a row.
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/streaming.cuh"
#include "cuda/vec.cuh"
#include "dequantization/packed_dequantize.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;

struct Plan {
  Divider threads_per_row, group_size;
  bool codes_aligned, scales_aligned, output_aligned, streamed;
};

// A small integer as a float of 2^23 and more, which has it in its lowest bits.
constexpr float kLarge = 8388608.0f;
__device__ __forceinline__ float above_large(uint32_t code) { return __uint_as_float(0x4b000000u | code); }

// What a thread has of each packing: kRows rows and kColumns columns.
template <Packing kPacking>
struct Words {
  static constexpr int kBits = bits_of(kPacking), kColumns = 4;
  static constexpr int kWords = kBits == 3 ? 3 : 1, kRows = 32 * kWords / kBits;

  uint32_t words[kWords][kColumns];

  __device__ void load(const PackedDequantizeArgs& args, int64_t step, int64_t column, bool aligned) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t* from = args.codes + (step * kWords + w) * args.code_stride + column;
      if (aligned) {
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        words[w][0] = four.x, words[w][1] = four.y, words[w][2] = four.z, words[w][3] = four.w;
      } else {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) words[w][i] = from[i];
      }
    }
  }
  __device__ uint32_t code(int row, int column) const {
    const int at = row * kBits, word = at / 32, shift = at % 32;
    uint32_t bits = words[word][column] >> shift;
    if (shift + kBits > 32) bits |= words[word + 1 < kWords ? word + 1 : word][column] << (32 - shift);
    return bits & ((1u << kBits) - 1);
  }
  __device__ static uint32_t zero(const PackedDequantizeArgs& args, int64_t group, int64_t column) {
    const uint32_t* from = args.zeros + group * args.zero_stride;
    const int64_t at = column * kBits;
    const int shift = static_cast<int>(at % 32);
    uint32_t bits = from[at / 32] >> shift;
    if (shift + kBits > 32) bits |= from[at / 32 + 1] << (32 - shift);
    return (bits & ((1u << kBits) - 1)) + args.zero_offset;
  }
};

template <>
struct Words<Packing::kAwq4> {
  static constexpr int kColumns = 8, kRows = 8;

  uint32_t words[kRows];

  __device__ void load(const PackedDequantizeArgs& args, int64_t step, int64_t column, bool) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = step * kRows + i;
      words[i] = row < args.rows ? args.codes[row * args.code_stride + column / kColumns] : 0;
    }
  }
  __device__ static uint32_t nibble(uint32_t word, int column) {
    return word >> (4 * (column / 2) + 16 * (column % 2)) & 15u;
  }
  __device__ uint32_t code(int row, int column) const { return nibble(words[row], column); }
  __device__ static uint32_t zero(const PackedDequantizeArgs& args, int64_t group, int64_t column) {
    return nibble(args.zeros[group * args.zero_stride + column / kColumns], static_cast<int>(column % kColumns));
  }
};

// Up to 16 bytes at once.
template <class T, int kSize>
__device__ void load_row(const T* from, bool aligned, float (&values)[kSize]) {
  constexpr int kOnce = kSize < kPackSize<T> ? kSize : kPackSize<T>;
#pragma unroll
  for (int first = 0; first < kSize; first += kOnce) {
    const auto v =
        to_floats(aligned ? load_vec<Vec<T, kOnce>>(from + first) : load_some<Vec<T, kOnce>>(from + first, kOnce));
#pragma unroll
    for (int i = 0; i < kOnce; ++i) values[first + i] = v[i];
  }
}

template <class T, int kSize>
__device__ void store_row(T* to, bool aligned, bool streamed, const float (&values)[kSize]) {
  constexpr int kOnce = kSize < kPackSize<T> ? kSize : kPackSize<T>;
#pragma unroll
  for (int first = 0; first < kSize; first += kOnce) {
    Vec<float, kOnce> v;
#pragma unroll
    for (int i = 0; i < kOnce; ++i) v[i] = values[first + i];
    const auto rounded = round_to<T>(v);
    if (aligned) {
      store_vec(to + first, rounded, streamed);
    } else {
      store_some(to + first, rounded, kOnce);
    }
  }
}

template <class T, Packing kPacking>
__global__ void __launch_bounds__(kThreads)
    packed_dequantize_kernel(const __grid_constant__ PackedDequantizeArgs args, const __grid_constant__ Plan plan,
                             const Reporter report) {
  using Own = Words<kPacking>;
  constexpr int kColumns = Own::kColumns, kRows = Own::kRows;
  begin_dependent();
  uint32_t place;
  const int64_t step = plan.threads_per_row(blockIdx.x * kThreads + threadIdx.x, place);
  const int64_t column = static_cast<int64_t>(place) * kColumns, first = step * kRows;
  if (first >= args.rows) return;
  Own own;
  own.load(args, step, column, plan.codes_aligned);
  int64_t known = -1;
  float zeros[kColumns], scales[kColumns];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first + i;
    if (row >= args.rows) break;
    const int64_t group =
        args.group_of_row.data ? args.group_of_row[row] : plan.group_size.quotient(static_cast<int>(row));
    if (group < 0 || group >= args.groups) {
      if (column == 0) report(group, args.groups);
      continue;
    }
    if (group != known) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) zeros[c] = kLarge + static_cast<float>(Own::zero(args, group, column + c));
      load_row(static_cast<const T*>(args.scales) + group * args.scale_stride + column, plan.scales_aligned, scales);
      known = group;
    }
    float values[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) values[c] = (above_large(own.code(i, c)) - zeros[c]) * scales[c];
    store_row(static_cast<T*>(args.output) + row * args.output_stride + column, plan.output_aligned, plan.streamed,
              values);
  }
}

template <class T, Packing kPacking>
void launch_kernel(const PackedDequantizeArgs& args, const Launch& launch) {
  using Own = Words<kPacking>;
  const int64_t across = args.columns / Own::kColumns, down = (args.rows + Own::kRows - 1) / Own::kRows;
  if (args.rows > INT32_MAX || down > (INT32_MAX - kThreads) / across)
    fail(PYKV_NOT_IMPLEMENTED, "out: 2^31 rows, or threads of %d x %d elements, in one call are not supported",
         Own::kRows, Own::kColumns);
  const int64_t size = sizeof(T), wide = size * Own::kColumns < 16 ? size * Own::kColumns : 16;
  const Plan plan{Divider(across),
                  Divider(args.group_size),
                  is_aligned(16, args.codes, {args.code_stride * 4}),
                  is_aligned(wide, args.scales, {args.scale_stride * size}),
                  is_aligned(wide, args.output, {args.output_stride * size}),
                  is_streamed(args.rows * args.columns * size)};
  launch_dependent(packed_dequantize_kernel<T, kPacking>,
                   static_cast<uint32_t>((across * down + kThreads - 1) / kThreads), kThreads, launch,
                   "packed_dequantize", args, plan, launch.reporter("gptq_dequantize: g_idx"));
}

}  // namespace

void packed_dequantize_cuda(const PackedDequantizeArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T> {
    switch (args.packing) {
      case Packing::kAwq4:
        return launch_kernel<T, Packing::kAwq4>(args, launch);
      case Packing::kGptq2:
        return launch_kernel<T, Packing::kGptq2>(args, launch);
      case Packing::kGptq3:
        return launch_kernel<T, Packing::kGptq3>(args, launch);
      case Packing::kGptq4:
        return launch_kernel<T, Packing::kGptq4>(args, launch);
      case Packing::kGptq8:
        return launch_kernel<T, Packing::kGptq8>(args, launch);
    }
  });
}

}  // namespace pykv
