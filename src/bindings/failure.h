// How a call that went wrong becomes an exception of Python.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "pykv/base.h"

namespace pykv::python {

// Which argument a conversion was at when it failed.
struct Failure {
  const char* op;
  int position;  // -1: none
};

// A tensor of torch that only torch's dispatcher can take: it stands for others, or for none as yet.
struct ForDispatcher : std::runtime_error {
  using runtime_error::runtime_error;
};
extern PyObject* for_dispatcher;  // its class in Python, a TypeError

// These set the error of Python, with the names of the operation and of the argument, and throw nothing.
void raise_at(const Failure& failure, PyObject* type, const std::string& message) noexcept;
void raise_failure(const Failure& failure) noexcept;  // from inside a catch block
void raise_status(pykv_status status);                // of the last failing call of C

PyObject* error_type(pykv_status status);

// Forgets the error of Python that is set, for there is another way; but throws it if it is nobody's to forget: an interrupt,
// an exit, or want of memory.
void forget_error();

// While it lives no error is set, so that code of Python may run; the one that was is put back.
class ErrorKept {
 public:
  ErrorKept() { PyErr_Fetch(&type_, &value_, &trace_); }
  ErrorKept(const ErrorKept&) = delete;
  ErrorKept& operator=(const ErrorKept&) = delete;
  ~ErrorKept() { PyErr_Restore(type_, value_, trace_); }

 private:
  PyObject *type_, *value_, *trace_;
};

// Adds ForDispatcher to the module.
void bind_failure(pybind11::module_& m);

}  // namespace pykv::python
