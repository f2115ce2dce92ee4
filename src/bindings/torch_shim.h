// torch's stable C shim (torch/csrc/stable, inductor/aoti_torch/c/shim.h), looked up by name in the torch that the process
// has loaded: nothing of torch is compiled against or linked.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "pykv/base.h"

namespace pykv::python {

inline constexpr char kNegativeView[] =
    "is a negative view, whose memory holds the values with the other sign; give tensor.resolve_neg()";

// Functions return 0 if all went well.  A handle of a tensor is an at::Tensor*, and holds a TensorImpl* and nothing else.
class TorchShim {
 public:
  using Kernel = void (*)(uint64_t* words, uint64_t num_inputs, uint64_t num_outputs);

  // Why a tensor cannot be read, as an error of Python.
  struct Wrong {
    PyObject* type = nullptr;
    const char* text = nullptr;
    explicit operator bool() const { return type; }
  };

  Wrong read(void* tensor, DLTensor& to) const;  // shape and strides stay the tensor's own
  bool requires_grad(void* tensor) const { return requires_grad_(*static_cast<void**>(tensor)); }
  bool is_negative(void* tensor) const { return is_negative_(tensor); }
  bool finds_tensors() const { return offset_; }
  // The one inside of an object of Python, or null.
  void* tensor_of(PyObject* object) const {
    char* at = reinterpret_cast<char*>(object);
    if (offset_ != sizeof(PyObject) && at[sizeof(PyObject)]) return nullptr;
    return at + offset_;
  }
  bool current_stream(int32_t device, void** stream) const { return current_cuda_stream_(device, stream) == 0; }
  void release(void* tensor) const { delete_tensor_(tensor); }
  bool tensors_want_the_gil() const { return decref_pyobject_; }  // to be released, if Python has them, too

  bool has_strings() const { return c_str_; }
  bool read_string(void* string, const char** to) const { return c_str_(string, to) == 0; }
  void release_string(void* string) const { delete_string_(string); }

  // Makes a function of C the kernel of an operation whose schema torch knows.
  bool implement(const char* operation, Kernel kernel) const;

  // What a call through the dispatcher is made of.  A word for each argument of the schema, as kernels get them; they are
  // gone when it returns.  False: something threw.
  bool can_call() const { return call_; }
  bool can_make_strings() const { return new_string_; }
  bool call(const char* operation, uint64_t* words) const {
    return (versioned_call_ ? versioned_call_(operation, "", words, kEncodings) : call_(operation, "", words)) == 0;
  }
  bool hold(void* tensor, void** handle) const { return new_tensor_(tensor, handle) == 0; }
  bool make_string(const char* text, size_t length, void** handle) const {
    return new_string_(text, length, handle) == 0;
  }
  // Whether calls of Python have to be shown to somebody before they come to the dispatcher, or change their way there.
  bool calls_are_watched() const {
    if (has_function_mode_()) return true;
    for (const uint64_t key : watching_keys_)
      if (includes_keys_(key)) return true;
    return false;
  }

  // Null: there is none, or not all of it.
  static const TorchShim* get();

 private:
  static constexpr uint64_t kEncodings = uint64_t{2} << 56 | uint64_t{10}
                                                                 << 48;  // of torch 2.10, which is the first to ask

  bool connect();
  bool find_call(void* in);
  void find_dtypes(void* in);
  void find_offset();
  bool is_at(size_t offset, const pybind11::object& tensor) const;

  static constexpr int kMaxDtypes = 64;

  int32_t (*delete_tensor_)(void*);
  int32_t (*data_ptr_)(void*, void**);
  int32_t (*dim_)(void*, int64_t*);
  int32_t (*sizes_)(void*, int64_t**);
  int32_t (*strides_)(void*, int64_t**);
  int32_t (*dtype_)(void*, int32_t*);
  int32_t (*device_type_)(void*, int32_t*);
  int32_t (*device_index_)(void*, int32_t*);
  int32_t (*init_impl_)(const char* name_space, const char* key, const char* file, uint32_t line, void** library);
  bool (*requires_grad_)(const void* tensor_impl);
  // those that not every torch has
  int32_t (*impl_)(void* library, const char* name, Kernel);
  int32_t (*versioned_impl_)(void* library, const char* name, Kernel, uint64_t version);
  int32_t (*delete_string_)(void*);
  int32_t (*c_str_)(void*, const char**);
  int32_t (*current_cuda_stream_)(int32_t device, void** stream);
  bool (*is_negative_)(const void* tensor);           // a view of minus what its memory holds
  void (*decref_pyobject_)(const void* tensor_impl);  // not called: where it is, tensors own their objects of Python

  // for calls
  int32_t (*call_)(const char* operation, const char* overload, uint64_t* words);
  int32_t (*versioned_call_)(const char* operation, const char* overload, uint64_t* words, uint64_t version);
  int32_t (*new_tensor_)(void* tensor, void** made);
  int32_t (*new_string_)(const char*, size_t, void** made);
  bool (*has_function_mode_)();
  bool (*includes_keys_)(uint64_t keys);  // of this thread, for all tensors
  std::array<uint64_t, 4> watching_keys_;

  int32_t cpu_, cuda_;             // types of devices
  DLDataType dtypes_[kMaxDtypes];  // by torch's numbers; no bits: unknown
  size_t offset_;                  // of the tensor in its object of Python; 0: not known
};

}  // namespace pykv::python
