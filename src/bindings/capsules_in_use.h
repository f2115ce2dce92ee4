// DLPack capsules of arrays on a GPU that enqueued work still uses.
//
// A capsule keeps its array's memory.  torch and CuPy would use that again in the order of their streams, so that a call could
// let go as soon as its work is enqueued; but they come another way.  JAX, whose arrays come by `__dlpack__`, knows nothing of
// our stream: memory that it gets back goes to its next computation at once.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "pykv/base.h"

namespace pykv::python {

// Takes the capsules over, until what was enqueued on `stream` so far is done; inside a graph capture lets them go.  Those of
// earlier calls whose work is done go now: nothing else looks after them.
void keep_until_done(std::vector<PyObject*> capsules, DLDevice device, void* stream);

}  // namespace pykv::python
