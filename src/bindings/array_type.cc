#include "array_type.h"

#include <pybind11/gil_safe_call_once.h>

#include <string>

#include "array.h"
#include "failure.h"
#include "pointer_map.h"

namespace pykv::python {
namespace {

PyObject* interned(const char* name) {
  PyObject* s = PyUnicode_InternFromString(name);
  if (!s) throw py::error_already_set();
  return s;
}

bool has_attribute(PyObject* object, const char* name) {
  PyObject* found = PyObject_GetAttrString(object, name);
  if (!found) forget_error();
  Py_XDECREF(found);
  return found;
}

const DLPackExchangeAPI* exchange_api(PyTypeObject* type) {
  PyObject* found = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (!found) {
    forget_error();
    return nullptr;
  }
  py::object capsule = py::reinterpret_steal<py::object>(found);
  if (!PyCapsule_IsValid(found, "dlpack_exchange_api")) return nullptr;
  auto* header = static_cast<DLPackExchangeAPIHeader*>(PyCapsule_GetPointer(found, "dlpack_exchange_api"));
  while (header && header->version.major > DLPACK_MAJOR_VERSION) header = header->prev_api;
  if (!header || header->version.major != DLPACK_MAJOR_VERSION) return nullptr;
  auto* api = reinterpret_cast<const DLPackExchangeAPI*>(header);
  return api->dltensor_from_py_object_no_sync ? api : nullptr;
}

TypeInfo inspect(PyTypeObject* type) {
  TypeInfo info;
  PyObject* object = reinterpret_cast<PyObject*>(type);
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> ndarray;
  ndarray.call_once_and_store_result([] { return py::object(py::module_::import("numpy").attr("ndarray")); });
  if (is_pointer(object)) {
    info.protocol = Protocol::kPointer;
    return info;
  }
  if (PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(ndarray.get_stored().ptr()))) {
    info.protocol = Protocol::kNumpy;
    return info;
  }
  bool cupy = false, is_torch = false, takes_dispatch = false;
  for (py::handle base : py::reinterpret_borrow<py::tuple>(type->tp_mro)) {
    if (!has_attribute(base.ptr(), "__module__")) continue;
    const std::string module = py::str(base.attr("__module__")), name = py::str(base.attr("__name__"));
    cupy |= name == "ndarray" && module.rfind("cupy", 0) == 0;
    if (name == "Tensor" && module == "torch") {
      is_torch = true;
      // FakeTensor and its like
      takes_dispatch = !py::handle(object).attr("__torch_dispatch__").is(base.attr("__torch_dispatch__"));
    }
    info.immutable |= (module.rfind("jax", 0) == 0) && (name == "ArrayImpl" || name == "Array" || name == "Tracer");
    info.immutable |= name == "array" && module == "mlx.core";
  }
  if (is_torch) {
    info.requires_grad = {object, "requires_grad"};
    info.torch = TorchShim::get();
  }
  info.api = exchange_api(type);
  if (takes_dispatch) {
    info.protocol = Protocol::kDispatcher;
  } else if (info.torch && info.torch->finds_tensors()) {
    info.protocol = Protocol::kTorch;
  } else if (info.api) {
    info.protocol = Protocol::kExchange;
  } else if (cupy) {
    info.protocol = Protocol::kCupy;
    info.cupy = CupyStruct::of(type);
    info.data = {object, "data"};
    info.shape = {object, "shape"};
    info.strides = {object, "strides"};
    info.dtype = {object, "dtype"};
  } else if (has_attribute(object, "__dlpack__")) {
    info.protocol = Protocol::kDlpack;
  } else if (has_attribute(object, "__cuda_array_interface__")) {
    info.protocol = Protocol::kCudaInterface;
  }
  return info;
}

// Keyed by exact type; the types are kept alive, so that an address never means another one.
PointerMap<TypeInfo> types;

}  // namespace

const TypeInfo& type_info(PyTypeObject* type) {
  if (const TypeInfo* known = types.find(type)) return *known;
  const TypeInfo info = inspect(type);
  if (info.protocol == Protocol::kNumpy && type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
    // classes derived from NumPy's may be made by the thousand, and this is all that is known of them
    static const TypeInfo numpy{.protocol = Protocol::kNumpy};
    return numpy;
  }
  return types.add(type, info, [type] { Py_INCREF(type); });
}

Attribute::Attribute(PyObject* type, const char* name) : name_(interned(name)) {
  PyObject* found = PyObject_GetAttr(type, name_);
  if (!found) {  // each object has its own
    forget_error();
    return;
  }
  if (Py_TYPE(found) == &PyGetSetDescr_Type) {
    owner_ = PyDescr_TYPE(found);
    getter_ = reinterpret_cast<PyGetSetDescrObject*>(found)->d_getset;
  }
  Py_DECREF(found);
}

const char* way_in(PyObject* type) {
  const TypeInfo& info = type_info(reinterpret_cast<PyTypeObject*>(type));
  switch (info.protocol) {
    case Protocol::kPointer:
      return "raw pointer";
    case Protocol::kNumpy:
      return "ndarray struct";
    case Protocol::kTorch:
      return "stable shim of torch";
    case Protocol::kExchange:
      return "DLPack C exchange API";
    case Protocol::kCupy:
      return info.cupy ? "struct of cupy.ndarray" : "attributes of cupy.ndarray";
    case Protocol::kDlpack:
      return "__dlpack__";
    case Protocol::kCudaInterface:
      return "__cuda_array_interface__";
    case Protocol::kDispatcher:
      return "torch's dispatcher";
    case Protocol::kNone:
      return "";
  }
  return "";
}

}  // namespace pykv::python
