#include "frame.h"

#include <atomic>
#include <stdexcept>
#include <vector>

#include "capsules_in_use.h"

namespace pykv::python {
namespace {

// Says once for each GPU that this build lacks the kernels made for it.
void warn_of_missing_kernels(int32_t device) {
  static std::atomic<uint64_t> asked{0};
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (asked.load(std::memory_order_relaxed) & bit || asked.fetch_or(bit) & bit) return;
  const char* note = pykv_device_note(device);
  if (*note && PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "pykv: cuda:%d: %s", device, note) < 0)
    throw py::error_already_set();
}

}  // namespace

void* Frame::resolve_streams(const StreamChoice& choice) {
  bool known = choice.given;
  void* stream = choice.stream;
  for (const Array* a = first_; a && !known; a = a->next) {
    if (!a->producer().known) continue;
    known = true;
    stream = a->producer().stream;
  }
  for (Array* a = first_; a; a = a->next) {
    at_.position = a->position;
    a->finish(known, stream);
    if (a->on_cuda()) warn_of_missing_kernels(a->tensor().device.device_id);
    // an explicit stream= is the caller's own word; otherwise every producer's work comes first
    if (!choice.given && a->producer().known && a->producer().stream != stream)
      if (pykv_stream_wait(a->tensor().device, stream, a->producer().stream) != PYKV_OK)
        throw std::runtime_error(pykv_last_error());
  }
  return stream;
}

void Frame::keep_capsules(void* stream) {
  std::vector<PyObject*> capsules;
  DLDevice device{};
  for (Array* a = first_; a; a = a->next) {
    PyObject* capsule = a->take_capsule();
    if (!capsule) continue;
    capsules.push_back(capsule);
    device = a->tensor().device;
  }
  if (!capsules.empty()) keep_until_done(std::move(capsules), device, stream);
}

}  // namespace pykv::python
