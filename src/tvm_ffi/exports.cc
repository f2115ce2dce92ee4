// libpykv_tvm_ffi.so: every operation as tvm-ffi calls it, which adds __tvm_ffi_ to its name.
//
// Arguments are those of the C declaration without the stream, which is the current one of tvm-ffi on the device of the
// arrays.  Of tvm-ffi only the header is wanted here: who loads this library has the rest.
#include <tvm/ffi/c_api.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "bindings/kinds.h"
#include "pykv/kernels.h"

extern "C" {
[[gnu::weak]] void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);
[[gnu::weak]] void* TVMFFIEnvGetStream(int32_t device_type, int32_t device_id);
}

namespace pykv::tvm_ffi {
namespace {

using python::Kind;
using python::Value;

int failed(const char* kind, const char* message) {
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return -1;
}

int failed(pykv_status status) {
  static constexpr const char* kKinds[] = {"", "ValueError", "TypeError", "NotImplementedError", "RuntimeError"};
  return failed(kKinds[status], pykv_last_error());
}

// Lists are objects with these two first.
struct Sequence {
  TVMFFIObject header;
  TVMFFIAny* items;
  int64_t size;
};

DLTensor* tensor(const TVMFFIAny& value) {
  if (value.type_index == kTVMFFIDLTensorPtr) return static_cast<DLTensor*>(value.v_ptr);
  if (value.type_index == kTVMFFITensor) return reinterpret_cast<DLTensor*>(value.v_obj + 1);
  return nullptr;
}

bool is_integer(const TVMFFIAny& value) { return value.type_index == kTVMFFIInt || value.type_index == kTVMFFIBool; }

// Arguments as C takes them, and what these point to.
class Arguments {
 public:
  // False: it is not what this parameter is.
  bool put(int i, Kind kind, const TVMFFIAny& value) {
    Value& to = values[i];
    const bool is_none = value.type_index == kTVMFFINone;
    switch (kind) {
      case Kind::kWritten:
        to.written = found(tensor(value));
        return to.written || is_none;
      case Kind::kRead:
        to.read = found(tensor(value));
        if (!to.read && (is_integer(value) || value.type_index == kTVMFFIFloat)) to.read = number(i, value);
        return to.read || is_none;
      case Kind::kWrittenList:
        return put_list(to, value);
      case Kind::kInt:
        to.integer = value.v_int64;
        return is_integer(value);
      case Kind::kBool:
        to.truth = value.v_int64 != 0;
        return is_integer(value);
      case Kind::kFloat:
        to.number = is_integer(value) ? static_cast<double>(value.v_int64) : value.v_float64;
        return is_integer(value) || value.type_index == kTVMFFIFloat;
      case Kind::kString:
        to.string = is_none ? nullptr : string(i, value);
        return to.string || is_none;
      default:
        return false;
    }
  }

  void put_stream(int i) {
    values[i].stream = device_.device_type == kDLCUDA ? TVMFFIEnvGetStream(kDLCUDA, device_.device_id) : nullptr;
  }

  Value values[python::kMaxParameters + 1];

 private:
  DLTensor* found(DLTensor* array) {
    if (array && device_.device_type != kDLCUDA) device_ = array->device;  // a scale may lie on the host
    return array;
  }

  const DLTensor* number(int i, const TVMFFIAny& value) {
    Number& n = numbers_[i];
    n.value = static_cast<float>(value.type_index == kTVMFFIFloat ? value.v_float64 : value.v_int64);
    n.array = {&n.value, {kDLCPU, 0}, 0, {kDLFloat, 32, 1}, nullptr, nullptr, 0};
    return &n.array;
  }

  const char* string(int i, const TVMFFIAny& value) {
    if (value.type_index == kTVMFFIRawStr) return value.v_c_str;
    if (value.type_index == kTVMFFISmallStr) {
      char* to = short_strings_[i];
      std::memcpy(to, value.v_bytes, sizeof value.v_bytes);
      to[value.small_str_len] = '\0';
      return to;
    }
    if (value.type_index != kTVMFFIStr) return nullptr;
    const auto* bytes = reinterpret_cast<const TVMFFIByteArray*>(value.v_obj + 1);
    return std::strlen(bytes->data) == bytes->size ? bytes->data : nullptr;
  }

  bool put_list(Value& to, const TVMFFIAny& value) {
    if (value.type_index != kTVMFFIArray && value.type_index != kTVMFFIList) return false;
    const auto* sequence = reinterpret_cast<const Sequence*>(value.v_obj);
    List& list = *lists_.emplace_back(std::make_unique<List>());
    for (int64_t i = 0; i < sequence->size; ++i) {
      list.arrays.push_back(found(tensor(sequence->items[i])));
      if (!list.arrays.back()) return false;
    }
    list.all = {list.arrays.data(), sequence->size};
    to.list = &list.all;
    return true;
  }

  struct Number {
    float value;
    DLTensor array;
  };
  struct List {
    std::vector<DLTensor*> arrays;
    pykv_tensor_list all;
  };

  DLDevice device_{kDLCPU, 0};
  Number numbers_[python::kMaxParameters];
  char short_strings_[python::kMaxParameters][9];
  std::vector<std::unique_ptr<List>> lists_;
};

int call(const char* name, const Kind* kinds, int count, pykv_status (*run)(const Value*), const TVMFFIAny* given,
         int num_given, TVMFFIAny* result) {
  static constexpr const char* kWanted[] = {
      "an array", "an array or a number", "a list of arrays", "an integer", "a number", "a bool", "a string"};
  char message[200];
  if (num_given != count) {
    std::snprintf(message, sizeof message, "%s: takes %d arguments, got %d", name, count, num_given);
    return failed("TypeError", message);
  }
  try {
    Arguments arguments;
    for (int i = 0; i < count; ++i)
      if (!arguments.put(i, kinds[i], given[i])) {
        std::snprintf(message, sizeof message, "%s: argument %d must be %s", name, i + 1,
                      kWanted[static_cast<int>(kinds[i])]);
        return failed("TypeError", message);
      }
    arguments.put_stream(count);
    const pykv_status status = run(arguments.values);
    if (status != PYKV_OK) return failed(status);
  } catch (const std::bad_alloc&) {
    return failed("MemoryError", name);
  }
  result->type_index = kTVMFFINone;
  result->zero_padding = 0;
  result->v_int64 = 0;
  return 0;
}

}  // namespace
}  // namespace pykv::tvm_ffi

#define PYKV_OPERATION(name)                                                                                     \
  extern "C" [[gnu::visibility("default")]] int __tvm_ffi_##name(void*, const TVMFFIAny* given, int32_t count,   \
                                                                 TVMFFIAny* result) {                            \
    using Callee = pykv::python::Callee<pykv_##name>;                                                            \
    return pykv::tvm_ffi::call(#name, Callee::kKinds.data(), Callee::kCount, Callee::run, given, count, result); \
  }
#include "operations.inc"
#undef PYKV_OPERATION
