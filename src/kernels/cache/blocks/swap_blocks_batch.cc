#include "cache/blocks/swap_blocks_batch.h"

#include <cinttypes>

#include "core/call.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

Index read_int64s(Call& call, const char* name, const DLTensor* array, Dim& count) {
  Tensor t = call.anywhere(name, array).shape(count).dtype({DType::kInt64});
  if (t.device().device_type == kDLExtDev) t.fail(PYKV_VALUE_ERROR, "must have memory, which is read at once");
  if (t.device().device_type == kDLCUDA)
    t.fail(PYKV_VALUE_ERROR, "must lie on the CPU, got cuda:%d", t.device().device_id);
  return t.index();
}

void check_address(const char* name, int64_t i, int64_t address, int64_t bytes) {
  if (address == 0)
    fail(PYKV_VALUE_ERROR, "%s: entry %" PRId64 " is null, with %" PRId64 " bytes to copy", name, i, bytes);
  if (address < 0 || bytes > INT64_MAX - address)
    fail(PYKV_VALUE_ERROR, "%s: entry %" PRId64 ", %" PRId64 ", is no address of %" PRId64 " bytes", name, i, address,
         bytes);
}

// Neighbours that go on where the one before them ends, on both sides, become one.
std::vector<Transfer> read_transfers(const Index& sources, const Index& targets, const Index& sizes, int64_t count) {
  std::vector<Transfer> transfers;
  transfers.reserve(count);
  int64_t end = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = sources[i], to = targets[i], bytes = sizes[i];
    if (bytes < 0) fail(PYKV_VALUE_ERROR, "sizes: entry %" PRId64 " must not be negative, got %" PRId64, i, bytes);
    if (bytes == 0) continue;
    check_address("src_ptrs", i, from, bytes);
    check_address("dst_ptrs", i, to, bytes);
    if (bytes > INT64_MAX - end) fail(PYKV_VALUE_ERROR, "sizes: too large in sum");
    end += bytes;
    const char* source = reinterpret_cast<const char*>(from);
    char* target = reinterpret_cast<char*>(to);
    Transfer* last = transfers.empty() ? nullptr : &transfers.back();
    if (last && last->from + last->bytes == source && last->to + last->bytes == target) {
      last->bytes += bytes;
      last->end = end;
    } else {
      transfers.push_back({source, target, bytes, end});
    }
  }
  return transfers;
}

}  // namespace
}  // namespace pykv

pykv_status pykv_swap_blocks_batch(const DLTensor* src_ptrs, const DLTensor* dst_ptrs, const DLTensor* sizes,
                                   bool is_src_access_order_any, void* stream) {
  using namespace pykv;
  return guarded("swap_blocks_batch", [&](Call& call) {
    (void)is_src_access_order_any;  // a permission: reads in the stream's order are right as well
    Dim count{"num_copies"};
    const Index sources = read_int64s(call, "src_ptrs", src_ptrs, count);
    const Index targets = read_int64s(call, "dst_ptrs", dst_ptrs, count);
    const Index bytes = read_int64s(call, "sizes", sizes, count);
    const std::vector<Transfer> transfers = read_transfers(sources, targets, bytes, count);
    if (transfers.empty()) return;
#if defined(PYKV_WITH_CUDA)
    const int device = device_of_transfers(transfers, stream);
    if (device >= 0) call.set_device({kDLCUDA, device});
#endif
    const SwapBlocksBatchArgs args{transfers.data(), static_cast<int64_t>(transfers.size())};
    call.run(stream, args, swap_blocks_batch_cpu, PYKV_CUDA(swap_blocks_batch_cuda));
  });
}
