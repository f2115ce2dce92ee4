// A thread has a vector of one token, and loads it of eight rows at once, or of two where there are no more.
//
// Memory-bound where the kind of rows is known when compiled: moe_sum of 4096 tokens of 8 x 7168 takes 120 us on an H200, as a copy of
// as many bytes does.  The instance for all kinds is bound by instructions: 193 us.
#include "cuda/streaming.cuh"
#include "moe/row_blocks.cuh"
#include "moe/sum_rows.h"

namespace pykv {
namespace {

struct SumPlan {
  SumRowsArgs args;
  RowBlocks rows;
  bool streamed;
  Reporter report;
};

// What is known when compiled: nothing; that all rows are added as they are; that places of int32 say where rows lie.
enum class Known { kNothing, kAll, kPlaces };

template <Known kKnown>
__device__ decltype(auto) known_of(const SumRowsArgs& args) {
  if constexpr (kKnown == Known::kNothing) {
    return (args);
  } else {
    SumRowsArgs a = args;
    a.ids.data = nullptr;
    a.expert_map.data = nullptr;
    a.places.is_int64 = false;
    if constexpr (kKnown == Known::kAll) {
      a.places.data = nullptr;
      a.num_valid.data = nullptr;
      a.weights = nullptr;
      a.numbers_are_old = false;
    }
    return a;
  }
}

// kRows: loaded at once.
template <class T, int kSize, Known kKnown, int kRows = 8>
__global__ void __launch_bounds__(256, kRows == 2              ? 4
                                       : kKnown == Known::kAll ? 3
                                                               : 2)
    sum_rows_kernel(const __grid_constant__ SumPlan plan) {
  using V = Vec<T, kSize>;
  const SumRowsArgs& a = known_of<kKnown>(plan.args);
  const int64_t token = plan.rows.row();
  const uint32_t vector = plan.rows.vector();
  std::conditional_t<kKnown == Known::kNothing, int64_t, int32_t> numbers[kRows];
  float weights[kRows];
  const auto load_numbers = [&](int64_t first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t j = first + i;
      if constexpr (kKnown == Known::kPlaces) {
        const int64_t at = token * a.places.token_stride + j * a.places.stride;
        numbers[i] = j < a.top_k ? static_cast<const int32_t*>(a.places.data)[at] : -1;
      } else {
        numbers[i] = j < a.top_k ? a.number_of(token, j) : -1;
      }
      weights[i] = a.weights && j < a.top_k ? a.weights[token * a.weights_token_stride + j * a.weights_stride] : 1.0f;
    }
  };
  if (a.numbers_are_old) load_numbers(0);
  begin_dependent();
  if (vector >= plan.rows.num_vectors) return;
  if (!a.numbers_are_old) load_numbers(0);
  const T* rows = static_cast<const T*>(a.rows) + static_cast<int64_t>(vector) * kSize;
  const int64_t end = a.end_of_places();
  Vec<float, kSize> sum{};
  for (int64_t first = 0; first < a.top_k; first += kRows) {
    // In three steps, each with all its loads under way at once.
    int64_t begins[kRows];
    V loaded[kRows];
    if (first != 0) load_numbers(first);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kKnown == Known::kAll)
        begins[i] = first + i < a.top_k ? token * a.token_stride + (first + i) * a.row_stride : a.kNoRow;
      else
        begins[i] = a.begin_of(token, first + i, numbers[i], end);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (begins[i] != a.kNoRow) loaded[i] = load_vec_in_order<V>(rows + begins[i]);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (kKnown != Known::kAll && vector == 0 && numbers[i] >= a.bound() && numbers[i] < end)
        plan.report(numbers[i], a.bound());
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (begins[i] == a.kNoRow) continue;
      const Vec<float, kSize> row = to_floats(loaded[i]);
#pragma unroll
      for (int e = 0; e < kSize; ++e) sum[e] = fmaf(row[e], weights[i], sum[e]);
    }
  }
  T* out = static_cast<T*>(a.out) + token * a.out_stride + static_cast<int64_t>(vector) * kSize;
  store_vec(out, round_to<T>(sum), plan.streamed);
}

template <class T, int kSize>
void launch_sum(const SumRowsArgs& args, const Launch& launch) {
  const SumPlan plan{args, RowBlocks(args.num_tokens, args.width / kSize),
                     is_streamed(args.num_tokens * args.width * static_cast<int64_t>(sizeof(T))),
                     launch.reporter(args.report_of())};
  const auto start = [&](auto kernel) {
    launch_dependent(kernel, plan.rows.blocks, plan.rows.threads, launch, "sum_rows", plan);
  };
  if constexpr (kSize > 1) {
    if (args.places.data && !args.places.is_int64)
      return args.top_k <= 2 ? start(sum_rows_kernel<T, kSize, Known::kPlaces, 2>)
                             : start(sum_rows_kernel<T, kSize, Known::kPlaces>);
    if (!args.places.data && !args.ids.data && !args.expert_map.data && !args.weights)
      return args.top_k <= 2 ? start(sum_rows_kernel<T, kSize, Known::kAll, 2>)
                             : start(sum_rows_kernel<T, kSize, Known::kAll>);
  }
  start(sum_rows_kernel<T, kSize, Known::kNothing>);
}

}  // namespace

void sum_rows_cuda(const SumRowsArgs& args, const Launch& launch) {
  dispatch<float, half, bf16>(args.dtype, [&]<class T> {
    constexpr int64_t kItem = sizeof(T);
    const bool is_wide =
        is_aligned(kAccessBytes, args.rows,
                   {args.places.data || args.num_tokens <= 1 ? 0 : args.token_stride * kItem,
                    args.places.data || args.top_k > 1 ? args.row_stride * kItem : 0}) &&
        is_aligned(kAccessBytes, args.out, {args.num_tokens <= 1 ? 0 : args.out_stride * kItem, args.width * kItem});
    if (is_wide)
      launch_sum<T, kPackSize<T>>(args, launch);
    else
      launch_sum<T, 1>(args, launch);
  });
}

}  // namespace pykv
