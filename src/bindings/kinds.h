// What an operation is called with, as its C declaration says.
//
//   DLTensor*         an array that is written          const DLTensor*   an array that is read, or a number (a scale)
//   pykv_tensor_list  a sequence of written arrays      int64_t, double, bool, const char*      as they are
//   void*             the stream, always last           const pykv_..._options*   each field behind struct_size, in order
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "pykv/attention.h"

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

// What a parameter of C is made of: one value, or one for each field of a struct of options.
template <class T>
struct Parameter {
  static constexpr Kind kKinds[] = {As<T>::kKind};
  static T of(const Value* values) { return As<T>::of(*values); }
};

template <class Options, class T>
T type_of(T Options::*);  // of a field

template <class Options, auto... kFields>
struct Fields {
  static constexpr Kind kKinds[] = {As<decltype(type_of(kFields))>::kKind...};
  struct Taken {
    Options options;
    operator const Options*() const { return &options; }
  };
  static Taken of(const Value* values) {
    Taken taken{};
    taken.options.struct_size = sizeof(Options);
    ((taken.options.*kFields = As<decltype(type_of(kFields))>::of(*values++)), ...);
    return taken;
  }
};

using Attention = pykv_paged_attention_options;
template <>
struct Parameter<const Attention*>
    : Fields<Attention, &Attention::cu_query_lens, &Attention::scale, &Attention::causal, &Attention::window,
             &Attention::softcap, &Attention::alibi_slopes, &Attention::sinks, &Attention::kv_cache_dtype,
             &Attention::k_scale, &Attention::v_scale, &Attention::batch_invariant, &Attention::lse,
             &Attention::workspace> {};

// What is to be called: the kinds of its values, and a call of it.
template <auto kOp, class Signature = decltype(kOp)>
struct Callee;

template <auto kOp, class... Args>
struct Callee<kOp, pykv_status (*)(Args...)> {
  static constexpr int kCount = (std::size(Parameter<Args>::kKinds) + ...) - 1;
  static constexpr std::array kKinds = [] {
    std::array<Kind, kCount + 1> all{};
    auto to = all.begin();
    ((to = std::ranges::copy(Parameter<Args>::kKinds, to).out), ...);
    return all;
  }();
  static_assert(kCount <= kMaxParameters && kKinds[kCount] == Kind::kStream);

  // Where the values of each parameter begin.
  static constexpr std::array kFirst = [] {
    std::array<size_t, sizeof...(Args)> first{};
    size_t i = 0, next = 0;
    ((first[i++] = next, next += std::size(Parameter<Args>::kKinds)), ...);
    return first;
  }();

  static pykv_status run(const Value* values) {
    return [values]<size_t... I>(std::index_sequence<I...>) {
      return kOp(Parameter<Args>::of(values + kFirst[I])...);
    }(std::index_sequence_for<Args...>());
  }
};

}  // namespace pykv::python
