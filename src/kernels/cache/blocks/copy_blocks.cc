#include "cache/blocks/copy_blocks.h"

#include <cinttypes>
#include <cstdlib>

#include "core/call.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

// A block of this cache: its dimensions in the order of memory, merged where they touch.
BlockShape shape_of_block(const Tensor& cache) {
  struct Axis {
    int64_t size, stride;
  };
  Axis axes[Tensor::kMaxRank];
  int rank = 0;
  const int64_t item = static_cast<int64_t>(size_of(cache.type()));
  for (int i = 1; i < cache.ndim(); ++i) {
    if (cache.size(i) == 1) continue;
    const Axis axis{cache.size(i), cache.stride(i) * item};
    int at = rank++;
    for (; at > 0 && std::abs(axes[at - 1].stride) > std::abs(axis.stride); --at) axes[at] = axes[at - 1];
    axes[at] = axis;
  }

  BlockShape shape{cache.stride(0) * item, item, {1, 1, 1}, {0, 0, 0}};
  int used = 0;
  for (int i = 0; i < rank; ++i) {
    if (used == 0 && axes[i].stride == shape.piece) {
      shape.piece *= axes[i].size;
    } else if (used > 0 && axes[i].stride == shape.strides[used - 1] * shape.sizes[used - 1]) {
      shape.sizes[used - 1] *= axes[i].size;
    } else if (used == 3) {
      cache.fail(PYKV_NOT_IMPLEMENTED, "a block must be at most 3 dimensions of contiguous pieces");
    } else {
      shape.sizes[used] = axes[i].size;
      shape.strides[used++] = axes[i].stride;
    }
  }
  return shape;
}

// The caches of a call, with what a block of each is.
struct Caches {
  Call& call;
  Dim blocks{"num_blocks"};
  std::vector<BlockArray> arrays{};
  std::vector<BlockShape> shapes{};
  bool empty = false;

  void add(const char* name, const pykv_tensor_list& list) {
    check_list(name, list);
    for (int64_t i = 0; i < list.size; ++i) {
      Tensor cache = call.write(name, list.tensors[i]).rank_between(1, Tensor::kMaxRank).dim(0, blocks);
      cache.no_overlap_within();
      char* data = static_cast<char*>(cache.data());
      arrays.push_back({data, data});
      shapes.push_back(shape_of_block(cache));
      empty = empty || cache.numel() == 0;
    }
  }
};

void copy(Caches& caches, const DLTensor* block_mapping, const char* report, void* stream) {
  Call& call = caches.call;
  const std::vector<BlockArray>& arrays = caches.arrays;
  Dim pairs{"num_pairs"}, two{"2 (source, destination)", 2};
  Tensor mapping =
      call.anywhere("block_mapping", block_mapping).shape(pairs, two).dtype({DType::kInt64, DType::kInt32});
  if (arrays.empty()) return;

  CopyBlocksArgs args{};
  args.report = report;
  args.num_pairs = pairs;
  args.num_blocks = caches.blocks;
  std::vector<BlockPair> rows;
  std::vector<int64_t> part_ends;
  if (mapping.device().device_type == kDLCPU) {
    rows = read_block_mapping(mapping, caches.blocks, caches.blocks);
    std::erase_if(rows, [](const BlockPair& p) { return p.from == p.to; });
    if (rows.empty()) return;
    part_ends = independent_parts(rows, true);
    args.pairs = rows.data();
    args.part_ends = part_ends.data();
    args.num_parts = static_cast<int64_t>(part_ends.size());
  } else {
    call.read("block_mapping", block_mapping);  // must be the device of the caches
    args.from = args.to = mapping.index();
    args.from.stride = args.to.stride = mapping.stride(0);
    args.to.data = static_cast<const char*>(mapping.data()) + mapping.stride(1) * size_of(mapping.type());
  }
  if (pairs == 0 || caches.empty) return;

  // Caches whose blocks look alike go together: all layers of a model, as a rule.
  for (size_t first = 0, last; first < arrays.size(); first = last) {
    for (last = first + 1; last < arrays.size() && caches.shapes[last] == caches.shapes[first];) ++last;
    args.arrays = &arrays[first];
    args.num_arrays = static_cast<int64_t>(last - first);
    args.shape = caches.shapes[first];
    call.run(stream, args, copy_blocks_cpu, PYKV_CUDA(copy_blocks_cuda));
  }
}

}  // namespace
}  // namespace pykv

pykv_status pykv_copy_blocks(pykv_tensor_list key_caches, pykv_tensor_list value_caches, const DLTensor* block_mapping,
                             void* stream) {
  using namespace pykv;
  return guarded("copy_blocks", [&](Call& call) {
    if (key_caches.size != value_caches.size)
      fail(PYKV_VALUE_ERROR, "value_caches: must have %" PRId64 " arrays like key_caches, got %" PRId64,
           key_caches.size, value_caches.size);
    Caches caches{call};
    caches.add("key_caches", key_caches);
    caches.add("value_caches", value_caches);
    copy(caches, block_mapping, "copy_blocks: block_mapping", stream);
  });
}

pykv_status pykv_copy_blocks_mla(pykv_tensor_list kv_caches, const DLTensor* block_mapping, void* stream) {
  using namespace pykv;
  return guarded("copy_blocks_mla", [&](Call& call) {
    Caches caches{call};
    caches.add("kv_caches", kv_caches);
    copy(caches, block_mapping, "copy_blocks_mla: block_mapping", stream);
  });
}
