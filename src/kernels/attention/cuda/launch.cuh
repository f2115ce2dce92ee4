// Launching what cuda/plan.cc says: a Step names an instance, and the function for its kind of cache elements launches it.
#pragma once

#include <atomic>
#include <cstdint>

#include "attention/cuda/plan_sizes.h"
#include "attention/cuda/problem.cuh"
#include "core/launch.h"
#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"

namespace pykv::attention {

const DeviceInfo& device_info(int device);

// Launches all of a plan's steps.
void launch_plan(const Plan& plan, const Problem& p, const Launch& launch);

// Launches a kernel, in clusters of so many blocks (sm_90), that may come up while the kernel before it still runs (it
// waits for that kernel itself).
template <class... Parameters>
void launch_after(void (*kernel)(Parameters...), const Step& s, const Launch& launch, const char* op,
                  const Parameters&... parameters) {
  pykv::launch_clusters(kernel, dim3(s.grid), dim3(s.threads), static_cast<unsigned>(s.cluster), s.shared_bytes, launch,
                        op, parameters...);
}

// Devices for which something has been done.
class DoneOnce {
 public:
  template <class F>
  void on(int device, F&& act) {
    if (device < kDevices && done_[device].load(std::memory_order_relaxed)) return;
    act();
    if (device < kDevices) done_[device].store(true, std::memory_order_relaxed);
  }

 private:
  static constexpr int kDevices = 64;
  std::atomic<bool> done_[kDevices]{};
};

// The same for a kernel of a Problem that may have so much shared memory, which is said once on each device.
template <auto kKernel, class... Args>
void launch_step(const Problem& p, const Step& s, int most_bytes, const Launch& launch, const Args&... args) {
  static DoneOnce allowed;
  allowed.on(launch.device, [&] {
    cuda_check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes), p.a.op);
  });
  launch_after(kKernel, s, launch, p.a.op, p, args...);
}

// What a block does, Block::run(), as a kernel: that of decode, verify and mma.
template <class Block>
__global__ void __launch_bounds__(Block::kThreadsOfBlock, Block::kBlocksOfSm)
    paged_attention_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies) {
  extern __shared__ __align__(1024) char shared_memory[];
  Block::run(p, copies, shared_memory);
}

// Where a plan names an instance that there is not.
[[noreturn]] void fail_without_instance(const Problem& p, const Step& s);

// Launches an instance of a family.
using LaunchOf = void(const Problem& p, const Step& s, const Launch& launch);

// Each is instantiated for a kind of cache element in a file of its own, which CMake makes of instance.cu.in: tiles of mma.sync,
template <class Element>
void launch_mma(const Problem& p, const Step& s, const Launch& launch);
// one query token of each sequence,
template <class Element>
void launch_decode(const Problem& p, const Step& s, const Launch& launch);
// several as columns, and pages of no whole groups,
template <class Element>
void launch_tokens(const Problem& p, const Step& s, const Launch& launch);
// four warps together, on Hopper,
template <class Element>
void launch_verify(const Problem& p, const Step& s, const Launch& launch);
template <class Element>
void launch_verify_clusters(const Problem& p, const Step& s, const Launch& launch);
// prefill on Hopper, and with batch_invariant.
template <class Element>
void launch_prefill(const Problem& p, const Step& s, const Launch& launch);
template <class Element>
void launch_prefill_invariant(const Problem& p, const Step& s, const Launch& launch);

// Behind what so many blocks of prefill leave: what they count.
struct PrefillCounts {
  int taken;  // entries of TileList beside the blocks' first
};
inline PrefillCounts* prefill_counts(const Problem& p, int grid) {
  return reinterpret_cast<PrefillCounts*>(p.partial + int64_t{2} * grid * p.rows * p.pitch);
}

void launch_simple(const Problem& p, const Step& s, const Launch& launch);  // generic/simple.cu: anything at all

}  // namespace pykv::attention
