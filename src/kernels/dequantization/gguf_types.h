// The block formats of GGUF: how many elements share a block, and how many bytes it has.
#pragma once

#include <cstdint>

namespace pykv::gguf {

// The ids of GGUF (ggml_type).
enum class Type : int32_t {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ8_1 = 9,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kQ8_K = 15,
  kIq2Xxs = 16,
  kIq2Xs = 17,
  kIq3Xxs = 18,
  kIq1S = 19,
  kIq4Nl = 20,
  kIq3S = 21,
  kIq2S = 22,
  kIq4Xs = 23,
  kIq1M = 29,
  kTq1_0 = 34,
  kTq2_0 = 35,
  kMxfp4 = 39,
  kNvfp4 = 40,
  kQ1_0 = 41,
};

struct BlockSize {
  int32_t elements, bytes;
};

// Elements 0: no such format.
constexpr BlockSize block_size(Type type) {
  switch (type) {
    case Type::kQ4_0:
    case Type::kIq4Nl:
      return {32, 18};
    case Type::kQ4_1:
      return {32, 20};
    case Type::kQ5_0:
      return {32, 22};
    case Type::kQ5_1:
      return {32, 24};
    case Type::kQ8_0:
      return {32, 34};
    case Type::kQ8_1:
      return {32, 36};
    case Type::kMxfp4:
      return {32, 17};
    case Type::kNvfp4:
      return {64, 36};
    case Type::kQ1_0:
      return {128, 18};
    case Type::kQ2_K:
      return {256, 84};
    case Type::kQ3_K:
    case Type::kIq3S:
      return {256, 110};
    case Type::kQ4_K:
      return {256, 144};
    case Type::kQ5_K:
      return {256, 176};
    case Type::kQ6_K:
      return {256, 210};
    case Type::kQ8_K:
      return {256, 292};
    case Type::kIq2Xxs:
    case Type::kTq2_0:
      return {256, 66};
    case Type::kIq2Xs:
      return {256, 74};
    case Type::kIq2S:
      return {256, 82};
    case Type::kIq3Xxs:
      return {256, 98};
    case Type::kIq1S:
      return {256, 50};
    case Type::kIq1M:
      return {256, 56};
    case Type::kIq4Xs:
      return {256, 136};
    case Type::kTq1_0:
      return {256, 54};
  }
  return {0, 0};
}

}  // namespace pykv::gguf
