// An operation as a kernel of torch's dispatcher, deduced from its C declaration as the Python function is.
//
// torch calls kernels of C through its stable shim: void kernel(words, num_inputs, num_outputs), a word of 64 bits for each
// argument of the schema, in the encodings of torch 2.10 whatever the version of torch.  A kernel owns what its words refer
// to, runs without the GIL and knows nothing of Python, except where it raises.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <exception>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "failure.h"
#include "pykv/base.h"
#include "signature.h"
#include "torch_shim.h"

namespace pykv::python::torch_ops {

namespace py = pybind11;

using Word = uint64_t;
using Kernel = TorchShim::Kernel;

enum class Kind : uint8_t { kTensor, kInt, kFloat, kBool, kString };

// What the schema and the Python definition say of a parameter.
struct Parameter {
  Kind kind;
  bool optional = false;          // the word is the address of another one, or null
  Word none = 0;                  // the number that C takes for None
  bool must_be_positive = false;  // a number, where C takes 0 for None
};

struct Operation {
  const char* name;
  Kernel kernel;
  std::vector<Parameter> parameters;  // without the stream
};

// A call that torch_packet.cc has made of a call of Python, and which waits for its kernel on this thread with an open
// ear: the kernel leaves it what costs less once the GIL is held again, and errors, which torch would not hand through.
struct Caller {
  explicit Caller(const Operation& o) : operation(o) {}
  const Operation& operation;
  std::exception_ptr error;
  std::array<void*, kMaxParameters> tensors;  // to be released
  int num_tensors = 0;
};
extern constinit thread_local Caller* waiting;

// The one that waits for this kernel, if any; it has waited enough.
inline Caller* caller_of(const Operation& operation) {
  Caller* caller = waiting;
  if (!caller || &caller->operation != &operation) return nullptr;
  waiting = nullptr;
  return caller;
}

// What an argument is, out of its optional.
struct Given {
  const Parameter& parameter;
  bool is_none;
  Word word;

  Given(Word given, const Parameter& p) : parameter(p), is_none(p.optional && !given), word(given) {
    if (!p.optional || is_none) return;
    auto* boxed = reinterpret_cast<Word*>(given);
    word = *boxed;
    delete boxed;  // torch made it by `new`
  }
};

// One call: where it is, and the device whose current stream it takes.
struct Call {
  Failure at;
  int32_t cuda_device = -1;
  [[noreturn]] void refuse(PyObject* type, const std::string& message) const;
  void* stream() const { return cuda_device < 0 ? nullptr : current_stream(); }

 private:
  void* current_stream() const;
};

[[noreturn]] void fail(pykv_status status);  // as the last failing call of C says

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

bool tensors_want_the_gil();

// Argument<T>: first all are made, and own what they were given, then `read`, in order, then `get`.
template <class T>
struct Argument;

class Tensor {
 public:
  explicit Tensor(const Given& given) : handle_(given.is_none ? nullptr : reinterpret_cast<void*>(given.word)) {}
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_) release();
  }
  void read(Call& call, bool written);
  void leave_to(Caller& caller) {
    if (handle_) caller.tensors[caller.num_tensors++] = std::exchange(handle_, nullptr);
  }
  DLTensor* get() { return handle_ ? &tensor_ : nullptr; }

 private:
  void release();

  void* handle_;
  DLTensor tensor_;
};

template <>
struct Argument<DLTensor*> : Tensor {
  using Tensor::Tensor;
  void read(Call& call) { Tensor::read(call, true); }
};

template <>
struct Argument<const DLTensor*> : Tensor {
  using Tensor::Tensor;
  void read(Call& call) { Tensor::read(call, false); }
};

template <>
struct Argument<const char*> {
  explicit Argument(const Given& given) : handle_(reinterpret_cast<void*>(given.word)) {}
  Argument(const Argument&) = delete;
  Argument& operator=(const Argument&) = delete;
  ~Argument();
  void read(Call& call);
  void leave_to(Caller&) {}
  const char* get() { return text_; }

 private:
  void* handle_;
  const char* text_ = nullptr;
};

template <class T>
class Number {
 public:
  explicit Number(const Given& given)
      : value_(std::bit_cast<T>(given.is_none ? given.parameter.none : given.word)),
        is_wrong_(given.parameter.must_be_positive && !given.is_none && !(value_ > 0)),
        sentinel_(std::bit_cast<T>(given.parameter.none)),
        is_none_(given.is_none) {}
  void read(Call& call) {
    if (is_wrong_) call.refuse(PyExc_ValueError, "must be positive, got " + std::to_string(value_));
    if constexpr (std::is_floating_point_v<T>) {  // NaN, where C takes it for None
      if (!is_none_ && std::isnan(value_) && std::isnan(sentinel_))
        call.refuse(PyExc_ValueError, "must be a number, got " + std::to_string(value_));
    }
  }
  void leave_to(Caller&) {}
  T get() { return value_; }

 private:
  T value_;
  bool is_wrong_;
  T sentinel_;
  bool is_none_;
};

template <>
struct Argument<int64_t> : Number<int64_t> {
  using Number::Number;
};

template <>
struct Argument<double> : Number<double> {
  using Number::Number;
};

template <>
struct Argument<bool> {
  bool value;
  explicit Argument(const Given& given) : value((given.word & 0xff) != 0) {}  // the other bytes say nothing
  void read(Call&) {}
  void leave_to(Caller&) {}
  bool get() { return value; }
};

// Operations with lists go through Python: torch 2.9 has no encoding for lists.
template <>
struct Argument<pykv_tensor_list> {
  explicit Argument(const Given&) {}
  void read(Call&) {}
  void leave_to(Caller&) {}
  pykv_tensor_list get() { return {nullptr, 0}; }
};

template <auto kOp, class Signature = decltype(kOp)>
struct Handler;

template <auto kOp, class... Args>
struct Handler<kOp, pykv_status (*)(Args...)> {
  static inline Operation operation{};

  static void call(Word* words, uint64_t, uint64_t) {
    constexpr auto kArguments = std::make_index_sequence<sizeof...(Args) - 1>();
    Caller* caller = caller_of(operation);
    if (!caller) return run(words, nullptr, kArguments);
    try {
      run(words, caller, kArguments);
    } catch (...) {
      caller->error = std::current_exception();
    }
  }

  template <size_t... I>
  static void run(Word* words, Caller* caller, std::index_sequence<I...>) {
    using Types = std::tuple<Args...>;
    const Parameter* parameters = operation.parameters.data();
    LettingGo letting_go;  // ends after the arguments
    std::tuple<Argument<std::tuple_element_t<I, Types>>...> arguments{Given(words[I], parameters[I])...};
    Call call{{operation.name, -1}};
    ((call.at.position = I, std::get<I>(arguments).read(call)), ...);
    const pykv_status status = kOp(std::get<I>(arguments).get()..., call.stream());
    if (status != PYKV_OK) fail(status);
    if (!tensors_want_the_gil()) return;
    if (caller)
      (std::get<I>(arguments).leave_to(*caller), ...);
    else
      letting_go.begin();
  }
};

void add(Operation& operation);
Operation& operation_of(const std::string& name);

// For Python: implement_in_torch().
void bind(py::module_& m);
// For Python: torch_packet() and call_directly(), in torch_packet.cc.
void bind_packet(py::module_& m);

}  // namespace pykv::python::torch_ops
