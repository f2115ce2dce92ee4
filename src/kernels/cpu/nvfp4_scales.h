// Where the scales of nvfp4 (core/nvfp4.h) lie, for the CPU's encoder and decoder.
#pragma once

#include "core/nvfp4.h"

namespace pykv::PYKV_ISA {

// Where the scales of a head's blocks are, one after another: without the divisions of each.
class Nvfp4Scales {
 public:
  Nvfp4Scales(const Nvfp4Page& places, int64_t token, int64_t head, int32_t block)
      : quarter_(places.quarter > 0 ? places.quarter : INT32_MAX),
        step_(places.quarter > 0 ? 4 : 1),
        column_(block % quarter_),
        next_row_(places.scales_token - int64_t{4} * (quarter_ - 1)),
        at_(places.scale_at(token, head, block)) {}

  // The place of this block's; goes on to the next.
  int64_t next() {
    const int64_t at = at_;
    const bool ends = ++column_ == quarter_;
    at_ += ends ? next_row_ : step_;
    column_ = ends ? 0 : column_;
    return at;
  }

 private:
  int32_t quarter_, step_, column_;
  int64_t next_row_, at_;
};

}  // namespace pykv::PYKV_ISA
