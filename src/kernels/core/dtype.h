// Element types.  One line here adds a dtype; the dispatch lists decide which op takes it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pykv {

enum class DType : uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kUInt8,
  kInt8,
  kInt32,
  kInt64,
  kOther
};

constexpr size_t size_of(DType t) {
  switch (t) {
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    default:
      return 1;
  }
}

constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kFloat8E5M2:
      return "float8_e5m2";
    case DType::kUInt8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    default:
      return "other";
  }
}

// How a KV cache stores its elements: as the data's own dtype; as one-byte floats or integers times a scale; or as
// four-bit floats with scales among them (core/nvfp4.h).
enum class KvFormat : uint8_t { kSame, kE4M3, kE5M2, kInt8, kNvfp4 };

}  // namespace pykv
