// What is known of the arrays of a Python type: found out when its first array comes, kept for all later ones.
#pragma once

#include <pybind11/pybind11.h>

#include "cupy_struct.h"
#include "pykv/base.h"
#include "torch_shim.h"

namespace pykv::python {

namespace py = pybind11;

// An attribute that every call reads: by the type's own getter of C, where it has one, without a look-up.
class Attribute {
 public:
  constexpr Attribute() = default;
  Attribute(PyObject* type, const char* name);  // both live for ever
  explicit operator bool() const { return name_; }
  py::object of(PyObject* object) const {
    PyObject* found = getter_ && PyObject_TypeCheck(object, owner_) ? getter_->get(object, getter_->closure)
                                                                    : PyObject_GetAttr(object, name_);
    if (!found) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(found);
  }

 private:
  PyObject* name_ = nullptr;
  PyTypeObject* owner_ = nullptr;  // whose objects the getter takes
  const PyGetSetDef* getter_ = nullptr;
};

enum class Protocol { kNone, kPointer, kNumpy, kTorch, kExchange, kCupy, kDlpack, kCudaInterface, kDispatcher };

// What is known of the arrays of a Python type.
struct TypeInfo {
  Protocol protocol = Protocol::kNone;
  const DLPackExchangeAPI* api = nullptr;
  const TorchShim* torch = nullptr;
  bool immutable = false;     // JAX, MLX: buffers are shared between arrays that look different, or are read later
  Attribute requires_grad{};  // torch, where there is no shim
  const CupyStruct* cupy = nullptr;
  Attribute data{}, shape{}, strides{}, dtype{};  // CuPy, where its struct is not known
};
const TypeInfo& type_info(PyTypeObject* type);

// How arrays of a Python type are borrowed, in words; "" for what is no array.
const char* way_in(PyObject* type);

}  // namespace pykv::python
