// Arrays of element types that the checks do not know, under the name of one of the same size that they do.
#pragma once

#include "core/check.h"

namespace pykv {

// bool as uint8, uint32 as int32; null stays null.  `copy` is what the result points to.
inline const DLTensor* with_known_dtype(const DLTensor* t, DLTensor& copy) {
  if (!t) return nullptr;
  copy = *t;
  if (key_of(t->dtype) == key_of({kDLBool, 8, 1})) copy.dtype.code = kDLUInt;
  if (key_of(t->dtype) == key_of({kDLUInt, 32, 1})) copy.dtype.code = kDLInt;
  return &copy;
}

}  // namespace pykv
