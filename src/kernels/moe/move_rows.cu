// A thread has a vector of up to 16 bytes of one row; of a row that goes to several places it is read once.
#include "cuda/streaming.cuh"
#include "moe/move_rows.h"
#include "moe/row_blocks.cuh"

namespace pykv {
namespace {

struct MovePlan {
  MoveRowsArgs args;
  RowBlocks rows;
  bool streamed;
  Reporter report;
};

template <class V>
__global__ void __launch_bounds__(256) gather_rows_kernel(const __grid_constant__ MovePlan plan) {
  const MoveRowsArgs& a = plan.args;
  const int64_t row = plan.rows.row();
  const uint32_t vector = plan.rows.vector();
  begin_dependent();
  if (vector >= plan.rows.num_vectors) return;
  const int64_t from = a.map[row];
  V v{};
  if (from >= 0 && from < a.num_source_rows)
    v = load_vec<V>(reinterpret_cast<const V*>(a.source + from * a.source_stride) + vector);
  else if (from >= 0 && vector == 0)
    plan.report(from, a.num_source_rows);
  store_vec(reinterpret_cast<V*>(a.target + row * a.target_stride) + vector, v, plan.streamed);
}

template <class V>
__global__ void __launch_bounds__(256) scatter_rows_kernel(const __grid_constant__ MovePlan plan) {
  const MoveRowsArgs& a = plan.args;
  const int64_t row = plan.rows.row();
  const uint32_t vector = plan.rows.vector();
  begin_dependent();
  if (vector >= plan.rows.num_vectors) return;
  const V v = load_vec<V>(reinterpret_cast<const V*>(a.source + row * a.source_stride) + vector);
  const int64_t num_valid = min(a.num_valid.at(0), a.num_target_rows);
#pragma unroll 4
  for (int64_t j = 0; j < a.top_k; ++j) {
    const int64_t to = a.places.at(row, j);
    if (to >= 0 && to < num_valid)
      store_vec(reinterpret_cast<V*>(a.target + to * a.target_stride) + vector, v, plan.streamed);
  }
}

template <class V>
void launch_move(const MoveRowsArgs& args, const Launch& launch) {
  const bool gathers = args.map.data != nullptr;
  const MovePlan plan{args,
                      RowBlocks(gathers ? args.num_target_rows : args.num_source_rows,
                                args.row_bytes / static_cast<int64_t>(sizeof(V))),
                      is_streamed(args.num_target_rows * args.row_bytes), launch.reporter(args.report)};
  launch_dependent(gathers ? gather_rows_kernel<V> : scatter_rows_kernel<V>, plan.rows.blocks, plan.rows.threads,
                   launch, "move_rows", plan);
}

}  // namespace

void move_rows_cuda(const MoveRowsArgs& args, const Launch& launch) {
  // The widest vector that all addresses, distances and sizes allow.
  uint64_t bits = 16 | reinterpret_cast<uintptr_t>(args.source) | reinterpret_cast<uintptr_t>(args.target) |
                  static_cast<uint64_t>(args.row_bytes);
  if (args.num_source_rows > 1) bits |= static_cast<uint64_t>(args.source_stride);
  if (args.num_target_rows > 1) bits |= static_cast<uint64_t>(args.target_stride);
  if (bits % 16 == 0) return launch_move<uint4>(args, launch);
  if (bits % 4 == 0) return launch_move<uint32_t>(args, launch);
  if (bits % 2 == 0) return launch_move<uint16_t>(args, launch);
  launch_move<uint8_t>(args, launch);
}

}  // namespace pykv
