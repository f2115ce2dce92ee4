// A number on the host or in device memory.
#pragma once

#include "core/launch.h"
#include "pykv/base.h"

namespace pykv {

class Call;

struct Parameter {
  const float* data;  // null: value
  float value;

  PYKV_HOST_DEVICE operator float() const { return data ? *data : value; }
};

// The argument `name` of a call, float32 of one element.
Parameter parameter(Call& call, const char* name, const DLTensor* t);

}  // namespace pykv
