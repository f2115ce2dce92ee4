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
  Dim(const char* name, int64_t value) : name_(name), value_(value) {}
  operator int64_t() const { return value_; }
  const char* name() const { return name_; }
  bool bound() const { return value_ >= 0; }
  void bind(int64_t value) { value_ = value; }

 private:
  const char* name_;
  int64_t value_ = -1;
};

inline constexpr std::initializer_list<DType> kFloats = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// An argument under inspection: a DLTensor with its name, its dtype and its strides made plain.  A null argument fails
// on construction; ask `if (alibi_slopes)` first where an argument is optional.
class Tensor {
 public:
  static constexpr int kMaxRank = 8;

  Tensor(const char* name, const DLTensor* t);

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
  Tensor& dtype(std::initializer_list<DType> allowed);
  Tensor& like(const Tensor& other);        // the same dtype
  Tensor& same_shape(const Tensor& other);  // and the same rank
  Tensor& contiguous_rows();                // the last dimension has stride 1
  Tensor& contiguous();
  Tensor& no_overlap_within();  // an array to be written: no two elements at one address (stride 0)

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
  int64_t numel() const;
  void* data() const { return data_; }

  // A one-dimensional (or scalar) array of int32 or int64 ids.
  Index index();
  // All but the last dimension, as numbered rows.
  Rows rows() const;

  std::string shape_string() const;
  [[noreturn]] __attribute__((format(printf, 3, 4))) void fail(pykv_status status, const char* format, ...) const;

 private:
  int64_t compact_stride(int axis) const;
  [[noreturn]] void fail_rank(int low, int high) const;
  [[noreturn]] void fail_dim(int axis, const Dim& d) const;

  const char* name_;
  void* data_;
  DLDevice device_;
  DType dtype_;
  int ndim_;
  const int64_t* shape_;
  const int64_t* strides_;  // null: compact
};

// What a cache of the given kv_cache_dtype string holds, checked against the dtypes of the cache and of the data.  Every op
// takes copies and fp8; `more` are the formats that this one takes beside them.
KvFormat kv_format(const char* kv_cache_dtype, const Tensor& cache, DType data,
                   std::initializer_list<KvFormat> more = {});

// The pages of an nvfp4 cache [NB, BS, heads, head_size * 9 / 16], NHD or HND, or [NB, BS, head_size * 9 / 16].  The shape
// is nominal: what lies where in a page is said in core/nvfp4.h.
Nvfp4Page nvfp4_page(const Tensor& cache, int64_t head_size);

}  // namespace pykv
