#include "op.h"

#include <stdexcept>

#include "capsules_in_use.h"

namespace pykv::python {

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
