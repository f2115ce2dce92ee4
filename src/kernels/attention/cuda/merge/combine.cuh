// Adds up the pieces of the segments that borders of blocks cut (schedule/line.cuh), in the kernel after that of a line: one of
// its own, or one whose clusters would have taken the call if its lengths had been for them (problem.cuh).
//
// Bottleneck: latency, notes and then pieces; these come from the L2.
#pragma once

#include "attention/cuda/merge/pieces.cuh"
#include "cuda/dependent.cuh"
#include "cuda/reduce.cuh"

namespace pykv::attention {

// The row r of a segment that was noted.
__device__ inline Row row_of_note(const Problem& p, const Unfinished& u, int r) {
  Unit unit{};
  unit.query_begin = u.query_begin;
  unit.query_len = u.query_len;
  unit.kv_head = u.kv_head;
  unit.head_tile = u.head_tile;
  unit.query_tile = u.query_tile;
  return row_of(p, unit, r);
}

// Four columns of a row of the output, wherever it lies.
template <class T>
__device__ void store_each(const Problem& p, const Row& row, int first, const float4& x) {
  T* out = output_row<T>(p, row);
  const float columns[4] = {x.x, x.y, x.z, x.w};
  for (int e = 0; e < 4; ++e) {
    if (first + e < p.a.head_size) out[first + e] = T(columns[e]);
  }
}

// What is to be done for a segment in so many pieces, each of so many items (four columns of a row): jobs for a warp, whose lanes
// have about `at_once` pieces of an item each.
struct CombineJobs {
  static constexpr int kMostParts = 16;
  int parts, items, jobs;  // parts of an item's pieces; items of a job

  __device__ CombineJobs(int pieces, int all_items, int at_once) : parts(1) {
    while (parts < kMostParts && parts * at_once < pieces) parts *= 2;
    items = 32 / parts;
    jobs = pieces == 0 ? 0 : (all_items + items - 1) / items;
  }
};

// Of the segment that block `note` of the line has noted, or none.
__device__ inline SegmentPieces pieces_of_note(const Unfinished& u, int note) {
  const int pieces = u.first_block < 0 ? 0 : (note - u.first_block) / u.step + 1;
  return {u.first_block, pieces, u.step, u.first_slot_is_head};
}

using JobsUpTo = int[kMaxGrid];  // of a block: how many jobs there are up to each note, and with it

// Which of the line's blocks left notes, and of how many pieces, is known here alone: each block reads all notes and counts jobs,
// which the warps take in turn.  A lane adds up four columns of a row over its part of the pieces, then the parts are added up.
// Sum: Quad or, with batch_invariant, ExactQuad.  After wait_for_previous_kernel(), by whole blocks.
template <class Sum, int kAtOnce>
__device__ void combine_pieces(const LeftPieces& left, JobsUpTo& jobs_up_to) {
  const Problem& p = left.p;
  const int lane = threadIdx.x % 32, quads = p.pitch / 4, notes = left.notes;
  for (int i = threadIdx.x; i < notes; i += blockDim.x) {
    jobs_up_to[i] = CombineJobs(pieces_of_note(p.unfinished[i], i).pieces, left.items, kAtOnce).jobs;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int own = (notes + 31) / 32, first = lane * own, end = min(first + own, notes);
    int jobs = 0;
    for (int i = first; i < end; ++i) jobs += jobs_up_to[i];
    int up_to = inclusive_sum(jobs) - jobs;
    for (int i = first; i < end; ++i) jobs_up_to[i] = up_to += jobs_up_to[i];
  }
  __syncthreads();

  const int all_jobs = notes > 0 ? jobs_up_to[notes - 1] : 0, warps = gridDim.x * (blockDim.x / 32);
  int own_note = 0, own_job = 0;  // lane k: of this warp's job k, from the 32nd to the 32nd
#pragma unroll 1
  for (int k = 0, job = threadIdx.x / 32 * gridDim.x + blockIdx.x; job < all_jobs; ++k, job += warps) {
    if (k % 32 == 0) {
      const int x = min(job + lane * warps, all_jobs - 1);
      int last = notes - 1;
      for (own_note = 0; own_note < last;) {  // the first with jobs_up_to[note] > x
        const int middle = (own_note + last) / 2;
        if (jobs_up_to[middle] > x) {
          last = middle;
        } else {
          own_note = middle + 1;
        }
      }
      own_job = x - (own_note == 0 ? 0 : jobs_up_to[own_note - 1]);
    }
    const int note = __shfl_sync(~0u, own_note, k % 32), of_segment = __shfl_sync(~0u, own_job, k % 32);
    const Unfinished u = p.unfinished[note];
    const SegmentPieces cut = pieces_of_note(u, note);
    const CombineJobs of_note(cut.pieces, left.items, kAtOnce);
    const int part = lane / of_note.items, item = of_segment * of_note.items + lane % of_note.items;
    const int r = item / quads, quad = item - r * quads;
    const Row row = row_of_note(p, u, r);
    const bool valid = item < left.items && r < p.rows && row.valid;

    Sum sum = Sum::empty();
    for (int first = part; valid && first < cut.pieces; first += of_note.parts * kAtOnce) {
      Sum x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int piece = first + i * of_note.parts;
        if (piece < cut.pieces) x[i] = Sum::load(p, cut.slot(piece), r, quad);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * of_note.parts < cut.pieces) sum.add(x[i]);
      }
    }
    for (int m = of_note.items; m < 32; m *= 2) sum.add(sum.of_lane(m));
    if (!valid || part > 0) continue;
    const float4 x = sum.finish(p, row, u.kv_head);
    if (p.a.dtype == DType::kFloat16) {
      store_each<half>(p, row, quad * 4, x);
    } else if (p.a.dtype == DType::kBFloat16) {
      store_each<bf16>(p, row, quad * 4, x);
    } else {
      store_each<float>(p, row, quad * 4, x);
    }
  }
}

// By a kernel of clusters, of which an SM has one or two blocks: with more under way for each lane.  `memory`: of the block's stages.
__device__ inline void combine_left_pieces(const LeftPieces& left, char* memory) {
  combine_pieces<Quad, 2 * Quad::kAtOnce>(left, *reinterpret_cast<JobsUpTo*>(memory));
}

// Of a mixed batch: waits for so many blocks of prefill, which was launched before the kernel before, that did not wait for it.  They
// were all there when that came up.  Whatever comes after this kernel comes after them, too.
__device__ inline void await_prefill(const int* ended, int blocks) {
  if (blocks == 0) return;
  if (threadIdx.x == 0) {
    int count;
    for (;;) {
      asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(count) : "l"(ended) : "memory");
      if (count >= blocks) break;
      __nanosleep(200);
    }
  }
  __syncthreads();
}

// In a kernel of its own.
template <class Sum>
__global__ void __launch_bounds__(kCombineThreads, Sum::kBlocksPerSm)
    combine_kernel(const __grid_constant__ LeftPieces left, const int* prefill_ended, int prefill_blocks) {
  __shared__ JobsUpTo jobs_up_to;
  // It lets no other come up: where the next kernel's blocks came to lie would depend on when which of these end, and what reads
  // neighbouring heads would no longer do so at the same time.
  wait_for_previous_kernel();
  await_prefill(prefill_ended, prefill_blocks);
  if (takes_call(left.p)) combine_pieces<Sum, Sum::kAtOnce>(left, jobs_up_to);
}

}  // namespace pykv::attention
