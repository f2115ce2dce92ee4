#include "core/device_scope.h"

#include <cstdlib>
#include <cstring>

#include "core/call.h"
#if defined(PYKV_WITH_CUDA)
#include "cuda/device.h"
#endif

namespace pykv {

#if defined(PYKV_WITH_CUDA)

DeviceScope::DeviceScope(int device, void* stream) {
  previous_ = enter_device(device);
  launch_ = {stream, device, error_word(device)};
}

DeviceScope::~DeviceScope() { leave_device(previous_); }

void DeviceScope::finish() {
  static const bool check_each_call = [] {
    const char* wanted = std::getenv("PYKV_CHECK");
    return wanted && std::strcmp(wanted, "sync") == 0;
  }();
  if (!check_each_call || is_capturing(launch_.stream)) return;
  const ErrorWord word = take_error_word(launch_.device);
  if (word.claimed) Call::fail_out_of_range(word);
}

#else

DeviceScope::DeviceScope(int, void*) { Call::no_cuda(); }
DeviceScope::~DeviceScope() = default;
void DeviceScope::finish() {}

#endif

}  // namespace pykv
