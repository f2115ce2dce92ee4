#include "cache/swap_blocks.h"

#include <cinttypes>

#include "cache/copy_blocks.h"
#include "core/call.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

// Bytes from the first to the last element.
int64_t extent(const Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t last = 0;
  for (int i = 0; i < t.ndim(); ++i) {
    if (t.stride(i) < 0)
      t.fail(PYKV_VALUE_ERROR, "must have no negative strides, got %" PRId64 " for dimension %d", t.stride(i), i);
    last += (t.size(i) - 1) * t.stride(i);
  }
  return (last + 1) * static_cast<int64_t>(size_of(t.type()));
}

bool on_cuda(const Tensor& t) { return t.device().device_type == kDLCUDA; }

// Both sides on one device: the kernel of copy_blocks takes all rows at once.
void copy_on_one_device(Call& call, void* stream, const SwapBlocksArgs& s, const std::vector<BlockPair>& pairs,
                        bool overlap) {
  const BlockArray array{s.from, s.to};
  std::vector<int64_t> part_ends;
  if (overlap && s.from != s.to) {  // the same memory by different numbers: row by row
    for (int64_t i = 1; i <= s.num_pairs; ++i) part_ends.push_back(i);
  } else {
    part_ends = independent_parts(pairs, overlap);
  }
  CopyBlocksArgs args{};
  args.arrays = &array;
  args.num_arrays = 1;
  args.shape = {s.block_bytes, s.block_bytes, {1, 1, 1}, {0, 0, 0}};
  args.pairs = s.pairs;
  args.num_pairs = s.num_pairs;
  args.part_ends = part_ends.data();
  args.num_parts = static_cast<int64_t>(part_ends.size());
  call.run(stream, args, copy_blocks_cpu, PYKV_CUDA(copy_blocks_cuda));
}

// An exchange between devices always runs on CUDA.
constexpr Twin<SwapBlocksArgs> kNoCpuTwin = nullptr;

}  // namespace
}  // namespace pykv

pykv_status pykv_swap_blocks(const DLTensor* src, DLTensor* dst, int64_t block_size_in_bytes,
                             const DLTensor* block_mapping, void* stream) {
  using namespace pykv;
  return guarded("swap_blocks", [&](Call& call) {
    Tensor from = call.anywhere("src", src), to = call.anywhere("dst", dst);
    if (block_size_in_bytes <= 0)
      fail(PYKV_VALUE_ERROR, "block_size_in_bytes: must be positive, got %" PRId64, block_size_in_bytes);
    Dim num_pairs{"num_pairs"}, two{"2 (source, destination)", 2};
    Tensor mapping =
        call.anywhere("block_mapping", block_mapping).shape(num_pairs, two).dtype({DType::kInt64, DType::kInt32});
    if (on_cuda(mapping))
      mapping.fail(PYKV_VALUE_ERROR, "must lie on the CPU, got cuda:%d", mapping.device().device_id);

    const int64_t from_bytes = extent(from), to_bytes = extent(to);
    const std::vector<BlockPair> pairs =
        read_block_mapping(mapping, from_bytes / block_size_in_bytes, to_bytes / block_size_in_bytes);
    if (pairs.empty()) return;
    SwapBlocksArgs args{static_cast<const char*>(from.data()),
                        static_cast<char*>(to.data()),
                        on_cuda(from) ? from.device().device_id : -1,
                        on_cuda(to) ? to.device().device_id : -1,
                        block_size_in_bytes,
                        pairs.data(),
                        num_pairs};
    call.set_device(on_cuda(to) ? to.device() : from.device());
    if (args.from_device == args.to_device) {
      const bool overlap = args.from < args.to + to_bytes && args.to < args.from + from_bytes;
      copy_on_one_device(call, stream, args, pairs, overlap);
    } else {
      call.run(stream, args, kNoCpuTwin, PYKV_CUDA(swap_blocks_cuda));
    }
  });
}
