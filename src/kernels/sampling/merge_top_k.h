// The first k of what several shards of a vocabulary found.  The idea behind pykv_merge_top_k.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "sampling/logit_order.h"

namespace pykv {

struct MergeTopKArgs {
  DType dtype;

  int32_t* indices;  // [num_rows, k]
  void* values;      // [num_rows, k]; null: not wanted
  int64_t index_stride, value_stride;

  const int32_t* shard_indices;  // [num_shards, num_rows, n]
  const void* shard_values;
  int64_t index_shard, index_row, value_shard, value_row;  // strides
  Index first_tokens;                                      // [num_shards]; data is null: 0

  int64_t num_shards, num_rows;
  int32_t n, k;
};

// What follows is compiled for each instruction set apart.
namespace {

// What one shard found for a row, in order.  V: float, or a 16-bit float.
template <class V>
class ShardList {
 public:
  PYKV_HOST_DEVICE ShardList(const MergeTopKArgs& args, int64_t shard, int64_t row)
      : indices_(args.shard_indices + shard * args.index_shard + row * args.index_row),
        values_(static_cast<const V*>(args.shard_values) + shard * args.value_shard + row * args.value_row),
        first_token_(args.first_tokens.data ? static_cast<uint64_t>(args.first_tokens[shard]) : 0) {}

  PYKV_HOST_DEVICE V value(int i) const { return values_[i]; }
  // Of that value as a float; 0 where there is none.
  PYKV_HOST_DEVICE Entry entry(int i, float value) const {
    const uint64_t token = token_at(i);
    return token >= kTokens ? 0 : entry_of(key_of_logit(value), static_cast<uint32_t>(token));
  }
  // Whether there is an entry, but no token: an int32 does not hold it.
  PYKV_HOST_DEVICE bool is_lost(int i) const { return indices_[i] >= 0 && token_at(i) >= kTokens; }
  PYKV_HOST_DEVICE uint64_t token_at(int i) const {
    return indices_[i] < 0 ? kTokens : first_token_ + static_cast<uint32_t>(indices_[i]);
  }

  static constexpr uint64_t kTokens = uint64_t{1} << 31;

 private:
  const int32_t* indices_;
  const V* values_;
  uint64_t first_token_;
};

inline constexpr const char* kMergeReport = "merge_top_k: entries in order in shard_values";
inline constexpr const char* kMergeTokenReport = "merge_top_k: shard_indices + first_tokens";

}  // namespace

PYKV_CPU_TWIN(merge_top_k_cpu, MergeTopKArgs)
void merge_top_k_cuda(const MergeTopKArgs& args, const Launch& launch);

}  // namespace pykv
