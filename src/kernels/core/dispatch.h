// From a DType known at run time to a C++ type: dispatch<half, bf16, float>(dtype, [&]<class T> { ... }).
#pragma once

#include "core/dtype.h"
#include "core/error.h"

namespace pykv {

template <class T>
inline constexpr DType kDTypeOf = DType::kOther;  // specialised beside each type: cpu/float16.h, cuda/types.cuh
template <>
inline constexpr DType kDTypeOf<float> = DType::kFloat32;

template <class... Ts, class F>
void dispatch(DType dtype, F&& body) {
  const bool found = ((dtype == kDTypeOf<Ts> && (body.template operator()<Ts>(), true)) || ...);
  if (!found) fail(PYKV_TYPE_ERROR, "no kernel for %s", name_of(dtype));
}

// dispatch_bool(flag, [&]<bool kFlag> { ... })
template <class F>
void dispatch_bool(bool flag, F&& body) {
  if (flag) {
    body.template operator()<true>();
  } else {
    body.template operator()<false>();
  }
}

}  // namespace pykv
