// Any Python array as a borrowed DLTensor.
//
// The quickest way that its type knows: our own Pointer; NumPy's C struct; the DLPack C exchange API (torch, paddle, ...);
// CuPy's attributes; `__dlpack__`; `__cuda_array_interface__` (Numba).
#pragma once

#include <pybind11/pybind11.h>

#include "pykv/base.h"

namespace pykv::python {

namespace py = pybind11;

inline constexpr int kMaxRank = 8;

// What `stream=` of the call said, if anything.
struct StreamChoice {
  bool given = false;
  void* stream = nullptr;
};

// The stream on which a producer's work on an array was enqueued.
struct Producer {
  bool known = false;
  void* stream = nullptr;
};

class Array {
 public:
  Array() {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array();

  // First pass: everything but `__dlpack__`, whose producers must be told the stream of the call.
  void borrow(PyObject* object, bool written, int position);
  // Second pass: those that were left, ordered before `stream`.
  void finish(bool stream_known, void* stream);

  DLTensor* get() { return none_ ? nullptr : &tensor_; }
  bool on_cuda() const {
    return !none_ && (tensor_.device.device_type == kDLCUDA || tensor_.device.device_type == kDLCUDAManaged);
  }
  const DLTensor& tensor() const { return tensor_; }
  const Producer& producer() const { return producer_; }
  int position() const { return position_; }  // among the arguments of the call

  Array* next = nullptr;  // of the call

 private:
  void borrow_numpy(PyObject* object);
  void borrow_exchange(PyObject* object, const DLPackExchangeAPI* api);
  void borrow_cupy(PyObject* object);
  void borrow_cuda_interface(PyObject* object);
  bool borrow_number(PyObject* object);
  void take_strides_in_bytes(int64_t itemsize);
  void keep_shape();

  int position_ = -1;
  DLTensor tensor_;
  int64_t shape_[kMaxRank], strides_[kMaxRank];
  float number_ = 0;
  bool none_ = true, written_ = false;
  PyObject* pending_ = nullptr;  // still wants __dlpack__; borrowed
  PyObject* owner_ = nullptr;    // a capsule that holds the memory during the call
  Producer producer_;
};

// An int, None, or an object of CuPy, torch or cuda.core.
StreamChoice stream_from(PyObject* object);

// The element type of a NumPy or CuPy dtype object, ml_dtypes included.
DLDataType dtype_from_numpy(PyObject* dtype);

// How arrays of a Python type are borrowed, in words; "" for what is no array.
const char* way_in(PyObject* type);

// pykv.Pointer: raw memory with a shape, from from_pointer().
void bind_pointer(py::module_& m);
bool is_pointer(PyObject* object);
const DLTensor& pointer_tensor(PyObject* object);

}  // namespace pykv::python
