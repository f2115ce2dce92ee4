// codes = code(x / scale) or code(x * factor) + zero point, scale from the largest magnitude of a row (int8 with a zero point: from
// its extremes).
//
// Memory-bound: the floor is each byte of input and codes moved once.  Registers hold a row, up to kPacks packs of each thread
// of a block (of a warp: short rows); packs beyond are read again, from L2.
#include <algorithm>
#include <cfloat>

#include "cuda/dependent.cuh"
#include "cuda/device.h"
#include "cuda/largest.cuh"
#include "cuda/quantise.cuh"
#include "cuda/quotient.cuh"
#include "cuda/reduce.cuh"
#include "quantization/packs.cuh"
#include "quantization/row_quant.h"
#include "quantization/shifted_int8.cuh"

namespace pykv {
namespace {

constexpr int kMostThreads = 1024, kWarps = 4;  // of a block: of long rows; of short ones

// Numbers in the order of their bits as signed integers, and back.
__device__ inline int ordered(float x) {
  const int bits = __float_as_int(x);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
__device__ inline float from_ordered(int key) { return __int_as_float(key < 0 ? key ^ 0x7fffffff : key); }

// The largest over all threads of a row.
template <bool kWarp>
__device__ int largest_of_row(int key, int (&memory)[32]) {
  key = __reduce_max_sync(0xffffffffu, key);
  if constexpr (kWarp) return key;
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = key;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, memory[min(threadIdx.x % 32, blockDim.x / 32 - 1)]);
}

// Codes of a pack by the scale of its row.
template <class T, bool kAsks, bool kShifted>
class Coder {
  static constexpr int kSize = kPackSize<T>;

 public:
  __device__ Coder(const RowQuantArgs& args, const RowScale& scale)
      : codes_(args.codes), rule_(args.rule), scale_(scale) {
    if (rule_ == RowRule::kDivide) quotient_ = Quotient(scale.scale);
  }
  __device__ Vec<uint8_t, kSize> operator()(const Pack<T>& x) const {
    if (kAsks ? rule_ == RowRule::kInt8Shifted : kShifted) return ShiftedInt8(scale_.factor, scale_.zero_point)(x);
    if (rule_ == RowRule::kDivide) {
      const auto divided = [this](Vec<float, kSize> v) {
        quotient_.template divide<T>(v.elements);
        return v;
      };
      if (codes_ == QuantCode::kE4M3) return quantise_pairs(x, scale_.scale > FLT_MAX, divided);
      return quantise<DType::kFloat8E5M2>(divided(to_floats(x)));
    }
    if (rule_ == RowRule::kMultiply || rule_ == RowRule::kInt8)
      return codes_times(codes_, x, scale_.factor, !(scale_.factor > 0.0f));
    auto v = to_floats(x);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      v[i] = __fmul_rn(v[i], scale_.factor);
      v[i] = roundf(v[i]);
    }
    return quantise<DType::kInt8>(v);
  }

 private:
  QuantCode codes_;
  RowRule rule_;
  RowScale scale_;
  Quotient quotient_;
};

// kWarp: a row is a warp's, else a block's.  kAny: it may have packs that no register holds, or that are not aligned.
// kShifted: whether codes are int8 with zero points; short rows, kAny and fp32 ask when they run.
template <class T, int kPacks, bool kWarp, bool kAny, bool kShifted = false>
__global__ __launch_bounds__(kWarp ? 32 * kWarps
                                   : kMostThreads) void row_quant_kernel(const __grid_constant__ RowQuantArgs args,
                                                                         bool aligned) {
  constexpr int kSize = kPackSize<T>;
  constexpr bool kAsks = kAny || kWarp || sizeof(T) == 4;
  __shared__ int memory[2][32];
  const int thread = kWarp ? threadIdx.x % 32 : threadIdx.x, threads = kWarp ? 32 : blockDim.x;
  const int64_t row = kWarp ? int64_t{blockIdx.x} * kWarps + threadIdx.x / 32 : blockIdx.x;
  const bool there = !kWarp || row < args.rows;
  const T* from = static_cast<const T*>(args.input) + args.input_rows.offset(there ? row : 0);
  uint8_t* to = static_cast<uint8_t*>(args.out) + args.out_rows.offset(there ? row : 0);
  const int64_t width = there ? args.width : 0;
  const auto at = [&](int64_t k) { return (thread + k * threads) * kSize; };
  const auto load = [&](int64_t k) {
    return load_pack(from + at(k), kAny ? width - at(k) : int64_t{kSize}, !kAny || aligned);
  };
  if (comes_early()) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k)
      if (at(k) < width) prefetch(from + at(k));
  }
  begin_dependent();
  if (row >= args.valid.of(args.rows)) return;

  Pack<T> x[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    x[k] = {};
    if (at(k) < width) x[k] = load(k);
  }
  float low = 0.0f, high;
  if (kAsks ? args.rule == RowRule::kInt8Shifted : kShifted) {
    Extremes extremes;
    const auto take = [&](const Pack<T>& pack, int64_t k) {
      const int64_t count = width - at(k);
      if (count >= kSize) {
        extremes.take(pack);
      } else if constexpr (kAny) {
        for (int i = 0; i < kSize; ++i)
          if (i < count) extremes.take(to_float(pack[i]));
      }
    };
#pragma unroll
    for (int k = 0; k < kPacks; ++k) take(x[k], k);
    if constexpr (kAny)
      for (int64_t k = kPacks; at(k) < width; ++k) take(load(k), k);
    low = from_ordered(~largest_of_row<kWarp>(~ordered(extremes.low), memory[1]));
    high = from_ordered(largest_of_row<kWarp>(ordered(extremes.high), memory[0]));
    if (!(low <= high)) low = high = 0.0f;  // no number
  } else {
    high = largest_of(x);
    if constexpr (kAny)
      for (int64_t k = kPacks; at(k) < width; ++k) high = fmaxf(high, largest_of(load(k)));
    high = __int_as_float(largest_of_row<kWarp>(__float_as_int(high), memory[0]));
  }
  const RowScale scale = args.scale_of(low, high, args.bounded ? float{args.bound} : INFINITY);
  if (thread == 0) {
    args.scales[row * args.scale_stride] = scale.scale;
    if (args.zero_points) args.zero_points[row * args.zero_stride] = scale.zero_point;
  }
  const Coder<T, kAsks, kShifted> coder(args, scale);
  const auto store = [&](const Pack<T>& pack, int64_t k) {
    store_codes(to + at(k), coder(pack), kAny ? width - at(k) : int64_t{kSize}, !kAny || aligned);
  };
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
    if (at(k) < width) store(x[k], k);
  if constexpr (kAny)
    for (int64_t k = kPacks; at(k) < width; ++k) store(load(k), k);
}

template <class T>
void run(const RowQuantArgs& args, const Launch& launch) {
  constexpr int64_t kItem = sizeof(T), kSize = kPackSize<T>;
  if (args.rows > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "input: 2^31 rows in one call are not supported");
  const bool aligned =
      rows_aligned(kAccessBytes, args.input, args.input_rows, kItem) && rows_aligned(kSize, args.out, args.out_rows, 1);
  const int64_t packs = (args.width + kSize - 1) / kSize;
  const auto rows = static_cast<unsigned>(args.rows);
  const auto start = [&](auto kernel, unsigned blocks, int64_t threads) {
    launch_dependent(kernel, blocks, static_cast<unsigned>(threads), launch, "row_quant", args, aligned);
  };
  // As many threads as have `each` packs; whole warps.
  const auto threads_for = [&](int64_t each) {
    return std::min<int64_t>(((packs + each - 1) / each + 31) / 32 * 32, kMostThreads);
  };
  if (!aligned || args.width % kSize != 0 || packs > 4 * kMostThreads)
    return start(row_quant_kernel<T, 4, false, true>, rows, threads_for(4));
  if (packs <= 128 && rows >= static_cast<unsigned>(num_sms(launch.device)))
    return start(row_quant_kernel<T, 4, true, false>, (rows + kWarps - 1) / kWarps, 32 * kWarps);
  // Few rows get all threads there are.
  const bool few = packs <= kMostThreads && rows <= 2u * static_cast<unsigned>(num_sms(launch.device));
  if constexpr (sizeof(T) == 2) {
    const bool shifted = args.rule == RowRule::kInt8Shifted;
    if (shifted && few) return start(row_quant_kernel<T, 1, false, false, true>, rows, threads_for(1));
    if (shifted) return start(row_quant_kernel<T, 4, false, false, true>, rows, threads_for(4));
  }
  if (few) return start(row_quant_kernel<T, 1, false, false>, rows, threads_for(1));
  start(row_quant_kernel<T, 4, false, false>, rows, threads_for(4));
}

}  // namespace

void row_quant_cuda(const RowQuantArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() { run<T>(args, launch); });
}

}  // namespace pykv
