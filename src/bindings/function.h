// The public operations: callables that take what the Python definition they were made from would take.
//
// A definition says names, defaults and text; `pykv._C` has a positional function of C for each.  Between the two a frame
// of Python would cost as much as reading four arrays, and more where keywords are given: so nothing of Python is between.
#pragma once

#include <pybind11/pybind11.h>

namespace pykv::python {

// Adds the type of these callables, and make_function(), to the module.
void bind_function(pybind11::module_& m);

}  // namespace pykv::python
