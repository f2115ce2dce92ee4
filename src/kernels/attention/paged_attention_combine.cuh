// The second kernel of a line: adds up the pieces of the segments that borders of blocks cut (paged_attention_plan.cuh).
//
// Bottleneck: latency, notes and then pieces; these come from the L2.
#pragma once

#include "attention/paged_attention_exact.cuh"
#include "attention/paged_attention_pieces.cuh"
#include "cuda/dependent.cuh"

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

constexpr int kCombineThreads = 256;

// What is to be done for a segment in so many pieces, each of so many items (four columns of a row): jobs for a block, whose
// threads have about Sum::kAtOnce pieces of an item each.
template <class Sum>
struct CombineJobs {
  static constexpr int kMostParts = 16;
  int parts, items, jobs;  // parts of an item's pieces; items of a job

  __device__ CombineJobs(int pieces, int all_items) : parts(1) {
    while (parts < kMostParts && parts * Sum::kAtOnce < pieces) parts *= 2;
    items = kCombineThreads / parts;
    jobs = pieces == 0 ? 0 : (all_items + items - 1) / items;
  }
};

// Of the segment that block `note` of the main kernel has noted, or none.
__device__ inline SegmentPieces pieces_of_note(const Unfinished& u, int note) {
  const int pieces = u.first_block < 0 ? 0 : (note - u.first_block) / u.step + 1;
  return {u.first_block, pieces, u.step, u.first_slot_is_head};
}

// Which of the main kernel's blocks left notes, and of how many pieces, is known here alone: each block reads all notes and
// counts jobs, which the blocks, as many as run at once, take in turn.  A thread adds up four columns of a row over its part
// of the pieces, then the parts are added up in their order.  `items`: of a segment.  Sum: Quad or, with batch_invariant,
// ExactQuad.
template <class T, class Sum>
__global__ void __launch_bounds__(kCombineThreads, Sum::kBlocksPerSm)
    combine_kernel(const __grid_constant__ Problem p, int notes, int items) {
  __shared__ Sum sums[kCombineThreads];
  __shared__ int jobs_up_to[kMaxGrid];  // and with each note
  __shared__ PlanScratchOf<kCombineThreads> scan;
  constexpr int kNotes = kMaxGrid / kCombineThreads;  // of a thread, at most, one after the other
  const int quads = p.pitch / 4;
  // If it has something to do it lets no other come up: where the next kernel's blocks came to lie would depend on when which of
  // these end, and what reads neighbouring heads would no longer do so at the same time.
  if (!takes_call(p)) return leave_call();
  wait_for_previous_kernel();
  const int own = (notes + kCombineThreads - 1) / kCombineThreads, first_own = threadIdx.x * own;
  int jobs[kNotes], own_jobs = 0;
#pragma unroll
  for (int i = 0; i < kNotes; ++i) {
    const bool exists = i < own && first_own + i < notes;
    jobs[i] =
        exists ? CombineJobs<Sum>(pieces_of_note(p.unfinished[first_own + i], first_own + i).pieces, items).jobs : 0;
    own_jobs += jobs[i];
  }
  int64_t all_jobs;
  int up_to = static_cast<int>(block_scan<0>(own_jobs, scan, all_jobs)) - own_jobs;
  if (all_jobs == 0) return;
#pragma unroll
  for (int i = 0; i < kNotes; ++i) {
    up_to += jobs[i];
    if (i < own && first_own + i < notes) jobs_up_to[first_own + i] = up_to;
  }
  __syncthreads();

#pragma unroll 1
  for (int job = blockIdx.x; job < all_jobs; job += gridDim.x) {
    int note = 0, last = notes - 1;  // the first with jobs_up_to[note] > job
    while (note < last) {
      const int middle = (note + last) / 2;
      if (jobs_up_to[middle] > job) {
        last = middle;
      } else {
        note = middle + 1;
      }
    }
    const Unfinished u = p.unfinished[note];
    const SegmentPieces cut = pieces_of_note(u, note);
    const CombineJobs<Sum> of_note(cut.pieces, items);
    const int part = threadIdx.x / of_note.items;
    const int of_segment = job - (note == 0 ? 0 : jobs_up_to[note - 1]);
    const int item = of_segment * of_note.items + threadIdx.x % of_note.items;
    const int r = item / quads, quad = item - r * quads;
    const Row row = row_of_note(p, u, r);
    const bool valid = item < items && r < p.rows && row.valid;

    Sum sum = Sum::empty();
    for (int first = part; valid && first < cut.pieces; first += of_note.parts * Sum::kAtOnce) {
      Sum x[Sum::kAtOnce];
#pragma unroll
      for (int k = 0; k < Sum::kAtOnce; ++k) {
        const int i = first + k * of_note.parts;
        if (i < cut.pieces) x[k] = Sum::load(p, cut.slot(i), r, quad);
      }
#pragma unroll
      for (int k = 0; k < Sum::kAtOnce; ++k) {
        if (first + k * of_note.parts < cut.pieces) sum.add(x[k]);
      }
    }
    if (of_note.parts > 1) {
      __syncthreads();  // nobody reads those of the job before
      sums[threadIdx.x] = sum;
      __syncthreads();
      if (part == 0) {
        for (int i = 1; i < of_note.parts; ++i) sum.add(sums[threadIdx.x + i * of_note.items]);
      }
    }
    if (!valid || part > 0) continue;
    const float4 x = sum.finish(p, row, u.kv_head);
    T* out = output_row<T>(p, row);
    const float columns[4] = {x.x, x.y, x.z, x.w};
    for (int e = 0; e < 4; ++e) {
      if (quad * 4 + e < p.a.head_size) out[quad * 4 + e] = T(columns[e]);
    }
  }
}

}  // namespace pykv::attention
