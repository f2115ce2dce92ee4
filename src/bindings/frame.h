// The arrays of one call from Python.
#pragma once

#include "array.h"
#include "failure.h"

namespace pykv::python {

// Those to which the stream of the call matters are chained: they lie where their arguments do, and nothing is allocated.
class Frame {
 public:
  explicit Frame(Failure& at) : at_(at) {}

  // Not of None.
  void add(Array& array, PyObject* object, bool written) {
    if (Py_TYPE(object) != type_) [[unlikely]] {  // as a rule all arrays of a call are of one
      if (!written && PyFloat_CheckExact(object)) return array.set_number(PyFloat_AS_DOUBLE(object));
      type_ = Py_TYPE(object);
      info_ = &type_info(type_);
    }
    if (!array.borrow(object, *info_, streams_, written)) return;
    array.position = at_.position;
    array.next = nullptr;
    *last_ = &array;
    last_ = &array.next;
  }

  // Decides the stream, orders the producers before it and finishes what had to wait for it.
  void* resolve_stream(const StreamChoice& choice) { return first_ ? resolve_streams(choice) : choice.stream; }

  // After the work was enqueued: what came by `__dlpack__` stays until it is done.
  void keep(void* stream) {
    if (first_) keep_capsules(stream);
  }

  bool is_on_host() const { return !first_; }

 private:
  void* resolve_streams(const StreamChoice& choice);
  void keep_capsules(void* stream);

  Failure& at_;
  PyTypeObject* type_ = nullptr;
  const TypeInfo* info_ = nullptr;
  CurrentStreams streams_;
  Array* first_ = nullptr;
  Array** last_ = &first_;
};

}  // namespace pykv::python
