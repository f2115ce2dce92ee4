#include "embedding/masked_embedding.h"

#include <algorithm>
#include <cinttypes>

#include "core/call.h"
#include "dequantization/gguf_call.h"
#include "pykv/embedding.h"

using namespace pykv;

namespace {

// One id for each row of `out`.
Index ids_of_rows(Call& call, const char* name, const DLTensor* t, const Tensor& out) {
  Tensor x = call.read(name, t).rank(out.ndim() - 1).dtype({DType::kInt32, DType::kInt64});
  for (int axis = 0; axis < x.ndim(); ++axis) {
    Dim wanted{"leading dimension of out", out.size(axis)};
    x.dim(axis, wanted);
  }
  if (x.ndim() > 1) x.contiguous();
  return {x.data(), x.ndim() == 1 ? x.stride(0) : 1, x.type() == DType::kInt64};
}

void check_range(const char* what, int64_t start, int64_t end) {
  if (start < 0 || end < start)
    fail(PYKV_VALUE_ERROR, "%s_start, %s_end: must be 0 <= start <= end, got %" PRId64 " and %" PRId64, what, what,
         start, end);
}

}  // namespace

pykv_status pykv_masked_embedding(DLTensor* out, const DLTensor* ids, const DLTensor* weight, int64_t org_start,
                                  int64_t org_end, int64_t num_org_pad, int64_t added_start, int64_t added_end,
                                  int64_t vocab_size, double scale, const DLTensor* weight_scale,
                                  const DLTensor* positions, const DLTensor* position_weight, int64_t quant_type,
                                  void* stream) {
  return guarded("masked_embedding", [&](Call& call) {
    Dim rows{"num_rows"}, hidden{"hidden_size"};
    MaskedEmbeddingArgs a{};
    Tensor w = call.read("weight", weight).rank(2).dim(0, rows).contiguous_rows();
    if (quant_type == -1) {
      w.dim(1, hidden);
    } else {
      a.block = gguf::known_block_size(quant_type);
      a.block_type = static_cast<gguf::Type>(quant_type);
      const int64_t bytes = w.dtype({DType::kUInt8}).size(1), blocks = bytes / a.block.bytes;
      if (bytes % a.block.bytes != 0)
        w.fail(PYKV_VALUE_ERROR, "its rows must be whole blocks of %d bytes, got %" PRId64, a.block.bytes, bytes);
      hidden.bind(std::min(blocks, INT64_MAX / a.block.elements) * a.block.elements);
      if (weight_scale) fail(PYKV_VALUE_ERROR, "weight_scale: must be None with quant_type: blocks have their scales");
    }
    Tensor y = call.write("out", out).rank_between(1, Tensor::kMaxRank).last_dim(hidden);
    y.contiguous_rows().no_overlap_within();
    a.copies = quant_type == -1 && y.type() == w.type() && scale == 1.0 && !weight_scale && !positions;
    if (!a.copies) {
      y.dtype(kFloats);
      w.dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt8, DType::kFloat8E4M3, DType::kFloat8E5M2,
               DType::kUInt8});
    }
    a.ids = ids_of_rows(call, "ids", ids, y);
    if (org_end == -1 && __builtin_add_overflow(org_start, int64_t{rows}, &org_end)) org_end = INT64_MAX;
    check_range("org", org_start, org_end);
    check_range("added", added_start, added_end);
    const int64_t base = org_end - org_start, added = added_end - added_start;
    if (num_org_pad < 0 || base > rows || num_org_pad > rows - base || added > rows - base - num_org_pad)
      w.fail(PYKV_VALUE_ERROR,
             "must have a row for each of %" PRId64 " ids, num_org_pad = %" PRId64 " (0 or more) and %" PRId64
             " added ids, got shape %s",
             base, num_org_pad, added, w.shape_string().c_str());
    if (vocab_size < -1) fail(PYKV_VALUE_ERROR, "vocab_size: must be 0 or more, or -1, got %" PRId64, vocab_size);
    if (weight_scale) {
      Tensor s = call.read("weight_scale", weight_scale).rank_between(1, 2).dtype({DType::kFloat32}).dim(0, rows);
      const int64_t groups = s.ndim() == 2 ? s.size(1) : 1;
      if (groups < 1 || hidden % groups != 0)
        s.fail(PYKV_VALUE_ERROR, "its last dimension must divide hidden_size = %" PRId64 ", got shape %s",
               static_cast<int64_t>(hidden), s.shape_string().c_str());
      a.weight_scale = static_cast<const float*>(s.data());
      a.scale_row = s.stride(0);
      a.scale_group = s.ndim() == 2 ? s.stride(1) : 0;
      a.group_size = hidden / groups;
    } else {
      a.group_size = hidden;
    }
    if ((positions == nullptr) != (position_weight == nullptr))
      fail(PYKV_VALUE_ERROR, "position_weight: must be given with positions, and only then");
    if (positions) {
      Dim all{"num_positions"};
      Tensor p = call.read("position_weight", position_weight).shape(all, hidden).dtype(kFloats).contiguous_rows();
      a.positions = ids_of_rows(call, "positions", positions, y);
      a.position_weight = p.data();
      a.position_dtype = p.type();
      a.position_stride = p.stride(0);
      a.num_positions = all;
    }
    a.dtype = y.type();
    a.weight_dtype = w.type();
    a.out = y.data();
    a.out_rows = y.rows();
    a.weight = w.data();
    a.weight_stride = w.stride(0);
    a.scale = number("scale", scale);
    a.org_start = org_start;
    a.org_end = org_end;
    a.num_org_pad = num_org_pad;
    a.added_start = added_start;
    a.added_end = added_end;
    a.vocab_size = vocab_size >= 0 ? vocab_size : std::max(org_end, added > 0 ? added_end : 0);
    a.hidden_size = hidden;
    if (y.numel() == 0) return;
    a.num_tokens = y.numel() / hidden;
    call.run(stream, a, masked_embedding_cpu, PYKV_CUDA(masked_embedding_cuda));
  });
}
