// packed_gemm on Hopper: which kernel a weight has, and those whose sums of groups are scaled (packed_gemm_sm90.cuh).
#include "gemm/packed_gemm_few_sm90.h"
#include "gemm/packed_gemm_folded_sm90.h"
#include "gemm/packed_gemm_many.h"
#include "gemm/packed_gemm_many_sm90.h"
#include "gemm/packed_gemm_sm90.cuh"

namespace pykv {
namespace packed_gemm_sm90 {

int segments_of(const PackedWeight& w, int sms) {
  const int64_t row_tiles = (w.n + kRows - 1) / kRows;
  return row_tiles * 2 <= sms && w.padded_k >= 4 * kColumns ? kMostSegments : 2;
}

template <class T, CodeKind kKind>
void launch_kind(const PackedGemmArgs& args, const Launch& launch) {
  const ScaleKind scales = args.weight.scales_kind;
  if constexpr (kKind == CodeKind::kTable16)
    if (scales == ScaleKind::kE4M3 ||
        (scales == ScaleKind::kE8M0 && !kIsHalf<T>))  // float16 has too few exponents for e8m0
      return launch_tokens<T, kKind, Minima::kScaled>(args, launch);
  if constexpr (is_integer(kKind))
    if (args.weight.minima_kind == MinimumKind::kZero)
      return launch_tokens<T, kKind, Minima::kSubtracted>(args, launch);
  launch_tokens<T, kKind, Minima::kNone>(args, launch);
}

}  // namespace packed_gemm_sm90

void packed_gemm_sm90_cuda(const PackedGemmArgs& args, const Launch& launch) {
  using packed_gemm_sm90::launch_kind;
  const int segments = packed_gemm_sm90::segments_of(args.weight, num_sms(launch.device));
  if (packed_gemm_few_sm90(args, segments, launch) || packed_gemm_many_sm90(args, segments, launch)) return;
  dispatch<half, bf16>(args.dtype, [&]<class T>() {
    if (is_folded<T>(args.weight, args.map.rows)) return packed_gemm_folded_sm90(args, launch);
    switch (args.weight.codes_kind) {
      case CodeKind::kUint4:
        return launch_kind<T, CodeKind::kUint4>(args, launch);
      case CodeKind::kUint8:
        return launch_kind<T, CodeKind::kUint8>(args, launch);
      case CodeKind::kE4M3:
        return launch_kind<T, CodeKind::kE4M3>(args, launch);
      default:
        return launch_kind<T, CodeKind::kTable16>(args, launch);
    }
  });
}

}  // namespace pykv
