// How a vector of elements is loaded, converted and stored, in every format of a byte or more.
#pragma once

#include <type_traits>

#include "core/args.h"
#include "cuda/fp8.cuh"
#include "cuda/int8.cuh"
#include "cuda/vec.cuh"

namespace pykv {

template <KvFormat kFormat>
struct Scales {
  Scale key, value;
};
template <>
struct Scales<KvFormat::kSame> {};

// As many elements as one access stores, as bytes; for 16-bit elements, twice as many as one access loads.
inline constexpr int kWideVector = 16;

// kVector elements at once: T on their way in; T again (kSame) or one-byte codes on their way out.
template <class T, KvFormat kFormat, int kVector>
struct Mover {
  static constexpr KvFormat kStoredFormat = kFormat;
  static constexpr int kWidth = kVector;
  using Stored = std::conditional_t<kFormat == KvFormat::kSame, T, uint8_t>;
  using Loaded = Vec<T, kVector>;
  using Result = Vec<Stored, kVector>;

  // By a branch where the scale is far from 1, not by an instruction for each element that mostly does nothing:
  // reshape_and_cache_flash of 65536 tokens of 8 heads to fp8 takes 96 us on an H200, not 100.
  static __device__ Result convert(const Loaded& v, const Quotient& quotient) {
    if constexpr (kFormat == KvFormat::kSame || kVector == 1) {
      return convert_all(v, quotient);
    } else if (quotient.is_plain()) {  // known to the compiler from here on
      return convert_all(v, quotient);
    } else {
      return convert_all(v, quotient);
    }
  }

  // Without a branch: better where several short vectors are converted before any is stored (transpose_tokens.cuh: 417 us, not
  // 425).
  static __device__ __forceinline__ Result convert_all(const Loaded& v, const Quotient& quotient) {
    if constexpr (kFormat == KvFormat::kSame) {
      return v;
    } else if constexpr (kVector == 1) {
      uint32_t words[sizeof(T)] = {};
      __builtin_memcpy(words, &v, sizeof v);
      return {static_cast<uint8_t>(to_codes<T>(words, quotient))};
    } else {
      constexpr int kQuads = kVector / 4;
      Result result;
      auto& codes = reinterpret_cast<uint32_t (&)[kQuads]>(result);
      auto& words = reinterpret_cast<const uint32_t (&)[kQuads][sizeof(T)]>(v);
#pragma unroll
      for (int i = 0; i < kQuads; ++i) codes[i] = to_codes<T>(words[i], quotient);
      return result;
    }
  }

 private:
  template <class Element>
  static __device__ uint32_t to_codes(const uint32_t (&words)[sizeof(Element)], const Quotient& quotient) {
    if constexpr (kFormat == KvFormat::kInt8) {
      return to_int8x4<Element>(words, quotient);
    } else {
      return to_fp8x4<kFormat, Element>(words, quotient);
    }
  }
};

}  // namespace pykv
