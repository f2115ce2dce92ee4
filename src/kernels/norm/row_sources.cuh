// How the rows of a norm lie, in packs, and what is normed: the sources of row_norm.cuh.
#pragma once

#include <type_traits>

#include "cuda/ahead.cuh"
#include "cuda/dependent.cuh"
#include "cuda/vec.cuh"
#include "norm/row_norm.h"

namespace pykv {
namespace {

// How arrays lie: anyhow, in rows of whole aligned packs, or (kPlain) besides that with one stride from row to row, weights
// being there, the same for all rows, and of the input's dtype.
enum class Fit { kAny, kPacks, kPlain };

// That of a source or a result.
template <class Part>
inline constexpr Fit kFitOf = Fit::kAny;
template <template <class, Fit> class Part, class T, Fit kFit>
inline constexpr Fit kFitOf<Part<T, kFit>> = kFit;

// Packs of kSize elements of a row, or of a part of one.  What lies anyhow is asked whether it is whole and aligned: if not,
// it is moved element by element.
template <class E, int kSize, Fit kFit>
struct Packs {
  using V = Vec<E, kSize>;
  E* data;
  int size;

  __device__ bool whole() const {
    return kFit != Fit::kAny || (size % kSize == 0 && reinterpret_cast<uintptr_t>(data) % alignof(V) == 0);
  }

  __device__ V load_in_order(int pack) const {
    if constexpr (kFit != Fit::kAny && sizeof(V) <= 16) {
      return load_vec_in_order<V>(data + pack * kSize);
    } else {
      return load(pack);
    }
  }
  __device__ V load(int pack) const {
    if (whole()) return load_vec<V>(data + pack * kSize);
    return load_some<V>(data + pack * kSize, size - pack * kSize);
  }
  __device__ void store(int pack, const V& v) const {
    if (whole()) return store_vec(data + pack * kSize, v);
    store_some(data + pack * kSize, v, size - pack * kSize);
  }
  __device__ void prefetch(int pack) const { pykv::prefetch(data + pack * kSize); }
  // Elements that a pack really has.
  __device__ int count(int pack) const { return kFit != Fit::kAny ? kSize : min(kSize, size - pack * kSize); }
};

// `size` elements of row `row`, from `first` on.
struct Part {
  uint32_t row;
  int first, size;

  template <class E, int kSize, Fit kFit>
  __device__ Packs<E, kSize, kFit> of(const void* data, const Rows& rows) const {
    return {static_cast<E*>(const_cast<void*>(data)) + offset<kFit>(rows) + first, size};
  }
  // Rows::offset in 32 bits: there are fewer than 2^31 rows.
  template <Fit kFit>
  __device__ int64_t offset(const Rows& rows) const {
    if (kFit == Fit::kPlain || (rows.size1 | rows.size2) == 1) return row * rows.stride0;
    const auto size1 = static_cast<uint32_t>(rows.size1), size2 = static_cast<uint32_t>(rows.size2);
    const uint32_t outer = row / size2;
    return outer / size1 * rows.stride0 + outer % size1 * rows.stride1 + row % size2 * rows.stride2;
  }
};

// Weights are loaded early as they lie; those in float32 beside 16-bit data, twice the registers, when they are needed.
template <class T, Fit kFit>
struct Weights {
  using Raw = Pack<T>;
  const void* data;
  bool is_float32;
  float otherwise;  // where there are none
  int first, size;

  __device__ Weights(const RowWeights& weights, float otherwise, const Part& part)
      : data(weights.data),
        is_float32(kFit != Fit::kPlain && sizeof(T) < 4 && weights.is_float32),
        otherwise(otherwise),
        first(part.first),
        size(part.size) {
    if (kFit != Fit::kPlain && weights.stride != 0)
      data = static_cast<const char*>(data) + static_cast<int64_t>(part.row / static_cast<uint32_t>(weights.rows)) *
                                                  weights.stride * static_cast<int64_t>(is_float32 ? 4 : sizeof(T));
  }
  template <class E>
  __device__ Packs<E, kPackSize<T>, kFit> packs() const {
    return {static_cast<E*>(const_cast<void*>(data)) + first, size};
  }
  __device__ Raw load(int pack) const {
    if constexpr (kFit == Fit::kPlain) return packs<T>().load(pack);
    return data && !is_float32 ? packs<T>().load(pack) : filled<T, kPackSize<T>>(otherwise);
  }
  __device__ void prefetch(int pack) const {
    if (kFit == Fit::kPlain || data)
      pykv::prefetch(static_cast<const char*>(data) + (first + pack * kPackSize<T>)*(is_float32 ? 4 : sizeof(T)));
  }
  __device__ Vec<float, kPackSize<T>> floats(int pack, const Raw& raw) const {
    if (is_float32) return packs<float>().load(pack);
    return to_floats(raw);
  }
};

// Sources.

template <class T, Fit kFit>
struct Input {
  using Element = T;
  using Raw = Pack<T>;
  using Value = Pack<T>;
  Packs<T, kPackSize<T>, kFit> input;

  __device__ Input(const RowNormArgs& args, const Part& part)
      : input(part.of<T, kPackSize<T>, kFit>(args.input, args.input_rows)) {}
  __device__ void prefetch(int pack) const { input.prefetch(pack); }
  __device__ void prefetch_row(uint32_t size) const { pykv::prefetch_row(input.data, size * sizeof(T)); }
  __device__ Raw load(int pack) const { return input.load_in_order(pack); }
  __device__ Value value(const Raw& raw) const { return raw; }
  __device__ void keep(int, const Value&) const {}
};

// input + residual.  kRounded: to T before anything else, as it is kept.
template <bool kRounded>
struct WithResidual {
  template <class T, Fit kFit>
  struct Source {
    using Element = T;
    static constexpr int kSize = kPackSize<T>;
    struct Raw {
      Pack<T> input;
      Pack<T> residual;
    };
    using Value = std::conditional_t<kRounded, Pack<T>, Vec<float, kSize>>;
    Packs<T, kSize, kFit> input, residual;

    __device__ Source(const RowNormArgs& args, const Part& part)
        : input(part.of<T, kSize, kFit>(args.input, args.input_rows)),
          residual(part.of<T, kSize, kFit>(args.residual, args.residual_rows)) {}
    __device__ void prefetch(int pack) const {
      input.prefetch(pack);
      residual.prefetch(pack);
    }
    __device__ void prefetch_row(uint32_t size) const {
      pykv::prefetch_row(input.data, size * sizeof(T));
      pykv::prefetch_row(residual.data, size * sizeof(T));
    }
    __device__ Raw load(int pack) const { return {input.load_in_order(pack), residual.load_in_order(pack)}; }
    __device__ Value value(const Raw& raw) const {
      auto sum = to_floats(raw.input);
      const auto other = to_floats(raw.residual);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] += other[i];
      if constexpr (kRounded) {
        return round_to<T>(sum);
      } else {
        return sum;
      }
    }
    __device__ void keep(int pack, const Value& v) const {
      if constexpr (kRounded) {
        residual.store(pack, v);
      } else {
        residual.store(pack, round_to<T>(v));
      }
    }
  };
};

// WithResidual<kRounded>, or where there is no residual the input alone.
template <bool kRounded>
struct WithOrWithoutResidual {
  template <class T, Fit kFit>
  struct Source : WithResidual<kRounded>::template Source<T, kFit> {
    using Sum = typename WithResidual<kRounded>::template Source<T, kFit>;
    using Raw = typename Sum::Raw;
    using Value = typename Sum::Value;
    bool has_residual;

    __device__ Source(const RowNormArgs& args, const Part& part)
        : Sum(args, part), has_residual(args.residual != nullptr) {}
    __device__ void prefetch(int pack) const {
      this->input.prefetch(pack);
      if (has_residual) this->residual.prefetch(pack);
    }
    __device__ void prefetch_row(uint32_t size) const {
      pykv::prefetch_row(this->input.data, size * sizeof(T));
      if (has_residual) pykv::prefetch_row(this->residual.data, size * sizeof(T));
    }
    __device__ Raw load(int pack) const {
      Raw raw{this->input.load_in_order(pack), {}};
      if (has_residual) raw.residual = this->residual.load_in_order(pack);
      return raw;
    }
    __device__ Value value(const Raw& raw) const {
      if (has_residual) return Sum::value(raw);
      if constexpr (kRounded) {
        return raw.input;
      } else {
        return to_floats(raw.input);
      }
    }
    __device__ void keep(int pack, const Value& v) const {
      if (has_residual) Sum::keep(pack, v);
    }
  };
};

}  // namespace
}  // namespace pykv
