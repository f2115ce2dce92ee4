#include "dequantization/ggml_dequantize.h"

#include <cinttypes>

#include "core/call.h"
#include "dequantization/gguf_call.h"
#include "pykv/dequantization.h"

namespace pykv {
namespace {

// Whether the rows lie one behind the other.
bool is_compact(const Rows& rows, const Tensor& t, int64_t num_rows) {
  return num_rows <= 1 || (rows.size1 == 1 && rows.size2 == 1 && rows.stride0 == t.size(-1));
}

bool same_rows(const Tensor& a, const Tensor& b) {
  bool same = a.ndim() == b.ndim();
  for (int i = 0; same && i < a.ndim() - 1; ++i) same = a.size(i) == b.size(i);
  return same;
}

}  // namespace
}  // namespace pykv

pykv_status pykv_ggml_dequantize(DLTensor* out, const DLTensor* W, int64_t quant_type, void* stream) {
  using namespace pykv;
  return guarded("ggml_dequantize", [&](Call& call) {
    Tensor to = call.write("out", out).dtype(kFloats).rank_between(1, Tensor::kMaxRank).contiguous_rows();
    to.no_overlap_within();
    Tensor from = call.read("W", W).dtype({DType::kUInt8}).rank_between(1, Tensor::kMaxRank).contiguous_rows();
    const auto [elements, bytes] = gguf::known_block_size(quant_type);
    if (from.size(-1) % bytes != 0)
      from.fail(PYKV_VALUE_ERROR, "the last dimension must be whole blocks of %d bytes, got %" PRId64, bytes,
                from.size(-1));
    if (to.numel() % elements != 0 || from.numel() / bytes != to.numel() / elements)
      to.fail(PYKV_VALUE_ERROR, "must have %" PRId64 " elements, %d for each %d bytes of W, got shape %s",
              from.numel() / bytes * elements, elements, bytes, to.shape_string().c_str());
    if (to.numel() == 0) return;

    GgmlDequantizeArgs args{};
    args.type = static_cast<gguf::Type>(quant_type);
    args.dtype = to.type();
    args.blocks = from.data();
    args.output = to.data();
    args.row_bytes = from.size(-1);
    args.row_elements = args.row_bytes / bytes * elements;
    args.num_rows = from.numel() / args.row_bytes;
    args.block_rows = from.rows();
    args.output_rows = to.rows();
    if (is_compact(args.block_rows, from, args.num_rows) &&
        is_compact(args.output_rows, to, to.numel() / to.size(-1))) {
      args.row_bytes = from.numel();
      args.row_elements = to.numel();
      args.num_rows = 1;
      args.block_rows = args.output_rows = {1, 1, 0, 0, 0};
    } else if (to.size(-1) != args.row_elements || !same_rows(from, to)) {
      to.fail(PYKV_VALUE_ERROR,
              "must have the rows of W, of %" PRId64 " elements each (other shapes: both contiguous), got shape %s",
              args.row_elements, to.shape_string().c_str());
    }
    call.run(stream, args, ggml_dequantize_cpu, PYKV_CUDA(ggml_dequantize_cuda));
  });
}
