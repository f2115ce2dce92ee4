// pykv._C: the C library as positional Python functions.
#include <pybind11/pybind11.h>

#include "array.h"
#include "failure.h"
#include "function.h"
#include "op.h"
#include "pykv/kernels.h"
#include "torch_ops.h"
#include "unlocked.h"

namespace pykv::python {

// Without a GIL, too: what threads share are maps that readers look into without a lock (pointer_map.h), the words of the
// library, which works without the GIL anyway, and the way that calls of an operation go (function.cc), one atomic word.
PYBIND11_MODULE(_C_of_main, m, py::mod_gil_not_used()) {
  bind_failure(m);
  bind_function(m);
  bind_pointer(m);
  m.def("version", pykv_version);
  m.def("has_cuda", pykv_has_cuda);
  m.def("cuda_architectures", pykv_cuda_architectures);
  m.def("cuda_device_count", pykv_cuda_device_count);
  m.def("build_note", pykv_build_note);
  m.def("device_note", pykv_device_note);
  m.def("cpu_isa", pykv_cpu_isa);
  m.def("way_in", [](py::type type) { return py::str(pykv::python::way_in(type.ptr())); });
  m.def("get_num_threads", pykv_get_num_threads);
  m.def("set_num_threads", pykv_set_num_threads);
  m.def("check_errors", [](int device_type, int device_id) {
    pykv_status status;
    {
      const Unlocked unlocked;
      status = pykv_check_errors({static_cast<DLDeviceType>(device_type), device_id});
    }
    if (status == PYKV_OK) return;
    raise_status(status);
    throw py::error_already_set();
  });

  m.def("paged_attention_workspace_size",
        [](int64_t num_tokens, int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
           bool batch_invariant, int32_t device_id) {
          int64_t size = 0;
          const pykv_status status = pykv_paged_attention_workspace_size(num_tokens, num_seqs, num_heads, num_kv_heads,
                                                                         head_size, batch_invariant, device_id, &size);
          if (status != PYKV_OK) {
            raise_status(status);
            throw py::error_already_set();
          }
          return size;
        });

  m.def("paged_attention_plan", pykv_paged_attention_plan);
  m.def("paged_attention_only_plan", pykv_paged_attention_only_plan);
  m.def("paged_attention_kernel", pykv_paged_attention_kernel);
  m.def("paged_attention_plan_for", [](const char* device) {
    if (const pykv_status status = pykv_paged_attention_plan_for(device); status != PYKV_OK) {
      raise_status(status);
      throw py::error_already_set();
    }
  });

  Module ops(m.ptr());
#define PYKV_OPERATION(name) ops.def<pykv_##name>(#name);
#include "operations.inc"  // one for each, of the headers (CMakeLists.txt)
#undef PYKV_OPERATION
  torch_ops::bind(m);
  torch_ops::bind_packet(m);
}

}  // namespace pykv::python

// pybind11 waits for ever in a subinterpreter of Python 3.11 and before; later ones refuse by themselves.
extern "C" PYBIND11_EXPORT PyObject* PyInit__C() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return pykv::python::PyInit__C_of_main();
  PyErr_SetString(PyExc_ImportError, "pykv works in the main interpreter, not in subinterpreters");
  return nullptr;
}
