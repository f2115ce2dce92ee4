// What layers of few pairs have in common, whatever their weights are: which pairs there are, and what becomes of a token's.
#pragma once

#include "cuda/vec.cuh"
#include "moe/pair_experts.cuh"
#include "moe/sum_rows.h"

namespace pykv::few_pairs {

constexpr int64_t kMostChoices = 32;  // of a token
constexpr int kRows = 16;             // of the second weight, of a block

// Whether each pair may be a tile of its own: with several tokens, those that have an expert in common read it several times.
inline bool are_few(const SortPairsArgs& sort) {
  constexpr int64_t kExpertsOfPair = 8;  // at least
  return sort.top_k <= kMostChoices && sort.num_pairs <= 65535 &&
         (sort.num_tokens == 1 || sort.num_pairs * kExpertsOfPair <= sort.num_experts);
}

// A token's, in shared memory.
struct Choices {
  int32_t experts[kMostChoices];  // negative: none
  float weights[kMostChoices];

  // By as many threads as there are.
  __device__ void load(const PairExperts& of, const SumRowsArgs& a, int64_t token) {
    const int64_t i = threadIdx.x;
    if (i >= a.top_k) return;
    experts[i] = of(token, i, false);
    weights[i] = a.weights ? a.weights[token * a.weights_token_stride + i * a.weights_stride] : 1.0f;
  }

  // Writes kRows columns of the token's row of out, by as many threads: the sum of its pairs' rows, as sum_rows.cu has it.
  template <class T>
  __device__ void write_sum(const SumRowsArgs& a, const T (*rows)[kRows], int64_t token, int64_t column) const {
    float sum = 0;
    for (int i = 0; i < a.top_k; ++i)
      if (experts[i] >= 0) sum = fmaf(to_float(rows[i][threadIdx.x]), weights[i], sum);
    static_cast<T*>(a.out)[token * a.out_stride + column] = from_float<T>(sum);
  }
};

}  // namespace pykv::few_pairs
