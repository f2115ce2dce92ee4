// What an operation is called with, as its C declaration says.
//
//   DLTensor*         an array that is written          const DLTensor*   an array that is read, or a number (a scale)
//   pykv_tensor_list  a sequence of written arrays      int64_t, double, bool, const char*      as they are
//   void*             the stream, always last
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "pykv/base.h"

namespace pykv::python {

inline constexpr int kMaxParameters = 31;  // beside the stream

// arrays come first
enum class Kind : uint8_t { kWritten, kRead, kWrittenList, kInt, kFloat, kBool, kString, kStream };

// An argument as C takes it.
union Value {
  DLTensor* written;
  const DLTensor* read;
  const pykv_tensor_list* list;
  int64_t integer;
  double number;
  bool truth;
  const char* string;
  void* stream;
};

template <class T>
struct As;
template <>
struct As<DLTensor*> {
  static constexpr Kind kKind = Kind::kWritten;
  static DLTensor* of(const Value& v) { return v.written; }
};
template <>
struct As<const DLTensor*> {
  static constexpr Kind kKind = Kind::kRead;
  static const DLTensor* of(const Value& v) { return v.read; }
};
template <>
struct As<pykv_tensor_list> {
  static constexpr Kind kKind = Kind::kWrittenList;
  static pykv_tensor_list of(const Value& v) { return *v.list; }
};
template <>
struct As<int64_t> {
  static constexpr Kind kKind = Kind::kInt;
  static int64_t of(const Value& v) { return v.integer; }
};
template <>
struct As<double> {
  static constexpr Kind kKind = Kind::kFloat;
  static double of(const Value& v) { return v.number; }
};
template <>
struct As<bool> {
  static constexpr Kind kKind = Kind::kBool;
  static bool of(const Value& v) { return v.truth; }
};
template <>
struct As<const char*> {
  static constexpr Kind kKind = Kind::kString;
  static const char* of(const Value& v) { return v.string; }
};
template <>
struct As<void*> {
  static constexpr Kind kKind = Kind::kStream;
  static void* of(const Value& v) { return v.stream; }
};

// What is to be called: the kinds of its parameters, and a call of it.
template <auto kOp, class Signature = decltype(kOp)>
struct Callee;

template <auto kOp, class... Args>
struct Callee<kOp, pykv_status (*)(Args...)> {
  static constexpr Kind kKinds[] = {As<Args>::kKind...};
  static constexpr int kCount = sizeof...(Args) - 1;
  static_assert(kCount <= kMaxParameters && kKinds[kCount] == Kind::kStream);

  static pykv_status run(const Value* values) {
    return [values]<size_t... I>(std::index_sequence<I...>) {
      return kOp(As<Args>::of(values[I])...);
    }(std::index_sequence_for<Args...>());
  }
};

}  // namespace pykv::python
