// out = alpha a b^T with nvfp4 a and b: codes of four bits, and a scale of eight for each 16 neighbours.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct Fp4MmArgs {
  DType out_dtype;
  const uint8_t *a, *b;                // [m, k / 2], [n, k / 2]
  const uint8_t *a_scales, *b_scales;  // e4m3, in tiles
  void* out;                           // [m, n]
  int64_t m, n, k;
  int64_t a_stride, b_stride, out_stride;  // of rows
  int64_t a_step, b_step;                  // from a byte of a row to the next
  Parameter alpha;

  // k is summed in segments, of multiples of kPiece of it, which are added in order.  begin: in pieces.
  static constexpr int kSegments = 8, kPiece = 128;
  PYKV_HOST_DEVICE static int segment_begin(int64_t k, int segment) {
    return static_cast<int>((k + kPiece - 1) / kPiece * segment / kSegments);
  }

  // Where the scale of a row's group lies: a tile is 128 rows of four groups.
  PYKV_HOST_DEVICE int64_t scale_at(int64_t row, int64_t group) const {
    const int64_t tiles = (k / 16 + 3) / 4;
    return (row / 128 * tiles + group / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
  }
};

PYKV_CPU_TWIN_OF_PRODUCTS(fp4_mm_cpu, Fp4MmArgs)
void fp4_mm_cuda(const Fp4MmArgs& args, const Launch& launch);
// For many rows: the same bits, sooner.  False: not by this GPU, or not of arrays that lie so, whatever m is.
bool fp4_mm_sm90(const Fp4MmArgs& args, const Launch& launch);

}  // namespace pykv
