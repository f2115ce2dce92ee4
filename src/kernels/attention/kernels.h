// The kernels of paged attention by name, and what a call launched: for pykv_paged_attention_plan().
#pragma once

#include <cstddef>
#include <cstdint>

namespace pykv::attention {

// A line shares all work out evenly; a cluster has one KV head of a sequence, or shares it with others (spans); either chooses
// between these two on the device.
enum class KernelId : int {
  kCpu,
  kSimple,        // any sizes, fp32
  kMma,           // 64 or 128 rows on any chip
  kMmaInvariant,  // the same with batch_invariant
  kDecodeLine,    // one query token
  kDecodeCluster,
  kDecodeSpans,
  kDecodeEither,
  kWindowCluster,  // keys that a window hides are left out
  kFoldedLine,     // two KV heads as one
  kFoldedCluster,
  kFoldedEither,
  kSmallPagesLine,  // pages that are no groups of eight tokens
  kSmallPagesCluster,
  kInvariantLine,  // one query token with batch_invariant
  kInvariantCluster,
  kInvariantSpans,
  kTokensLine,  // several query tokens as columns
  kTokensCluster,
  kTokensSpans,
  kTokensEither,
  kVerifyLine,   // up to 64 rows on Hopper
  kVerifyBlock,  // a block without a cluster for each KV head of a sequence
  kVerifyCluster,
  kVerifySpans,
  kPrefill,  // 128 rows on Hopper
  kPrefillInvariant,
  kClear,  // what kPrefill counts
  kAwait,  // waits for kPrefill, if another kernel runs at the same time
};
constexpr int kKernels = static_cast<int>(KernelId::kAwait) + 1;

const char* name_of(KernelId kernel);

// One of a kernel's instances.  0: it has no such size.
struct Instance {
  KernelId kernel;
  int head_size = 0;      // of its tiles
  int rows = 0;           // queries, times heads, of a tile
  bool packed = false;    // values are columns of tokens
  bool folded = false;    // two KV heads as one
  bool wide = false;      // clusters of more warps
  bool deep = false;      // lines of more stages, and fewer blocks
  bool single = false;    // lines take KV heads one by one
  bool sees_all = false;  // lines have neither a window nor sparsity
};

// Is this thread to launch nothing?
bool only_plans();
void only_plan(bool on);

// Of the thread's last call: a line for each launch, and one for the workspace.  It holds until the next one is asked for.
const char* plan_text();

}  // namespace pykv::attention
