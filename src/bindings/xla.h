// An operation as a handler of XLA, deduced from its C declaration as the Python function is.
//
// pykv/jax.py says by the attribute "modes", a character for each parameter, where its value is:
//   r  the next buffer                       m  the next buffer, and the next result, which has its memory
//   l  as many of these as attribute pNN     w  the next result after those
//   n  attribute pNN, a number for an array  a  attribute pNN, a plain value          -  nowhere: it is None
#pragma once

#include <cfenv>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "pykv/base.h"
#include "xla_ffi.h"

namespace pykv::xla {

// Reads the values of one call in the order of the parameters; throws std::runtime_error where they do not fit.
class Reader {
 public:
  Reader(const CallFrame& frame, DLDevice device);

  DLTensor* tensor(int parameter);
  pykv_tensor_list list(int parameter);
  int64_t integer(int parameter);
  double number(int parameter);
  const char* string(int parameter);

 private:
  const void* attribute(std::string_view name, int type);
  const Scalar& scalar(int parameter);
  DLTensor* view(const Buffer& buffer);
  const Buffer& next(const Arguments& from, int64_t& at);

  const CallFrame& frame_;
  DLDevice device_;
  std::string_view modes_;
  int64_t argument_ = 0, changed_ = 0, made_ = 0;  // of arguments; of results that share memory; of the others
  std::deque<DLTensor> tensors_;                   // addresses stay
  std::deque<float> numbers_;
  std::deque<std::string> strings_;
  std::deque<std::vector<DLTensor*>> lists_;
};

template <class T>
struct Read;
template <>
struct Read<DLTensor*> {
  static DLTensor* from(Reader& r, int i) { return r.tensor(i); }
};
template <>
struct Read<const DLTensor*> {
  static const DLTensor* from(Reader& r, int i) { return r.tensor(i); }
};
template <>
struct Read<pykv_tensor_list> {
  static pykv_tensor_list from(Reader& r, int i) { return r.list(i); }
};
template <>
struct Read<int64_t> {
  static int64_t from(Reader& r, int i) { return r.integer(i); }
};
template <>
struct Read<bool> {
  static bool from(Reader& r, int i) { return r.integer(i) != 0; }
};
template <>
struct Read<double> {
  static double from(Reader& r, int i) { return r.number(i); }
};
template <>
struct Read<const char*> {
  static const char* from(Reader& r, int i) { return r.string(i); }
};

// Answers the question for metadata; true if that was all.
bool answer_metadata(const CallFrame& frame);
Error* make_error(const CallFrame& frame, int code, const char* message);
Error* last_error(const CallFrame& frame, pykv_status status);
DLDevice device_of(const CallFrame& frame, DLDeviceType type);
void* stream_of(const CallFrame& frame);

// XLA's threads take denormal numbers for zero; an operation computes as it does for other callers.
class UsualArithmetic {
 public:
  UsualArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~UsualArithmetic() { std::fesetenv(&before_); }
  UsualArithmetic(const UsualArithmetic&) = delete;
  UsualArithmetic& operator=(const UsualArithmetic&) = delete;

 private:
  std::fenv_t before_;
};

template <auto kOp, DLDeviceType kDevice, class Signature = decltype(kOp)>
struct Handler;

template <auto kOp, DLDeviceType kDevice, class... Args>
struct Handler<kOp, kDevice, pykv_status (*)(Args...)> {
  static Error* call(CallFrame* frame) {
    if (answer_metadata(*frame) || frame->stage != kExecute) return nullptr;
    try {
      return run(*frame, std::make_index_sequence<sizeof...(Args) - 1>());
    } catch (const std::exception& e) {
      return make_error(*frame, kInternal, e.what());
    }
  }

  template <size_t... I>
  static Error* run(const CallFrame& frame, std::index_sequence<I...>) {
    using Values = std::tuple<Args...>;
    Reader reader(frame, device_of(frame, kDevice));
    // braces: read from left to right
    const std::tuple<std::tuple_element_t<I, Values>...> values{
        Read<std::tuple_element_t<I, Values>>::from(reader, I)...};
    void* stream = kDevice == kDLCUDA ? stream_of(frame) : nullptr;
    const UsualArithmetic usual;
    const pykv_status status = kOp(std::get<I>(values)..., stream);
    return status == PYKV_OK ? nullptr : last_error(frame, status);
  }
};

}  // namespace pykv::xla
