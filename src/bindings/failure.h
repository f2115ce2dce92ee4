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

// These set the error of Python, with the names of the operation and of the argument.
void raise_at(const Failure& failure, PyObject* type, const std::string& message);
void raise_failure(const Failure& failure);  // from inside a catch block
void raise_status(pykv_status status);       // of the last failing call of C

PyObject* error_type(pykv_status status);

// Adds ForDispatcher to the module.
void bind_failure(pybind11::module_& m);

}  // namespace pykv::python
