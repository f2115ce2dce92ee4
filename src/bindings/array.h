// Any Python array as a borrowed DLTensor.
//
// The quickest way that its type knows: our own Pointer; NumPy's C struct; torch's stable shim; the DLPack C exchange API
// (paddle, ...); CuPy's struct or its attributes; `__dlpack__`; `__cuda_array_interface__` (Numba).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>

#include "array_type.h"
#include "pykv/base.h"

namespace pykv::python {

namespace py = pybind11;

inline constexpr int kMaxRank = 8;
inline std::string too_many_dimensions(int64_t ndim) {
  return "at most " + std::to_string(kMaxRank) + " dimensions are supported, got " + std::to_string(ndim);
}
inline constexpr char kRequiresGrad[] =
    "requires grad: autograd would not see that it is written; give tensor.detach()";

// What `stream=` of the call said, if anything.
struct StreamChoice {
  bool given = false;
  void* stream = nullptr;
};

// The stream on which a producer's work on an array was enqueued.
struct Producer {
  bool known;
  void* stream;
};

// The current streams that the arrays of a call have asked their libraries for: a call asks once.
struct CurrentStreams {
  Producer cupy{};
  Producer torch{};  // of `torch_device`
  int32_t torch_device;
  const DLPackExchangeAPI* api = nullptr;  // of whom `stream` is, on `device`
  DLDevice device;
  void* stream;
};

// Whether this thread rounds to nearest and keeps denormal numbers (core/float_environment.h sets this for the kernels).
inline bool usual_arithmetic() {
#if defined(__x86_64__)
  return (__builtin_ia32_stmxcsr() & 0xffc0) == 0x1f80;
#else
  return __builtin_aarch64_get_fpcr64() == 0;
#endif
}
// A number as float32, whatever this thread's way of rounding.
float nearest_float(double value);

// Gives the memory behind a DLPack capsule back to its producer, and lets the capsule go.
void release_capsule(PyObject* capsule);

class Array {
 public:
  Array() {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() {
    if (owner_) release_capsule(owner_);
  }

  // First pass: everything but `__dlpack__`, whose producers must be told the stream of the call.  Tells whether the
  // stream of the call matters: to this array, or because this array has one.
  bool borrow(PyObject* object, const TypeInfo& info, CurrentStreams& streams, bool written) {
    none_ = false;
    if (info.protocol != Protocol::kNumpy) return borrow_other(object, info, streams, written);
    borrow_numpy(object, written);  // the quickest: the others' function would cost as much again
    return false;
  }
  // A Python number in place of an array that is read: a scalar float32 on the host.
  void set_number(double value) {
    none_ = false;
    number_ = usual_arithmetic() ? static_cast<float>(value) : nearest_float(value);
    tensor_ = {&number_, {kDLCPU, 0}, 0, {kDLFloat, 32, 1}, shape_, strides_, 0};
  }
  // Second pass: those that were left, ordered before `stream`.
  void finish(bool stream_known, void* stream) {
    if (pending_) ask(stream_known, stream);
  }
  // The capsule of an array on a GPU, which the caller then owns; null: none is needed, or it lies elsewhere.
  PyObject* take_capsule() { return on_cuda() ? std::exchange(owner_, nullptr) : nullptr; }

  DLTensor* get() { return none_ ? nullptr : &tensor_; }
  bool on_cuda() const {
    return !none_ && (tensor_.device.device_type == kDLCUDA || tensor_.device.device_type == kDLCUDAManaged);
  }
  const DLTensor& tensor() const { return tensor_; }
  const Producer& producer() const { return producer_; }

  Array* next;   // of those whose call's stream matters
  int position;  // among the arguments of the call; of those, too

 private:
  void ask(bool stream_known, void* stream);
  bool borrow_other(PyObject* object, const TypeInfo& info, CurrentStreams& streams, bool written);
  void borrow_numpy(PyObject* object, bool written);
  bool borrow_torch(PyObject* object, const TypeInfo& info, CurrentStreams& streams);
  void borrow_exchange(PyObject* object, const DLPackExchangeAPI* api, CurrentStreams& streams);
  bool borrow_cupy(PyObject* object, const CupyStruct& cupy, CurrentStreams& streams);
  void borrow_cupy(PyObject* object, const TypeInfo& info, CurrentStreams& streams);
  void borrow_cuda_interface(PyObject* object);
  bool borrow_number(PyObject* object);
  void take_layout(const int64_t* sizes, const int64_t* strides);
  void keep_shape();

  DLTensor tensor_;
  int64_t shape_[kMaxRank], strides_[kMaxRank];
  float number_;
  bool none_ = true;
  PyObject* owner_ = nullptr;  // a capsule that holds the memory during the call
  // of arrays that are not NumPy's
  bool written_;
  PyObject* pending_;  // still wants __dlpack__; borrowed
  Producer producer_;
};

// An int, or an object of CuPy, torch or cuda.core.
StreamChoice stream_from(PyObject* object);

// The element type of a NumPy or CuPy dtype object, ml_dtypes included.
DLDataType dtype_from_numpy(PyObject* dtype);

// pykv.Pointer: raw memory with a shape, from from_pointer().
void bind_pointer(py::module_& m);
bool is_pointer(PyObject* object);
const DLTensor& pointer_tensor(PyObject* object, bool written);

}  // namespace pykv::python
