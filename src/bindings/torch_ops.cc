#include "torch_ops.h"

#include <pybind11/stl.h>

#include <string_view>
#include <unordered_map>

#include "array.h"

namespace pykv::python::torch_ops {
namespace {

const TorchShim* shim = nullptr;  // from the first kernel on

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

Kind kind_of(const std::string& kind) {
  return kind == "int"     ? Kind::kInt
         : kind == "float" ? Kind::kFloat
         : kind == "bool"  ? Kind::kBool
         : kind == "str"   ? Kind::kString
                           : Kind::kTensor;
}

// (kind, whether it is optional, what C takes for None, whether a number must be positive)
using Described = std::tuple<std::string, bool, py::object, bool>;

// Makes the C function the kernel of an operation whose schema torch knows.  False: it cannot be one.
bool implement(const std::string& name, const std::vector<Described>& parameters) {
  shim = TorchShim::get();
  if (!shim) return false;
  Operation& operation = operation_of(name);
  operation.parameters.clear();
  for (const auto& [kind, optional, none, must_be_positive] : parameters) {
    if (kind == "written list" || (kind == "str" && (!shim->has_strings() || optional))) return false;
    Parameter p{kind_of(kind), optional, 0, must_be_positive};
    if (!none.is_none())
      p.none =
          kind == "float" ? std::bit_cast<Word>(py::cast<double>(none)) : std::bit_cast<Word>(py::cast<int64_t>(none));
    operation.parameters.push_back(p);
  }
  return shim->implement(operation.name, operation.kernel);
}

}  // namespace

constinit thread_local Caller* waiting = nullptr;

void add(Operation& operation) { operations()[operation.name] = &operation; }

Operation& operation_of(const std::string& name) { return *operations().at(name); }

void Call::refuse(PyObject* type, const std::string& message) const { throw Refusal(at, type, message); }

void fail(pykv_status status) { throw Refusal({nullptr, -1}, error_type(status), pykv_last_error()); }

void* Call::current_stream() const {
  void* stream = nullptr;
  if (!shim->current_stream(cuda_device, &stream))
    throw Refusal({at.op, -1}, PyExc_RuntimeError, "torch does not tell its current stream");
  return stream;
}

bool tensors_want_the_gil() { return shim->tensors_want_the_gil(); }

void Tensor::release() { shim->release(handle_); }

void Tensor::read(Call& call, bool written) {
  if (!handle_) return;
  if (written && shim->requires_grad(handle_)) call.refuse(PyExc_ValueError, kRequiresGrad);
  if (const TorchShim::Wrong wrong = shim->read(handle_, tensor_)) call.refuse(wrong.type, wrong.text);
  if (tensor_.ndim > kMaxRank) call.refuse(PyExc_ValueError, too_many_dimensions(tensor_.ndim));
  if (tensor_.device.device_type == kDLCUDA && call.cuda_device < 0) call.cuda_device = tensor_.device.device_id;
}

Argument<const char*>::~Argument() { shim->release_string(handle_); }

void Argument<const char*>::read(Call& call) {
  if (!shim->read_string(handle_, &text_)) call.refuse(PyExc_TypeError, "a string is required");
}

void bind(py::module_& m) { m.def("implement_in_torch", implement, py::arg("name"), py::arg("parameters")); }

}  // namespace pykv::python::torch_ops
