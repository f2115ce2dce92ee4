// The device of a call while its CUDA twin runs.  Core declares what it needs; cuda/device_scope.cc has it.
#pragma once

#include "core/launch.h"

namespace pykv {

class DeviceScope {
 public:
  // Makes `device` current.  Raises in a build without CUDA.
  DeviceScope(int device, void* stream);
  // Makes the device current again that was.
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;

  const Launch& launch() const { return launch_; }

  // With PYKV_CHECK=sync: waits for the kernels, and raises what they reported.
  void finish();

 private:
  Launch launch_{};
  int previous_ = -1;
};

}  // namespace pykv
