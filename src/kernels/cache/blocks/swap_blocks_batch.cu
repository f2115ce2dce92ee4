// For each i: sizes[i] bytes from one address to another, each on this device, on another one, or on the host, pinned or not.
//
// Bound by the link, as swap_blocks.cu: what a kernel can reach (this device, pinned and managed memory) it copies itself,
// since each short range would cost the copy engine's queue some microseconds.  Few long ranges that cross the link, and all
// that a kernel cannot reach, go to the copy engines.
//
// Where an address lies only the driver knows, and asking it takes a fraction of a microsecond: it is asked once for each
// allocation, which is then known as a range.
//
// Kernel: ranges are cut into units of 4 KB, which the warps of the grid take in turn; a warp finds the range of its unit
// in the kernel's parameters, where ranges travel, a thousand to a launch.  A few blocks of threads fill the link.
#include <cuda.h>

#include <algorithm>

#include "cache/blocks/swap_blocks_batch.h"
#include "cuda/dependent.cuh"
#include "cuda/vec.cuh"

namespace pykv {
namespace {

constexpr char kOp[] = "swap_blocks_batch";
constexpr int kThreads = 256, kWarps = kThreads / 32, kVectorsPerThread = 4;
constexpr uint32_t kUnit = 4096, kMostRanges = 1024;  // ranges: 24 KB of the 32 KB that parameters may take
constexpr uint32_t kBlocksForLink = 32, kBlocksPerSm = 4;

// The copy engines: ranges at least this long, and so few that issuing them takes some hundred microseconds.
constexpr int64_t kLongRange = 1 << 20, kMostLongRanges = 128;

struct Range {
  const char* from;
  char* to;
  uint32_t bytes, first_unit;
};

struct Work {
  uint32_t num_ranges, num_units;
  bool is_first;  // of the launches of a call
  Range ranges[kMostRanges];
};

// By one warp.
template <class Vector>
__device__ void copy_unit(char* to, const char* from, uint32_t bytes) {
  const uint32_t n = bytes / sizeof(Vector);
  for (uint32_t first = threadIdx.x % 32; first < n; first += 32 * kVectorsPerThread) {
    Vector v[kVectorsPerThread];
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i)
      if (first + 32 * i < n) v[i] = load_vec<Vector>(from + (first + 32 * i) * sizeof(Vector));
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i)
      if (first + 32 * i < n) store_vec(to + (first + 32 * i) * sizeof(Vector), v[i]);
  }
}

// Launches of a call need not wait for each other: the next one begins when this one has nothing left to load.  Each ends after
// the one before, so that the end of the last is the end of all.
__global__ void __launch_bounds__(kThreads) swap_blocks_batch_kernel(const __grid_constant__ Work work) {
  if (work.is_first) wait_for_previous_kernel();
  uint32_t range = 0;  // units of a warp ascend
  for (uint32_t unit = blockIdx.x * kWarps + threadIdx.x / 32; unit < work.num_units; unit += gridDim.x * kWarps) {
    for (uint32_t end = work.num_ranges; end - range > 1;) {
      const uint32_t middle = range + (end - range) / 2;
      if (work.ranges[middle].first_unit <= unit) {
        range = middle;
      } else {
        end = middle;
      }
    }
    const uint32_t first = (unit - work.ranges[range].first_unit) * kUnit;
    const uint32_t bytes = min(work.ranges[range].bytes - first, kUnit);
    const char* from = work.ranges[range].from + first;
    char* to = work.ranges[range].to + first;
    // the largest power of two that divides them all; the same for the whole warp
    const uint32_t bits =
        static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) | bytes;
    if (bits % 16 == 0) {
      copy_unit<uint4>(to, from, bytes);
    } else if (bits % 8 == 0) {
      copy_unit<uint2>(to, from, bytes);
    } else if (bits % 4 == 0) {
      copy_unit<uint32_t>(to, from, bytes);
    } else {
      copy_unit<uint8_t>(to, from, bytes);
    }
  }
  let_next_kernel_start();
  if (!work.is_first) wait_for_previous_kernel();
}

// Ranges that are launched together.
class Batch {
 public:
  Batch(const Launch& launch, uint32_t most_blocks) : launch_(launch), most_blocks_(most_blocks) {
    work_.is_first = true;
    clear();
  }

  void add(const char* from, char* to, int64_t bytes) {
    while (bytes > 0) {
      const uint32_t n = static_cast<uint32_t>(std::min<int64_t>(bytes, 1 << 30));  // numbers of units stay below 2^31
      work_.ranges[work_.num_ranges++] = {from, to, n, work_.num_units};
      work_.num_units += (n + kUnit - 1) / kUnit;
      from += n, to += n, bytes -= n;
      if (work_.num_ranges == kMostRanges) flush();
    }
  }

  void flush() {
    if (work_.num_ranges == 0) return;
    const uint32_t blocks = std::min((work_.num_units + kWarps - 1) / kWarps, most_blocks_);
    launch_dependent(swap_blocks_batch_kernel, blocks, kThreads, launch_, kOp, work_);
    work_.is_first = false;
    clear();
  }

 private:
  void clear() { work_.num_ranges = work_.num_units = 0; }

  const Launch& launch_;
  const uint32_t most_blocks_;
  Work work_;
};

// Addresses [begin, end) of one allocation that CUDA knows.
struct Memory {
  uintptr_t begin, end;
  cudaMemoryType type;
  int device;
  intptr_t shift;  // from here to where devices see it
  bool mapped;     // whether they do

  bool contains(uintptr_t p) const { return begin <= p && p < end; }
  bool reachable_from(int other) const { return mapped && (type != cudaMemoryTypeDevice || device == other); }
};

using GetAttribute = CUresult (*)(void*, CUpointer_attribute, CUdeviceptr);

// cuPointerGetAttribute, or null: the library is not linked to the driver.
GetAttribute driver_attributes() {
  static const GetAttribute found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion("cuPointerGetAttribute", &function, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      cudaGetLastError();
      function = nullptr;
    }
    return reinterpret_cast<GetAttribute>(function);
  }();
  return found;
}

// What was learned about addresses in the course of one call: memory may be freed afterwards.
class AddressSpace {
 public:
  // The allocation of `address`; null for plain memory of the host.
  const Memory* find(const void* address) {
    const uintptr_t p = reinterpret_cast<uintptr_t>(address);
    if (last_ < known_.size() && known_[last_].contains(p)) return &known_[last_];
    auto next =
        std::upper_bound(known_.begin(), known_.end(), p, [](uintptr_t x, const Memory& m) { return x < m.begin; });
    if (next == known_.begin() || !std::prev(next)->contains(p)) {
      Memory memory;
      if (!ask(address, memory)) return nullptr;
      next = std::next(known_.insert(next, memory));
    }
    last_ = static_cast<size_t>(std::prev(next) - known_.begin());
    return &known_[last_];
  }

 private:
  static bool ask(const void* address, Memory& memory) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    if (attributes.type == cudaMemoryTypeUnregistered) return false;
    const uintptr_t p = reinterpret_cast<uintptr_t>(address);
    memory = {p,
              p + 1,
              attributes.type,
              attributes.device,
              static_cast<intptr_t>(reinterpret_cast<uintptr_t>(attributes.devicePointer) - p),
              attributes.devicePointer != nullptr};
    CUdeviceptr begin = 0;
    size_t size = 0;
    const GetAttribute get = driver_attributes();
    if (get && get(&begin, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, p) == CUDA_SUCCESS &&
        get(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p) == CUDA_SUCCESS && begin <= p && p - begin < size)
      memory.begin = begin, memory.end = begin + size;
    return true;
  }

  std::vector<Memory> known_;  // by address
  size_t last_ = 0;
};

// A side of a transfer as this device sees it; null if it does not.
struct Seen {
  const char* address = nullptr;
  bool is_here = false;  // in the memory of this device
};

Seen see(AddressSpace& space, const char* p, int64_t bytes, int device) {
  const Memory* memory = space.find(p);
  if (!memory || !memory->reachable_from(device)) return {};
  const Memory first = *memory;
  if (!first.contains(reinterpret_cast<uintptr_t>(p) + bytes - 1)) {  // neighbouring allocations may look like one
    const Memory* last = space.find(p + bytes - 1);
    if (!last || !last->reachable_from(device) || last->type != first.type || last->shift != first.shift) return {};
  }
  return {p + first.shift, first.type == cudaMemoryTypeDevice};
}

}  // namespace

int device_of_transfers(const std::vector<Transfer>& transfers, void* stream) {
  const auto handle = static_cast<cudaStream_t>(stream);
  const bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (!is_default) cuda_check(cudaStreamIsCapturing(handle, &capture), "cudaStreamIsCapturing");
  int device = -1;
  if (!is_default && capture == cudaStreamCaptureStatusNone) {  // one that captures does not tell its device
    cuda_check(cudaStreamGetDevice(handle, &device), "cudaStreamGetDevice");
    return device;
  }
  AddressSpace space;
  for (const Transfer& t : transfers)
    for (const void* p : {t.from, static_cast<const char*>(t.to)})
      if (const Memory* memory = space.find(p); memory && memory->type != cudaMemoryTypeHost) return memory->device;
  if (handle != nullptr) cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

void swap_blocks_batch_cuda(const SwapBlocksBatchArgs& args, const Launch& launch) {
  AddressSpace sources, targets;
  Batch over_link(launch, kBlocksForLink), inside(launch, kBlocksPerSm * num_sms(launch.device));
  const auto engine = [&](const Transfer& t) {
    cuda_check(cudaMemcpyAsync(t.to, t.from, t.bytes, cudaMemcpyDefault, stream_of(launch)), "cudaMemcpyAsync");
  };
  const Transfer* end = args.transfers + args.num_transfers;
  const bool few_long_ones =
      std::count_if(args.transfers, end, [](const Transfer& t) { return t.bytes >= kLongRange; }) <= kMostLongRanges;
  for (const Transfer* t = args.transfers; t < end; ++t) {
    const Seen from = see(sources, t->from, t->bytes, launch.device), to = see(targets, t->to, t->bytes, launch.device);
    const bool reachable = from.address && to.address;
    if (reachable && from.is_here && to.is_here) {
      inside.add(from.address, const_cast<char*>(to.address), t->bytes);
    } else if (reachable && (from.is_here || to.is_here) && !(few_long_ones && t->bytes >= kLongRange)) {
      over_link.add(from.address, const_cast<char*>(to.address), t->bytes);
    } else {
      engine(*t);
    }
  }
  over_link.flush();
  inside.flush();
}

}  // namespace pykv
