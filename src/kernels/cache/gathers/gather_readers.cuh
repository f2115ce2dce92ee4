// What moves in a gather, and how: a reader for each way in which entries lie in a cache (gather_cache.cu).
#pragma once

#include "cache/dequantise.cuh"
#include "cache/gathers/gather_cache.h"
#include "cache/gathers/locate_rows.cuh"
#include "cache/mla_record.h"
#include "core/nvfp4.h"
#include "cuda/divider.cuh"

namespace pykv {
namespace {

constexpr int kHalfBlock = kNvfp4Block / 2;

// Where a token is: its entry; in pages, its codes, and its scales.
struct Source {
  const char *entry = nullptr, *scales = nullptr;
};

struct Plan {
  RowLocator locate;
  const char* src;
  char* dst;
  int64_t src_block, src_token, dst_row;  // bytes
  uint32_t rows, rows_at_once;            // of a block of threads
  Divider vectors, in_piece;              // of an entry, of a piece
  int64_t src_piece, dst_piece;
  MlaRecord record;
  Nvfp4Page page;
  int64_t dst_dim;
  RecordRows record_rows;
  Nvfp4MlaRecord nvfp4_record;
  uint32_t early;   // bytes of an entry, or of its codes, to prefetch before the wait; 0: none
  bool next_early;  // whether the next kernel may come up before the wait

  template <bool kInPages, bool kMapped>
  __device__ Source source_of(const PagedRequests::Place& place) const {
    if (place.block < 0) return {nullptr, nullptr};
    if constexpr (kMapped) {
      const int64_t block_size = locate.block_size();
      int64_t slot = place.block * block_size + place.offset;
      const char* from;
      if (!record_rows.find(slot, from, locate.errors())) return {nullptr, nullptr};
      if (from) return {from, nullptr};
      return {src + slot / block_size * src_block + slot % block_size * src_token, nullptr};
    }
    const char* block = src + place.block * src_block;
    if constexpr (kInPages)
      return {block + page.codes_at(place.offset, 0, 0), block + page.scale_at(place.offset, 0, 0)};
    return {block + place.offset * src_token, nullptr};
  }

  template <bool kInPages>
  __device__ void prefetch_entry(const Source& source) const {
    prefetch(source.entry, early);
    const int rows = page.quarter > 0 ? kNvfp4TokenGroup : 1;  // of scales
    if constexpr (kInPages) prefetch(source.scales, static_cast<uint32_t>(rows * page.scales_token));
  }

  // The piece of a vector, and its place there.
  __device__ uint32_t piece_of(uint32_t vector, uint32_t& at) const {
    at = vector;
    return in_piece.d == vectors.d ? 0 : in_piece(vector, at);
  }
};

// Readers: what a thread knows about one vector of every entry, and of every row, that it moves.
template <class V>
struct Copy {
  using Loaded = V;
  int64_t from, to;
  __device__ Copy(const Plan& plan, uint32_t vector) {
    uint32_t at;
    const uint32_t piece = plan.piece_of(vector, at);
    from = piece * plan.src_piece + at * int64_t{sizeof(V)};
    to = piece * plan.dst_piece + at * int64_t{sizeof(V)};
  }
  __device__ Loaded load(const Source& source) const { return load_vec<V>(source.entry + from); }
  __device__ void store(char* row, const Loaded& v, float) const { store_vec(row + to, v); }
};

template <class T, KvFormat kFormat, int kSize>
struct Scaled {
  using Loaded = Vec<uint8_t, kSize>;
  int64_t from, to;
  __device__ Scaled(const Plan& plan, uint32_t vector) {
    uint32_t at;
    const uint32_t piece = plan.piece_of(vector, at);
    from = piece * plan.src_piece + at * int64_t{kSize};
    to = piece * plan.dst_piece + at * int64_t{kSize * sizeof(T)};
  }
  __device__ Loaded load(const Source& source) const { return load_vec<Loaded>(source.entry + from); }
  __device__ void store(char* row, const Loaded& v, float scale) const {
    store_vec(row + to, dequantise<T, kFormat>(v, scale));
  }
};

// Of a record: 8 codes and their scale, or 4 elements of rope.
template <class T>
struct Records {
  static constexpr int kCodes = 8, kElements = 4;
  struct Loaded {
    uint2 raw;
    float scale;
  };
  uint32_t from, scale_from, to;
  bool is_latent;
  __device__ Records(const Plan& plan, uint32_t vector) {
    const uint32_t latent = static_cast<uint32_t>(plan.record.latent), of_rope = vector - latent / kCodes;
    is_latent = vector < latent / kCodes;
    from = is_latent ? vector * kCodes : static_cast<uint32_t>(plan.record.rope_at()) + of_rope * 2 * kElements;
    scale_from = static_cast<uint32_t>(plan.record.scales_at()) + vector / (MlaRecord::kTile / kCodes) * 4;
    to = 2 * (is_latent ? vector * kCodes : latent + of_rope * kElements);
  }
  __device__ Loaded load(const Source& source) const {
    Loaded v;
    v.raw = *reinterpret_cast<const uint2*>(source.entry + from);
    if (is_latent) v.scale = *reinterpret_cast<const float*>(source.entry + scale_from);
    return v;
  }
  __device__ void store(char* row, const Loaded& v, float) const {
    if (is_latent) {
      store_vec(row + to, dequantise<T, KvFormat::kE4M3>(Vec<uint8_t, kCodes>{{v.raw.x, v.raw.y}}, v.scale));
    } else {
      store_vec(row + to, v.raw);
    }
  }
};

// The same element by element, whatever the alignment: everything is put together from bytes.
template <class T>
struct RecordElements {
  using Loaded = T;
  uint32_t from, scale_from;
  int64_t to;
  bool is_latent;
  __device__ RecordElements(const Plan& plan, uint32_t column) : to(column * plan.dst_piece) {
    const uint32_t latent = static_cast<uint32_t>(plan.record.latent);
    is_latent = column < latent;
    from = is_latent ? column : static_cast<uint32_t>(plan.record.rope_at()) + 2 * (column - latent);
    scale_from = static_cast<uint32_t>(plan.record.scales_at()) + column / MlaRecord::kTile * 4;
  }
  static __device__ uint32_t bytes(const char* from, int n) {
    uint32_t bits = 0;
    for (int i = 0; i < n; ++i) bits |= uint32_t{static_cast<uint8_t>(from[i])} << (8 * i);
    return bits;
  }
  __device__ Loaded load(const Source& source) const {
    if (is_latent) {
      const float scale = __uint_as_float(bytes(source.entry + scale_from, 4));
      return from_float<T>(fp8_to_float<KvFormat::kE4M3>(static_cast<uint8_t>(source.entry[from])) * scale);
    }
    const uint16_t bits = static_cast<uint16_t>(bytes(source.entry + from, 2));
    return reinterpret_cast<const T&>(bits);
  }
  __device__ void store(char* row, const Loaded& v, float) const { *reinterpret_cast<T*>(row + to) = v; }
};

// Of an nvfp4_ds_mla record: 8 codes and their scale, or 8 codes of rope.
template <class T, bool kAligned>
struct Nvfp4Records {
  static constexpr int kElements = 8;
  struct Loaded {
    uint2 codes;  // of the latent the first word alone
    uint8_t scale;
  };
  uint32_t from, scale_from;
  int64_t to, step;
  bool is_latent;
  __device__ Nvfp4Records(const Plan& plan, uint32_t vector) : step(plan.dst_piece) {
    const uint32_t of_latent = static_cast<uint32_t>(plan.nvfp4_record.latent) / kElements;
    is_latent = vector < of_latent;
    from = is_latent ? vector * (kElements / 2)
                     : static_cast<uint32_t>(plan.nvfp4_record.rope_at()) + (vector - of_latent) * kElements;
    scale_from = static_cast<uint32_t>(plan.nvfp4_record.scale_at(vector / 2));
    to = vector * kElements * step;
  }
  __device__ Loaded load(const Source& source) const {
    Loaded v{};
    const char* at = source.entry + from;
    if constexpr (kAligned) {
      v.codes.x = *reinterpret_cast<const uint32_t*>(at);
      if (!is_latent) v.codes.y = *reinterpret_cast<const uint32_t*>(at + 4);
    } else {
      v.codes.x = RecordElements<T>::bytes(at, 4);
      if (!is_latent) v.codes.y = RecordElements<T>::bytes(at + 4, 4);
    }
    if (is_latent) v.scale = static_cast<uint8_t>(source.entry[scale_from]);
    return v;
  }
  __device__ void store(char* row, const Loaded& v, float) const {
    const Vec<T, kElements> x =
        is_latent ? dequantise<T>(v.codes.x, v.scale, 1.0f)
                  : dequantise<T, KvFormat::kE4M3>(Vec<uint8_t, kElements>{{v.codes.x, v.codes.y}}, 1.0f);
    if constexpr (kAligned) {
      store_vec(row + to, x);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) *reinterpret_cast<T*>(row + to + i * step) = x[i];
    }
  }
};

// Records or their elements, that may lie in host memory.
template <class Reader>
struct Mapped : Reader {
  using Reader::Reader;
};

// Of a page: half a block, so that neighbouring threads store whole sectors, and the scale of the block.  kAligned: codes are
// loaded and elements stored by vectors.
template <class T, bool kAligned>
struct Pages {
  struct Loaded {
    uint32_t codes;
    uint8_t scale;
  };
  int64_t codes_from, scale_from, to, step;
  __device__ Pages(const Plan& plan, uint32_t vector) {
    uint32_t at;
    const uint32_t head = plan.piece_of(vector, at);
    codes_from = plan.page.codes_at(0, head, int64_t{at} * kHalfBlock);
    scale_from = plan.page.scale_at(0, head, static_cast<int32_t>(at / 2)) - plan.page.scales;
    to = head * plan.dst_piece + int64_t{at} * kHalfBlock * plan.dst_dim;
    step = plan.dst_dim;
  }
  __device__ Loaded load(const Source& source) const {
    Loaded v;
    if constexpr (kAligned) {
      v.codes = *reinterpret_cast<const uint32_t*>(source.entry + codes_from);
    } else {
      v.codes = 0;
#pragma unroll
      for (int i = 0; i < kHalfBlock / 2; ++i)
        v.codes |= uint32_t{static_cast<uint8_t>(source.entry[codes_from + i])} << (8 * i);
    }
    v.scale = static_cast<uint8_t>(source.scales[scale_from]);
    return v;
  }
  __device__ void store(char* row, const Loaded& v, float global) const {
    const Vec<T, kHalfBlock> x = dequantise<T>(v.codes, v.scale, global);
    if constexpr (kAligned) {
      const auto& vectors = reinterpret_cast<const Vec<uint4, sizeof(T) / 2>&>(x);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) store_vec(row + to + i * 16, vectors[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kHalfBlock; ++i) *reinterpret_cast<T*>(row + to + i * step) = x[i];
    }
  }
};

template <class Reader>
inline constexpr bool kInPages = false;
template <class T, bool kAligned>
inline constexpr bool kInPages<Pages<T, kAligned>> = true;

template <class Reader>
inline constexpr bool kIsMapped = false;
template <class Reader>
inline constexpr bool kIsMapped<Mapped<Reader>> = true;

}  // namespace
}  // namespace pykv
