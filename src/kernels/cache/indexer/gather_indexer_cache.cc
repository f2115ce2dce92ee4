#include "cache/indexer/gather_indexer_cache.h"

#include <cinttypes>

#include "cache/gathers/request_arrays.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

GatheredRows rows_of(const Tensor& t) {
  const int64_t bytes = static_cast<int64_t>(size_of(t.type()));
  return {t.data(), t.stride(0) * bytes, t.stride(1) * bytes, bytes};
}

// Scales of a token in rows of `scales`.
int64_t groups_of(const Tensor& scales, int64_t head_dim) {
  const int64_t columns = scales.size(1), bytes = columns * static_cast<int64_t>(size_of(scales.type()));
  const int64_t groups = bytes / 4;
  if (bytes % 4 != 0 || (head_dim > 0 && (groups == 0 || head_dim % groups != 0)))
    scales.fail(PYKV_VALUE_ERROR,
                "must hold a float32 for each of the groups that head_dim = %" PRId64
                " is cut into, got shape %s of %s",
                head_dim, scales.shape_string().c_str(), name_of(scales.type()));
  return groups;
}

}  // namespace
}  // namespace pykv

pykv_status pykv_cp_gather_indexer_k_quant_cache(const DLTensor* kv_cache, DLTensor* dst_k, DLTensor* dst_scale,
                                                 const DLTensor* block_table, const DLTensor* cu_seq_lens,
                                                 const DLTensor* seq_starts, void* stream) {
  using namespace pykv;
  return guarded("cp_gather_indexer_k_quant_cache", [&](Call& call) {
    Dim blocks{"num_blocks"}, block_size{"block_size"}, entry{"entry"}, rows{"num_rows"}, head_dim{"head_dim"};
    Dim groups{"scales of a token"};
    Tensor cache = call.read("kv_cache", kv_cache).shape(blocks, block_size, entry);
    Tensor values = call.write("dst_k", dst_k).shape(rows, head_dim).no_overlap_within();
    values.dtype({DType::kUInt8, DType::kInt8, DType::kFloat8E4M3});
    Tensor scales = call.write("dst_scale", dst_scale).shape(rows, groups).no_overlap_within();
    scales.dtype({DType::kUInt8, DType::kInt8, DType::kFloat32});

    GatherIndexerArgs args{};
    args.block = {block_size, head_dim, groups_of(scales, head_dim)};
    check_indexer_cache(cache, args.block);
    args.cache = cache.data();
    args.block_bytes = cache.stride(0);
    args.values = rows_of(values);
    args.scales = rows_of(scales);
    args.num_rows = rows;

    PagedRequests& r = args.requests;
    r.reports = {nullptr, "cp_gather_indexer_k_quant_cache: position", "cp_gather_indexer_k_quant_cache: block_table",
                 "cp_gather_indexer_k_quant_cache: cu_seq_lens"};
    set_requests(call, cu_seq_lens, block_table, r);
    if (seq_starts) r.positions = read_ids(call, "seq_starts", seq_starts, r.num_requests, "one for each request");
    r.num_blocks = blocks;
    r.block_size = block_size;
    if (rows == 0 || r.num_requests == 0 || head_dim == 0) return;
    if (block_size == 0) cache.fail(PYKV_VALUE_ERROR, "must have blocks of at least one token");
    call.run(stream, args, gather_indexer_cache_cpu, PYKV_CUDA(gather_indexer_cache_cuda));
  });
}
