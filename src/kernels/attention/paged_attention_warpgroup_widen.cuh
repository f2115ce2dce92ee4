// Caches of one byte for paged_attention_warpgroup.cuh: its stages hold halves, which the copying warps make.
//
//   cache -> (cp.async) pieces of 16 bytes in a ring of raw tiles -> registers -> widened, two pieces in lines of the stage
//
// A thread widens what it has copied itself: it waits for its own copies alone, and each of its pieces has a place of its own,
// in which the next copies follow as soon as it has been read.  All raw tiles are then under way while a stage is waited for.
#pragma once

#include "attention/paged_attention_load.cuh"

namespace pykv::attention {

// One byte in the cache, a half in the stages.
template <KvFormat kFormat>
struct WidenedElement {
  using Narrow = Element8<kFormat>;
  using Mma = half;
  static constexpr int kBytes = 2;  // there
};

// Raw tiles; a thread's pieces of one: of `kRows` keys, then of as many values.
template <class S>
struct TileWidener : TileLoader<S> {
  using Base = TileLoader<S>;
  using Base::copies;
  using Base::kTile;
  using Base::member;
  using Base::p;
  using typename Base::TileSlot;
  static constexpr int kChunks = S::kD / 16;  // of 16 codes, in a token's row
  static constexpr int kRowsAtOnce = kThreads / kChunks, kRows = kTile / kRowsAtOnce;
  static constexpr int kPieceStep = kThreads * 16, kTileBytes = 2 * kRows * kPieceStep;
  static_assert(kTileBytes * 2 == S::kStageBytes && kRowsAtOnce % 8 == 0);
  using Pieces = uint4[2 * kRows];

  uint32_t mine;  // shared address of this thread's first piece

  __device__ static TileWidener make(const Base& loader, uint32_t raw) { return {{loader}, raw + loader.member * 16}; }

  // ---- from the cache -------------------------------------------------------------------------------------------------

  // Neighbouring threads take neighbouring chunks of a token.  Zeros come for what is no key, and past the head.
  template <bool kChecked>
  __device__ void copy_rows(uint32_t to, const TileSlot& slot) const {
    const int chunk = member % kChunks, r0 = member / kChunks;
    const bool in_head = chunk * 16 < copies.head_bytes;
    const auto copy = [&](uint32_t to, const char* row) {
      const bool read = !kChecked || (row != nullptr && in_head);
      const char* from = read ? row + chunk * 16 : static_cast<const char*>(p.a.key.data);
      if constexpr (kChecked || S::kD % 128 != 0) {  // no whole lines
        cp_async_16_of_row(to, from, read);
      } else {
        cp_async_16_once(to, from);
      }
    };
#pragma unroll(kChecked ? 1 : kRows)
    for (int i = 0; i < kRows; ++i) {
      const TokenPointers at = slot.tokens[r0 + i * kRowsAtOnce];
      copy(to + i * kPieceStep, at.key);
      copy(to + (kRows + i) * kPieceStep, at.value);
    }
  }

  __device__ void copy(int tile, const TileSlot& slot) const {
    const uint32_t to = mine + tile * kTileBytes;
    if (this->is_whole(slot.valid) && copies.head_bytes == S::kD) {
      copy_rows<false>(to, slot);
    } else {
      copy_rows<true>(to, slot);
    }
  }

  // ---- to a stage -----------------------------------------------------------------------------------------------------

  __device__ void read(int tile, Pieces& pieces) const {
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) {
      uint4& x = pieces[i];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "r"(mine + tile * kTileBytes + i * kPieceStep)
                   : "memory");
    }
  }

  static __device__ void widen_to(uint32_t to, uint32_t codes0, uint32_t codes1) {
    uint32_t x[4];
    S::Element::Narrow::widen(codes0, x[0], x[1]);
    S::Element::Narrow::widen(codes1, x[2], x[3]);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
  }

  // Sixteen codes become two neighbours of a line, whose places differ in one bit.  Eight lanes store at once, of one token
  // if heads have 128 dimensions: then those of the upper 64, which have a line of their own in the same banks, store their
  // second piece first.
  __device__ void store(uint32_t stage, const Pieces& pieces) const {
    const int chunk = member % kChunks, r0 = member / kChunks;
    const bool swaps = kChunks > 4 && chunk >= 4;
    const uint32_t first = stage + (Base::row_place(r0, chunk * 2) ^ (swaps ? 16 : 0)), second = first ^ 16;
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) {
      const uint4& x = pieces[i];
      const int row = i / kRows * S::kTileBytes + i % kRows * kRowsAtOnce * 128;
      widen_to(first + row, swaps ? x.z : x.x, swaps ? x.w : x.y);
      widen_to(second + row, swaps ? x.x : x.z, swaps ? x.y : x.w);
    }
  }
};

}  // namespace pykv::attention
