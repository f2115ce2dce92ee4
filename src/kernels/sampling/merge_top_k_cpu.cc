// The first of the shards' next entries, k times: shards are few.
#include <memory>

#include "cpu/float16.h"
#include "cpu/parallel.h"
#include "sampling/merge_top_k.h"

namespace pykv::PYKV_ISA {
namespace {

template <class V>
Entry entry_at(const ShardList<V>& list, int i) {
  return list.entry(i, to_float(list.value(i)));
}

template <class V>
void merge_row(const MergeTopKArgs& args, int64_t row, int32_t* next, const Launch& launch) {
  int32_t* indices = args.indices + row * args.index_stride;
  V* values = args.values ? static_cast<V*>(args.values) + row * args.value_stride : nullptr;
  for (int64_t shard = 0; shard < args.num_shards; ++shard) next[shard] = 0;
  for (int32_t i = 0; i < args.k; ++i) {
    Entry best = 0;
    int64_t from = 0;
    for (int64_t shard = 0; shard < args.num_shards; ++shard) {
      const Entry entry = next[shard] < args.n ? entry_at(ShardList<V>(args, shard, row), next[shard]) : 0;
      if (entry > best) best = entry, from = shard;
    }
    indices[i] = best == 0 ? -1 : static_cast<int32_t>(index_of(best));
    if (values)
      values[i] = best == 0 ? from_float<V>(-__builtin_inff()) : ShardList<V>(args, from, row).value(next[from]);
    if (best != 0) ++next[from];
  }
  for (int64_t shard = 0; shard < args.num_shards; ++shard) {
    const ShardList<V> list(args, shard, row);
    for (int32_t i = 0; i < args.n; ++i) {
      if (list.is_lost(i))
        launch.reporter(kMergeTokenReport)(static_cast<int64_t>(list.token_at(i)), ShardList<V>::kTokens);
      if (i > 0 && entry_at(list, i) > entry_at(list, i - 1)) launch.reporter(kMergeReport)(i, i);
    }
  }
}

}  // namespace

void merge_top_k_cpu(const MergeTopKArgs& args, const Launch& launch) {
  parallel_for(args.num_rows, 1, [&](int64_t begin, int64_t end) {
    constexpr int64_t kUsual = 64;
    int32_t few[kUsual];
    std::unique_ptr<int32_t[]> many;
    if (args.num_shards > kUsual) many.reset(new int32_t[static_cast<size_t>(args.num_shards)]);
    int32_t* const next = many ? many.get() : few;
    dispatch<float, f16, bf16>(args.dtype, [&]<class V>() {
      for (int64_t row = begin; row < end; ++row) merge_row<V>(args, row, next, launch);
    });
  });
}

}  // namespace pykv::PYKV_ISA
