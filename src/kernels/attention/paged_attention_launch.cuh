// Host side shared by the kernels of paged attention: sizes of tiles, grids and the workspace.
#pragma once

#include <atomic>
#include <cstdint>

#include "attention/paged_attention_kernels.h"
#include "attention/paged_attention_problem.cuh"
#include "core/launch.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace pykv::attention {

// Tile sizes that the grid and the workspace follow from.
struct Tiling {
  int rows;           // of a query tile, or of several of which a block leaves a piece
  int pitch;          // floats in a partial row
  int blocks_per_sm;  // at most
  int tile_rows = 0;  // of each of these
  int lead = 1;       // places of the line for what a segment begins and ends with, but with batch_invariant
};

// How many rows a query tile has: Few 16, Some 32, More 64, Many 64 or 128; with batch_invariant 16 or 64.  mma.sync takes Few and
// Some with more: mma_rows().
enum class RowClass { kFew, kSome, kMore, kMany, kInvariantFew, kInvariantMore };

inline Tiling few_rows_tiling(int head_size) {
  return head_size <= 64 ? Tiling{16, 64, 4} : head_size <= 128 ? Tiling{16, 128, 3} : Tiling{16, 256, 1};
}
inline Tiling some_rows_tiling(int head_size) { return {32, head_size <= 64 ? 64 : 128, head_size <= 64 ? 3 : 2}; }
inline Tiling more_rows_tiling(int head_size) { return {64, head_size <= 64 ? 64 : 128, 2}; }
inline Tiling many_rows_tiling(int head_size) {
  return head_size <= 64 ? Tiling{128, 64, 2} : head_size <= 128 ? Tiling{128, 128, 2} : Tiling{64, 256, 2};
}
inline Tiling simple_tiling(int head_size) { return {16, (head_size + 3) / 4 * 4, 4}; }
inline Tiling tiling_of(RowClass rows, int head_size) {
  switch (rows) {
    case RowClass::kFew:
    case RowClass::kInvariantFew:
      return few_rows_tiling(head_size);
    case RowClass::kSome:
      return some_rows_tiling(head_size);
    case RowClass::kMany:
      return many_rows_tiling(head_size);
    default:
      return more_rows_tiling(head_size);
  }
}

// The tiles of mma.sync (paged_attention_mma.cuh) for such rows: 64 for fewer, too, and of heads of 256 16 with batch_invariant.
inline RowClass mma_rows(RowClass rows, int head_size) {
  switch (rows) {
    case RowClass::kMany:
      return RowClass::kMany;
    case RowClass::kInvariantFew:
    case RowClass::kInvariantMore:
      return head_size > 128 ? RowClass::kInvariantFew : RowClass::kInvariantMore;
    default:
      return head_size > 128 ? RowClass::kMany : RowClass::kMore;
  }
}
inline Tiling mma_tiling(RowClass rows, int head_size) {
  const RowClass tile = mma_rows(rows, head_size);
  Tiling tiling = tiling_of(tile, head_size);
  if (tile != rows) tiling.blocks_per_sm = 1;  // workspaces would be three times as large
  return tiling;
}

// Launches what takes all sequences of a call.
void launch_all(Problem p, const Launch& launch);

// If all sequences have about as few rows, as in decoding, one launch with tiles of that size takes them all.  (It would
// take any: this is a guess from the totals, the lengths being on the device.)
bool uniform_rows(int64_t num_tokens, int64_t num_seqs, int group, int head_size, RowClass& rows);
RowClass uniform_rows(const Problem& p);  // of a call that has such a class

// With batch_invariant: tiles that all compute a row in the same steps.  Without it, where sequences are so short that they are
// mostly waits for their queries, tiles of 64 rows do better than those of 32 if four warps multiply together.
RowClass class_for(RowClass rows, bool batch_invariant, bool short_by_warpgroups, int head_size);

// Can four warps together multiply so many rows of a KV head?
bool may_use_warpgroups(const PagedAttentionArgs& a, RowClass rows, int device);

// ... and are there so many sequences that for few rows, too, this is quicker than the lines of decoding?
bool fills_warpgroups(const Problem& p, int device);

// Do queries see keys through a window that is so short (in tokens) that a cluster suffices for each of few KV heads, too?
constexpr int kMostWindow = 4096;
inline bool has_short_window(const Problem& p) { return p.window <= kMostWindow; }

// Whose line takes a call that may go either way, if its lengths do not suit clusters: that of decoding, of four warps together, or of
// single warps.
enum class LineOf { kDecoding, kWarpgroups, kWarps };
LineOf line_of(const Problem& p, int device);

// For such a call, when `p` is complete for clusters: when they take it, if an SM has so many of their blocks.
void set_balance(Problem& p, LineOf line, int blocks_per_sm, int device);

// The line for the lengths that they do not take.  What that of warpgroups leaves becomes `left`.  False: the call had better go
// another way.
bool launch_line_of(Problem p, LineOf line, const Launch& launch, LeftPieces& left);

// Launches clusters, launch_clusters(left), and the line beside them, if they are not for all lengths: of warpgroups before them, for
// they then add up what it leaves, else after them.
bool launch_with_line(const Problem& p, LineOf line, const Launch& launch, auto&& launch_clusters) {
  const bool has_line = p.lengths != Lengths::kAny, is_first = line == LineOf::kWarpgroups;
  LeftPieces left{};
  if (has_line && is_first && !launch_line_of(p, line, launch, left)) return false;
  launch_clusters(left);
  return !has_line || is_first || launch_line_of(p, line, launch, left);
}

// Completes `p` for a tiling (rows, workspace) and returns the grid: as many blocks as run at once, at most
// tiling.blocks_per_sm on an SM.
int set_tiling(Problem& p, const Tiling& tiling, int blocks_per_sm, int device);

// The same for a grid of so many blocks, which are no more than workspaces are made for, and places of so many keys.
void set_line(Problem& p, const Tiling& tiling, int grid);
void set_places(Problem& p, int unit_tokens);

// How the rows of a KV head are divided into query tiles of at most so many.
void set_rows(Problem& p, int rows);

// Of clusters of so many blocks: what their blocks finish of a tile's queries, and how many of them are there early.
void set_cluster(Problem& p, int blocks, int queries, int head_size, int device);

// Are KV heads so few, in tables with room for many keys, that clusters had better share these?
bool suits_spans(const Problem& p, int device);

// Clusters beside each other for the keys of a KV head, of so many clusters in all: where these leave their sums, by columns and
// their dimensions.
void set_spans(Problem& p, int spans, int clusters, int columns, int pitch);

// What the `grid` blocks of a launch leave unfinished, and a kernel that adds it up.
LeftPieces left_pieces(const Problem& p, int grid);
void combine(const LeftPieces& left, const Launch& launch);

// Launches a kernel, in clusters of so many blocks (sm_90), that may come up while the kernel before it still runs (it
// waits for that kernel itself).
template <class... Parameters>
void launch_after(Instance instance, void (*kernel)(Parameters...), dim3 grid, dim3 block, int cluster,
                  size_t shared_bytes, const Launch& launch, const char* op, const Parameters&... parameters) {
  if (!note_launch({instance, static_cast<int>(grid.x), static_cast<int>(block.x), cluster, shared_bytes})) return;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream_of(launch);
  config.attrs = attributes;
  config.numAttrs = !overlaps_kernels(launch.device) ? 0 : cluster > 1 ? 2 : 1;
  cuda_check(cudaLaunchKernelEx(&config, kernel, parameters...), op);
}

size_t shared_memory_limit(int device);  // of one block

// Sets up one kernel: how many of its blocks an SM holds.
int count_resident_blocks(const void* kernel, int threads, size_t shared_bytes);

constexpr int kMostBlocks = 8;                    // of a cluster, everywhere
constexpr int kFewestSpans = 3, kMostSpans = 16;  // that share a sequence's keys; two draw hardly more than one
constexpr int64_t kMostOfFew = 8192;              // tokens of a sequence that a cluster takes, where it is not alone

// How many clusters of so many blocks run at once; 0 if the device has no such clusters.
int count_resident_clusters(const void* kernel, int blocks, int threads, size_t shared_bytes, const Launch& launch);

// A number, not below zero, found out once on each device.
class PerDevice {
 public:
  template <class F>
  int get(int device, F&& find_out) {
    if (device >= kDevices) return find_out();
    int next = values_[device].load(std::memory_order_relaxed);
    if (next == 0) values_[device].store(next = find_out() + 1, std::memory_order_relaxed);
    return next - 1;
  }

 private:
  static constexpr int kDevices = 64;
  std::atomic<int> values_[kDevices]{};  // the number and one; 0: not known yet
};

// Lets a kernel have so much shared memory: said once on each device.
template <class Kernel>
void allow_shared_memory(Kernel kernel, int bytes, PerDevice& allowed, const char* op, const Launch& launch) {
  allowed.get(launch.device, [&] {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    return 1;
  });
}

// Launches one kernel, which takes a Problem and `args`, over the whole line.  Gives the grid, or 0 if the device has too
// little shared memory.
template <class Kernel, class... Args>
int launch_main(Instance instance, Kernel kernel, int threads, int shared_bytes, int unit_tokens, const Tiling& tiling,
                Problem& p, const Launch& launch, PerDevice& resident, const Args&... args) {
  if (shared_bytes > static_cast<int>(shared_memory_limit(launch.device))) return 0;
  const int blocks_per_sm = resident.get(launch.device, [&] {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), p.a.op);
    return count_resident_blocks(reinterpret_cast<const void*>(kernel), threads, shared_bytes);
  });
  set_places(p, unit_tokens);
  const int grid = set_tiling(p, tiling, blocks_per_sm, launch.device);
  launch_after(instance, kernel, dim3(grid), dim3(threads), 1, shared_bytes, launch, p.a.op, p, args...);
  return grid;
}

// The same, and what combines its pieces, unless that is left to another kernel.  scaled_pieces: they have been multiplied by the
// scales of values.
template <class Kernel, class Copies>
bool launch_line(Instance instance, Kernel kernel, int threads, int shared_bytes, int unit_tokens, const Tiling& tiling,
                 const Copies& copies, Problem p, const Launch& launch, PerDevice& resident, LeftPieces* left = nullptr,
                 bool scaled_pieces = false) {
  const int grid =
      launch_main(instance, kernel, threads, shared_bytes, unit_tokens, tiling, p, launch, resident, copies);
  if (grid == 0) return false;
  if (scaled_pieces) p.a.kv_format = KvFormat::kSame;
  const LeftPieces pieces = left_pieces(p, grid);
  if (left) {
    *left = pieces;
  } else {
    combine(pieces, launch);
  }
  return true;
}

// One for each kind of cache element, in a file of its own.  False if the device has too little shared memory.
bool launch_f16(const Problem& p, RowClass rows, const Launch& launch);
bool launch_bf16(const Problem& p, RowClass rows, const Launch& launch);
bool launch_e4m3(const Problem& p, RowClass rows, const Launch& launch);
bool launch_e5m2(const Problem& p, RowClass rows, const Launch& launch);
bool launch_int8(const Problem& p, RowClass rows, const Launch& launch);
bool launch_nvfp4(const Problem& p, RowClass rows, const Launch& launch);
// The same for one query token of each sequence.  False if the call is not for the kernels of decoding proper.
bool launch_decode_f16(const Problem& p, const Launch& launch);
bool launch_decode_bf16(const Problem& p, const Launch& launch);
bool launch_decode_e4m3(const Problem& p, const Launch& launch);
bool launch_decode_e5m2(const Problem& p, const Launch& launch);
bool launch_decode_int8(const Problem& p, const Launch& launch);
bool launch_decode_nvfp4(const Problem& p, const Launch& launch);
// Up to 64 rows of short calls, up to 16 of one-byte caches that warpgroups leave, and decoding over pages of no whole groups.
// False if the call is not for these kernels.
bool launch_tokens_f16(const Problem& p, const Launch& launch);
bool launch_tokens_bf16(const Problem& p, const Launch& launch);
bool launch_tokens_e4m3(const Problem& p, const Launch& launch);
bool launch_tokens_e5m2(const Problem& p, const Launch& launch);
bool launch_tokens_int8(const Problem& p, const Launch& launch);
bool launch_tokens_nvfp4(const Problem& p, const Launch& launch);
// Few, Some or More rows by four warps together, where may_use_warpgroups(); left: pieces are not combined, but noted there.  False
// if the device has too little shared memory.
bool launch_warpgroups_f16(const Problem& p, RowClass rows, const Launch& launch, LeftPieces* left);
bool launch_warpgroups_bf16(const Problem& p, RowClass rows, const Launch& launch, LeftPieces* left);
bool launch_warpgroups_e4m3(const Problem& p, RowClass rows, const Launch& launch, LeftPieces* left);
bool launch_warpgroups_e5m2(const Problem& p, RowClass rows, const Launch& launch, LeftPieces* left);
bool launch_warpgroups_int8(const Problem& p, RowClass rows, const Launch& launch, LeftPieces* left);
// 17 to 64 rows of short calls by clusters of such warps, where may_use_warpgroups().  False if the call had better go another
// way.
bool launch_warpgroup_clusters_f16(const Problem& p, const Launch& launch);
bool launch_warpgroup_clusters_bf16(const Problem& p, const Launch& launch);
bool launch_warpgroup_clusters_e4m3(const Problem& p, const Launch& launch);
// Prefill on Hopper.  False if the call is not for these kernels.
bool launch_wgmma_f16(const Problem& p, const Launch& launch);
bool launch_wgmma_bf16(const Problem& p, const Launch& launch);
void launch_simple(Problem p, const Launch& launch);  // anything at all

}  // namespace pykv::attention
