#include "failure.h"

#include <new>

namespace pykv::python {

namespace py = pybind11;

namespace {

// The Python functions of this name carry the names; they are looked up only when something went wrong.
std::string argument_name(const Failure& failure) {
  const py::object function = py::module_::import("pykv").attr(failure.op);
  const py::object parameters = py::module_::import("inspect").attr("signature")(function).attr("parameters");
  return py::str(py::list(parameters)[failure.position]);
}

}  // namespace

PyObject* for_dispatcher = nullptr;

void bind_failure(py::module_& m) {
  for_dispatcher = py::exception<ForDispatcher>(m, "ForDispatcher", PyExc_TypeError).release().ptr();
}

namespace {

// What is not a complaint about an argument: an interrupt, an exit, want of memory.
bool stays_what_it_is(PyObject* type) {
  return !PyErr_GivenExceptionMatches(type, PyExc_Exception) || PyErr_GivenExceptionMatches(type, PyExc_MemoryError);
}

}  // namespace

void forget_error() {
  PyObject* type = PyErr_Occurred();
  if (type && stays_what_it_is(type)) throw py::error_already_set();
  PyErr_Clear();
}

void raise_at(const Failure& failure, PyObject* type, const std::string& message) noexcept try {
  std::string where = failure.op;
  if (failure.position >= 0) {
    try {
      where += ": " + argument_name(failure);
    } catch (const py::error_already_set& e) {
      if (stays_what_it_is(e.type().ptr())) throw;
      where += ": argument " + std::to_string(failure.position + 1);
    }
  }
  PyErr_SetString(type, (where + ": " + message).c_str());
} catch (py::error_already_set& e) {
  e.restore();
} catch (const std::exception&) {
  PyErr_NoMemory();
}

void raise_failure(const Failure& failure) noexcept try {
  try {
    throw;
  } catch (py::error_already_set& e) {
    if (stays_what_it_is(e.type().ptr())) return e.restore();
    // a framework's own refusal: its type of error, without its C++ trace
    PyObject* type = e.matches(PyExc_TypeError)             ? PyExc_TypeError
                     : e.matches(PyExc_NotImplementedError) ? PyExc_NotImplementedError
                     : e.matches(PyExc_RuntimeError)        ? PyExc_RuntimeError
                                                            : PyExc_ValueError;
    std::string message = py::str(e.value());
    message = message.substr(0, message.find('\n'));
    raise_at(failure, type, message);
  } catch (const ForDispatcher& e) {
    raise_at(failure, for_dispatcher, e.what());
  } catch (const py::type_error& e) {
    raise_at(failure, PyExc_TypeError, e.what());
  } catch (const py::value_error& e) {
    raise_at(failure, PyExc_ValueError, e.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    raise_at(failure, PyExc_RuntimeError, e.what());
  }
} catch (py::error_already_set& e) {  // raised by what tells the message
  if (stays_what_it_is(e.type().ptr())) return e.restore();
  raise_at(failure, PyExc_ValueError, "has an error without a text");
} catch (...) {
  PyErr_NoMemory();
}

PyObject* error_type(pykv_status status) {
  return status == PYKV_VALUE_ERROR       ? PyExc_ValueError
         : status == PYKV_TYPE_ERROR      ? PyExc_TypeError
         : status == PYKV_NOT_IMPLEMENTED ? PyExc_NotImplementedError
                                          : PyExc_RuntimeError;
}

void raise_status(pykv_status status) { PyErr_SetString(error_type(status), pykv_last_error()); }

}  // namespace pykv::python
