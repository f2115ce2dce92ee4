// pykv for C++17: what C leaves to the caller.  Views that own their shapes, dtypes from C++ types, exceptions from statuses,
// a workspace that frees itself.  No operation is listed here: `call` takes those of pykv/kernels.h as they are.
//
//   std::vector<float> x(2 * 3), y(2 * 3), w(3);
//   pykv::Tensor out(y.data(), {2, 3});
//   pykv::call(pykv_rms_norm, out, pykv::ConstTensor(x.data(), {2, 3}), pykv::ConstTensor(w), 1e-6);
#ifndef PYKV_KERNELS_HPP_
#define PYKV_KERNELS_HPP_

#include <pykv/kernels.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace pykv {

// --- errors ---------------------------------------------------------------------------------------

// What a call that did not return PYKV_OK had to say: "op: argument: wanted, got".
class Error : public std::runtime_error {
 public:
  Error(pykv_status status, const char* message) : std::runtime_error(message), status_(status) {}
  pykv_status status() const { return status_; }

 private:
  pykv_status status_;
};

inline void check(pykv_status status) {
  if (status != PYKV_OK) throw Error(status, pykv_last_error());
}

// Calls an operation of pykv/kernels.h, and throws Error if it fails.  Arguments are those of the C declaration: a Tensor for
// DLTensor*, a ConstTensor or Tensor for const DLTensor*, a TensorList for pykv_tensor_list, nullptr for what is left out.
// The stream may be left out: it is the last one, and without it the default stream.
template <class... Parameters, class... Arguments>
void call(pykv_status (*op)(Parameters...), const Arguments&... arguments) {
  constexpr std::size_t count = sizeof...(Parameters);
  if constexpr (sizeof...(Arguments) + 1 == count) {
    static_assert(std::is_same_v<std::tuple_element_t<count - 1, std::tuple<Parameters...>>, void*>,
                  "nothing but the stream may be left out");
    check(op(arguments..., nullptr));
  } else {
    check(op(arguments...));
  }
}

// --- dtypes and devices ---------------------------------------------------------------------------

inline constexpr DLDataType float32{kDLFloat, 32, 1}, float16{kDLFloat, 16, 1}, bfloat16{kDLBfloat, 16, 1},
    float8_e4m3fn{kDLFloat8_e4m3fn, 8, 1}, float8_e5m2{kDLFloat8_e5m2, 8, 1}, int8{kDLInt, 8, 1}, uint8{kDLUInt, 8, 1},
    int32{kDLInt, 32, 1}, int64{kDLInt, 64, 1};

// The dtype of a C++ type.  A specialisation adds one: template <> constexpr DLDataType pykv::dtype_of<__half>() { ... }
template <class T>
constexpr DLDataType dtype_of() {
  static_assert(std::is_arithmetic_v<T>, "this type has no dtype here: name one, such as pykv::bfloat16");
  constexpr DLDataTypeCode code = std::is_same_v<T, bool>       ? kDLBool
                                  : std::is_floating_point_v<T> ? kDLFloat
                                  : std::is_signed_v<T>         ? kDLInt
                                                                : kDLUInt;
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * sizeof(T)), 1};
}

inline constexpr DLDevice cpu{kDLCPU, 0};
constexpr DLDevice cuda(int32_t index = 0) { return {kDLCUDA, index}; }

// --- views ----------------------------------------------------------------------------------------

// Up to 8 sizes or strides: {2, 3}, or (pointer, count).
class Sizes {
 public:
  static constexpr int kMost = 8;
  Sizes(std::initializer_list<int64_t> values) : Sizes(values.begin(), static_cast<int>(values.size())) {}
  Sizes(const int64_t* values, int count) : count_(count) {
    if (count < 0 || count > kMost) throw std::length_error("pykv: an array has up to 8 dimensions");
    std::copy(values, values + count, values_);
  }
  int count() const { return count_; }
  int64_t& operator[](int i) { return values_[i]; }
  int64_t operator[](int i) const { return values_[i]; }
  int64_t* data() { return values_; }

 private:
  int64_t values_[kMost] = {};
  int count_;
};

// Memory of somebody else, to be read: a DLTensor with its shape and strides.  Compact unless with_strides says otherwise.
class ConstTensor {
 public:
  template <class T>
  ConstTensor(const T* data, const Sizes& shape, DLDevice device = cpu)
      : ConstTensor(data, shape, dtype_of<T>(), device) {}
  ConstTensor(const void* data, const Sizes& shape, DLDataType dtype, DLDevice device = cpu)
      : shape_(shape), strides_(shape) {
    tensor_.data = const_cast<void*>(data);
    tensor_.device = device;
    tensor_.ndim = shape.count();
    tensor_.dtype = dtype;
    int64_t stride = 1;
    for (int i = shape.count() - 1; i >= 0; --i) {
      strides_[i] = stride;
      stride *= std::max<int64_t>(shape[i], 1);
    }
    link();
  }
  template <class T>
  explicit ConstTensor(const std::vector<T>& values)
      : ConstTensor(values.data(), {static_cast<int64_t>(values.size())}) {}
  ConstTensor(const ConstTensor& other) : tensor_(other.tensor_), shape_(other.shape_), strides_(other.strides_) {
    link();
  }
  ConstTensor& operator=(const ConstTensor& other) {
    tensor_ = other.tensor_;
    shape_ = other.shape_;
    strides_ = other.strides_;
    link();
    return *this;
  }

  operator const DLTensor*() const { return &tensor_; }
  int ndim() const { return tensor_.ndim; }
  int64_t size(int axis) const { return shape_[axis]; }
  int64_t stride(int axis) const { return strides_[axis]; }

  // The same memory with other strides, in elements.
  ConstTensor with_strides(const Sizes& strides) const { return restrided(*this, strides); }
  // Elements begin, ..., end - 1 of an axis.
  ConstTensor slice(int axis, int64_t begin, int64_t end) const { return sliced(*this, axis, begin, end); }

 protected:
  template <class Self>
  static Self restrided(Self copy, const Sizes& strides) {
    if (strides.count() != copy.ndim()) throw std::invalid_argument("pykv: one stride for each dimension is wanted");
    copy.strides_ = strides;
    copy.link();
    return copy;
  }
  template <class Self>
  static Self sliced(Self copy, int axis, int64_t begin, int64_t end) {
    if (axis < 0 || axis >= copy.ndim() || begin < 0 || begin > end || end > copy.size(axis))
      throw std::out_of_range("pykv: slice [" + std::to_string(begin) + ", " + std::to_string(end) + ") of axis " +
                              std::to_string(axis) + " is outside the array");
    const DLDataType dtype = copy.tensor_.dtype;
    copy.tensor_.data =
        static_cast<char*>(copy.tensor_.data) + begin * copy.strides_[axis] * (dtype.bits * dtype.lanes / 8);
    copy.shape_[axis] = end - begin;
    return copy;
  }

 private:
  void link() {
    tensor_.shape = shape_.data();
    tensor_.strides = strides_.data();
  }

  DLTensor tensor_{};
  Sizes shape_, strides_;
};

// The same, to be written.  As with a pointer, a const Tensor is one that does not turn to other memory.
class Tensor : public ConstTensor {
 public:
  template <class T>
  Tensor(T* data, const Sizes& shape, DLDevice device = cpu) : ConstTensor(data, shape, device) {
    static_assert(!std::is_const_v<T>, "memory to be read is a ConstTensor");
  }
  Tensor(void* data, const Sizes& shape, DLDataType dtype, DLDevice device = cpu)
      : ConstTensor(data, shape, dtype, device) {}
  template <class T>
  explicit Tensor(std::vector<T>& values) : ConstTensor(values) {}

  operator DLTensor*() const { return const_cast<DLTensor*>(static_cast<const DLTensor*>(*this)); }
  Tensor with_strides(const Sizes& strides) const { return restrided(*this, strides); }
  Tensor slice(int axis, int64_t begin, int64_t end) const { return sliced(*this, axis, begin, end); }
};

// One array for each layer, for pykv_copy_blocks and its kin.
class TensorList {
 public:
  explicit TensorList(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {
    for (const Tensor& tensor : tensors_) pointers_.push_back(tensor);
  }
  TensorList(const TensorList& other) : TensorList(other.tensors_) {}
  TensorList& operator=(const TensorList&) = delete;
  operator pykv_tensor_list() const { return {pointers_.data(), static_cast<int64_t>(pointers_.size())}; }

 private:
  std::vector<Tensor> tensors_;
  std::vector<DLTensor*> pointers_;
};

// --- workspace ------------------------------------------------------------------------------------

// Bytes that pykv_paged_attention wants for batches of up to these sizes: 0 on the CPU.
inline int64_t paged_attention_workspace_size(int64_t num_tokens, int64_t num_seqs, int64_t num_heads,
                                              int64_t num_kv_heads, int64_t head_size, bool batch_invariant,
                                              DLDevice device) {
  int64_t size = 0;
  if (device.device_type != kDLCPU)
    call(pykv_paged_attention_workspace_size, num_tokens, num_seqs, num_heads, num_kv_heads, head_size, batch_invariant,
         device.device_id, &size);
  return size;
}

// Bytes that are freed with the last copy of their owner.  Without any it is a null argument.  Where they come from is the
// caller's affair, so that this header needs no CUDA; attention wants them aligned to 256 bytes, as cudaMalloc does:
//
//   pykv::Workspace workspace(size, pykv::cuda(0), [](size_t n) { void* p = nullptr; cudaMalloc(&p, n); return p; }, cudaFree);
class Workspace {
 public:
  Workspace() = default;
  template <class Allocate, class Free>
  Workspace(int64_t bytes, DLDevice device, Allocate&& allocate, Free release) {
    if (bytes == 0) return;
    void* memory = allocate(static_cast<std::size_t>(bytes));
    if (!memory) throw std::bad_alloc();
    memory_.reset(memory, release);
    view_ = Tensor(memory_.get(), {bytes}, uint8, device);
  }
  operator DLTensor*() const { return memory_ ? static_cast<DLTensor*>(view_) : nullptr; }

 private:
  std::shared_ptr<void> memory_;
  Tensor view_{static_cast<uint8_t*>(nullptr), {0}};
};

}  // namespace pykv

#endif  // PYKV_KERNELS_HPP_
