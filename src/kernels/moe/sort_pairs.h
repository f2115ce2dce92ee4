// Pairs of tokens and experts, sorted by expert: one stable counting sort, of which moe_align_block_size and its kin,
// get_cutlass_moe_mm_data and moe_permute are views.
//
// A pair falls into a bin, mostly that of its expert, or is dropped.  Bins lie one after another, each padded to a multiple of
// block_size; in a bin pairs ascend.  Everything that can be said of the result is an output that may be left out.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

// A number for each pair of a token and a choice, int32 or int64.  Pairs are numbered token * top_k + choice, from 0 to
// num_tokens * top_k - 1 < 2^31.
struct PairIds {
  const void* data;
  int64_t token_stride, stride;  // elements
  bool is_int64;

  PYKV_HOST_DEVICE __attribute__((always_inline)) int64_t at(int64_t offset) const {
    return is_int64 ? static_cast<const int64_t*>(data)[offset] : static_cast<const int32_t*>(data)[offset];
  }
  PYKV_HOST_DEVICE __attribute__((always_inline)) int64_t at(int64_t token, int64_t choice) const {
    return at(token * token_stride + choice * stride);
  }
};

struct SortPairsArgs {
  PairIds ids;
  int64_t num_tokens, top_k, num_pairs;
  int64_t num_experts;  // ids from here on are reported and dropped, negative ones dropped

  Index expert_map;  // [num_experts], from ids to bins; negative: not here; data null: bins are ids

  // Pairs that are dropped or not here get bins of their own, behind the others: num_listed + id, and the last one.
  bool keeps_all;
  int64_t num_bins, num_listed;  // of all; of those that are listed in the outputs

  // With sizes given, nothing is sorted: bin b has the rows b * rows_of_bin + i, i = 0 ... sizes[b] - 1.
  Index sizes;  // data null: pairs are sorted
  int64_t rows_of_bin;

  // LoRA: list i is made of the pairs of tokens whose adapter is l = adapters[i], and is row l of the outputs.
  Index token_adapters, adapters, adapter_enabled;  // data null: one list of all pairs
  int64_t num_lists, max_adapters;

  int64_t block_size;
  int32_t *sorted, sentinel;          // [capacity]: pairs in order, and the sentinel in all other places
  int64_t capacity, list_stride;      // elements from list to list
  int32_t* blocks;                    // [num_blocks]: the bin of each block, -1 behind the last
  int64_t num_blocks, blocks_stride;  // elements from list to list
  int32_t* num_padded;                // places that are taken, padding included
  int64_t num_padded_stride;          // from list to list
  int32_t* sorted_tokens;             // [num_pairs]: the token of each place
  int32_t *places, dropped_place;     // [num_pairs]: the place of each pair
  int32_t* offsets;                   // [num_listed + 1]: where bins begin
  int64_t* wide_offsets;              // the same
  int32_t* offsets_of_128;            // the same, had bins been padded to multiples of 128
  int32_t *problems1, *problems2;  // [num_listed, 3]: (m, columns, hidden) and (m, hidden, inner) of two grouped GEMMs
  int64_t columns, hidden, inner;
  bool is_swapped;  // m stands behind n

  const char *report_ids, *report_map, *report_sizes, *report_adapters;
};

PYKV_CPU_TWIN(sort_pairs_cpu, SortPairsArgs)
void sort_pairs_cuda(const SortPairsArgs& args, const Launch& launch);

// One problem of a grouped GEMM.
PYKV_HOST_DEVICE inline __attribute__((always_inline)) void put_problem(int32_t* to, int64_t m, int64_t n, int64_t k,
                                                                        bool is_swapped) {
  to[0] = static_cast<int32_t>(is_swapped ? n : m);
  to[1] = static_cast<int32_t>(is_swapped ? m : n);
  to[2] = static_cast<int32_t>(k);
}

}  // namespace pykv
