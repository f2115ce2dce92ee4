// Arrays of bool, read as the bytes that they are.
#pragma once

#include "pykv/base.h"

namespace pykv {

class Flags {
 public:
  explicit Flags(const DLTensor* t) : given_(t) {
    if (!t || t->dtype.code != kDLBool || t->dtype.bits != 8) return;
    bytes_ = *t;
    bytes_.dtype.code = kDLUInt;
    given_ = &bytes_;
  }
  Flags(const Flags&) = delete;
  operator const DLTensor*() const { return given_; }

 private:
  DLTensor bytes_{};
  const DLTensor* given_;
};

}  // namespace pykv
