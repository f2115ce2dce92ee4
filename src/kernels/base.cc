// The entries of base.h: everything of the C ABI that is not an operation.
#include "core/call.h"
#include "cpu/parallel.h"
#if defined(PYKV_WITH_CUDA)
#include "cuda/device.h"
#endif

using pykv::Call;
using pykv::fail;
using pykv::guarded;

namespace {
// Where the caller wants a result.
void need_place(const char* name, const void* place) {
  if (!place) fail(PYKV_TYPE_ERROR, "%s: a place for the result is required, got NULL", name);
}
}  // namespace

int32_t pykv_version() { return PYKV_VERSION_MAJOR * 10000 + PYKV_VERSION_MINOR * 100 + PYKV_VERSION_PATCH; }

const char* pykv_build_note() { return PYKV_BUILD_NOTE; }

int32_t pykv_get_num_threads() { return pykv::num_threads(); }
void pykv_set_num_threads(int32_t num_threads) { pykv::set_num_threads(num_threads); }

#if defined(PYKV_WITH_CUDA)

bool pykv_has_cuda() { return true; }
const char* pykv_cuda_architectures() { return PYKV_CUDA_ARCHITECTURES; }
int32_t pykv_cuda_device_count() { return pykv::device_count(); }
const char* pykv_device_note(int32_t device) { return pykv::device_note(device); }

pykv_status pykv_check_errors(DLDevice device) {
  if (device.device_type != kDLCUDA && device.device_type != kDLCUDAManaged) return PYKV_OK;
  pykv::ErrorWord word{};
  const pykv_status status = guarded("check_errors", [&](Call&) { word = pykv::take_error_word(device.device_id); });
  if (status != PYKV_OK || !word.claimed) return status;
  return pykv::set_last_error(word);
}

pykv_status pykv_stream_wait(DLDevice device, void* stream, void* producer) {
  return guarded("stream_wait", [&](Call&) { pykv::stream_wait(device.device_id, stream, producer); });
}

pykv_status pykv_mark_stream(DLDevice device, void* stream, void** mark) {
  return guarded("mark_stream", [&](Call&) {
    need_place("mark", mark);
    *mark = pykv::mark_stream(device.device_id, stream);
  });
}

pykv_status pykv_mark_passed(void* mark, bool* passed) {
  return guarded("mark_passed", [&](Call&) {
    need_place("passed", passed);
    *passed = !mark || pykv::mark_passed(mark);
  });
}

#else

bool pykv_has_cuda() { return false; }
const char* pykv_cuda_architectures() { return ""; }
int32_t pykv_cuda_device_count() { return 0; }
const char* pykv_device_note(int32_t) { return ""; }

pykv_status pykv_check_errors(DLDevice device) {
  return guarded("check_errors", [&](Call&) {
    if (device.device_type != kDLCPU && device.device_type != kDLCUDAHost) Call::no_cuda();
  });
}

pykv_status pykv_stream_wait(DLDevice, void*, void*) {
  return guarded("stream_wait", [](Call&) { Call::no_cuda(); });
}

pykv_status pykv_mark_stream(DLDevice, void*, void** mark) {
  return guarded("mark_stream", [&](Call&) {
    need_place("mark", mark);
    Call::no_cuda();
  });
}

pykv_status pykv_mark_passed(void* mark, bool* passed) {
  return guarded("mark_passed", [&](Call&) {
    need_place("passed", passed);
    if (mark) Call::no_cuda();
    *passed = true;
  });
}

#endif
