// Checks that read as the contract.  A message names the argument, what was wanted and what came.
#pragma once

#include <initializer_list>
#include <string>

#include "core/args.h"
#include "core/error.h"
#include "core/nvfp4.h"

namespace pykv {

// A symbolic size: the first array that has it binds it, all others must agree.
class Dim {
 public:
  explicit Dim(const char* name) : name_(name) {}
  // Known from elsewhere.  A negative number, which may be a caller's, is the size of no array.
  Dim(const char* name, int64_t value) : name_(name), value_(value), bound_(true) {}
  operator int64_t() const { return value_; }
  const char* name() const { return name_; }
  bool bound() const { return bound_; }
  void bind(int64_t value) {
    value_ = value;
    bound_ = true;
  }

 private:
  const char* name_;
  int64_t value_ = -1;
  bool bound_ = false;
};

inline constexpr std::initializer_list<DType> kFloats = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// All of it in one number: comparing that is what eight arrays a call would notice.
constexpr uint32_t key_of(DLDataType t) { return t.code | uint32_t{t.bits} << 8 | uint32_t{t.lanes} << 16; }

constexpr DType to_dtype(DLDataType t) {
  switch (key_of(t)) {
    case key_of({kDLFloat, 32, 1}):
      return DType::kFloat32;
    case key_of({kDLFloat, 16, 1}):
      return DType::kFloat16;
    case key_of({kDLBfloat, 16, 1}):
      return DType::kBFloat16;
    case key_of({kDLFloat8_e4m3fn, 8, 1}):
      return DType::kFloat8E4M3;
    case key_of({kDLFloat8_e5m2, 8, 1}):
      return DType::kFloat8E5M2;
    case key_of({kDLInt, 64, 1}):
      return DType::kInt64;
    case key_of({kDLInt, 32, 1}):
      return DType::kInt32;
    case key_of({kDLInt, 8, 1}):
      return DType::kInt8;
    case key_of({kDLUInt, 8, 1}):
      return DType::kUInt8;
    default:
      return DType::kOther;
  }
}

// An argument under inspection: a DLTensor with its name, its dtype and its strides made plain.  A null argument fails
// on construction; ask `if (alibi_slopes)` first where an argument is optional.
class Tensor {
 public:
  static constexpr int kMaxRank = 8;
  // Where arrays without elements lie, whatever their address is: some libraries give them none, which would look as if they were
  // not given.
  alignas(256) static inline char kNowhere[1];

  Tensor(const char* name, const DLTensor* t) : name_(name) {
    if (!t || t->ndim < 0 || t->ndim > kMaxRank || (!t->shape && t->ndim > 0)) fail_array(name, t);
    dtype_ = to_dtype(t->dtype);
    device_ = plain(t->device);
    ndim_ = t->ndim;
    shape_ = t->shape;
    strides_ = t->strides;
    // Sizes and distances below 2^28, as nearly all are, need no closer look; negative ones are large here.
    uint64_t large = 0;
    int64_t count = 1;  // with 1 in the place of 0
    bool empty = false, wraps = false;
    for (int i = 0; i < ndim_; ++i) {
      const int64_t size = shape_[i];
      large |= static_cast<uint64_t>(size) >> 28;
      empty |= size == 0;
      wraps |= __builtin_mul_overflow(count, size + (size == 0), &count);
    }
    if (strides_)
      for (int i = 0; i < ndim_; ++i) large |= static_cast<uint64_t>(strides_[i] ^ strides_[i] >> 63) >> 28;
    numel_ = empty ? 0 : count;
    data_ = empty ? kNowhere : static_cast<char*>(t->data) + t->byte_offset;
    if ((large | static_cast<uint64_t>(count) >> 59) != 0 || wraps) check_extent(name, t);
    const bool without_memory = !t->data && device_.device_type != kDLExtDev;
    const uint64_t misaligned = reinterpret_cast<uintptr_t>(data_) & ((t->dtype.bits >> 3) - 1u);
    if (dtype_ == DType::kOther || !device_.device_type || ((without_memory || misaligned) && !empty))
      fail_array(name, t);
  }
  // Member by member: a copy in wide pieces of what has just been written in narrow ones would stall.
  Tensor(const Tensor& t)
      : name_(t.name_),
        data_(t.data_),
        device_(t.device_),
        dtype_(t.dtype_),
        ndim_(t.ndim_),
        shape_(t.shape_),
        strides_(t.strides_),
        numel_(t.numel_) {}

  // Checks; each returns the tensor, so that they chain.
  template <class... Dims>
  Tensor& shape(Dims&... dims) {
    rank(sizeof...(Dims));
    int axis = 0;
    (dim(axis++, dims), ...);
    return *this;
  }
  Tensor& rank(int wanted) { return rank_between(wanted, wanted); }
  Tensor& rank_between(int low, int high) {
    if (ndim_ < low || ndim_ > high) fail_rank(low, high);
    return *this;
  }
  Tensor& dim(int axis, Dim& d) {  // axis < 0 counts from the end
    const int at = axis < 0 ? axis + ndim_ : axis;
    if (at < 0 || at >= ndim_) fail_dim(at, d);
    if (!d.bound()) d.bind(shape_[at]);
    if (shape_[at] != d) fail_dim(at, d);
    return *this;
  }
  Tensor& last_dim(Dim& d) { return dim(-1, d); }
  Tensor& dtype(std::initializer_list<DType> allowed) {
    for (DType t : allowed)
      if (t == dtype_) return *this;
    fail_dtype(allowed);
  }
  Tensor& like(const Tensor& other) {  // the same dtype
    if (dtype_ != other.dtype_) fail_like(other);
    return *this;
  }
  Tensor& same_shape(const Tensor& other);  // and the same rank
  Tensor& contiguous_rows() {               // the last dimension has stride 1
    if (ndim_ > 0 && stride(ndim_ - 1) != 1 && numel() > 0) fail_rows();
    return *this;
  }
  Tensor& contiguous();
  Tensor& no_overlap_within() {  // an array to be written: no two elements at one address (stride 0)
    if (!strides_ || numel_ == 0) return *this;
    for (int i = 0; i < ndim_; ++i)
      if (shape_[i] > 1 && strides_[i] == 0) fail_overlap(i);
    return *this;
  }

  // The two may interleave, but not begin in the same place: one of them is written.
  const Tensor& apart_from(const Tensor& other) const {
    if (data() == other.data() && numel_ > 0 && other.numel_ > 0)
      fail(PYKV_VALUE_ERROR, "must not share memory with %s", other.name_);
    return *this;
  }

  const char* name() const { return name_; }
  DType type() const { return dtype_; }
  DLDevice device() const { return device_; }  // kDLCPU or kDLCUDA
  int ndim() const { return ndim_; }
  int64_t size(int axis) const { return shape_[axis < 0 ? axis + ndim_ : axis]; }
  // In elements.  The stride of a dimension of one element says nothing: it is what a compact array would have.
  int64_t stride(int axis) const {
    const int i = axis < 0 ? axis + ndim_ : axis;
    return strides_ && shape_[i] != 1 ? strides_[i] : compact_stride(i);
  }
  int64_t numel() const { return numel_; }
  void* data() const { return data_; }

  // A one-dimensional (or scalar) array of int32 or int64 ids.
  Index index() {
    dtype({DType::kInt64, DType::kInt32});
    return {data_, ndim_ ? stride(ndim_ - 1) : 1, dtype_ == DType::kInt64};
  }
  // All but the last dimension, as numbered rows.
  Rows rows() const;

  std::string shape_string() const { return shape_string(ndim_, shape_); }
  [[noreturn]] __attribute__((format(printf, 3, 4))) void fail(pykv_status status, const char* format, ...) const;

 private:
  int64_t compact_stride(int axis) const {
    int64_t n = 1;
    for (int i = axis + 1; i < ndim_; ++i) n *= shape_[i] > 0 ? shape_[i] : 1;  // fits: the constructor has looked
    return n;
  }
  // What is the host's is the CPU's; device_type 0: neither on the CPU nor on a CUDA device.
  static DLDevice plain(DLDevice device) {
    const DLDeviceType type = device.device_type;
    if (type == kDLCPU || type == kDLCUDAHost) return {kDLCPU, 0};
    if (type == kDLCUDA || type == kDLCUDAManaged) return {kDLCUDA, device.device_id};
    return type == kDLExtDev ? device : DLDevice{};
  }
  static std::string shape_string(int ndim, const int64_t* shape);
  [[noreturn]] static void fail_array(const char* name, const DLTensor* t);
  // Fails unless all bytes of the array can be counted, and all distances between them.
  static void check_extent(const char* name, const DLTensor* t);
  [[noreturn]] void fail_rank(int low, int high) const;
  [[noreturn]] void fail_dim(int axis, const Dim& d) const;
  [[noreturn]] void fail_dtype(std::initializer_list<DType> allowed) const;
  [[noreturn]] void fail_like(const Tensor& other) const;
  [[noreturn]] void fail_rows() const;
  [[noreturn]] void fail_overlap(int axis) const;

  const char* name_;
  void* data_;
  DLDevice device_;
  DType dtype_;
  int ndim_;
  const int64_t* shape_;
  const int64_t* strides_;  // null: compact
  int64_t numel_;
};

// A number among the options, as kernels have it: never NaN, and finite in fp32 ...
float number(const char* name, double given);
// ... or infinite, where that means something.
float number_or_infinity(const char* name, double given);
// The same of what stands for one in place of an array: a scalar on the host.  What arrays hold is not looked at.
inline void check_number(const Tensor& t) {
  if (t.ndim() == 0 && t.device().device_type == kDLCPU && t.type() == DType::kFloat32)
    number_or_infinity(t.name(), *static_cast<const float*>(t.data()));
}

// A string of the caller's, which must be there.
const char* required(const char* name, const char* given);

// The arrays of a list, each of which the caller still looks at.
void check_list(const char* name, const pykv_tensor_list& list);

// What a cache of the given kv_cache_dtype string holds, checked against the dtypes of the cache and of the data.  Every op
// takes copies and fp8; `more` are the formats that this one takes beside them.
KvFormat kv_format(const char* kv_cache_dtype, const Tensor& cache, DType data,
                   std::initializer_list<KvFormat> more = {});

// The pages of an nvfp4 cache [NB, BS, heads, head_size * 9 / 16], NHD or HND, or [NB, BS, head_size * 9 / 16].  The shape
// is nominal: what lies where in a page is said in core/nvfp4.h.
Nvfp4Page nvfp4_page(const Tensor& cache, int64_t head_size, bool swizzled);

}  // namespace pykv
