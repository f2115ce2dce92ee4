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
  const char* const from = a.tokens + pair / a.top_k * a.layout.bytes;
  const int64_t at = int64_t{vector} * 16;
  uint4 v{};
  if (at + 16 <= a.layout.width) {
    v = load_vec<uint4>(from + at);
  } else if (at < a.layout.scales_at) {
    uint8_t codes[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) codes[i] = at + i < a.layout.width ? static_cast<uint8_t>(from[at + i]) : uint8_t{0};
    __builtin_memcpy(&v, codes, sizeof v);
  } else {
    const float factor = a.factor_of(pair);
    const auto* const scales = reinterpret_cast<const float*>(from + a.layout.scales_at);
    const int64_t first = (at - a.layout.scales_at) / 4;
    float scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      scaled[i] =
          first + i >= a.layout.num_scales ? 0.0f : (a.is_static ? float{a.number} : scales[first + i]) * factor;
    __builtin_memcpy(&v, scaled, sizeof v);
  }
  *(reinterpret_cast<uint4*>(a.pairs + place * a.layout.bytes) + vector) = v;
}

}  // namespace

void code_records_cuda(const CodeRecordsArgs& args, const Launch& launch) {
  const RecordsPlan plan{args, RowBlocks(args.num_pairs, args.layout.bytes / 16)};
  launch_dependent(code_records_kernel, plan.rows.blocks, plan.rows.threads, launch, "fused_moe", plan);
}

}  // namespace pykv
