#include "cache/blocks/swap_blocks.h"

#include <algorithm>
#include <cinttypes>

#include "core/call.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

struct Bytes {
  const char* data;
  int64_t size;
  bool overlaps(const Bytes& other) const { return data < other.data + other.size && other.data < data + size; }
};

// All bytes from the first to the last element.
Bytes bytes_of(const Tensor& t) {
  if (t.numel() == 0) return {static_cast<const char*>(t.data()), 0};
  int64_t last = 0;
  for (int i = 0; i < t.ndim(); ++i) {
    if (t.stride(i) < 0)
      t.fail(PYKV_VALUE_ERROR, "must have no negative strides, got %" PRId64 " for dimension %d", t.stride(i), i);
    last += (t.size(i) - 1) * t.stride(i);
  }
  return {static_cast<const char*>(t.data()), (last + 1) * static_cast<int64_t>(size_of(t.type()))};
}

int ordinal(DLDevice d) { return d.device_type == kDLCUDA ? d.device_id : -1; }
bool same(DLDevice a, DLDevice b) { return ordinal(a) == ordinal(b); }

std::string name_of_device(DLDevice d) {
  return d.device_type == kDLCUDA ? "cuda:" + std::to_string(d.device_id) : "cpu";
}

// One side of the swap: arrays that lie on one device.
struct Side {
  std::vector<Bytes> arrays;
  DLDevice device{kDLCPU, 0};

  void add(const Tensor& t) {
    if (t.device().device_type == kDLExtDev) t.fail(PYKV_VALUE_ERROR, "must have memory, which is copied at once");
    if (arrays.empty()) device = t.device();
    if (!same(t.device(), device))
      t.fail(PYKV_VALUE_ERROR, "must all lie on %s like the first, got %s", name_of_device(device).c_str(),
             name_of_device(t.device()).c_str());
    arrays.push_back(bytes_of(t));
  }
  int64_t num_blocks(int64_t block_bytes) const {
    int64_t least = INT64_MAX;
    for (const Bytes& a : arrays) least = std::min(least, a.size / block_bytes);
    return least;
  }
};

// Whether the arrays can be copied at once: none that is written overlaps another one.
bool independent(const Side& from, const Side& to) {
  for (size_t i = 0; i < to.arrays.size(); ++i)
    for (size_t j = 0; j < to.arrays.size(); ++j)
      if ((i != j && to.arrays[i].overlaps(to.arrays[j])) || to.arrays[i].overlaps(from.arrays[j])) return false;
  return true;
}

// An exchange between devices always runs on CUDA.
constexpr Twin<SwapBlocksArgs> kNoCpuTwin = nullptr;

// Copies all rows of arrays [first, first + count), which are independent unless count is 1.
void copy(Call& call, void* stream, const Side& from, const Side& to, size_t first, size_t count, int64_t block_bytes,
          const std::vector<BlockPair>& pairs) {
  std::vector<BlockArray> arrays;
  for (size_t i = first; i < first + count; ++i)
    arrays.push_back({from.arrays[i].data, const_cast<char*>(to.arrays[i].data)});
  const bool one_device = same(from.device, to.device);
  const bool overlap = one_device && count == 1 && to.arrays[first].overlaps(from.arrays[first]);
  const int64_t num_pairs = static_cast<int64_t>(pairs.size());

  std::vector<int64_t> part_ends;
  if (overlap &&
      from.arrays[first].data != to.arrays[first].data) {  // the same memory by different numbers: row by row
    for (int64_t i = 1; i <= num_pairs; ++i) part_ends.push_back(i);
  } else {
    part_ends = independent_parts(pairs, overlap);
  }
  const int64_t num_arrays = static_cast<int64_t>(count), num_parts = static_cast<int64_t>(part_ends.size());
  if (one_device) {
    CopyBlocksArgs args{};
    args.arrays = arrays.data();
    args.num_arrays = num_arrays;
    args.shape = {block_bytes, block_bytes, {1, 1, 1}, {0, 0, 0}};
    args.pairs = pairs.data();
    args.num_pairs = num_pairs;
    args.part_ends = part_ends.data();
    args.num_parts = num_parts;
    call.run(stream, args, copy_blocks_cpu, PYKV_CUDA(copy_blocks_cuda));
  } else {
    const SwapBlocksArgs args{arrays.data(), num_arrays, ordinal(from.device), ordinal(to.device), block_bytes,
                              pairs.data(),  num_pairs,  part_ends.data(),     num_parts};
    call.run(stream, args, kNoCpuTwin, PYKV_CUDA(swap_blocks_cuda));
  }
}

void swap(Call& call, const Side& from, const Side& to, int64_t block_bytes, const DLTensor* block_mapping,
          void* stream) {
  if (block_bytes <= 0) fail(PYKV_VALUE_ERROR, "block_size_in_bytes: must be positive, got %" PRId64, block_bytes);
  Dim num_pairs{"num_pairs"}, two{"2 (source, destination)", 2};
  Tensor mapping =
      call.anywhere("block_mapping", block_mapping).shape(num_pairs, two).dtype({DType::kInt64, DType::kInt32});
  if (mapping.device().device_type == kDLCUDA)
    mapping.fail(PYKV_VALUE_ERROR, "must lie on the CPU, got cuda:%d", mapping.device().device_id);
  if (from.arrays.empty()) return;
  const std::vector<BlockPair> pairs =
      read_block_mapping(mapping, from.num_blocks(block_bytes), to.num_blocks(block_bytes));
  if (pairs.empty()) return;

  call.set_device(to.device.device_type == kDLCUDA ? to.device : from.device);
  const size_t count = from.arrays.size(), at_once = independent(from, to) ? count : 1;
  for (size_t first = 0; first < count; first += at_once)
    copy(call, stream, from, to, first, at_once, block_bytes, pairs);
}

}  // namespace
}  // namespace pykv

pykv_status pykv_swap_blocks(const DLTensor* src, DLTensor* dst, int64_t block_size_in_bytes,
                             const DLTensor* block_mapping, void* stream) {
  using namespace pykv;
  return guarded("swap_blocks", [&](Call& call) {
    Side from, to;
    from.add(call.anywhere("src", src));
    to.add(call.anywhere("dst", dst));
    swap(call, from, to, block_size_in_bytes, block_mapping, stream);
  });
}

pykv_status pykv_swap_blocks_layers(pykv_tensor_list src_caches, pykv_tensor_list dst_caches,
                                    int64_t block_size_in_bytes, const DLTensor* block_mapping, void* stream) {
  using namespace pykv;
  return guarded("swap_blocks_layers", [&](Call& call) {
    check_list("src_caches", src_caches);
    check_list("dst_caches", dst_caches);
    if (src_caches.size != dst_caches.size)
      fail(PYKV_VALUE_ERROR, "dst_caches: must be as many as src_caches, %" PRId64 ", got %" PRId64, src_caches.size,
           dst_caches.size);
    Side from, to;
    for (int64_t i = 0; i < src_caches.size; ++i) {
      from.add(call.anywhere("src_caches", src_caches.tensors[i]));
      to.add(call.anywhere("dst_caches", dst_caches.tensors[i]));
    }
    swap(call, from, to, block_size_in_bytes, block_mapping, stream);
  });
}
