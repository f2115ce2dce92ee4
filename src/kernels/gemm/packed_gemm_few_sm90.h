// packed_gemm of the fewest tokens on Hopper.
#pragma once

#include "gemm/packed_gemm.h"

namespace pykv {

// Whether it was launched: not for many tokens, for bytes with zero points, for maps but of four bits, or where columns, groups or x do
// not come in whole copies.
// segments: of the columns, whose sums are added in order.
bool packed_gemm_few_sm90(const PackedGemmArgs& args, int segments, const Launch& launch);

namespace packed_gemm_sm90 {
// Segments of the columns: what is summed in which order depends on this alone, not on the number of tokens.
int segments_of(const PackedWeight& weight, int sms);
}  // namespace packed_gemm_sm90

}  // namespace pykv
