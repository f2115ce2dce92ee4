// Adds up the pieces of the segments that borders of blocks cut (schedule/line.cuh), in a kernel after that of a line.  All of the
// device's SMs do: pieces of 17 to 64 rows are so many that their last block alone, as in merge/pieces.cuh, takes 6 to 30 us longer.
//
// Bottleneck: latency, notes and then pieces; these come from the L2.
#pragma once

#include "attention/cuda/merge/pieces.cuh"
#include "cuda/dependent.cuh"
#include "cuda/reduce.cuh"

namespace pykv::attention {

// What blocks note, where those that add up by themselves have tickets.
__device__ inline CutUnit* notes_of(const Problem& p) { return reinterpret_cast<CutUnit*>(p.tickets); }

// By one thread: notes the block's first segment if it began in an earlier block and ends in this one.
__device__ inline void note_first(const Problem& p, const LineEnds& ends) {
  const CutUnit& first = ends.of[0];
  const int block = blockIdx.x, last = first.cut.first_block + (first.cut.pieces - 1) * first.cut.step;
  if (first.cut.pieces > 0 && last == block) {
    notes_of(p)[block] = first;
  } else {
    notes_of(p)[block].cut.pieces = 0;
  }
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

using JobsUpTo = int[kMaxGrid];  // of a block: how many jobs there are up to each note, and with it

// Which of the line's blocks left notes, and of how many pieces, is known here alone: each block reads all notes and counts jobs,
// which the warps take in turn.  A lane adds up four columns of a row over its part of the pieces, then the parts are added up.
// After wait_for_previous_kernel(), by whole blocks.
__device__ inline void combine_pieces(const LeftPieces& left, JobsUpTo& jobs_up_to) {
  constexpr int kAtOnce = 4;  // pieces
  const Problem& p = left.p;
  const int lane = threadIdx.x % 32, quads = p.pitch / 4, notes = left.notes;
  for (int i = threadIdx.x; i < notes; i += blockDim.x) {
    jobs_up_to[i] = CombineJobs(notes_of(p)[i].cut.pieces, left.items, kAtOnce).jobs;
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
    const auto [cut, u] = notes_of(p)[note];
    const CombineJobs of_note(cut.pieces, left.items, kAtOnce);
    const int part = lane / of_note.items, item = of_segment * of_note.items + lane % of_note.items;
    const int r = item / quads, quad = item - r * quads;
    const Row row = row_of(p, u, r);
    const bool valid = item < left.items && r < p.rows && row.valid;

    Quad sum = Quad::empty();
    for (int first = part; valid && first < cut.pieces; first += of_note.parts * kAtOnce) {
      Quad x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int piece = first + i * of_note.parts;
        if (piece < cut.pieces) x[i] = Quad::load(p, cut.slot(piece), r, quad);
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

}  // namespace pykv::attention
