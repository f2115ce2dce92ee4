// pykv.Pointer: memory that some other code owns, described by hand.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <vector>

#include "array.h"

namespace pykv::python {
namespace {

struct Pointer {
  DLTensor tensor;
  std::vector<int64_t> shape, strides;
  py::object owner;
};

PyTypeObject* pointer_type = nullptr;

// A capsule that keeps the Pointer (and so its owner) alive until its consumer is done.
struct Export {
  DLManagedTensorVersioned managed;
  PyObject* self;
};

py::object export_dlpack(py::object self) {
  const Pointer& p = py::cast<const Pointer&>(self);
  auto holder = std::make_unique<Export>();
  holder->managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  holder->managed.manager_ctx = holder.get();
  holder->managed.flags = 0;
  holder->managed.dl_tensor = p.tensor;
  holder->managed.deleter = [](DLManagedTensorVersioned* m) {
    const py::gil_scoped_acquire gil;
    auto* e = static_cast<Export*>(m->manager_ctx);
    Py_DECREF(e->self);
    delete e;
  };
  holder->self = self.ptr();
  PyObject* capsule = PyCapsule_New(&holder->managed, "dltensor_versioned", [](PyObject* c) {
    if (!PyCapsule_IsValid(c, "dltensor_versioned")) return;  // consumed
    auto* m = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(c, "dltensor_versioned"));
    m->deleter(m);
  });
  if (!capsule) throw py::error_already_set();
  holder.release()->self = self.release().ptr();
  return py::reinterpret_steal<py::object>(capsule);
}

}  // namespace

bool is_pointer(PyObject* type) { return reinterpret_cast<PyTypeObject*>(type) == pointer_type; }

const DLTensor& pointer_tensor(PyObject* object) { return py::cast<const Pointer&>(py::handle(object)).tensor; }

void bind_pointer(py::module_& m) {
  py::class_<Pointer> type(m, "Pointer", "Raw memory with a shape and a dtype; see pykv.from_pointer.");
  type.def(py::init([](uintptr_t address, std::vector<int64_t> shape, py::object dtype, int device_type, int device_id,
                       std::optional<std::vector<int64_t>> strides, py::object owner) {
             auto p = std::make_unique<Pointer>();
             p->shape = std::move(shape);
             if (strides) {
               if (strides->size() != p->shape.size())
                 throw py::value_error("strides: must have one entry for each dimension");
               p->strides = std::move(*strides);
             } else {
               p->strides.resize(p->shape.size());
               int64_t compact = 1;
               for (size_t i = p->shape.size(); i-- > 0; compact *= p->shape[i]) p->strides[i] = compact;
             }
             if (p->shape.size() > kMaxRank) throw py::value_error("shape: at most 8 dimensions are supported");
             p->owner = std::move(owner);
             p->tensor = {reinterpret_cast<void*>(address),
                          {static_cast<DLDeviceType>(device_type), device_id},
                          static_cast<int32_t>(p->shape.size()),
                          dtype_from_numpy(dtype.ptr()),
                          p->shape.data(),
                          p->strides.data(),
                          0};
             return p;
           }),
           py::arg("address"), py::arg("shape"), py::arg("dtype"), py::arg("device_type"), py::arg("device_id"),
           py::arg("strides") = py::none(), py::arg("owner") = py::none());
  type.def_property_readonly("shape", [](const Pointer& p) { return py::tuple(py::cast(p.shape)); });
  type.def_property_readonly("strides", [](const Pointer& p) { return py::tuple(py::cast(p.strides)); });
  type.def_property_readonly("address", [](const Pointer& p) { return reinterpret_cast<uintptr_t>(p.tensor.data); });
  type.def("__dlpack_device__", [](const Pointer& p) {
    return py::make_tuple(static_cast<int>(p.tensor.device.device_type), p.tensor.device.device_id);
  });
  type.def("__dlpack__", [](py::object self, const py::kwargs&) { return export_dlpack(std::move(self)); });
  pointer_type = reinterpret_cast<PyTypeObject*>(type.ptr());
}

}  // namespace pykv::python
