#include "torch_ops.h"

#include <dlfcn.h>
#include <pybind11/stl.h>

#include <string_view>
#include <unordered_map>

#include "array.h"

namespace pykv::python::torch_ops {
namespace {

constexpr uint64_t kEncodings = uint64_t{2} << 56 | uint64_t{10}
                                                        << 48;  // those of torch 2.10, which is the first to ask
constexpr int kMaxDtypes = 64;

// Functions return 0 if all went well.  A handle of a tensor is an at::Tensor*, which holds a TensorImpl* and nothing else.
struct Shim {
  int32_t (*delete_tensor)(void*);
  int32_t (*data_ptr)(void*, void**);
  int32_t (*dim)(void*, int64_t*);
  int32_t (*sizes)(void*, int64_t**);
  int32_t (*strides)(void*, int64_t**);
  int32_t (*dtype)(void*, int32_t*);
  int32_t (*device_type)(void*, int32_t*);
  int32_t (*device_index)(void*, int32_t*);
  int32_t (*init_impl)(const char* name_space, const char* key, const char* file, uint32_t line, void** library);
  bool (*requires_grad)(const void* tensor_impl);
  // those that not every torch has
  int32_t (*impl)(void* library, const char* name, Kernel);
  int32_t (*versioned_impl)(void* library, const char* name, Kernel, uint64_t version);
  int32_t (*delete_string)(void*);
  int32_t (*c_str)(void*, const char**);
  int32_t (*current_cuda_stream)(int32_t device, void** stream);

  int32_t cpu, cuda;              // types of devices
  DLDataType dtypes[kMaxDtypes];  // by torch's numbers; no bits: unknown
  void* library;
};
Shim shim;

std::unordered_map<std::string_view, Operation*>& operations() {
  static std::unordered_map<std::string_view, Operation*> map;
  return map;
}

// torch hands exceptions through; it catches those of pybind11 by this base, and has them set the error of Python.
class PYBIND11_EXPORT_EXCEPTION Refusal final : public py::builtin_exception {
 public:
  Refusal(const Failure& at, PyObject* type, const std::string& message)
      : builtin_exception(message), at_(at), type_(type) {}
  void set_error() const override {
    if (at_.op) return raise_at(at_, type_, what());
    PyErr_SetString(type_, what());
  }

 private:
  Failure at_;  // no op: the message says where
  PyObject* type_;
};

template <class F>
bool find(void* in, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(in, name));
  return function;
}

void find_dtypes(void* in) {
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
  for (const auto& [name, dtype] : kDtypes) {
    int32_t (*number)();
    if (!find(in, name, number)) continue;
    const int32_t n = number();
    if (n >= 0 && n < kMaxDtypes) shim.dtypes[n] = dtype;
  }
}

// Finds the shim in the libraries that `path`, a loaded module of torch, needs.  Tells whether it is all there.
bool connect(const std::string& path, bool has_cuda) {
  void* in = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (!in) return false;
  int32_t (*cpu)(), (*cuda)();
  const bool is_versioned = find(in, "torch_library_impl", shim.versioned_impl);
  if (!find(in, "aoti_torch_library_impl", shim.impl) && !is_versioned) return false;
  if (!find(in, "aoti_torch_get_current_cuda_stream", shim.current_cuda_stream) && has_cuda) return false;
  if (!find(in, "torch_string_c_str", shim.c_str) || !find(in, "torch_delete_string", shim.delete_string))
    shim.c_str = nullptr;
  const bool is_complete =
      find(in, "aoti_torch_delete_tensor_object", shim.delete_tensor) &&
      find(in, "aoti_torch_get_data_ptr", shim.data_ptr) && find(in, "aoti_torch_get_dim", shim.dim) &&
      find(in, "aoti_torch_get_sizes", shim.sizes) && find(in, "aoti_torch_get_strides", shim.strides) &&
      find(in, "aoti_torch_get_dtype", shim.dtype) && find(in, "aoti_torch_get_device_type", shim.device_type) &&
      find(in, "aoti_torch_get_device_index", shim.device_index) &&
      find(in, "aoti_torch_library_init_impl", shim.init_impl) && find(in, "aoti_torch_device_type_cpu", cpu) &&
      find(in, "aoti_torch_device_type_cuda", cuda) &&
      // c10::TensorImpl::requires_grad() const: the shim has no such question
      find(in, "_ZNK3c1010TensorImpl13requires_gradEv", shim.requires_grad);
  if (!is_complete) return false;
  shim.cpu = cpu();
  shim.cuda = cuda();
  find_dtypes(in);
  return shim.init_impl("pykv", "CompositeExplicitAutograd", __FILE__, __LINE__, &shim.library) == 0;
}

// (kind, whether it is optional, what C takes for None, whether a number must be positive)
using Described = std::tuple<std::string, bool, py::object, bool>;

// Makes the C function the kernel of an operation whose schema torch knows.  False: it cannot be one.
bool implement(const std::string& name, const std::vector<Described>& parameters) {
  Operation& operation = *operations().at(name);
  operation.parameters.clear();
  for (const auto& [kind, optional, none, must_be_positive] : parameters) {
    if (kind == "written list" || (kind == "str" && (!shim.c_str || optional))) return false;
    Parameter p{optional, 0, must_be_positive};
    if (!none.is_none())
      p.none =
          kind == "float" ? std::bit_cast<Word>(py::cast<double>(none)) : std::bit_cast<Word>(py::cast<int64_t>(none));
    operation.parameters.push_back(p);
  }
  const int32_t status = shim.versioned_impl
                             ? shim.versioned_impl(shim.library, operation.name, operation.kernel, kEncodings)
                             : shim.impl(shim.library, operation.name, operation.kernel);
  return status == 0;
}

}  // namespace

void add(Operation& operation) { operations()[operation.name] = &operation; }

void Call::refuse(PyObject* type, const std::string& message) const { throw Refusal(at, type, message); }

void fail(pykv_status status) { throw Refusal({nullptr, -1}, error_type(status), pykv_last_error()); }

void* Call::current_stream() const {
  void* stream = nullptr;
  if (shim.current_cuda_stream(cuda_device, &stream) != 0)
    throw Refusal({at.op, -1}, PyExc_RuntimeError, "torch does not tell its current stream");
  return stream;
}

void Tensor::release() { shim.delete_tensor(handle_); }

// Shape and strides stay the tensor's own, as in any operation of torch.
void Tensor::read(Call& call, bool written) {
  if (!handle_) return;
  if (written && shim.requires_grad(*static_cast<void**>(handle_))) call.refuse(PyExc_ValueError, kRequiresGrad);
  int64_t ndim;
  int32_t dtype, device;
  if (shim.device_type(handle_, &device) | shim.dtype(handle_, &dtype) | shim.dim(handle_, &ndim) |
      shim.sizes(handle_, &tensor_.shape) | shim.strides(handle_, &tensor_.strides) |
      shim.data_ptr(handle_, &tensor_.data))
    call.refuse(PyExc_ValueError, "is a tensor without memory or without strides");
  if (ndim > kMaxRank) call.refuse(PyExc_ValueError, "at most 8 dimensions are supported, got " + std::to_string(ndim));
  tensor_.ndim = static_cast<int32_t>(ndim);
  tensor_.byte_offset = 0;
  tensor_.device = {kDLCPU, 0};
  if (device == shim.cuda) {
    tensor_.device.device_type = kDLCUDA;
    shim.device_index(handle_, &tensor_.device.device_id);
    if (call.cuda_device < 0) call.cuda_device = tensor_.device.device_id;
  } else if (device != shim.cpu) {
    call.refuse(PyExc_ValueError, "must lie on the CPU or on a CUDA device");
  }
  tensor_.dtype = dtype >= 0 && dtype < kMaxDtypes ? shim.dtypes[dtype] : DLDataType{};
  if (!tensor_.dtype.bits) call.refuse(PyExc_TypeError, "has a dtype that is not supported");
}

Argument<const char*>::~Argument() { shim.delete_string(handle_); }

void Argument<const char*>::read(Call& call) {
  if (shim.c_str(handle_, &text_) != 0) call.refuse(PyExc_TypeError, "a string is required");
}

void bind(py::module_& m) {
  m.def("connect_torch", connect, py::arg("path"), py::arg("has_cuda"));
  m.def("implement_in_torch", implement, py::arg("name"), py::arg("parameters"));
}

}  // namespace pykv::python::torch_ops
