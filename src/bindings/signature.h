// The parameters of a callable of C, and how a call's arguments become one value for each of them.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "op.h"

namespace pykv::python {

// Lives as long as the process, and so do the names and the defaults.
class Signature {
 public:
  PyObject** names = nullptr;     // interned
  PyObject** left_out = nullptr;  // for each parameter what stands for it where it is not given; null: it is required
  Py_ssize_t count = 0, num_positional = 0;
  uint32_t required = 0;  // a bit for each parameter

  // defaults: by name, of those that have one.
  void set(const pybind11::tuple& of, Py_ssize_t positional, const pybind11::dict& defaults) {
    count = static_cast<Py_ssize_t>(of.size());
    num_positional = positional;
    names = new PyObject*[of.size()]();
    left_out = new PyObject*[of.size()]();
    for (size_t i = 0; i < of.size(); ++i) {
      const pybind11::object name = of[i];
      names[i] = pybind11::object(name).release().ptr();
      PyUnicode_InternInPlace(&names[i]);
      if (defaults.contains(name))
        left_out[i] = pybind11::object(defaults[name]).release().ptr();
      else
        required |= uint32_t{1} << i;
    }
  }

  // False: these are not the arguments of such a call.
  bool match(PyObject* const* args, Py_ssize_t num_given, PyObject* keywords, PyObject** values,
             uint32_t& given) const {
    if (num_given > num_positional) return false;
    std::copy_n(args, num_given, values);
    std::copy(left_out + num_given, left_out + count, values + num_given);
    given = (uint32_t{1} << num_given) - 1;
    if (keywords) {
      Py_ssize_t next = num_given;
      for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(keywords); ++k) {
        const Py_ssize_t i = find(PyTuple_GET_ITEM(keywords, k), next);
        if (i < 0 || (given >> i & 1)) return false;
        values[i] = args[num_given + k];
        given |= uint32_t{1} << i;
        next = i + 1;
      }
    }
    return !(required & ~given);
  }

 private:
  // As a rule names are interned on both sides, and keywords come in the order of the parameters.
  Py_ssize_t find(PyObject* keyword, Py_ssize_t from) const {
    for (Py_ssize_t i = from; i < count; ++i)
      if (names[i] == keyword) return i;
    for (Py_ssize_t i = 0; i < from; ++i)
      if (names[i] == keyword) return i;
    for (Py_ssize_t i = 0; i < count; ++i)
      if (PyUnicode_Compare(names[i], keyword) == 0) return i;
    return -1;
  }
};

}  // namespace pykv::python
