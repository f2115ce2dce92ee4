// pykv.Pointer: memory that some other code owns, described by hand.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "array.h"
#include "failure.h"

namespace pykv::python {
namespace {

struct Pointer {
  DLTensor tensor;
  std::vector<int64_t> shape, strides;
  py::object owner;
  bool read_only;
};

PyTypeObject* pointer_type = nullptr;

// pybind11 would give memory that nobody has written for an object whose __init__ was not called.
const Pointer& pointer_of(PyObject* object) {
  auto value = reinterpret_cast<py::detail::instance*>(object)->get_value_and_holder();
  if (!value.holder_constructed()) throw py::value_error("is a Pointer to nothing: pykv.from_pointer makes them");
  return *static_cast<const Pointer*>(value.value_ptr());
}

std::vector<int64_t> compact_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  uint64_t compact = 1;  // of shapes that do not fit into int64 calls and exports complain
  for (size_t i = shape.size(); i-- > 0; compact *= static_cast<uint64_t>(shape[i]))
    strides[i] = static_cast<int64_t>(compact);
  return strides;
}

[[noreturn]] void buffer_error(const char* message) {
  PyErr_SetString(PyExc_BufferError, message);
  throw py::error_already_set();
}

int64_t bytes_of(const Pointer& p) {
  int64_t bytes = p.tensor.dtype.bits / 8;
  for (const int64_t size : p.shape)
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes))
      buffer_error("the shape is negative or has more bytes than int64 can count");
  return bytes;
}

// What a capsule holds: the Pointer, and so its owner, or a copy of the memory.
struct Content {
  PyObject* self = nullptr;
  std::vector<int64_t> shape, strides;
  std::unique_ptr<char[]> copied;

  Content() = default;
  Content(const Content&) = delete;
  Content& operator=(const Content&) = delete;
  ~Content() { Py_XDECREF(self); }
};

// The elements of the axes from `axis` on, one after another.
char* copy_elements(const Pointer& p, size_t axis, const char* from, char* to) {
  const int64_t item = p.tensor.dtype.bits / 8;
  if (axis == p.shape.size()) return static_cast<char*>(std::memcpy(to, from, item)) + item;
  for (int64_t i = 0; i < p.shape[axis]; ++i) to = copy_elements(p, axis + 1, from + i * p.strides[axis] * item, to);
  return to;
}

DLTensor fill(Content& content, const Pointer& p, py::handle self, bool copy) {
  DLTensor tensor = p.tensor;
  const int64_t bytes = bytes_of(p);
  if (bytes > 0 && !tensor.data) buffer_error("has a shape, but no memory");
  if (copy) {
    content.copied = std::make_unique<char[]>(static_cast<size_t>(std::max<int64_t>(bytes, 1)));
    if (bytes > 0) copy_elements(p, 0, static_cast<const char*>(tensor.data), content.copied.get());
    tensor.data = content.copied.get();
    content.strides = compact_strides(p.shape);
  } else {
    content.self = self.inc_ref().ptr();
    content.strides = p.strides;
  }
  content.shape = p.shape;
  tensor.shape = content.shape.data();
  tensor.strides = content.strides.data();
  return tensor;
}

// Managed: DLManagedTensorVersioned, or DLManagedTensor for consumers of before DLPack 1.0.
template <class Managed>
struct Export {
  Managed managed{};
  Content content;
};

template <class Managed>
py::object capsule_of(std::unique_ptr<Export<Managed>> holder, const char* name) {
  Managed& managed = holder->managed;
  managed.manager_ctx = holder.get();
  managed.deleter = [](Managed* m) {
    const py::gil_scoped_acquire gil;
    const ErrorKept kept;
    delete static_cast<Export<Managed>*>(m->manager_ctx);
  };
  PyObject* capsule = PyCapsule_New(&managed, name, [](PyObject* c) {
    const char* left = PyCapsule_GetName(c);  // another one once it was consumed
    if (std::strncmp(left, "used", 4) == 0) return;
    auto* m = static_cast<Managed*>(PyCapsule_GetPointer(c, left));
    m->deleter(m);
  });
  if (!capsule) throw py::error_already_set();
  holder.release();
  return py::reinterpret_steal<py::object>(capsule);
}

// Memory has no stream of its own: whoever gave the pointer has ordered what is done with it.
py::object export_dlpack(const py::object& self, const py::object&, std::optional<std::pair<int, int>> max_version,
                         std::optional<std::pair<int, int>> dl_device, std::optional<bool> copy) {
  const Pointer& p = pointer_of(self.ptr());
  const DLDevice device = p.tensor.device;
  const bool must_copy = copy.value_or(false);
  if (dl_device && *dl_device != std::pair<int, int>(device.device_type, device.device_id))
    buffer_error("lies on another device than dl_device, and is not moved");
  if (must_copy && device.device_type != kDLCPU) buffer_error("is not copied on a GPU: let the consumer do it");
  if (max_version && max_version->first >= 1) {
    auto holder = std::make_unique<Export<DLManagedTensorVersioned>>();
    holder->managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    holder->managed.flags = must_copy ? DLPACK_FLAG_BITMASK_IS_COPIED : p.read_only ? DLPACK_FLAG_BITMASK_READ_ONLY : 0;
    holder->managed.dl_tensor = fill(holder->content, p, self, must_copy);
    return capsule_of(std::move(holder), "dltensor_versioned");
  }
  if (p.read_only && !must_copy) buffer_error("is read-only, which DLPack can say from version 1.0 on");
  auto holder = std::make_unique<Export<DLManagedTensor>>();
  holder->managed.dl_tensor = fill(holder->content, p, self, must_copy);
  return capsule_of(std::move(holder), "dltensor");
}

std::unique_ptr<Pointer> make(uintptr_t address, std::vector<int64_t> shape, const py::object& dtype, int device_type,
                              int device_id, std::optional<std::vector<int64_t>> strides, py::object owner,
                              bool read_only) {
  if (shape.size() > kMaxRank)
    throw py::value_error("shape: " + too_many_dimensions(static_cast<int64_t>(shape.size())));
  if (strides && strides->size() != shape.size())
    throw py::value_error("strides: must have one entry for each dimension");
  auto p = std::make_unique<Pointer>();
  p->strides = strides ? std::move(*strides) : compact_strides(shape);
  p->shape = std::move(shape);
  p->owner = std::move(owner);
  p->read_only = read_only;
  p->tensor = {reinterpret_cast<void*>(address),
               {static_cast<DLDeviceType>(device_type), device_id},
               static_cast<int32_t>(p->shape.size()),
               dtype_from_numpy(dtype.ptr()),
               p->shape.data(),
               p->strides.data(),
               0};
  return p;
}

// An array that operations check as they would check this one, and then leave alone: they write into its memory as little as they
// read it.  Such a device has its ordinal, and the host has -1.
py::object untouched(const py::object& array, bool written, const std::string& op, int position) {
  const Failure at{op.c_str(), position};
  try {
    Array borrowed;
    CurrentStreams streams;
    if (borrowed.borrow(array.ptr(), type_info(Py_TYPE(array.ptr())), streams, written))
      borrowed.finish(false, nullptr);
    const DLTensor& t = borrowed.tensor();
    auto p = std::make_unique<Pointer>();
    p->shape.assign(t.shape, t.shape + t.ndim);
    p->strides = t.strides ? std::vector<int64_t>(t.strides, t.strides + t.ndim) : compact_strides(p->shape);
    p->tensor = t;
    p->tensor.device = {kDLExtDev, borrowed.on_cuda() ? t.device.device_id : -1};
    p->tensor.shape = p->shape.data();
    p->tensor.strides = p->strides.data();
    p->read_only = false;
    return py::cast(std::move(p));
  } catch (...) {
    raise_failure(at);
  }
  throw py::error_already_set();
}

}  // namespace

bool is_pointer(PyObject* type) { return reinterpret_cast<PyTypeObject*>(type) == pointer_type; }

const DLTensor& pointer_tensor(PyObject* object, bool written) {
  const Pointer& p = pointer_of(object);
  if (written && p.read_only) throw py::value_error("is read-only, but it is written");
  return p.tensor;
}

void bind_pointer(py::module_& m) {
  py::class_<Pointer> type(m, "Pointer", "Raw memory with a shape and a dtype; see pykv.from_pointer.");
  type.def(py::init(&make), py::arg("address"), py::arg("shape"), py::arg("dtype"), py::arg("device_type"),
           py::arg("device_id"), py::arg("strides") = py::none(), py::arg("owner") = py::none(),
           py::arg("read_only") = false);
  const auto property = [&type](const char* name, auto of) {
    type.def_property_readonly(name, [of](const py::object& self) { return of(pointer_of(self.ptr())); });
  };
  property("shape", [](const Pointer& p) { return py::tuple(py::cast(p.shape)); });
  property("strides", [](const Pointer& p) { return py::tuple(py::cast(p.strides)); });
  property("address", [](const Pointer& p) { return reinterpret_cast<uintptr_t>(p.tensor.data); });
  property("read_only", [](const Pointer& p) { return p.read_only; });
  type.def("__dlpack_device__", [](const py::object& self) {
    const DLDevice device = pointer_of(self.ptr()).tensor.device;
    return py::make_tuple(static_cast<int>(device.device_type), device.device_id);
  });
  type.def("__dlpack__", &export_dlpack, py::kw_only(), py::arg("stream") = py::none(),
           py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(), py::arg("copy") = py::none());
  pointer_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  m.def("untouched", &untouched, py::arg("array"), py::arg("written"), py::arg("op"), py::arg("position"));
}

}  // namespace pykv::python
