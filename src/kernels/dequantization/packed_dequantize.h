// Integer weights packed in words of 32 bits, with a scale and a zero for each group of rows: (code - zero) * scale.
//
// AWQ: a word has eight neighbours of a row, column 2 i in nibble i and column 2 i + 1 in nibble i + 4.
// GPTQ: the words of a column are a stream of bits, lowest first; the zeros of a group are such a stream along the columns.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

enum class Packing : uint8_t { kAwq4, kGptq2, kGptq3, kGptq4, kGptq8 };

constexpr int bits_of(Packing packing) {
  switch (packing) {
    case Packing::kGptq2:
      return 2;
    case Packing::kGptq3:
      return 3;
    case Packing::kGptq8:
      return 8;
    default:
      return 4;
  }
}

struct PackedDequantizeArgs {
  Packing packing;
  DType dtype;  // of scales and output
  const uint32_t *codes, *zeros;
  const void* scales;
  void* output;
  Index group_of_row;  // data null: row / group_size
  int64_t rows, columns, groups, group_size;
  int64_t code_stride, zero_stride, scale_stride, output_stride;  // elements from row to row
  int32_t zero_offset;                                            // what is added to a stored zero
};

PYKV_CPU_TWIN(packed_dequantize_cpu, PackedDequantizeArgs)
void packed_dequantize_cuda(const PackedDequantizeArgs& args, const Launch& launch);

}  // namespace pykv
