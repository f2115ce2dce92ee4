// Rows of 8-bit codes with their scales, a record each, to the places of pairs: what the products of a layer in 8 bits read.
//
// A record has the codes of a row, filled up to a multiple of 16 bytes, then its scales, likewise.  What fills up is zeros in the
// records of pairs, and not written in those of tokens.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "quantization/group_quant.h"

namespace pykv {

struct RecordLayout {
  static constexpr int64_t kBlock = 128;  // columns that share a scale, where a row has several

  int64_t width, scales_at, bytes;  // of the codes; of a record
  int64_t num_scales;

  RecordLayout() = default;
  RecordLayout(int64_t width, bool in_blocks)
      : width(width),
        scales_at(up16(width)),
        bytes(scales_at + up16(4 * blocks(width))),
        num_scales(in_blocks ? blocks(width) : 1) {}

  static int64_t up16(int64_t n) { return (n + 15) / 16 * 16; }
  // Whether there are several or not, there is room for them.
  static int64_t blocks(int64_t width) { return width < kBlock ? 1 : (width + kBlock - 1) / kBlock; }
};

struct CodeRecordsArgs {
  RecordLayout layout;
  const char* tokens;     // [num_pairs / top_k]
  char* pairs;            // [num_pairs], sorted
  const int32_t* sorted;  // [num_pairs]: the pair of each place
  const int32_t* taken;   // places that count
  int64_t num_pairs, top_k;
  bool is_static;                                // all have one scale
  Parameter number;                              // that one
  const float* factors;                          // of pairs, which scales are multiplied by; null: 1
  int64_t factors_token_stride, factors_stride;  // elements

  // A scale that is given for rows which come later, to where kernels find it.
  bool copies_number;
  Parameter next_number;
  float* next_scale;

  PYKV_HOST_DEVICE __attribute__((always_inline)) float factor_of(int64_t pair) const {
    return factors ? factors[pair / top_k * factors_token_stride + pair % top_k * factors_stride] : 1.0f;
  }
};

PYKV_CPU_TWIN(code_records_cpu, CodeRecordsArgs)
void code_records_cuda(const CodeRecordsArgs& args, const Launch& launch);

// The same from x itself, where blocks of it have scales (group_quant): no records of tokens.
struct BlockRecordsArgs {
  CodeRecordsArgs records;
  GroupQuantArgs quant;   // of x
  const int32_t* places;  // [num_pairs]: negative ones are none
};
// False: not with these arrays.
bool block_records_cuda(const BlockRecordsArgs& args, const Launch& launch);

}  // namespace pykv
