// Host memory as the device sees it.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

namespace pykv {

// Where the device sees pinned host memory [p, p + bytes), or null.
template <class T>
T* on_device(T* p, int64_t bytes) {
  T* ends[2] = {p, p + bytes - 1};
  for (T*& end : ends) {
    cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, end) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    if (attributes.type != cudaMemoryTypeHost) return nullptr;
    end = static_cast<T*>(attributes.devicePointer);
  }
  return ends[0] && ends[1] == ends[0] + bytes - 1 ? ends[0] : nullptr;
}

}  // namespace pykv
