// A thread has a vector of one token, and loads it of eight rows at once, or of two where there are no more.  Of many tokens whose
// numbers say where rows lie it loads four at once: registers are left for more threads, which load while it waits for numbers.
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

// What is known when compiled: nothing; that all rows are added as they are; that numbers of int32, places or ids, say which are,
// and lie side by side, as weights do.
enum class Known { kNothing, kAll, kNumbers };

constexpr int kManyBlocks = 2;  // on a multiprocessor, of threads that load eight rows at once

template <Known kKnown>
__device__ decltype(auto) known_of(const SumRowsArgs& args) {
  if constexpr (kKnown == Known::kNothing) {
    return (args);
  } else {
    SumRowsArgs a = args;
    a.expert_map.data = nullptr;
    a.weights_stride = 1;
    if (a.places.data) {  // numbers are `ids`, whatever they are
      a.ids.data = a.places.data;
      a.ids.token_stride = a.places.token_stride;
    }
    if constexpr (kKnown == Known::kAll) {
      a.ids.data = a.places.data = nullptr;
      a.num_valid.data = nullptr;
      a.weights = nullptr;
      a.numbers_are_old = false;
    }
    return a;
  }
}

// kRows: rows of a token whose numbers are loaded at once; if two, a token has no more.  kAtOnce: rows that are loaded at once.
template <class T, int kSize, Known kKnown, int kRows, int kAtOnce>
__global__ void __launch_bounds__(256, kAtOnce < 8             ? 16 / kAtOnce
                                       : kKnown == Known::kAll ? 3
                                                               : kManyBlocks)
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
      if constexpr (kKnown == Known::kNumbers) {
        const int64_t at = token * a.ids.token_stride + j;
        numbers[i] = j < a.top_k ? static_cast<const int32_t*>(a.ids.data)[at] : -1;
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
  for (int64_t first = 0; first < (kRows == 2 ? 2 : a.top_k); first += kRows) {
    if (kRows != 2 && first != 0) load_numbers(first);
#pragma unroll
    for (int part = 0; part < kRows; part += kAtOnce) {
      // In three steps, each with all its loads under way at once.
      int64_t begins[kAtOnce];
      V loaded[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t j = first + part + i;
        if constexpr (kKnown == Known::kAll)
          begins[i] = j < a.top_k ? token * a.token_stride + j * a.row_stride : a.kNoRow;
        else
          begins[i] = a.begin_of(token, j, numbers[part + i], end);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (begins[i] != a.kNoRow) loaded[i] = load_vec_in_order<V>(rows + begins[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begins[i] == a.kNoRow) continue;
        const Vec<float, kSize> row = to_floats(loaded[i]);
#pragma unroll
        for (int e = 0; e < kSize; ++e) sum[e] = fmaf(row[e], weights[part + i], sum[e]);
      }
    }
    if (kKnown != Known::kAll && vector == 0) {
      int64_t beyond = -1;
#pragma unroll
      for (const int64_t number : numbers)
        if (number >= a.bound() && number < end) beyond = number;
      if (beyond >= 0) plan.report(beyond, a.bound());
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
    const PairIds& numbers = args.places.data ? args.places : args.ids;
    if (numbers.data && !numbers.is_int64 && numbers.stride == 1 && !args.expert_map.data &&
        (!args.weights || args.weights_stride == 1)) {
      if (args.top_k <= 2) return start(sum_rows_kernel<T, kSize, Known::kNumbers, 2, 2>);
      const bool are_many = plan.rows.blocks > static_cast<uint32_t>(kManyBlocks * num_sms(launch.device));
      return are_many ? start(sum_rows_kernel<T, kSize, Known::kNumbers, 8, 4>)
                      : start(sum_rows_kernel<T, kSize, Known::kNumbers, 8, 8>);
    }
    if (!args.places.data && !args.ids.data && !args.expert_map.data && !args.weights)
      return args.top_k <= 2 ? start(sum_rows_kernel<T, kSize, Known::kAll, 2, 2>)
                             : start(sum_rows_kernel<T, kSize, Known::kAll, 8, 8>);
  }
  start(sum_rows_kernel<T, kSize, Known::kNothing, 8, 8>);
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
