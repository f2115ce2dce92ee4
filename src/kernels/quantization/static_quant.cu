// codes = code(x * (1 / scale)), or code(x / scale), or code(x * (1 / scale)) + zero point; scale given, or from the largest
// magnitude of all numbers.
//
// Memory-bound: the floor is each byte of input and codes moved once, and once more of the input where the largest is to be
// found.  A thread takes up to four packs, all loads under way before the first is used; neighbours in a warp are neighbours in a
// row.  Where rectangles have scales, its packs are of neighbouring rows, which share one as a rule.  The second reading goes from
// the end, where the first one has left what the second-level cache holds.
#include <algorithm>
#include <cfloat>

#include "cuda/dependent.cuh"
#include "cuda/device.h"
#include "cuda/divider.cuh"
#include "cuda/largest.cuh"
#include "cuda/quantise.cuh"
#include "cuda/quotient.cuh"
#include "cuda/reduce.cuh"
#include "quantization/packs.cuh"
#include "quantization/shifted_int8.cuh"
#include "quantization/static_quant.h"

namespace pykv {
namespace {

constexpr int kThreads = 128, kMostVectors = 4;

struct Plan {
  Divider packs, group_rows, group_columns;  // packs: of a row
  uint32_t total;
  bool aligned, one_scale, backwards;  // one_scale: for all of a pack
  bool rows_share;                     // the scale of a thread's rows is one
  bool one_row;                        // packs follow one another
};

// A pack: row, column, and where it is.
template <class T>
struct Part {
  uint32_t row;
  int64_t column, count;
  const T* from;
  uint8_t* to;

  Part() = default;
  // Where rows follow one another, the place takes no division, which at 4096 tokens was a twentieth of the time.
  __device__ Part(const StaticQuantArgs& args, const Plan& plan, uint32_t n) {
    if (plan.one_row) {
      row = 0;
      column = int64_t{n} * kPackSize<T>;
      count = args.width - column;
      from = static_cast<const T*>(args.input) + column;
      to = static_cast<uint8_t*>(args.out) + column;
      return;
    }
    uint32_t pack;
    const uint32_t of = plan.packs(n, pack);
    *this = Part(args, of, pack);
  }
  __device__ Part(const StaticQuantArgs& args, uint32_t of_row, uint32_t pack) : row(of_row) {
    column = int64_t{pack} * kPackSize<T>;
    count = args.width - column;
    from = static_cast<const T*>(args.input) + (args.input_rows.offset(row) + column);
    to = static_cast<uint8_t*>(args.out) + (args.out_rows.offset(row) + column);
  }
};

struct Factor {
  float scale, inverse;
  bool odd;

  __device__ Factor(const StaticQuantArgs& args, float given) {
    scale = given;
    inverse = args.from_largest ? factor_of(given) : 1.0f / given;
    odd = !(inverse > 0.0f && inverse <= FLT_MAX);
  }
};

// Codes of what is known when this is compiled: E4M3 with one scale for all numbers or for all of a pack, int8 of quotients or
// with a zero point; or of any kind, and any scales.
enum class Way { kE4M3, kE4M3Blocks, kDivided, kShifted, kAny };

template <class T, Way kWay, int kVectors>
__global__ __launch_bounds__(kThreads) void static_quant_kernel(const __grid_constant__ StaticQuantArgs args,
                                                                const __grid_constant__ Plan plan) {
  constexpr int kSize = kPackSize<T>;
  const uint32_t block = plan.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  constexpr bool kBlocks = kWay == Way::kE4M3Blocks;
  const uint32_t first = block * (kThreads * (kBlocks ? 1 : kVectors)) + threadIdx.x;
  Part<T> parts[kVectors];
  uint32_t pack = 0;
  const uint32_t first_row = kBlocks ? plan.packs(min(first, plan.total - 1), pack) * kVectors : 0;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if constexpr (kBlocks) {
      parts[k] = Part<T>(args, min(first_row + k, static_cast<uint32_t>(args.rows) - 1), pack);
    } else {
      parts[k] = Part<T>(args, plan, min(first + k * kThreads, plan.total - 1));
    }
    if (comes_early()) prefetch(parts[k].from);
  }
  // Numbers of which the largest is being found may be read: all blocks that look for it have waited for those before them, and
  // write nothing but the scale.
  if (!args.from_largest) begin_dependent();
  uint32_t total = plan.total;
  if (!kBlocks && args.valid.data) {
    total = plan.packs.d * static_cast<uint32_t>(args.valid.of(args.rows));
    if (first >= total) return;
#pragma unroll
    for (int k = 1; k < kVectors; ++k)
      if (first + k * kThreads >= total) parts[k] = parts[0];
  }

  Pack<T> x[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) x[k] = load_pack(parts[k].from, parts[k].count, plan.aligned);
  if (args.from_largest) begin_dependent();
  const auto scale_of = [&](uint32_t row, int64_t column) {
    return args.scales[plan.group_rows.quotient(static_cast<int>(row)) * args.scale_row +
                       plan.group_columns.quotient(static_cast<int>(column)) * args.scale_column];
  };
  float scales[kVectors];
  if constexpr (kBlocks) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      scales[k] = scale_of(plan.rows_share ? first_row : parts[k].row, parts[k].column);
  }
  const float number = args.from_largest ? *args.scale_out : args.scales ? 1.0f : float{args.number};
  Factor factor(args, number);
  Quotient quotient;
  if constexpr (kWay == Way::kDivided) quotient = Quotient(number);
  const ShiftedInt8 shifted(factor.inverse, args.zero_point ? *args.zero_point : args.zero);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (kBlocks ? first >= plan.total || first_row + k >= args.rows : first + k * kThreads >= total) break;
    const Part<T>& part = parts[k];
    Vec<uint8_t, kSize> codes;
    if constexpr (kWay == Way::kDivided) {
      auto v = to_floats(x[k]);
      quotient.divide<T>(v.elements);
      codes = quantise<DType::kInt8>(v);
    } else if constexpr (kWay == Way::kShifted) {
      codes = shifted(x[k]);
    } else if constexpr (kWay == Way::kE4M3 || kBlocks) {
      if (kBlocks && (k == 0 || !plan.rows_share)) factor = Factor(args, scales[k]);
      codes = codes_times(QuantCode::kE4M3, x[k], factor.inverse, factor.odd);
    } else {
      if (plan.one_scale) {
        if (args.scales) factor = Factor(args, scale_of(part.row, part.column));
        codes = codes_times(args.codes, x[k], factor.inverse, factor.odd);
      } else {
        auto v = to_floats(x[k]);
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          if (i < part.count) v[i] *= 1.0f / scale_of(part.row, part.column + i);
        codes = args.codes == QuantCode::kE4M3 ? quantise<DType::kFloat8E4M3>(v) : quantise<DType::kFloat8E5M2>(v);
      }
    }
    store_codes(part.to, codes, part.count, plan.aligned);
  }
}

__global__ void clear_scale_kernel(float* scale) {
  begin_dependent();
  *scale = 0.0f;
}

// The largest magnitude, through the largest code, of as many blocks as there are, of all of which the largest is left in `scale`.
constexpr int kReaders = 256;
template <class T>
__global__ __launch_bounds__(kReaders) void largest_kernel(const __grid_constant__ StaticQuantArgs args,
                                                           const __grid_constant__ Plan plan) {
  begin_dependent();
  const uint32_t step = gridDim.x * kReaders;
  float most = 0.0f;
  const auto read = [&](auto load) {
    for (uint32_t base = blockIdx.x * kReaders + threadIdx.x; base < plan.total; base += step * kMostVectors) {
      Pack<T> x[kMostVectors];
#pragma unroll
      for (int k = 0; k < kMostVectors; ++k) {
        x[k] = {};
        const uint32_t n = base + k * step;
        if (n < plan.total) x[k] = load(n);
      }
      most = fmaxf(most, largest_of(x));
    }
  };
  if (plan.one_row && plan.aligned && args.width % kPackSize<T> == 0) {
    const T* const from = static_cast<const T*>(args.input);
    read([=](uint32_t n) { return load_vec_in_order<Pack<T>>(from + int64_t{n} * kPackSize<T>); });
  } else {
    read([&](uint32_t n) {
      const Part<T> part(args, plan, n);
      return load_pack(part.from, part.count, plan.aligned);
    });
  }
  most = block_reduce<0>(most, kReaders / 32, Maximum()) / largest_code(args.codes);
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<int*>(args.scale_out), __float_as_int(most));
}

bool is_one_row(const Rows& rows, int64_t width) { return (rows.size1 | rows.size2) == 1 && rows.stride0 == width; }

template <class T, Way kWay>
void start(const StaticQuantArgs& args, Plan plan, const Launch& launch) {
  const auto sized = [&]<int kVectors>() {
    constexpr bool kBlocks = kWay == Way::kE4M3Blocks;
    constexpr int64_t kTile = kThreads * (kBlocks ? 1 : kVectors);
    if (kBlocks) plan.total = plan.packs.d * static_cast<uint32_t>((args.rows + kVectors - 1) / kVectors);
    launch_dependent(static_quant_kernel<T, kWay, kVectors>, static_cast<unsigned>((plan.total + kTile - 1) / kTile),
                     kThreads, launch, "static_quant", args, plan);
  };
  // What does not fill the chip is spread over as much of it as possible.
  if (plan.total > 2048u * static_cast<unsigned>(num_sms(launch.device))) {
    sized.template operator()<kMostVectors>();
  } else {
    sized.template operator()<1>();
  }
}

template <class T>
void run(const StaticQuantArgs& given, const Launch& launch) {
  constexpr int64_t kItem = sizeof(T), kSize = kPackSize<T>;
  StaticQuantArgs args = given;
  if (!args.scales && !args.valid.data && args.rows * args.width < INT32_MAX - kSize &&
      is_one_row(args.input_rows, args.width) && is_one_row(args.out_rows, args.width))
    args.width *= args.rows, args.rows = 1;
  const int64_t packs = (args.width + kSize - 1) / kSize;
  if (args.width > INT32_MAX - kSize || packs > (INT32_MAX - kThreads * kMostVectors) / args.rows)
    fail(PYKV_NOT_IMPLEMENTED, "input: 2^31 vectors of %d elements in one call are not supported",
         static_cast<int>(kSize));
  Plan plan{
      Divider(packs),
      Divider(args.group_rows),
      Divider(args.group_columns),
      static_cast<uint32_t>(packs * args.rows),
      rows_aligned(kAccessBytes, args.input, args.input_rows, kItem) && rows_aligned(kSize, args.out, args.out_rows, 1),
      !args.scales || args.group_columns % kSize == 0 || args.group_columns >= args.width,
      false,
      args.group_rows % kMostVectors == 0 || args.group_rows >= args.rows,
      args.rows == 1};
  if (args.from_largest) {
    launch_dependent(clear_scale_kernel, 1, 1, launch, "largest", args.scale_out);
    launch_dependent(
        largest_kernel<T>,
        std::min((plan.total + kReaders - 1) / kReaders, 8u * static_cast<unsigned>(num_sms(launch.device))), kReaders,
        launch, "largest", args, plan);
    plan.backwards = true;
  }
  if (args.divides) return start<T, Way::kDivided>(args, plan, launch);
  if (args.shifted) return start<T, Way::kShifted>(args, plan, launch);
  if (args.codes == QuantCode::kE4M3 && !args.scales) return start<T, Way::kE4M3>(args, plan, launch);
  if (args.codes == QuantCode::kE4M3 && plan.one_scale) return start<T, Way::kE4M3Blocks>(args, plan, launch);
  start<T, Way::kAny>(args, plan, launch);
}

}  // namespace

void static_quant_cuda(const StaticQuantArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() { run<T>(args, launch); });
}

}  // namespace pykv
