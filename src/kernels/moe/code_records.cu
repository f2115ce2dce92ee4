// A thread has 16 bytes of one record.
#include "cuda/streaming.cuh"
#include "moe/code_records.h"
#include "moe/row_blocks.cuh"

namespace pykv {
namespace {

struct RecordsPlan {
  CodeRecordsArgs args;
  RowBlocks rows;
};

__global__ void __launch_bounds__(256) code_records_kernel(const __grid_constant__ RecordsPlan plan) {
  const CodeRecordsArgs& a = plan.args;
  const int64_t place = plan.rows.row();
  const uint32_t vector = plan.rows.vector();
  begin_dependent();
  if (a.copies_number && blockIdx.x == 0 && threadIdx.x == 0) *a.next_scale = a.next_number;
  if (vector >= plan.rows.num_vectors || place >= *a.taken) return;
  const int64_t pair = a.sorted[place];
  uint4 v = load_vec<uint4>(reinterpret_cast<const uint4*>(a.tokens + pair / a.top_k * a.layout.bytes) + vector);
  if (int64_t{vector} * 16 >= a.layout.scales_at) {
    const float factor = a.factor_of(pair);
    const auto scaled = [&](uint32_t bits) {
      return __float_as_uint((a.is_static ? float{a.number} : __uint_as_float(bits)) * factor);
    };
    v = make_uint4(scaled(v.x), scaled(v.y), scaled(v.z), scaled(v.w));
  }
  *(reinterpret_cast<uint4*>(a.pairs + place * a.layout.bytes) + vector) = v;
}

}  // namespace

void code_records_cuda(const CodeRecordsArgs& args, const Launch& launch) {
  const RecordsPlan plan{args, RowBlocks(args.num_pairs, args.layout.bytes / 16)};
  launch_dependent(code_records_kernel, plan.rows.blocks, plan.rows.threads, launch, "fused_moe", plan);
}

}  // namespace pykv
