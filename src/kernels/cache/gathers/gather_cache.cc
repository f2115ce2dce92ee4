#include "cache/gathers/gather_cache.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "cache/gathers/request_arrays.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

void not_negative(const char* name, int64_t value) {
  if (value < 0) fail(PYKV_VALUE_ERROR, "%s: must not be negative, got %" PRId64, name, value);
}

// The dimensions of an entry, merged where they touch in both arrays.
void set_entry(const Tensor& src, const Tensor& dst, GatherCacheArgs& args) {
  struct Axis {
    int64_t size, src, dst;
  } axes[2] = {{1, 1, 1}, {1, 1, 1}};  // innermost first
  int used = 0;
  for (int i = src.ndim() - 1; i >= 2; --i) {
    if (dst.size(i - 1) != src.size(i))
      dst.fail(PYKV_VALUE_ERROR, "must have shape [num_tokens, ...] with entries like those of src_cache, %s, got %s",
               src.shape_string().c_str(), dst.shape_string().c_str());
    if (src.size(i) == 1) continue;
    const Axis axis{src.size(i), src.stride(i), dst.stride(i - 1)};
    if (used > 0 && axis.src == axes[used - 1].size * axes[used - 1].src &&
        axis.dst == axes[used - 1].size * axes[used - 1].dst) {
      axes[used - 1].size *= axis.size;
    } else if (used == 2) {
      src.fail(PYKV_NOT_IMPLEMENTED, "an entry must be at most 2 dimensions with independent strides");
    } else {
      axes[used++] = axis;
    }
  }
  if (axes[0].src == 1 && axes[0].dst == 1) {
    args.piece = axes[0].size;
    args.pieces = axes[1].size;
    args.src_piece = axes[1].src;
    args.dst_piece = axes[1].dst;
  } else if (used == 1) {
    args.piece = 1;
    args.pieces = axes[0].size;
    args.src_piece = axes[0].src;
    args.dst_piece = axes[0].dst;
  } else {
    src.fail(PYKV_NOT_IMPLEMENTED, "the last dimension of entries of 2 dimensions must be contiguous");
  }
}

Tensor source(Call& call, const DLTensor* src_cache, GatherCacheArgs& args) {
  Tensor src = call.read("src_cache", src_cache).rank_between(3, Tensor::kMaxRank);
  args.src = src.data();
  args.src_block = src.stride(0);
  args.src_token = src.stride(1);
  args.requests.num_blocks = src.size(0);
  args.requests.block_size = src.size(1);
  return src;
}

Tensor target(Call& call, DLTensor* dst, int rank, GatherCacheArgs& args) {
  Tensor t = call.write("dst", dst).rank(rank).no_overlap_within();
  args.dst = t.data();
  args.dst_row = t.stride(0);
  args.num_rows = t.size(0);
  args.dtype = t.type();
  return t;
}

void set_records(Tensor& src, const Tensor& dst, GatherCacheArgs& args) {
  src.rank(3).dtype({DType::kUInt8, DType::kInt8, DType::kFloat8E4M3, DType::kFloat8E5M2}).contiguous_rows();
  Tensor(dst).dtype({DType::kFloat16, DType::kBFloat16});
  args.kind = GatherKind::kRecords;
  args.record = mla_record(src.size(2), dst.size(1));
  args.pieces = dst.size(1);
  args.piece = 1;
  args.dst_piece = dst.stride(1);
  if (args.record.latent < 0)
    dst.fail(PYKV_VALUE_ERROR,
             "no fp8_ds_mla record of %" PRId64 " bytes holds rows of %" PRId64 " elements (656 bytes hold 576)",
             src.size(2), dst.size(1));
}

void set_nvfp4_records(Tensor& src, const Tensor& dst, GatherCacheArgs& args) {
  src.rank(3).dtype({DType::kUInt8, DType::kInt8}).contiguous_rows();
  Tensor(dst).dtype({DType::kFloat16, DType::kBFloat16});
  args.kind = GatherKind::kNvfp4Records;
  args.nvfp4_record = nvfp4_mla_record(src.size(2), dst.size(1));
  args.pieces = dst.size(1);
  args.piece = 1;
  args.dst_piece = dst.stride(1);
  if (args.nvfp4_record.latent < 0)
    dst.fail(PYKV_VALUE_ERROR,
             "no nvfp4_ds_mla record of %" PRId64 " bytes holds rows of %" PRId64 " elements (352 bytes hold 576)",
             src.size(2), dst.size(1));
}

// The maps of records that lie partly in host memory: all of them, or none.
void set_record_rows(Call& call, const Tensor& src, const DLTensor* host_cache, const DLTensor* host_row_ids,
                     const DLTensor* device_row_ids, GatherCacheArgs& args) {
  if (!host_cache && !host_row_ids && !device_row_ids) return;
  if (!host_cache || !host_row_ids || !device_row_ids)
    fail(PYKV_TYPE_ERROR, "host_cache, host_row_ids, device_row_ids: must be given all or none");
  Dim rows{"num_host_rows"}, record{"record of src_cache", src.size(2)};
  Tensor host = call.anywhere("host_cache", host_cache).shape(rows, record);
  host.dtype({DType::kUInt8, DType::kInt8, DType::kFloat8E4M3, DType::kFloat8E5M2}).contiguous_rows();
  if (host.device().device_type == kDLCUDA) host.fail(PYKV_VALUE_ERROR, "must lie in host memory");
  Tensor in_cache = call.read("device_row_ids", device_row_ids).contiguous();
  Tensor in_host = call.read("host_row_ids", host_row_ids).contiguous().same_shape(in_cache);

  RecordRows& maps = args.record_rows;
  maps.in_cache = {in_cache.data(), 1, in_cache.index().is_int64};
  maps.in_host = {in_host.data(), 1, in_host.index().is_int64};
  maps.num_in_cache = args.requests.num_blocks * args.requests.block_size;
  maps.num_in_host = rows;
  maps.host = static_cast<const char*>(host.data());
  maps.host_row = host.stride(0);
  // blocks of the block table are those of the maps
  args.requests.num_blocks = in_cache.numel() / std::max<int64_t>(args.requests.block_size, 1);
}

// [NB, BS, head_size * 9 / 16] or [NB, BS, heads, head_size * 9 / 16].
void set_pages(Tensor& src, const Tensor& dst, GatherCacheArgs& args, bool values) {
  src.rank_between(3, 4);
  args.kind = GatherKind::kNvfp4;
  args.piece = dst.size(-1);
  args.pieces = src.ndim() == 4 ? src.size(2) : 1;
  args.dst_dim = dst.stride(-1);
  args.dst_piece = src.ndim() == 4 ? dst.stride(1) : 0;
  if (src.size(-1) != nvfp4_bytes(args.piece) || (src.ndim() == 4 && dst.size(1) != args.pieces))
    dst.fail(PYKV_VALUE_ERROR,
             "must have shape [num_tokens, ...] with entries like those of src_cache, %s with 16 elements in 9 bytes, "
             "got %s",
             src.shape_string().c_str(), dst.shape_string().c_str());
  args.page = nvfp4_page(src, args.piece, values);
}

// Requests whose rows end where those of the next begin, the last one's with the output.
void set_open_requests(Call& call, const DLTensor* block_table, const DLTensor* workspace_starts, int64_t batch_size,
                       PagedRequests& requests) {
  not_negative("batch_size", batch_size);
  set_blocks(call, block_table, batch_size, requests);
  requests.starts = read_ids(call, "workspace_starts", workspace_starts, batch_size, "batch_size");
  requests.open_end = true;
}

void run(Call& call, void* stream, const GatherCacheArgs& args) {
  if (args.num_rows == 0 || args.requests.num_requests == 0 || args.pieces * args.piece == 0) return;
  if (args.requests.block_size == 0) fail(PYKV_VALUE_ERROR, "src_cache: must have blocks of at least one token");
  call.run(stream, args, gather_cache_cpu, PYKV_CUDA(gather_cache_cuda));
}

}  // namespace
}  // namespace pykv

pykv_status pykv_cp_gather_cache(const DLTensor* src_cache, DLTensor* dst, const DLTensor* block_table,
                                 const DLTensor* cu_seq_lens, int64_t batch_size, const DLTensor* seq_starts,
                                 void* stream) {
  using namespace pykv;
  return guarded("cp_gather_cache", [&](Call& call) {
    GatherCacheArgs args{};
    PagedRequests& requests = args.requests;
    requests.reports = {nullptr, "cp_gather_cache: position", "cp_gather_cache: block_table",
                        "cp_gather_cache: cu_seq_lens"};
    Tensor src = source(call, src_cache, args);
    Tensor rows = target(call, dst, src.ndim() - 1, args).like(src);
    set_entry(src, rows, args);
    args.element_bytes = static_cast<int64_t>(size_of(src.type()));
    not_negative("batch_size", batch_size);
    set_blocks(call, block_table, batch_size, requests);
    requests.starts = read_ids(call, "cu_seq_lens", cu_seq_lens, batch_size + 1, "batch_size + 1");
    if (seq_starts) requests.positions = read_ids(call, "seq_starts", seq_starts, batch_size, "batch_size");
    run(call, stream, args);
  });
}

pykv_status pykv_gather_and_maybe_dequant_cache(const DLTensor* src_cache, DLTensor* dst, const DLTensor* block_table,
                                                const DLTensor* cu_seq_lens, const DLTensor* token_to_seq,
                                                int64_t num_tokens, const char* kv_cache_dtype, const DLTensor* scale,
                                                const DLTensor* seq_starts, void* stream) {
  using namespace pykv;
  return guarded("gather_and_maybe_dequant_cache", [&](Call& call) {
    GatherCacheArgs args{};
    PagedRequests& requests = args.requests;
    requests.reports = {"gather_and_maybe_dequant_cache: token_to_seq", "gather_and_maybe_dequant_cache: position",
                        "gather_and_maybe_dequant_cache: block_table", "gather_and_maybe_dequant_cache: cu_seq_lens"};
    Tensor src = source(call, src_cache, args);
    Tensor rows = target(call, dst, src.ndim() - 1, args).dtype(kFloats);
    if (std::strcmp(required("kv_cache_dtype", kv_cache_dtype), "fp8_ds_mla") == 0) {
      set_records(src, rows, args);
    } else {
      const bool values = std::strcmp(kv_cache_dtype, "nvfp4_v") == 0;  // pages of values, whose scales are swizzled
      args.format = kv_format(values ? "nvfp4" : kv_cache_dtype, src, rows.type(), {KvFormat::kInt8, KvFormat::kNvfp4});
      args.kind = args.format == KvFormat::kSame ? GatherKind::kCopy : GatherKind::kScaled;
      args.element_bytes = static_cast<int64_t>(size_of(src.type()));
      if (args.format == KvFormat::kNvfp4) {
        set_pages(src, rows, args, values);
      } else {
        set_entry(src, rows, args);
      }
      if (args.format != KvFormat::kSame) call.scale(args.scale, "scale", scale, 1);
    }
    not_negative("num_tokens", num_tokens);
    at_least(rows, num_tokens, "num_tokens");
    args.num_rows = num_tokens;
    set_requests(call, cu_seq_lens, block_table, requests);
    if (token_to_seq) requests.request_of = read_ids(call, "token_to_seq", token_to_seq, num_tokens, "num_tokens");
    if (seq_starts)
      requests.positions = read_ids(call, "seq_starts", seq_starts, requests.num_requests, "one for each request");
    run(call, stream, args);
  });
}

pykv_status pykv_cp_gather_and_upconvert_fp8_kv_cache(const DLTensor* src_cache, DLTensor* dst,
                                                      const DLTensor* block_table, const DLTensor* workspace_starts,
                                                      int64_t batch_size, const DLTensor* seq_starts,
                                                      const DLTensor* host_cache, const DLTensor* host_row_ids,
                                                      const DLTensor* device_row_ids, void* stream) {
  using namespace pykv;
  return guarded("cp_gather_and_upconvert_fp8_kv_cache", [&](Call& call) {
    GatherCacheArgs args{};
    PagedRequests& requests = args.requests;
    requests.reports = {nullptr, "cp_gather_and_upconvert_fp8_kv_cache: position",
                        "cp_gather_and_upconvert_fp8_kv_cache: block_table",
                        "cp_gather_and_upconvert_fp8_kv_cache: workspace_starts"};
    Tensor src = source(call, src_cache, args);
    set_records(src, target(call, dst, 2, args), args);
    set_open_requests(call, block_table, workspace_starts, batch_size, requests);
    if (seq_starts) requests.positions = read_ids(call, "seq_starts", seq_starts, batch_size, "batch_size");
    set_record_rows(call, src, host_cache, host_row_ids, device_row_ids, args);
    args.record_rows.in_cache_report = "cp_gather_and_upconvert_fp8_kv_cache: device_row_ids";
    args.record_rows.in_host_report = "cp_gather_and_upconvert_fp8_kv_cache: host_row_ids";
    run(call, stream, args);
  });
}

pykv_status pykv_cp_gather_and_upconvert_nvfp4_kv_cache(const DLTensor* src_cache, DLTensor* dst,
                                                        const DLTensor* block_table, const DLTensor* workspace_starts,
                                                        int64_t batch_size, void* stream) {
  using namespace pykv;
  return guarded("cp_gather_and_upconvert_nvfp4_kv_cache", [&](Call& call) {
    GatherCacheArgs args{};
    PagedRequests& requests = args.requests;
    requests.reports = {nullptr, "cp_gather_and_upconvert_nvfp4_kv_cache: position",
                        "cp_gather_and_upconvert_nvfp4_kv_cache: block_table",
                        "cp_gather_and_upconvert_nvfp4_kv_cache: workspace_starts"};
    Tensor src = source(call, src_cache, args);
    set_nvfp4_records(src, target(call, dst, 2, args), args);
    set_open_requests(call, block_table, workspace_starts, batch_size, requests);
    run(call, stream, args);
  });
}
