// A thread has a vector of one token, and loads it of eight rows at once, or of two where there are no more.  Where places say where
// rows lie, it waits for these first; of many tokens it has two, whose places it loads at once, and fewer registers, so that others
// load rows meanwhile.
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

template <Known kKnown>
__device__ decltype(auto) known_of(const SumRowsArgs& args) {
  if constexpr (kKnown == Known::kNothing) {
    return (args);
  } else {
    SumRowsArgs a = args;
    a.expert_map.data = nullptr;
    a.places.is_int64 = a.ids.is_int64 = false;
    a.places.stride = a.ids.stride = a.weights_stride = 1;
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

// Blocks that find room on a multiprocessor.
constexpr int blocks_at_once(Known known, int rows, int tokens) {
  if (tokens > 1) return rows == 2 ? 6 : 4;
  return rows == 2 ? 4 : known == Known::kAll ? 3 : 2;
}

// kRows: of a token, whose numbers are loaded at once; with two there are no more.
// kTokens: neighbours that a thread has.
template <class T, int kSize, Known kKnown, int kRows, int kTokens>
__global__ void __launch_bounds__(256, blocks_at_once(kKnown, kRows, kTokens))
    sum_rows_kernel(const __grid_constant__ SumPlan plan) {
  using V = Vec<T, kSize>;
  // That are loaded at once.
  constexpr int kSomeTokens = kRows == 2 ? kTokens : 1, kSomeRows = kRows * kTokens > 8 ? 4 : kRows;
  const SumRowsArgs& a = known_of<kKnown>(plan.args);
  const int64_t first_token = plan.rows.row() * kTokens;
  const uint32_t vector = plan.rows.vector();
  std::conditional_t<kKnown == Known::kNothing, int64_t, int32_t> numbers[kTokens][kRows];
  float weights[kTokens][kRows];
  const auto load_numbers = [&](int t, int64_t first) {
    const int64_t token = first_token + t;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t j = first + i;
      const bool is_there = j < a.top_k && (kTokens == 1 || token < a.num_tokens);
      if constexpr (kKnown == Known::kNumbers) {
        const int64_t at = token * a.ids.token_stride + j;
        numbers[t][i] = is_there ? static_cast<const int32_t*>(a.ids.data)[at] : -1;
      } else {
        numbers[t][i] = is_there ? a.number_of(token, j) : -1;
      }
      weights[t][i] = a.weights && is_there ? a.weights[token * a.weights_token_stride + j * a.weights_stride] : 1.0f;
    }
  };
  const auto load_all_numbers = [&] {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) load_numbers(t, 0);
  };
  if (a.numbers_are_old) load_all_numbers();
  begin_dependent();
  if (vector >= plan.rows.num_vectors) return;
  if (!a.numbers_are_old) load_all_numbers();
  const T* rows = static_cast<const T*>(a.rows) + static_cast<int64_t>(vector) * kSize;
  const int64_t end = a.end_of_places();
  int64_t beyond = -1;  // a number that is out of range
#pragma unroll
  for (int some = 0; some < kTokens; some += kSomeTokens) {
    Vec<float, kSize> sums[kSomeTokens] = {};
    for (int64_t first = 0; first < (kRows == 2 ? 2 : a.top_k); first += kRows) {
      if (kRows != 2 && first != 0) load_numbers(some, first);
#pragma unroll
      for (int part = 0; part < kRows; part += kSomeRows) {
        const auto each = [&](auto&& f) {
#pragma unroll
          for (int t = 0; t < kSomeTokens; ++t)
#pragma unroll
            for (int i = 0; i < kSomeRows; ++i) f(t, i);
        };
        // In three steps, each with all its loads under way at once.
        int64_t begins[kSomeTokens][kSomeRows];
        V loaded[kSomeTokens][kSomeRows];
        each([&](int t, int i) {
          const int64_t token = first_token + some + t, j = first + part + i;
          if constexpr (kKnown == Known::kAll)
            begins[t][i] = j < a.top_k ? token * a.token_stride + j * a.row_stride : a.kNoRow;
          else
            begins[t][i] = a.begin_of(token, j, numbers[some + t][part + i], end);
        });
        each([&](int t, int i) {
          if (begins[t][i] != a.kNoRow) loaded[t][i] = load_vec_in_order<V>(rows + begins[t][i]);
        });
        each([&](int t, int i) {
          const int64_t number = numbers[some + t][part + i];
          if (number >= a.bound() && number < end) beyond = number;
        });
        each([&](int t, int i) {
          if (begins[t][i] == a.kNoRow) return;
          const Vec<float, kSize> row = to_floats(loaded[t][i]);
#pragma unroll
          for (int e = 0; e < kSize; ++e) sums[t][e] = fmaf(row[e], weights[some + t][part + i], sums[t][e]);
        });
      }
    }
#pragma unroll
    for (int t = 0; t < kSomeTokens; ++t) {
      const int64_t token = first_token + some + t;
      if (kTokens > 1 && token >= a.num_tokens) break;
      T* out = static_cast<T*>(a.out) + token * a.out_stride + static_cast<int64_t>(vector) * kSize;
      store_vec(out, round_to<T>(sums[t]), plan.streamed);
    }
  }
  if (kKnown != Known::kAll && vector == 0 && beyond >= 0) plan.report(beyond, a.bound());
}

template <class T, int kSize>
void launch_sum(const SumRowsArgs& args, const Launch& launch) {
  const auto start = [&]<Known kKnown, int kRows, int kTokens>() {
    const SumPlan plan{args, RowBlocks((args.num_tokens + kTokens - 1) / kTokens, args.width / kSize),
                       is_streamed(args.num_tokens * args.width * static_cast<int64_t>(sizeof(T))),
                       launch.reporter(args.report_of())};
    launch_dependent(sum_rows_kernel<T, kSize, kKnown, kRows, kTokens>, plan.rows.blocks, plan.rows.threads, launch,
                     "sum_rows", plan);
  };
  const auto start_rows = [&]<Known kKnown, int kTokens>() {
    return args.top_k <= 2 ? start.template operator()<kKnown, 2, kTokens>()
                           : start.template operator()<kKnown, 8, kTokens>();
  };
  if constexpr (kSize > 1) {
    const PairIds& numbers = args.places.data ? args.places : args.ids;
    if (numbers.data && !numbers.is_int64 && numbers.stride == 1 && !args.expert_map.data &&
        (!args.weights || args.weights_stride == 1)) {
      const bool are_many = args.num_tokens * (args.width / kSize) >= int64_t{1024} * num_sms(launch.device);
      return are_many ? start_rows.template operator()<Known::kNumbers, 2>()
                      : start_rows.template operator()<Known::kNumbers, 1>();
    }
    if (!args.places.data && !args.ids.data && !args.expert_map.data && !args.weights)
      return start_rows.template operator()<Known::kAll, 1>();
  }
  start.template operator()<Known::kNothing, 8, 1>();
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
