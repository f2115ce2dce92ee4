// Arrays to one-byte floats and back: the idea behind pykv_convert_fp8.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct ConvertFp8Args {
  static constexpr int kAxes = 4;

  bool to_fp8;  // otherwise from it
  KvFormat format;
  DType dtype;  // of the other side
  const void* input;
  void* output;
  // Outermost first; the unused ones have size 1.  Elements.
  int64_t sizes[kAxes], input_strides[kAxes], output_strides[kAxes];
  Scale scale;
};

PYKV_CPU_TWIN(convert_fp8_cpu, ConvertFp8Args)
void convert_fp8_cuda(const ConvertFp8Args& args, const Launch& launch);

}  // namespace pykv
