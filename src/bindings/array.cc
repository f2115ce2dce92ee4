#include "array.h"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/numpy.h>

#include <cfenv>
#include <string>
#include <unordered_map>

#include "failure.h"
#include "pointer_map.h"

namespace pykv::python {
namespace {

[[noreturn]] void type_error(const std::string& message) { throw py::type_error(message); }
[[noreturn]] void value_error(const std::string& message) { throw py::value_error(message); }

[[noreturn]] void fail_rank(int64_t ndim) { value_error(too_many_dimensions(ndim)); }
inline void check_rank(int64_t ndim) {
  if (ndim > kMaxRank) fail_rank(ndim);
}

[[noreturn]] void fail_stride(int64_t stride, int64_t itemsize) {
  value_error("strides must be multiples of the element size of " + std::to_string(itemsize) + " bytes, got " +
              std::to_string(stride));
}

PyObject* type_of(const py::object& object) { return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())); }

void refuse_requires_grad(PyObject* tensor, const Attribute& requires_grad) {
  if (requires_grad && requires_grad.of(tensor).ptr() == Py_True) value_error(kRequiresGrad);
}

// Of a tensor that the shim of torch has not read; of other arrays nothing is asked.
void refuse_negative_view(PyObject* object, const TypeInfo& info) {
  if (info.requires_grad && py::handle(object).attr("is_neg")().ptr() == Py_True) value_error(kNegativeView);
}

}  // namespace

namespace {

// Of dtypes that others than NumPy have made, such as ml_dtypes.  Of float16, too, there may be any number of objects: each array
// out of a pickle brings its own.  Known by the type of their scalars, of which there is one.
DLDataType dtype_by_name(PyObject* dtype) {
  static PointerMap<DLDataType> dtypes;
  PyObject* scalar = py::detail::array_descriptor_proxy(dtype)->typeobj;
  if (const DLDataType* known = dtypes.find(scalar)) return *known;
  static const std::unordered_map<std::string, DLDataType> names = {
      {"bfloat16", {kDLBfloat, 16, 1}},
      {"float8_e4m3fn", {kDLFloat8_e4m3fn, 8, 1}},
      {"float8_e5m2", {kDLFloat8_e5m2, 8, 1}},
  };
  py::handle d(dtype);
  const std::string name = py::str(d.attr("name"));
  const auto known = names.find(name);
  if (known == names.end() || py::cast<int>(d.attr("itemsize")) * 8 != known->second.bits)
    type_error("dtype '" + name + "' is not supported");
  return dtypes.add(scalar, known->second, [scalar] { Py_INCREF(scalar); });
}

// NumPy's own dtypes have numbers for ever.
DLDataType dtype_of(PyObject* dtype) {
  static constexpr DLDataType kKnown[] = {
      {kDLBool, 8, 1},  {kDLInt, 8, 1},    {kDLUInt, 8, 1},   {kDLInt, 16, 1},  {kDLUInt, 16, 1},
      {kDLInt, 32, 1},  {kDLUInt, 32, 1},  {kDLInt, 64, 1},   {kDLUInt, 64, 1}, {kDLInt, 64, 1},
      {kDLUInt, 64, 1}, {kDLFloat, 32, 1}, {kDLFloat, 64, 1},
  };
  static_assert(sizeof(long) == 8, "NumPy's numbers 7 and 8 are those of long");
  constexpr int kHalf = 23;
  const auto* descr = py::detail::array_descriptor_proxy(dtype);
  if (descr->byteorder != '=' && descr->byteorder != '|') [[unlikely]]
    type_error("dtype '" + std::string(py::str(py::handle(dtype))) + "' is not in native byte order");
  if (static_cast<size_t>(descr->type_num) < std::size(kKnown)) return kKnown[descr->type_num];
  if (descr->type_num == kHalf) return {kDLFloat, 16, 1};
  return dtype_by_name(dtype);
}

}  // namespace

DLDataType dtype_from_numpy(PyObject* dtype) {
  if (!py::isinstance<py::dtype>(py::handle(dtype)))
    type_error("a dtype of NumPy is required, got " + std::string(Py_TYPE(dtype)->tp_name));
  return dtype_of(dtype);
}

// The call may have failed already, and the deleter may be Python's.
void release_capsule(PyObject* capsule) {
  const ErrorKept kept;
  if (PyCapsule_IsValid(capsule, "used_dltensor_versioned")) {
    auto* m = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, "used_dltensor_versioned"));
    if (m->deleter) m->deleter(m);
  } else if (PyCapsule_IsValid(capsule, "used_dltensor")) {
    auto* m = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "used_dltensor"));
    if (m->deleter) m->deleter(m);
  }
  Py_DECREF(capsule);
}

bool Array::borrow_other(PyObject* object, const TypeInfo& info, CurrentStreams& streams, bool written) {
  written_ = written;
  pending_ = nullptr;
  producer_ = {};
  if (written && info.immutable)
    value_error(
        "an array of JAX or MLX cannot be written in place: its buffer may be shared; give one of NumPy, CuPy or "
        "torch");
  switch (info.protocol) {
    case Protocol::kPointer:
      tensor_ = pointer_tensor(object, written);
      return on_cuda();
    case Protocol::kTorch:
      return borrow_torch(object, info, streams);
    case Protocol::kExchange:
      refuse_negative_view(object, info);
      if (written_) refuse_requires_grad(object, info.requires_grad);
      borrow_exchange(object, info.api, streams);
      return producer_.known;
    case Protocol::kCupy:
      if (!info.cupy || !borrow_cupy(object, *info.cupy, streams)) borrow_cupy(object, info, streams);
      producer_ = streams.cupy;
      return true;
    case Protocol::kDlpack:
      if (written_) refuse_requires_grad(object, info.requires_grad);
      pending_ = object;
      return true;
    case Protocol::kCudaInterface:
      borrow_cuda_interface(object);
      return true;
    case Protocol::kDispatcher:
      throw ForDispatcher("a " + std::string(Py_TYPE(object)->tp_name) +
                          " goes through torch's dispatcher: import pykv.torch");
    case Protocol::kNumpy:  // borrow() has done it
      break;
    case Protocol::kNone:
      if (borrow_number(object)) return false;
      type_error(
          "an array (NumPy, CuPy, torch, JAX, or anything with __dlpack__ or __cuda_array_interface__) is required, "
          "got " +
          std::string(Py_TYPE(object)->tp_name));
  }
  return false;
}

// A Python number stands for a scale: a scalar float32 on the host.
bool Array::borrow_number(PyObject* object) {
  if (!PyNumber_Check(object)) return false;
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) {
    forget_error();
    return false;
  }
  if (written_) type_error("an array is required, got a number");
  set_number(value);
  return true;
}

float nearest_float(double value) {
  std::fenv_t before;
  std::fegetenv(&before);
  std::fesetenv(FE_DFL_ENV);
  const volatile double asked = value;  // volatile: the conversion stays between the two
  const volatile float rounded = static_cast<float>(asked);
  std::fesetenv(&before);
  return rounded;
}

// By loops: calls of memcpy take longer for so little.
void Array::keep_shape() {
  const int ndim = tensor_.ndim;
  check_rank(ndim);
  for (int i = 0; i < ndim; ++i) shape_[i] = tensor_.shape[i];
  tensor_.shape = shape_;
  if (!tensor_.strides) return;
  for (int i = 0; i < ndim; ++i) strides_[i] = tensor_.strides[i];
  tensor_.strides = strides_;
}

void check_strides(int ndim, const int64_t* sizes, const int64_t* strides, int64_t itemsize) {
  for (int i = 0; i < ndim; ++i)
    if (strides[i] % itemsize != 0 && sizes[i] > 1) fail_stride(strides[i], itemsize);
}

// Strides in bytes, elsewhere than our own.  Element sizes are powers of two; divisions are what a call with eight arrays
// would notice.
[[gnu::always_inline]] inline void Array::take_layout(const int64_t* sizes, const int64_t* strides) {
  const int log2 = __builtin_ctz(tensor_.dtype.bits) - 3;
  int64_t any = 0;
  for (int i = 0; i < tensor_.ndim; ++i) {
    any |= strides[i];
    shape_[i] = sizes[i];
    strides_[i] = strides[i] >> log2;
  }
  const int64_t itemsize = int64_t{1} << log2;
  if (any & (itemsize - 1)) [[unlikely]]
    check_strides(tensor_.ndim, sizes, strides, itemsize);
  tensor_.strides = strides_;
}

void Array::borrow_numpy(PyObject* object, bool written) {
  const auto* a = py::detail::array_proxy(object);
  if (written && !(a->flags & py::detail::npy_api::NPY_ARRAY_WRITEABLE_))
    value_error("is read-only, but it is written");
  check_rank(a->nd);
  tensor_ = {a->data, {kDLCPU, 0}, a->nd, dtype_of(a->descr), shape_, strides_, 0};
  take_layout(a->dimensions, a->strides);
}

// What the shim cannot read, others tell more about.
bool Array::borrow_torch(PyObject* object, const TypeInfo& info, CurrentStreams& streams) {
  void* tensor = info.torch->tensor_of(object);
  if (!tensor || info.torch->read(tensor, tensor_)) {
    if (!tensor || info.torch->is_negative(tensor)) refuse_negative_view(object, info);
    if (written_) refuse_requires_grad(object, info.requires_grad);
    if (!info.api) {
      pending_ = object;
      return true;
    }
    borrow_exchange(object, info.api, streams);
    return producer_.known;
  }
  if (written_ && info.torch->requires_grad(tensor)) value_error(kRequiresGrad);
  keep_shape();
  if (tensor_.device.device_type == kDLCPU) return false;
  const int32_t device = tensor_.device.device_id;
  if (!streams.torch.known || streams.torch_device != device) {
    streams.torch.known = info.torch->current_stream(device, &streams.torch.stream);
    if (!streams.torch.known) throw std::runtime_error("torch does not tell its current stream");
    streams.torch_device = device;
  }
  producer_ = streams.torch;
  return true;
}

void Array::borrow_exchange(PyObject* object, const DLPackExchangeAPI* api, CurrentStreams& streams) {
  if (api->dltensor_from_py_object_no_sync(object, &tensor_) != 0) throw py::error_already_set();
  keep_shape();
  if (!on_cuda()) return;
  const DLDevice device = tensor_.device;
  const DLDevice known = streams.device;
  if (streams.api != api || known.device_type != device.device_type || known.device_id != device.device_id) {
    if (api->current_work_stream(device.device_type, device.device_id, &streams.stream) != 0)
      throw py::error_already_set();
    streams.api = api;
    streams.device = device;
  }
  producer_ = {true, streams.stream};
}

bool Array::borrow_cupy(PyObject* object, const CupyStruct& cupy, CurrentStreams& streams) {
  CupyStruct::Fields fields;
  if (!cupy.read(object, fields)) return false;
  check_rank(fields.ndim);
  tensor_ = {
      fields.pointer, {kDLCUDA, fields.device}, fields.ndim, dtype_from_numpy(fields.dtype), shape_, strides_, 0};
  take_layout(fields.sizes, fields.strides);
  if (!streams.cupy.known) streams.cupy = {true, cupy.current_stream()};
  return true;
}

void Array::borrow_cupy(PyObject* object, const TypeInfo& info, CurrentStreams& streams) {
  const py::object memory = info.data.of(object);
  struct OfMemory {
    Attribute pointer, device_id;
  };
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<OfMemory> of_memory;
  of_memory.call_once_and_store_result(
      [&memory] { return OfMemory{{type_of(memory), "ptr"}, {type_of(memory), "device_id"}}; });
  const auto& [pointer, device_id] = of_memory.get_stored();
  const py::tuple sizes = info.shape.of(object), steps = info.strides.of(object);
  const int ndim = static_cast<int>(sizes.size());
  check_rank(ndim);
  tensor_ = {PyLong_AsVoidPtr(pointer.of(memory.ptr()).ptr()),
             {kDLCUDA, static_cast<int32_t>(PyLong_AsLong(device_id.of(memory.ptr()).ptr()))},
             ndim,
             dtype_from_numpy(info.dtype.of(object).ptr()),
             shape_,
             strides_,
             0};
  int64_t shape[kMaxRank], strides[kMaxRank];
  for (int i = 0; i < ndim; ++i) {
    shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
    strides[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(steps.ptr(), i));
  }
  if (PyErr_Occurred()) throw py::error_already_set();
  take_layout(shape, strides);
  if (!streams.cupy.known) {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> current_stream;
    current_stream.call_once_and_store_result(
        [] { return py::object(py::module_::import("cupy").attr("cuda").attr("get_current_stream")); });
    const py::object stream = current_stream.get_stored()();
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Attribute> stream_pointer;
    stream_pointer.call_once_and_store_result([&stream] { return Attribute(type_of(stream), "ptr"); });
    streams.cupy = {true, PyLong_AsVoidPtr(stream_pointer.get_stored().of(stream.ptr()).ptr())};
  }
}

void Array::borrow_cuda_interface(PyObject* object) {
  const py::dict face = py::handle(object).attr("__cuda_array_interface__");
  const py::tuple memory = face["data"];
  if (written_ && py::cast<bool>(memory[1])) value_error("is read-only, but it is written");
  const py::tuple sizes = face["shape"];
  const int ndim = static_cast<int>(sizes.size());
  check_rank(ndim);
  const py::object dtype = py::module_::import("numpy").attr("dtype")(face["typestr"]);
  tensor_ = {reinterpret_cast<void*>(py::cast<uintptr_t>(memory[0])),
             {kDLCUDA, 0},
             ndim,
             dtype_from_numpy(dtype.ptr()),
             shape_,
             nullptr,
             0};
  for (int i = 0; i < ndim; ++i) shape_[i] = py::cast<int64_t>(sizes[i]);
  if (face.contains("strides") && !face["strides"].is_none()) {
    const py::tuple steps = face["strides"];
    int64_t strides[kMaxRank];
    for (int i = 0; i < ndim; ++i) strides[i] = py::cast<int64_t>(steps[i]);
    take_layout(shape_, strides);
  }
  // the interface names no device: the owner may (Numba: context.device.id)
  if (py::hasattr(py::handle(object), "gpu_data")) {
    const py::object context = py::handle(object).attr("gpu_data").attr("context");
    tensor_.device.device_id = py::cast<int32_t>(context.attr("device").attr("id"));
  }
  if (face.contains("stream") && !face["stream"].is_none())
    producer_ = {true, reinterpret_cast<void*>(py::cast<uintptr_t>(face["stream"]))};
}

// By `__dlpack__`.
void Array::ask(bool stream_known, void* stream) {
  py::handle object(pending_);
  pending_ = nullptr;
  const py::object device = object.attr("__dlpack_device__")();
  if (!PyTuple_Check(device.ptr()) || PyTuple_GET_SIZE(device.ptr()) != 2)
    type_error("__dlpack_device__ must give a tuple (type, id), got " + std::string(Py_TYPE(device.ptr())->tp_name));
  const long type = PyLong_AsLong(PyTuple_GET_ITEM(device.ptr(), 0));
  if (type == -1 && PyErr_Occurred()) throw py::error_already_set();
  py::dict options;
  if (type == kDLCUDA || type == kDLCUDAManaged) {
    // CUDA's own numbers: 1 is the legacy default stream, 0 may not be used
    const auto number = reinterpret_cast<uintptr_t>(stream);
    if (stream_known) options["stream"] = number ? number : 1;
  }
  py::dict versioned = options.attr("copy")();
  versioned["max_version"] = py::make_tuple(DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION);
  versioned["copy"] = false;
  py::object capsule;
  try {
    capsule = object.attr("__dlpack__")(**versioned);
  } catch (py::error_already_set& e) {
    if (!e.matches(PyExc_TypeError)) throw;
    capsule = object.attr("__dlpack__")(**options);  // a producer of before DLPack 1.0
  }
  uint64_t flags = 0;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* m = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    owner_ = capsule.release().ptr();
    if (m->version.major != DLPACK_MAJOR_VERSION)
      value_error("exports DLPack version " + std::to_string(m->version.major) + ", which is not known here");
    flags = m->flags;
    tensor_ = m->dl_tensor;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    auto* m = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    owner_ = capsule.release().ptr();
    tensor_ = m->dl_tensor;
  } else {
    type_error("__dlpack__ gave no DLPack capsule");
  }
  keep_shape();
  if (written_ && (flags & DLPACK_FLAG_BITMASK_READ_ONLY)) value_error("is read-only, but it is written");
  if (written_ && (flags & DLPACK_FLAG_BITMASK_IS_COPIED))
    value_error("was copied by its producer, so that a write would be lost");
}

namespace {

// Of a stream that is an int; errors of Python are thrown.
StreamChoice stream_of_number(PyObject* number) {
  void* stream = PyLong_AsVoidPtr(number);
  if (PyErr_Occurred()) throw py::error_already_set();
  return {true, stream};
}

py::object attribute_or_null(PyObject* object, const char* name) {
  PyObject* found = PyObject_GetAttrString(object, name);
  if (!found) forget_error();
  return py::reinterpret_steal<py::object>(found);
}

}  // namespace

StreamChoice stream_from(PyObject* object) {
  if (PyLong_Check(object)) return stream_of_number(object);
  if (const py::object protocol = attribute_or_null(object, "__cuda_stream__")) {
    const py::object pair = protocol();
    if (!PyTuple_Check(pair.ptr()) || PyTuple_GET_SIZE(pair.ptr()) != 2)
      type_error("__cuda_stream__ must give a tuple (version, address), got " +
                 std::string(Py_TYPE(pair.ptr())->tp_name));
    return stream_of_number(PyTuple_GET_ITEM(pair.ptr(), 1));
  }
  for (const char* name : {"cuda_stream", "ptr"})  // torch, CuPy
    if (const py::object address = attribute_or_null(object, name)) return stream_of_number(address.ptr());
  type_error("must be an int or a stream of CuPy, torch or cuda.core, got " + std::string(Py_TYPE(object)->tp_name));
}

}  // namespace pykv::python
