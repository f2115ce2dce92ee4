#include "core/check.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace pykv {
namespace {

std::string name_of(DLDataType t) {
  const auto with_bits = [&](const char* kind) { return kind + std::to_string(t.bits); };
  switch (t.code) {
    case kDLInt:
      return with_bits("int");
    case kDLUInt:
      return with_bits("uint");
    case kDLFloat:
      return with_bits("float");
    case kDLBfloat:
      return with_bits("bfloat");
    case kDLComplex:
      return with_bits("complex");
    case kDLBool:
      return t.bits == 8 ? "bool" : with_bits("bool");
    default:
      return with_bits("DLPack type code");
  }
}

std::string list_of(std::initializer_list<DType> types) {
  std::string s;
  for (DType t : types) s += (s.empty() ? "" : " or ") + std::string(name_of(t));
  return s;
}

// All dtypes that any operation takes: which of them this one does, nobody has asked yet.
std::string all_dtypes() {
  std::string s;
  for (int t = 0; t < static_cast<int>(DType::kOther); ++t) s += (t ? ", " : "") + std::string(name_of(DType(t)));
  return s;
}

}  // namespace

void Tensor::fail_array(const char* name, const DLTensor* t) {
  if (!t) pykv::fail(PYKV_TYPE_ERROR, "%s: an array is required, got None", name);
  if (t->ndim < 0 || t->ndim > kMaxRank)
    pykv::fail(PYKV_VALUE_ERROR, "%s: at most %d dimensions are supported, got %d", name, kMaxRank, t->ndim);
  if (!t->shape && t->ndim > 0)
    pykv::fail(PYKV_VALUE_ERROR, "%s: has %d dimensions, but its shape is NULL", name, t->ndim);
  if (to_dtype(t->dtype) == DType::kOther)
    pykv::fail(PYKV_TYPE_ERROR, "%s: elements of %s are not supported; pykv knows %s", name, name_of(t->dtype).c_str(),
               all_dtypes().c_str());
  if (!plain(t->device).device_type)
    pykv::fail(PYKV_VALUE_ERROR, "%s: must lie on the CPU or on a CUDA device, got DLPack device type %d", name,
               static_cast<int>(t->device.device_type));
  const std::string shape = shape_string(t->ndim, t->shape);
  if (!t->data)
    pykv::fail(PYKV_VALUE_ERROR, "%s: has shape %s but no memory (a fake, lazy or freed array?)", name, shape.c_str());
  pykv::fail(PYKV_VALUE_ERROR, "%s: must be aligned to its elements of %d bytes, got address 0x%" PRIxPTR, name,
             t->dtype.bits / 8, reinterpret_cast<uintptr_t>(t->data) + static_cast<uintptr_t>(t->byte_offset));
}

void Tensor::check_extent(const char* name, const DLTensor* t) {
  int64_t bytes = std::max(t->dtype.bits / 8, 1), span = bytes;
  bool fits = true;
  for (int i = 0; i < t->ndim; ++i) {
    const int64_t size = t->shape[i];
    if (size < 0) pykv::fail(PYKV_VALUE_ERROR, "%s: dimension %d is negative: %" PRId64, name, i, size);
    fits = fits && !__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes);
  }
  if (!fits)
    pykv::fail(PYKV_VALUE_ERROR, "%s: shape %s has more bytes than int64 can count", name,
               shape_string(t->ndim, t->shape).c_str());
  for (int i = 0; t->strides && i < t->ndim; ++i) {
    if (t->shape[i] <= 1) continue;
    int64_t reach;  // to the last element of the dimension
    fits = fits && t->strides[i] > INT64_MIN &&
           !__builtin_mul_overflow(std::max<int64_t>(t->dtype.bits / 8, 1), std::abs(t->strides[i]), &reach) &&
           !__builtin_mul_overflow(reach, t->shape[i] - 1, &reach) && !__builtin_add_overflow(span, reach, &span);
    if (!fits)
      pykv::fail(PYKV_VALUE_ERROR,
                 "%s: stride %" PRId64 " of dimension %d of shape %s leads beyond what int64 can count", name,
                 t->strides[i], i, shape_string(t->ndim, t->shape).c_str());
  }
}

void Tensor::fail(pykv_status status, const char* format, ...) const {
  char buffer[896];
  va_list args;
  va_start(args, format);
  std::vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  pykv::fail(status, "%s: %s", name_, buffer);
}

std::string Tensor::shape_string(int ndim, const int64_t* shape) {
  std::string s = "[";
  for (int i = 0; i < ndim; ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

void Tensor::fail_rank(int low, int high) const {
  if (low == high)
    fail(PYKV_VALUE_ERROR, "must have %d dimension%s, got shape %s", low, low == 1 ? "" : "s", shape_string().c_str());
  fail(PYKV_VALUE_ERROR, "must have %d to %d dimensions, got shape %s", low, high, shape_string().c_str());
}

void Tensor::fail_dim(int axis, const Dim& d) const {
  if (axis < 0 || axis >= ndim_)
    fail(PYKV_VALUE_ERROR, "must have a dimension for %s, got shape %s", d.name(), shape_string().c_str());
  const std::string number = std::to_string(static_cast<int64_t>(d));
  const std::string wanted = d.name() == number ? number : std::string(d.name()) + " = " + number;  // not "1 = 1"
  fail(PYKV_VALUE_ERROR, "dimension %d must equal %s, got shape %s", axis, wanted.c_str(), shape_string().c_str());
}

void Tensor::fail_dtype(std::initializer_list<DType> allowed) const {
  fail(PYKV_TYPE_ERROR, "dtype must be %s, got %s", list_of(allowed).c_str(), name_of(dtype_));
}

void Tensor::fail_like(const Tensor& other) const {
  fail(PYKV_TYPE_ERROR, "dtype must be that of %s, %s, got %s", other.name_, name_of(other.dtype_), name_of(dtype_));
}

Tensor& Tensor::same_shape(const Tensor& other) {
  if (ndim_ != other.ndim_ || (ndim_ && std::memcmp(shape_, other.shape_, ndim_ * sizeof(int64_t)) != 0))
    fail(PYKV_VALUE_ERROR, "must have the shape of %s, %s, got %s", other.name_, other.shape_string().c_str(),
         shape_string().c_str());
  return *this;
}

void Tensor::fail_rows() const {
  fail(PYKV_VALUE_ERROR, "the last dimension must be contiguous (stride 1), got stride %" PRId64, stride(ndim_ - 1));
}

Tensor& Tensor::contiguous() {
  int64_t compact = 1;
  for (int i = ndim_ - 1; i >= 0 && numel() > 0; --i) {
    if (stride(i) != compact)
      fail(PYKV_VALUE_ERROR, "must be contiguous, got stride %" PRId64 " for dimension %d of shape %s", stride(i), i,
           shape_string().c_str());
    compact *= shape_[i];
  }
  return *this;
}

void Tensor::fail_overlap(int axis) const {
  fail(PYKV_VALUE_ERROR, "is written, but dimension %d of shape %s has stride 0 (an expanded view?)", axis,
       shape_string().c_str());
}

Rows Tensor::rows() const {
  int64_t sizes[3] = {1, 1, 1}, strides[3] = {0, 0, 0};  // innermost first
  int used = 0;
  for (int i = ndim_ - 2; i >= 0; --i) {
    if (shape_[i] == 1) continue;
    if (used > 0 && stride(i) == sizes[used - 1] * strides[used - 1]) {
      sizes[used - 1] *= shape_[i];
      continue;
    }
    if (used == 3) fail(PYKV_NOT_IMPLEMENTED, "at most 3 leading dimensions with independent strides are supported");
    sizes[used] = shape_[i];
    strides[used++] = stride(i);
  }
  switch (used) {
    case 0:
    case 1:
      return {1, 1, strides[0], 0, 0};
    case 2:
      return {1, sizes[0], strides[1], 0, strides[0]};
    default:
      return {sizes[1], sizes[0], strides[2], strides[1], strides[0]};
  }
}

float number_or_infinity(const char* name, double given) {
  if (std::isnan(given)) fail(PYKV_VALUE_ERROR, "%s: must be a number, got nan", name);
  return static_cast<float>(given);
}

float number(const char* name, double given) {
  const float x = number_or_infinity(name, given);
  if (std::isinf(x)) fail(PYKV_VALUE_ERROR, "%s: must be finite in fp32, got %g", name, given);
  return x;
}

const char* required(const char* name, const char* given) {
  if (!given) fail(PYKV_TYPE_ERROR, "%s: a string is required, got NULL", name);
  return given;
}

void check_list(const char* name, const pykv_tensor_list& list) {
  if (list.size < 0) fail(PYKV_VALUE_ERROR, "%s: must not have a negative size, got %" PRId64, name, list.size);
  if (list.size > 0 && !list.tensors)
    fail(PYKV_TYPE_ERROR, "%s: a list of %" PRId64 " arrays is required, got NULL", name, list.size);
}

KvFormat kv_format(const char* name, const Tensor& cache, DType data, std::initializer_list<KvFormat> more) {
  required("kv_cache_dtype", name);
  struct Choice {
    const char* name;
    KvFormat format;
    DType dtype;  // kSame: of the data; else of the cache, if it is not just bytes
  };
  static constexpr Choice kChoices[] = {
      {"auto", KvFormat::kSame, DType::kOther},          {"float16", KvFormat::kSame, DType::kFloat16},
      {"bfloat16", KvFormat::kSame, DType::kBFloat16},   {"float32", KvFormat::kSame, DType::kFloat32},
      {"fp8", KvFormat::kE4M3, DType::kFloat8E4M3},      {"fp8_e4m3", KvFormat::kE4M3, DType::kFloat8E4M3},
      {"fp8_e5m2", KvFormat::kE5M2, DType::kFloat8E5M2}, {"int8", KvFormat::kInt8, DType::kInt8},
      {"nvfp4", KvFormat::kNvfp4, DType::kUInt8},        {"nvfp4_4over6", KvFormat::kNvfp4, DType::kUInt8},
  };
  const auto is_offered = [&](const Choice& c) {
    const bool extra = c.format == KvFormat::kInt8 || c.format == KvFormat::kNvfp4;
    return !extra || std::find(more.begin(), more.end(), c.format) != more.end();
  };
  for (const Choice& c : kChoices) {
    if (std::strcmp(name, c.name) != 0 || !is_offered(c)) continue;
    if (c.format == KvFormat::kSame) {
      if (c.dtype != DType::kOther && c.dtype != data)
        fail(PYKV_TYPE_ERROR, "kv_cache_dtype: '%s' needs data of that dtype, got %s", name, name_of(data));
      if (cache.type() != data)
        cache.fail(PYKV_TYPE_ERROR, "dtype must be that of the data, %s, for kv_cache_dtype '%s', got %s",
                   name_of(data), name, name_of(cache.type()));
    } else if (cache.type() != c.dtype && cache.type() != DType::kUInt8 && cache.type() != DType::kInt8) {
      cache.fail(PYKV_TYPE_ERROR, "dtype must be %s%s for kv_cache_dtype '%s', got %s", name_of(c.dtype),
                 c.dtype == DType::kUInt8 ? "" : " or uint8", name, name_of(cache.type()));
    }
    return c.format;
  }
  std::string names;
  for (const Choice& c : kChoices)
    if (is_offered(c)) names += (names.empty() ? "'" : ", '") + std::string(c.name) + "'";
  fail(PYKV_VALUE_ERROR, "kv_cache_dtype: must be one of %s, got '%s'", names.c_str(), name);
}

Nvfp4Page nvfp4_page(const Tensor& cache, int64_t head_size, bool swizzled) {
  if (head_size % kNvfp4HeadMultiple != 0)
    cache.fail(PYKV_VALUE_ERROR, "nvfp4 needs a head size (MLA: an entry) that is a multiple of 64, got %" PRId64,
               head_size);
  const int64_t block_size = cache.size(1), heads = cache.ndim() == 4 ? cache.size(2) : 1, row = nvfp4_bytes(head_size);
  if (block_size % kNvfp4TokenGroup != 0)
    cache.fail(PYKV_VALUE_ERROR, "nvfp4 needs blocks of a multiple of 4 tokens, got shape %s",
               cache.shape_string().c_str());
  const int64_t token = cache.stride(1), head = cache.ndim() == 4 && heads > 1 ? cache.stride(2) : row;
  const bool compact = cache.size(-1) == row && cache.stride(-1) == 1;
  const bool tokens_first = token == heads * row && head == row;
  const bool heads_first = token == row && (head == block_size * row || heads == 1);
  if (cache.numel() > 0 && !(compact && (tokens_first || heads_first)))
    cache.fail(PYKV_VALUE_ERROR,
               "nvfp4 needs blocks [block_size, num_heads, %" PRId64
               "] of bytes without gaps, NHD or (by permuted strides) HND, got shape %s with strides [%" PRId64
               ", %" PRId64 ", %" PRId64 ", ...]",
               row, cache.shape_string().c_str(), cache.stride(0), token, cache.stride(2));
  return nvfp4_page(block_size, heads, head_size, !tokens_first, swizzled);
}

}  // namespace pykv
