// Arrays of element types that the checks do not know, under the name of one of the same size that they do.
#pragma once

#include "core/check.h"

namespace pykv {

// `t` itself, or where it is an array of `unknown` a copy that calls it `known`; null stays null.
inline const DLTensor* renamed(const DLTensor* t, DLDataType unknown, DLDataType known, DLTensor& copy) {
  if (!t || key_of(t->dtype) != key_of(unknown)) return t;
  copy = *t;
  copy.dtype = known;
  return &copy;
}

// bool as uint8, and uint32 as int32.
inline const DLTensor* bool_as_bytes(const DLTensor* t, DLTensor& copy) {
  return renamed(t, {kDLBool, 8, 1}, {kDLUInt, 8, 1}, copy);
}
inline const DLTensor* uint32_as_int32(const DLTensor* t, DLTensor& copy) {
  return renamed(t, {kDLUInt, 32, 1}, {kDLInt, 32, 1}, copy);
}

}  // namespace pykv
