// Neighbouring tokens of a call, as far as their slots are neighbours, too.
#pragma once

#include <cstdint>

namespace pykv::PYKV_ISA {

// `length` tokens in consecutive slots of one block.
struct Run {
  int64_t token, length, block, offset;
};

}  // namespace pykv::PYKV_ISA
