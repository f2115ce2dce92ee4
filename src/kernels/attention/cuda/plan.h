// Which kernels take a call of paged attention, and with what grids and sizes: a pure function of the call and the device.
//
// Host code without CUDA: it is the same in a build for the CPU alone, where tests/attention/test_paged_attention_plan.py
// compares it with a table of calls.  launch.cuh launches what it says.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention/paged_attention.h"

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
  kClear,    // what kPrefill counts
  kCombine,  // adds up what kVerifyLine left
};
constexpr int kKernels = static_cast<int>(KernelId::kCombine) + 1;

const char* name_of(KernelId kernel);  // ../kernels.cc

// One of a kernel's instances.  0: it has no such size.
struct Instance {
  KernelId kernel;
  int head_size = 0;    // of its tiles
  int rows = 0;         // queries, times heads, of a tile
  bool packed = false;  // values are columns of tokens
  bool folded = false;  // two KV heads as one
  bool wide = false;    // clusters of more warps, or of smaller blocks
  bool single = false;  // lines take KV heads one by one
};

enum class CacheKind : uint8_t { k16Bits, kE4M3, kE5M2, kInt8, kNvfp4 };

// Kinds that are served by all kernels.  The others have the line of one token, those of several (of nvfp4 in decode/, of one byte in
// verify/), and mma.
constexpr bool is_common(CacheKind kind) { return kind == CacheKind::k16Bits || kind == CacheKind::kE4M3; }

constexpr int kThreads = 128;
// With batch_invariant: a chunk begins at a multiple of its size, and one warp has a quarter of it.
constexpr int kChunkTokens = 512, kPartTokens = kChunkTokens / 4;
constexpr int kMaxGrid = 1024;                    // blocks, which bounds the pieces of one segment
constexpr int kNoWindow = 1 << 30;                // longer than any sequence
constexpr int kMostBlocks = 8;                    // of a cluster, everywhere
constexpr int kFewestSpans = 3, kMostSpans = 16;  // that share a sequence's keys; two draw hardly more than one
constexpr int kCombineThreads = 256;

// What a plan depends on.
struct DeviceInfo {
  int sms;
  int capability;                     // 90: compute capability 9.0
  bool has_warpgroups;                // it is 9.0, and the build has the machine code for it
  int shared_of_block, shared_of_sm;  // bytes
  int threads_of_sm;
  int clusters[2][kMostBlocks + 1];  // of so many blocks, that run at once, if an SM holds one or two blocks

  // Kernels may come up before the one before has ended, and there are clusters.
  bool overlaps_kernels() const { return capability >= 90; }
};

// "A100", "H100" or "H200", else null.
const DeviceInfo* device_called(const char* name);

// The one that this thread's calls are planned for, and launch nothing; null: as usual.
const DeviceInfo* planned_device();

// Is this thread to launch nothing?
bool only_plans();
void only_plan(bool on);

// Of the thread's last call: a line for each launch, and one for the workspace.  It holds until the next one is asked for.
const char* plan_text();

// What a kernel is launched for: any lengths; or, where another is launched for the same call, those that suit clusters, or those
// that do not.
enum class Lengths : uint8_t { kAny, kForClusters, kForLine };

// Clusters take the call if its longest sequence has at most `share` of all tokens, and `slack` more.
struct Balance {
  static constexpr int kUnit = 128;  // tokens
  float share, slack;                // of a unit
};

// Tile sizes that the grid and the workspace follow from.
struct Tiling {
  int rows;           // of a query tile, or of several of which a block leaves a piece
  int pitch;          // floats in a partial row
  int blocks_per_sm;  // at most
  int tile_rows = 0;  // of each of these
  int lead = 1;       // places of the line for what a segment begins and ends with, but with batch_invariant
};

// How many rows a query tile has: Few 16, Some 32, More 64, Many 64 or 128; with batch_invariant 16 or 64.  mma.sync takes few rows
// in tiles of more: mma_rows().
enum class RowClass { kFew, kSome, kMore, kMany, kInvariantFew, kInvariantMore };

struct Step {
  Instance instance;
  int grid, threads, cluster;
  int shared_bytes;
  // Takes the sequences with min_rows < query tokens * group <= max_rows, if their lengths are these.
  int min_rows, max_rows;
  Lengths lengths;
  Balance balance;
  // Prefill, or the kernel after it, which takes the sequences of few rows at the same time.
  bool mixed;
  int64_t pieces_at;  // bytes of the workspace in front of what a line leaves
  int kv_tile;        // tokens, or none
  Tiling line;        // or no rows
  int query_rows;     // of a query tile, or none
  int tile_tokens;    // 0: as many as fit in
  // Of clusters.
  int ways;               // beside each other, which take a sequence's query tiles in turn
  int spans, pitch;       // beside each other, which share a sequence's keys; floats in a row that each leaves
  int keys_alone;         // ... if keys are more than so many
  unsigned early_blocks;  // that are there, or nearly, before the kernel before has ended
  int block_items;        // four columns of a query each, that a block finishes, at most
  int round_chunks;       // with batch_invariant: that the teams of a cluster take at once
  int exchange_bytes;     // ... and room for what its blocks send each
};

struct Plan {
  static constexpr int kMost = 8;
  int count;
  Step steps[kMost];
  int64_t workspace;  // bytes
};

// Of this thread's last call.
Plan& last_plan();

// Bytes of workspace of such calls: closed form, no array is read.
int64_t workspace_bytes(int64_t num_tokens, int64_t num_seqs, int num_heads, int num_kv_heads, int head_size,
                        bool batch_invariant, const DeviceInfo& device);

// A call that has tokens and sequences.
void make_plan(const PagedAttentionArgs& args, const DeviceInfo& device, Plan& plan);

// Where things lie in a workspace for a grid of so many blocks, which leave two pieces each; their tickets, or notes, come first.
struct WorkspacePlaces {
  int64_t stats, partial, end;
};
WorkspacePlaces workspace_places(int grid, int rows, int pitch, bool batch_invariant);

// With batch_invariant: what a block of prefill keeps of a query tile's chunks, 64 bits for a column and 32 for every four.
constexpr int64_t kept_bytes(int head_size) {
  const int columns = head_size <= 64 ? 64 : 128;
  return int64_t{2} * kThreads * (columns / 4 + columns / 32) * 16;
}

// A call's longest sequence.
inline int64_t most_tokens(const PagedAttentionArgs& a) {
  return std::min({a.max_seq_len, a.max_blocks_per_seq * a.block_size, int64_t{kNoWindow}});
}

// The window of a call, in tokens: one that can hide nothing is none.
inline int window_of(const PagedAttentionArgs& a) {
  const bool hides = a.window > 0 && (a.window < most_tokens(a) || (!a.causal && a.cu_query_lens.data));
  return hides && a.window < kNoWindow ? static_cast<int>(a.window) : kNoWindow;
}

}  // namespace pykv::attention
