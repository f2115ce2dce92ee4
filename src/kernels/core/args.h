// Small pieces that args structs are made of: plain data, understood by host and device alike.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/launch.h"

namespace pykv {

// A list of int32 or int64 ids with a stride.
struct Index {
  const void* data;
  int64_t stride;  // elements
  bool is_int64;

  PYKV_HOST_DEVICE int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i * stride] : static_cast<const int32_t*>(data)[i * stride];
  }
};

// One scale, or one a head: in device memory, or (given on the host) carried by value.
struct Scale {
  static constexpr int kMaxOnHost = 128;  // heads whose scales fit into the kernel's parameters

  const float* data = nullptr;  // null: read values[]
  int64_t stride = 0;           // elements between two heads; 0 for a single scale
  float values[kMaxOnHost];     // as many as there are: the rest is never written, since every call would pay for it

  PYKV_HOST_DEVICE Scale() { values[0] = 1.0f; }
  PYKV_HOST_DEVICE Scale(const float* memory, int64_t step) : data(memory), stride(step) {}

  // Copies what there is.
  void take(const Scale& other) {
    data = other.data;
    stride = other.stride;
    for (int i = 0; i < (!data && stride ? kMaxOnHost : 1); ++i) values[i] = other.values[i];
  }

  PYKV_HOST_DEVICE float operator[](int64_t head) const {
    return data ? data[head * stride] : values[stride ? head : 0];
  }
};

// A number on the host or in device memory.
struct Parameter {
  const float* data;  // null: value
  float value;

  PYKV_HOST_DEVICE operator float() const { return data ? *data : value; }
};

// Leading dimensions as numbered rows: up to three that do not collapse into one another.
struct Rows {
  int64_t size1, size2;               // the inner two of the leading dimensions; 1 where they collapsed
  int64_t stride0, stride1, stride2;  // elements

  PYKV_HOST_DEVICE int64_t offset(int64_t row) const {
    if ((size1 | size2) == 1) return row * stride0;
    const int64_t outer = row / size2;
    return outer / size1 * stride0 + outer % size1 * stride1 + row % size2 * stride2;
  }
};

}  // namespace pykv
