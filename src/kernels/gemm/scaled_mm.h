// out = a_scales b_scales (a b) + bias with 8-bit a and b.  The idea behind pykv_cutlass_scaled_mm and _azp, and with several b
// behind pykv_grouped_scaled_mm.
//
// Products are exact.  Those of int8 are summed in int32, exactly; those of float8_e4m3fn by the machine's own instruction over
// blocks of 128 of k, whose sums are added in fp32, in order.  So a row of out has the same bits however many rows there are.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "gemm/row_groups.h"
#include "pykv/base.h"

namespace pykv {

class Call;
class Dim;
class Tensor;

// Scales in two dimensions.  Strides are in floats or bytes, 0 where one is for all.
struct MmScales {
  const void* data;      // float, or bytes: 2^(byte - 127)
  int64_t along, block;  // from a row (or column, or 128 columns) to the next; from 128 of k to the next
  bool is_e8m0;
  int64_t group;          // from a group to the next
  bool in_words = false;  // the bytes of four blocks lie side by side, and `block` leads to the next four

  // Those of a group, or from another row or column on.
  PYKV_HOST_DEVICE MmScales from(int64_t elements) const {
    MmScales s = *this;
    s.data = static_cast<const char*>(data) + elements * (is_e8m0 ? 1 : 4);
    return s;
  }
  // The place of one.
  PYKV_HOST_DEVICE int64_t place(int64_t line, int64_t of_k) const {
    return line * along + (in_words ? (of_k >> 2) * block + (of_k & 3) : of_k * block);
  }
};

// Reads scales, which lie on the device of the call; one element may lie on the host.  on_host: so it does, and the call is on CUDA.
Tensor read_scales(Call& call, const char* name, const DLTensor* given, bool& on_host);

// Of blocks of rows of a, checked: [rows, blocks of k] floats or bytes, or words of four bytes; of groups' own matrices with them before.
MmScales scales_of_rows(Tensor& given, Dim* groups, Dim& rows, int64_t blocks);

struct ScaledMmArgs {
  static constexpr int kBlock = 128;  // of k; and of columns that share a scale

  bool is_int8;
  bool in_blocks;  // scales are those of blocks of k
  DType out_dtype;
  bool a_on_host, b_on_host;  // on CUDA: the one scale of all is a number on the host
  const uint8_t* a;           // [m, k]
  const uint8_t* b;           // [k, n]
  void* out;                  // [m, n]
  int64_t m, n, k;
  int64_t a_stride, out_stride;  // of rows
  int64_t a_along_k = 1;
  int64_t b_along_k, b_along_n;
  MmScales a_scales, b_scales;
  const void* bias;        // [n], dtype of out; null: none.  Of a group: bias_group elements on
  const int32_t* azp_adj;  // [n]; null: none
  const int32_t* azp;      // [m]; null: 1
  int64_t azp_adj_stride, azp_stride;
  RowGroups groups;
  int64_t a_group, b_group,
      out_group;  // from a group's matrix to the next, elements; of a and out 0 unless they are apart
  int64_t bias_group;

  PYKV_HOST_DEVICE int64_t blocks() const { return (k + kBlock - 1) / kBlock; }
};

PYKV_CPU_TWIN_OF_PRODUCTS(scaled_mm_cpu, ScaledMmArgs)
void scaled_mm_cuda(const ScaledMmArgs& args, const Launch& launch);

}  // namespace pykv
