#include "torch_shim.h"

#include <dlfcn.h>
#include <pybind11/gil_safe_call_once.h>

#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace pykv::python {
namespace {

namespace py = pybind11;

constexpr std::pair<const char*, DLDataType> kDtypes[] = {
    {"aoti_torch_dtype_float64", {kDLFloat, 64, 1}},
    {"aoti_torch_dtype_float32", {kDLFloat, 32, 1}},
    {"aoti_torch_dtype_float16", {kDLFloat, 16, 1}},
    {"aoti_torch_dtype_bfloat16", {kDLBfloat, 16, 1}},
    {"aoti_torch_dtype_float8_e4m3fn", {kDLFloat8_e4m3fn, 8, 1}},
    {"aoti_torch_dtype_float8_e5m2", {kDLFloat8_e5m2, 8, 1}},
    {"aoti_torch_dtype_int64", {kDLInt, 64, 1}},
    {"aoti_torch_dtype_int32", {kDLInt, 32, 1}},
    {"aoti_torch_dtype_int16", {kDLInt, 16, 1}},
    {"aoti_torch_dtype_int8", {kDLInt, 8, 1}},
    {"aoti_torch_dtype_uint64", {kDLUInt, 64, 1}},
    {"aoti_torch_dtype_uint32", {kDLUInt, 32, 1}},
    {"aoti_torch_dtype_uint16", {kDLUInt, 16, 1}},
    {"aoti_torch_dtype_uint8", {kDLUInt, 8, 1}},
    {"aoti_torch_dtype_bool", {kDLBool, 8, 1}},
};

template <class F>
bool find(void* in, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(in, name));
  return function;
}

}  // namespace

const TorchShim* TorchShim::get() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<const TorchShim*> shim;
  return shim
      .call_once_and_store_result([]() -> const TorchShim* {
        auto* made = new TorchShim();
        try {
          if (made->connect()) return made;
        } catch (const std::exception&) {  // a torch of another kind
        }
        delete made;
        return nullptr;
      })
      .get_stored();
}

bool TorchShim::connect() {
  const py::module_ torch = py::module_::import("torch");
  if (!torch.attr("version").attr("hip").is_none()) return false;       // its GPUs call themselves CUDA devices
  const std::string path = py::str(torch.attr("_C").attr("__file__"));  // needs all of torch's libraries
  void* in = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (!in) return false;
  const bool is_versioned = find(in, "torch_library_impl", versioned_impl_);
  if (!find(in, "aoti_torch_library_impl", impl_) && !is_versioned) return false;
  const bool has_cuda = !torch.attr("version").attr("cuda").is_none();
  if (!find(in, "aoti_torch_get_current_cuda_stream", current_cuda_stream_) && has_cuda) return false;
  if (!find(in, "torch_string_c_str", c_str_) || !find(in, "torch_delete_string", delete_string_)) c_str_ = nullptr;
  find(in, "_ZNK3c1010TensorImpl15decref_pyobjectEv", decref_pyobject_);
  int32_t (*cpu)(), (*cuda)();
  const bool is_complete =
      find(in, "aoti_torch_delete_tensor_object", delete_tensor_) && find(in, "aoti_torch_get_data_ptr", data_ptr_) &&
      find(in, "aoti_torch_get_dim", dim_) && find(in, "aoti_torch_get_sizes", sizes_) &&
      find(in, "aoti_torch_get_strides", strides_) && find(in, "aoti_torch_get_dtype", dtype_) &&
      find(in, "aoti_torch_get_device_type", device_type_) && find(in, "aoti_torch_get_device_index", device_index_) &&
      find(in, "aoti_torch_library_init_impl", init_impl_) && find(in, "aoti_torch_device_type_cpu", cpu) &&
      find(in, "aoti_torch_device_type_cuda", cuda) &&
      // c10::TensorImpl::requires_grad() const, at::native::is_neg(const at::Tensor&): the shim has no such questions
      find(in, "_ZNK3c1010TensorImpl13requires_gradEv", requires_grad_) &&
      find(in, "_ZN2at6native6is_negERKNS_6TensorE", is_negative_);
  if (!is_complete) return false;
  cpu_ = cpu();
  cuda_ = cuda();
  find_dtypes(in);
  find_offset();
  try {
    if (!offset_ || !find_call(in)) call_ = nullptr;
  } catch (const py::error_already_set&) {  // torch spells its keys in another way
    call_ = nullptr;
  }
  return true;
}

// Modes of torch.overrides, traces of torch.jit, modes of torch.utils._python_dispatch, torch.func, Python's dispatcher.
bool TorchShim::find_call(void* in) {
  find(in, "torch_call_dispatcher", versioned_call_);
  find(in, "torch_new_string_handle", new_string_);
  if (!find(in, "aoti_torch_call_dispatcher", call_) || !find(in, "aoti_torch_new_tensor_handle", new_tensor_) ||
      !find(in, "_ZN2at4impl27torch_function_mode_enabledEv", has_function_mode_) ||
      !find(in, "_ZN3c104impl31tls_is_dispatch_keyset_includedENS_14DispatchKeySetE", includes_keys_))
    return false;
  const py::object c = py::module_::import("torch").attr("_C");
  const char* const keys[] = {"Tracer", "Python", "FuncTorchDynamicLayerFrontMode", "PythonDispatcher"};
  for (size_t i = 0; i < watching_keys_.size(); ++i) {
    const py::object key = c.attr("_dispatch_key_parse")(keys[i]);
    watching_keys_[i] = py::cast<uint64_t>(c.attr("DispatchKeySet")(key).attr("raw_repr")());
  }
  return true;
}

void TorchShim::find_dtypes(void* in) {
  for (const auto& [name, dtype] : kDtypes) {
    int32_t (*number)();
    if (!find(in, name, number)) continue;
    const int32_t n = number();
    if (n >= 0 && n < kMaxDtypes) dtypes_[n] = dtype;
  }
}

// A tensor of Python is the head of an object, up to torch 2.10 a flag, set while it but refers to the tensor of another
// owner, and the at::Tensor.  Nobody promises that: it is tried with tensors that differ in all that can be told of them.
void TorchShim::find_offset() {
  const py::module_ torch = py::module_::import("torch");
  const auto empty = [&torch](py::tuple shape, const char* dtype, bool requires_grad) {
    return torch.attr("empty")(shape, py::arg("dtype") = torch.attr(dtype), py::arg("requires_grad") = requires_grad,
                               py::arg("device") = "cpu");
  };
  const py::object plain = empty(py::make_tuple(3, 4), "float32", false);
  const py::object learnt = empty(py::make_tuple(5), "float64", true);
  const py::object part =
      empty(py::make_tuple(6, 7, 8), "int16", false).attr("permute")(2, 0, 1).attr("narrow")(1, 2, 3);
  for (const size_t offset : {sizeof(PyObject), sizeof(PyObject) + sizeof(void*)}) {
    if (!is_at(offset, plain) || !is_at(offset, learnt) || !is_at(offset, part)) continue;
    offset_ = offset;
    return;
  }
}

bool TorchShim::is_at(size_t offset, const py::object& tensor) const {
  if (static_cast<size_t>(Py_TYPE(tensor.ptr())->tp_basicsize) < offset + sizeof(void*)) return false;
  void* handle = reinterpret_cast<char*>(tensor.ptr()) + offset;
  void* impl;
  std::memcpy(&impl, handle, sizeof impl);
  if (reinterpret_cast<uintptr_t>(impl) != py::cast<uintptr_t>(tensor.attr("_cdata"))) return false;
  DLTensor found;
  if (read(handle, found)) return false;
  py::list shape, strides;
  for (int i = 0; i < found.ndim; ++i) {
    shape.append(found.shape[i]);
    strides.append(found.strides[i]);
  }
  return py::tuple(shape).equal(tensor.attr("shape")) && py::tuple(strides).equal(tensor.attr("stride")()) &&
         reinterpret_cast<uintptr_t>(found.data) == py::cast<uintptr_t>(tensor.attr("data_ptr")()) &&
         found.dtype.bits / 8 == py::cast<int>(tensor.attr("itemsize")) &&
         requires_grad(handle) == py::cast<bool>(tensor.attr("requires_grad"));
}

TorchShim::Wrong TorchShim::read(void* tensor, DLTensor& to) const {
  int64_t ndim;
  int32_t dtype, device;
  if (device_type_(tensor, &device) | dtype_(tensor, &dtype) | dim_(tensor, &ndim) | sizes_(tensor, &to.shape) |
      strides_(tensor, &to.strides) | data_ptr_(tensor, &to.data))
    return {PyExc_ValueError, "is a tensor without memory or without strides"};
  to.ndim = static_cast<int32_t>(ndim);
  to.byte_offset = 0;
  to.device = {kDLCPU, 0};
  if (device == cuda_) {
    to.device.device_type = kDLCUDA;
    device_index_(tensor, &to.device.device_id);
  } else if (device != cpu_) {
    return {PyExc_ValueError, "must lie on the CPU or on a CUDA device"};
  }
  if (is_negative_(tensor)) return {PyExc_ValueError, kNegativeView};
  to.dtype = dtype >= 0 && dtype < kMaxDtypes ? dtypes_[dtype] : DLDataType{};
  if (!to.dtype.bits) return {PyExc_TypeError, "has a dtype that is not supported"};
  return {};
}

bool TorchShim::implement(const char* operation, Kernel kernel) const {
  // for ever, as its kernels
  static void* library = [this] {
    void* made = nullptr;
    return init_impl_("pykv", "CompositeExplicitAutograd", __FILE__, __LINE__, &made) == 0 ? made : nullptr;
  }();
  if (!library) return false;
  return (versioned_impl_ ? versioned_impl_(library, operation, kernel, kEncodings)
                          : impl_(library, operation, kernel)) == 0;
}

}  // namespace pykv::python
