#include "gemm/packed_gemm_folded_sm90.h"
#include "gemm/packed_gemm_sm90.cuh"

namespace pykv {

void packed_gemm_folded_sm90(const PackedGemmArgs& args, const Launch& launch) {
  using namespace packed_gemm_sm90;
  const PackedWeight& w = args.weight;
  dispatch<half, bf16>(args.dtype, [&]<class T>() {
    if (w.codes_kind == CodeKind::kUint8) return launch_tokens<T, CodeKind::kUint8, Minima::kFolded>(args, launch);
    if (w.codes_kind == CodeKind::kTable16) return launch_tokens<T, CodeKind::kTable16, Minima::kFolded>(args, launch);
    if (is_q4_k(w)) return launch_tokens<T, CodeKind::kUint4, Minima::kQ4K>(args, launch);
    launch_tokens<T, CodeKind::kUint4, Minima::kFolded>(args, launch);
  });
}

}  // namespace pykv
