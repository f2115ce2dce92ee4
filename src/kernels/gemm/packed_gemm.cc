#include "gemm/packed_gemm.h"

#include "core/call.h"
#include "pykv/gemm.h"

using namespace pykv;

pykv_status pykv_packed_gemm(DLTensor* out, const DLTensor* x, const DLTensor* weight, const char* format,
                             const DLTensor* bias, void* stream) {
  return guarded("packed_gemm", [&](Call& call) {
    PackedGemmArgs args{};
    args.weight = parse_format(required("format", format));
    Dim num_rows{"num_rows"}, n{"n of the format", args.weight.n}, k{"k of the format", args.weight.k};
    const Tensor from = call.read("x", x).dtype({DType::kFloat16, DType::kBFloat16}).shape(num_rows, k);
    const Tensor to = call.write("out", out).like(from).shape(num_rows, n).contiguous_rows().no_overlap_within();
    const Tensor packed = call.read("weight", weight).dtype({DType::kUInt8}).rank(1).contiguous();
    const int64_t bytes = place_sections(args.weight, packed.data());
    if (packed.numel() != bytes)
      packed.fail(PYKV_VALUE_ERROR, "must have the %lld bytes of its format, got shape %s",
                  static_cast<long long>(bytes), packed.shape_string().c_str());
    if (reinterpret_cast<uintptr_t>(packed.data()) % 16 != 0)
      packed.fail(PYKV_VALUE_ERROR, "must be aligned to 16 bytes");
    if (bias) args.bias = call.read("bias", bias).like(from).shape(n).contiguous_rows().data();
    args.dtype = from.type();
    args.x = from.data();
    args.out = to.data();
    args.num_rows = num_rows;
    args.x_stride = from.stride(0);
    args.x_step = from.stride(1);
    args.out_stride = to.stride(0);
    if (args.num_rows == 0 || args.weight.n == 0) return;
    call.run(stream, args, packed_gemm_cpu, PYKV_CUDA(packed_gemm_cuda));
  });
}
