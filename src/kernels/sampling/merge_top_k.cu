// A block has a row.  Lists are in order, so that the place of an entry is the number of entries before it in its own list, and
// in each other list what a binary search finds.
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/vec.cuh"
#include "sampling/merge_top_k.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;

template <class V>
__device__ Entry entry_at(const ShardList<V>& list, int i) {
  return list.entry(i, to_float(list.value(i)));
}

// How many entries of a list come before `entry`; those that equal it, too, where `with_equals`.
template <class V>
__device__ int count_before(const ShardList<V>& list, int n, Entry entry, bool with_equals) {
  int low = 0, high = n;
  while (low < high) {
    const int middle = (low + high) / 2;
    const Entry other = entry_at(list, middle);
    if (other > entry || (with_equals && other == entry)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class V>
__global__ __launch_bounds__(kThreads) void merge_top_k_kernel(const __grid_constant__ MergeTopKArgs args,
                                                               const __grid_constant__ Divider n,
                                                               const __grid_constant__ Reporter reporter,
                                                               const __grid_constant__ Reporter token_reporter) {
  begin_dependent();
  const int64_t row = blockIdx.x;
  int32_t* indices = args.indices + row * args.index_stride;
  V* values = args.values ? static_cast<V*>(args.values) + row * args.value_stride : nullptr;
  for (int i = threadIdx.x; i < args.k; i += kThreads) {
    indices[i] = -1;
    if (values) values[i] = from_float<V>(-INFINITY);
  }
  __syncthreads();
  const int shards = static_cast<int>(args.num_shards), total = shards * args.n;
  for (int i = threadIdx.x; i < total; i += kThreads) {
    uint32_t place_in_list;
    const int shard = static_cast<int>(n(static_cast<uint32_t>(i), place_in_list)),
              own = static_cast<int>(place_in_list);
    const ShardList<V> list(args, shard, row);
    const Entry entry = entry_at(list, own);
    if (list.is_lost(own)) token_reporter(static_cast<int64_t>(list.token_at(own)), ShardList<V>::kTokens);
    if (own > 0 && entry > entry_at(list, own - 1)) reporter(own, own);
    if (entry == 0) continue;
    int place = own;
    for (int other = 0; other < shards && place < args.k; ++other)
      if (other != shard) place += count_before(ShardList<V>(args, other, row), args.n, entry, other < shard);
    if (place >= args.k) continue;
    indices[place] = static_cast<int32_t>(index_of(entry));
    if (values) values[place] = list.value(own);
  }
}

}  // namespace

void merge_top_k_cuda(const MergeTopKArgs& args, const Launch& launch) {
  if (args.num_rows > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 rows are supported");
  dispatch<half, bf16, float>(args.dtype, [&]<class V>() {
    launch_dependent(merge_top_k_kernel<V>, static_cast<unsigned>(args.num_rows), kThreads, launch, "merge_top_k", args,
                     Divider(args.n), launch.reporter(kMergeReport), launch.reporter(kMergeTokenReport));
  });
}

}  // namespace pykv
