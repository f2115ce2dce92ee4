// A thread has 16 bytes of one record; or, of records made from x itself, eight codes of a token, which go to all its pairs.
#include "cuda/streaming.cuh"
#include "moe/block_codes.cuh"
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

struct BlockRecordsPlan {
  BlockRecordsArgs args;
  Divider blocks;  // of 128 columns
  uint32_t total;  // of all tokens
};

constexpr int kBlockThreads = 128;

// x is older than the map: its codes are there when the map comes.
template <class T, QuantCode kCodes>
__global__ void __launch_bounds__(kBlockThreads) block_records_kernel(const __grid_constant__ BlockRecordsPlan plan) {
  const CodeRecordsArgs& a = plan.args.records;
  const GroupQuantArgs& quant = plan.args.quant;
  const uint32_t lane = threadIdx.x % kLanesOfBlock, n = (blockIdx.x * kBlockThreads + threadIdx.x) / kLanesOfBlock;
  const bool there = n < plan.total;  // others read the first one
  uint32_t block;
  const int64_t token = plan.blocks(there ? n : 0, block), column = int64_t{block} * RecordLayout::kBlock + 8 * lane;
  const auto x =
      load_vec_in_order<Pack<T>>(static_cast<const T*>(quant.input) + token * quant.input_rows.stride0 + column);
  GroupScale scale;
  const auto codes = block_codes<kCodes>(quant.rule, quant.given, x, scale);
  begin_dependent();
  if (!there) return;
  for (int64_t pair = token * a.top_k; pair < (token + 1) * a.top_k; ++pair) {
    const int64_t place = plan.args.places[pair];
    if (place < 0) continue;
    char* const record = a.pairs + place * a.layout.bytes;
    store_vec(reinterpret_cast<uint8_t*>(record + column), codes);
    if (lane == 0)
      reinterpret_cast<float*>(record + a.layout.scales_at)[block] = __uint_as_float(scale.stored) * a.factor_of(pair);
  }
}

}  // namespace

bool block_records_cuda(const BlockRecordsArgs& args, const Launch& launch) {
  const RecordLayout& layout = args.records.layout;
  const GroupQuantArgs& quant = args.quant;
  const int64_t blocks = layout.width / RecordLayout::kBlock, total = blocks * quant.rows;
  if (layout.width % RecordLayout::kBlock != 0 || total > INT32_MAX / kLanesOfBlock ||
      !is_aligned(16, quant.input, {quant.input_rows.stride0 * 2}))
    return false;
  const BlockRecordsPlan plan{args, Divider(blocks), static_cast<uint32_t>(total)};
  dispatch<half, bf16>(quant.dtype, [&]<class T>() {
    const auto start = [&](auto kernel) {
      const int64_t each = kBlockThreads / kLanesOfBlock;
      launch_dependent(kernel, static_cast<unsigned>((total + each - 1) / each), kBlockThreads, launch, "fused_moe",
                       plan);
    };
    if (quant.codes == QuantCode::kE4M3)
      start(block_records_kernel<T, QuantCode::kE4M3>);
    else
      start(block_records_kernel<T, QuantCode::kInt8>);
  });
  return true;
}

void code_records_cuda(const CodeRecordsArgs& args, const Launch& launch) {
  const RecordsPlan plan{args, RowBlocks(args.num_pairs, args.layout.bytes / 16)};
  launch_dependent(code_records_kernel, plan.rows.blocks, plan.rows.threads, launch, "fused_moe", plan);
}

}  // namespace pykv
