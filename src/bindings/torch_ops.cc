#include "torch_ops.h"

#include <pybind11/stl.h>

#include <bit>
#include <cmath>
#include <memory>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "array.h"
#include "failure.h"
#include "torch_shim.h"

namespace pykv::python {
namespace torch_ops {
namespace {

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

// Since torch 2.10 or so a tensor that Python has, too, takes the GIL when its last other owner lets go of it.  A call lets go
// of all that it was given while this holds the GIL: once, where eight tensors would take it eight times (0.3 us).
class LettingGo {
 public:
  LettingGo() = default;
  LettingGo(const LettingGo&) = delete;
  LettingGo& operator=(const LettingGo&) = delete;
  ~LettingGo() {
    if (begun_) PyGILState_Release(state_);
  }
  void begin() {
    state_ = PyGILState_Ensure();
    begun_ = true;
  }

 private:
  PyGILState_STATE state_;
  bool begun_ = false;
};

// The arguments of a call, whose words torch has left to it.  First all are taken out of their optionals, then read, in order.
class Arguments {
 public:
  Arguments(const Operation& operation, Word* words)
      : operation_(operation), rules_(*operation.rules), words_(words), at_{operation.name, -1} {
    for (uint32_t left = rules_.optional; left; left &= left - 1) {
      const int i = std::countr_zero(left);
      if (!words[i]) none_ |= uint32_t{1} << i;
      words[i] = words[i] ? unbox(words[i]) : rules_.none[i];
    }
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  ~Arguments() {
    for (uint32_t left = operation_.arrays; left; left &= left - 1)
      if (void* tensor = handle(std::countr_zero(left))) shim->release(tensor);
    for (uint32_t left = operation_.strings; left; left &= left - 1)
      shim->release_string(handle(std::countr_zero(left)));
  }

  void read() {
    const int count = operation_.count;
    for (int i = 0; i < count; ++i) {
      at_.position = i;
      if (!(operation_.arrays >> i & 1))
        read(i, operation_.kinds[i], values_[i]);
      else
        values_[i].written = words_[i] ? read_tensor(i, operation_.kinds[i] == Kind::kWritten) : nullptr;
    }
    at_.position = -1;
    values_[count].stream = cuda_device_ < 0 ? nullptr : current_stream();
  }

  const Value* values() const { return values_; }

  void leave_to(Caller& caller) {
    for (uint32_t left = operation_.arrays; left; left &= left - 1)
      if (Word& word = words_[std::countr_zero(left)])
        caller.tensors[caller.num_tensors++] = reinterpret_cast<void*>(std::exchange(word, 0));
  }

 private:
  [[noreturn]] void refuse(PyObject* type, const std::string& message) const { throw Refusal(at_, type, message); }

  void* handle(int i) const { return reinterpret_cast<void*>(words_[i]); }

  void read(int i, Kind kind, Value& value) {
    switch (kind) {
      case Kind::kInt:
        value.integer = std::bit_cast<int64_t>(words_[i]);
        check_positive(i, value.integer);
        return;
      case Kind::kFloat:
        value.number = std::bit_cast<double>(words_[i]);
        check_positive(i, value.number);
        if (std::isnan(value.number) && !(none_ >> i & 1) && std::isnan(std::bit_cast<double>(rules_.none[i])))
          refuse(PyExc_ValueError, "must be a number, got " + std::to_string(value.number));  // C takes it for None
        return;
      case Kind::kBool:
        value.truth = (words_[i] & 0xff) != 0;  // the other bytes say nothing
        return;
      case Kind::kString:
        if (!shim->read_string(handle(i), &value.string)) refuse(PyExc_TypeError, "a string is required");
        return;
      default:  // lists go through Python: torch 2.9 has no encoding for them
        return;
    }
  }

  template <class T>
  void check_positive(int i, T value) const {
    if ((rules_.must_be_positive & ~none_) >> i & 1 && !(value > 0))
      refuse(PyExc_ValueError, "must be positive, got " + std::to_string(value));
  }

  DLTensor* read_tensor(int i, bool written) {
    DLTensor& tensor = tensors_[i];
    if (written && shim->requires_grad(handle(i))) refuse(PyExc_ValueError, kRequiresGrad);
    if (const TorchShim::Wrong wrong = shim->read(handle(i), tensor)) refuse(wrong.type, wrong.text);
    if (tensor.ndim > kMaxRank) refuse(PyExc_ValueError, too_many_dimensions(tensor.ndim));
    if (tensor.device.device_type == kDLCUDA && cuda_device_ < 0) cuda_device_ = tensor.device.device_id;
    return &tensor;
  }

  void* current_stream() const {
    void* stream = nullptr;
    if (!shim->current_stream(cuda_device_, &stream))
      refuse(PyExc_RuntimeError, "torch does not tell its current stream");
    return stream;
  }

  const Operation& operation_;
  const Rules& rules_;
  Word* words_;
  Failure at_;
  uint32_t none_ = 0;         // bits of those that are None
  int32_t cuda_device_ = -1;  // whose current stream the call takes
  DLTensor tensors_[kMaxParameters];
  Value values_[kMaxParameters + 1];
};

void run(const Operation& operation, Word* words, Caller* caller) {
  LettingGo letting_go;  // ends after the arguments
  Arguments arguments(operation, words);
  arguments.read();
  const pykv_status status = operation.run(arguments.values());
  if (status != PYKV_OK) throw Refusal({nullptr, -1}, error_type(status), pykv_last_error());
  if (!shim->tensors_want_the_gil()) return;
  if (caller)
    arguments.leave_to(*caller);
  else
    letting_go.begin();
}

// (kind, whether it is optional, what C takes for None, whether a number must be positive)
using Described = std::tuple<std::string, bool, py::object, bool>;

// Makes the C function the kernel of an operation whose schema torch knows.  False: it cannot be one.
bool implement(const std::string& name, const std::vector<Described>& parameters) {
  shim = TorchShim::get();
  if (!shim) return false;
  Operation& operation = operation_of(name);
  auto rules = std::make_unique<Rules>();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [kind, optional, none, must_be_positive] = parameters[i];
    if (kind == "written list" || (kind == "str" && (!shim->has_strings() || optional))) return false;
    rules->optional |= uint32_t{optional} << i;
    rules->must_be_positive |= uint32_t{must_be_positive} << i;
    if (none.is_none()) continue;
    rules->none[i] =
        kind == "float" ? std::bit_cast<Word>(py::cast<double>(none)) : std::bit_cast<Word>(py::cast<int64_t>(none));
  }
  operation.rules = rules.release();  // for ever
  return shim->implement(operation.name, operation.from_torch);
}

}  // namespace

constinit const TorchShim* shim = nullptr;
constinit thread_local Caller* waiting = nullptr;

void add(Operation& operation) { operations()[operation.name] = &operation; }

Operation& operation_of(const std::string& name) { return *operations().at(name); }

void bind(py::module_& m) { m.def("implement_in_torch", implement, py::arg("name"), py::arg("parameters")); }

}  // namespace torch_ops

void call_from_torch(const Operation& operation, uint64_t* words) {
  using namespace torch_ops;
  // the one that waits for this kernel, if any: it has waited enough
  Caller* caller = waiting && &waiting->operation == &operation ? std::exchange(waiting, nullptr) : nullptr;
  if (!caller) return run(operation, words, nullptr);
  try {
    run(operation, words, caller);
  } catch (...) {
    caller->error = std::current_exception();
  }
}

}  // namespace pykv::python
