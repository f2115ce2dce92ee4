// The second kernel of a line: adds up the pieces of the segments that borders of blocks cut (paged_attention_plan.cuh).
//
// Bottleneck: latency, two loads one after the other.
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

// blockIdx.x: the block of the main kernel whose note is followed.  A thread adds up four columns of a row over its part
// of the pieces, whose loads depend on the note alone; then the parts are added up in their order.  Sum: Quad or, with
// batch_invariant, ExactQuad.
template <class T, class Sum>
__global__ void __launch_bounds__(kCombineThreads, Sum::kBlocksPerSm)
    combine_kernel(const __grid_constant__ Problem p, int parts) {
  __shared__ Sum sums[kCombineThreads];
  const int items = kCombineThreads / parts;  // of a block
  const int part = threadIdx.x / items, item = blockIdx.y * items + threadIdx.x % items;
  const int quads = p.pitch / 4, r = item / quads, quad = item % quads;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Unfinished u = p.unfinished[blockIdx.x];
  if (u.first_block < 0) return;
  const Row row = row_of_note(p, u, r);
  const bool valid = r < p.rows && row.valid;

  const int pieces = (blockIdx.x - u.first_block) / u.step + 1;
  Sum sum = Sum::empty();
  for (int first = part; valid && first < pieces; first += parts * Sum::kAtOnce) {
    Sum x[Sum::kAtOnce];
#pragma unroll
    for (int k = 0; k < Sum::kAtOnce; ++k) {
      const int i = first + k * parts;
      if (i < pieces)
        x[k] = Sum::load(p, 2 * (u.first_block + i * u.step) + (i == 0 && !u.first_slot_is_head), r, quad);
    }
#pragma unroll
    for (int k = 0; k < Sum::kAtOnce; ++k) {
      if (first + k * parts < pieces) sum.add(x[k]);
    }
  }
  if (parts > 1) {
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (part > 0) return;
    for (int i = 1; i < parts; ++i) sum.add(sums[threadIdx.x + i * items]);
  }
  if (!valid) return;
  const float4 x = sum.finish(p, row, u.kv_head);
  T* out = output_row<T>(p, row);
  const float columns[4] = {x.x, x.y, x.z, x.w};
  for (int e = 0; e < 4; ++e) {
    if (quad * 4 + e < p.a.head_size) out[quad * 4 + e] = T(columns[e]);
  }
}

}  // namespace pykv::attention
