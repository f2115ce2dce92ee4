// Tokens into pages of nvfp4 (core/nvfp4.h).
//
// A thread takes one block of 16 elements of kNvfp4Tokens neighbouring tokens, so that what is the same for all of them is
// worked out once and all loads are in flight together.  Where these tokens go to the four slots of a group, as they do
// in a prefill, their places are one sum apart and their scales, of values, are one word.
//
// Bound by the instructions of the conversion: 240 for a block of bf16, of which 130 are elements, make 82 us of 65536 tokens
// of 8 heads of 128 on an H200, 97 % of a copy that reads and writes as much.  So the way of nearly all blocks is straight;
// if a block is odd, its thread takes its tokens again, one by one.
#pragma once

#include <type_traits>

#include "cache/quantise_nvfp4.cuh"
#include "cache/slot_map.cuh"
#include "core/nvfp4.h"

namespace pykv {

inline constexpr int kNvfp4Tokens = kNvfp4TokenGroup;

// An SM must hold so many threads, as many as registers allow: the conversion is most of the time, and hides only behind that of
// other threads.
template <class T, bool kAligned>
inline constexpr int kNvfp4ThreadsOfSm = kAligned ? (sizeof(T) == 4 ? 512 : 768) : 256;

template <class T>
__device__ __forceinline__ void load_block(const char* from, uint32_t (&words)[4 * sizeof(T)]) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
    const auto v = load_vec_in_order<uint4>(from + 16 * i);
    __builtin_memcpy(words + 4 * i, &v, sizeof v);
  }
}

// A block of each token, in bytes: its first `split` elements at a, the others at b.  With kAligned they are all at a, side
// by side, and may be loaded by 16 bytes.
struct Nvfp4Source {
  const char *a, *b;
  int64_t a_token, b_token, a_dim, b_dim;
  int split;

  template <class T, bool kAligned>
  __device__ __forceinline__ void load(int64_t token, uint32_t (&words)[4 * sizeof(T)]) const {
    const char* from = a + token * a_token;
    if constexpr (kAligned) {
      load_block<T>(from, words);
    } else {
      T elements[kNvfp4Block];
#pragma unroll
      for (int i = 0; i < kNvfp4Block; ++i)
        elements[i] = *reinterpret_cast<const T*>(i < split ? from + i * a_dim : b + token * b_token + i * b_dim);
      __builtin_memcpy(words, elements, sizeof elements);
    }
  }
};

// Where that block goes: in page 0, for the token in its first slot.
struct Nvfp4Target {
  char *codes, *scales;
  int64_t page, codes_token, scales_token;  // bytes
  int64_t scale_in_group;                   // from the scale of a token to that of the next in its group

  __device__ Nvfp4Target(char* cache, int64_t from_page_to_page, const Nvfp4Page& places, uint32_t head, uint32_t block)
      : codes(cache + places.codes_at(0, head, int64_t{block} * kNvfp4Block)),
        scales(cache + places.scale_at(0, head, static_cast<int32_t>(block))),
        page(from_page_to_page),
        codes_token(places.codes_token),
        scales_token(places.scales_token),
        scale_in_group(places.quarter > 0 ? 1 : places.scales_token) {}

  __device__ char* codes_at(int64_t number, uint32_t offset) const {
    return codes + number * page + offset * codes_token;
  }
  __device__ char* scale_at(int64_t number, uint32_t offset) const {
    return scales + number * page + offset / kNvfp4TokenGroup * kNvfp4TokenGroup * scales_token +
           offset % kNvfp4TokenGroup * scale_in_group;
  }
};

// One token, whatever its block.
template <class T, bool kAligned>
__device__ __forceinline__ void write_nvfp4_token(const SlotMap& map, const Nvfp4Source& source,
                                                  const Nvfp4Target& target, const Nvfp4Quantiser& quantise,
                                                  int64_t token) {
  int64_t page;
  uint32_t offset;
  if (!map.locate(map.slots[token], page, offset)) return;
  uint32_t words[4 * sizeof(T)];
  source.template load<T, kAligned>(token, words);
  const Nvfp4Codes block = quantise.template operator()<T>(words);
  char* codes = target.codes_at(page, offset);
  if constexpr (kAligned) {
    store_vec(codes, block.codes);
  } else {
#pragma unroll
    for (int b = 0; b < 8; ++b) codes[b] = static_cast<char>((b < 4 ? block.codes.x : block.codes.y) >> (b % 4 * 8));
  }
  *target.scale_at(page, offset) = static_cast<char>(block.scale);
}

// `count` tokens, at most kTokens, from token `first` on.  kAligned: of the target, too, and never four_over_six, which would
// cost the registers of the straight way.  Waits for the kernel before.
template <class T, bool kAligned, int kTokens = kNvfp4Tokens>
__device__ __forceinline__ void write_nvfp4(const SlotMap& map, const Nvfp4Source& source, const Nvfp4Target& target,
                                            const Scale& scale, bool four_over_six, uint32_t head, int64_t first,
                                            int count) {
  static_assert(kNvfp4TokenGroup % kTokens == 0);
  if constexpr (!kAligned) {
    begin_dependent();
    if (count <= 0) return;
  } else {
    const char* from = source.a + first * source.a_token;
    if (comes_early() && count > 0) {
      map.prefetch_slot(first);
#pragma unroll
      for (int i = 0; i < kTokens; ++i)
        if (i < count) prefetch(from + i * source.a_token);
    }
    // Threads of fewer tokens are there before the wait, and work out what needs no load: 4096 tokens of MLA take 2.9 us on an
    // H200, not 3.2.  The scale's part only where there are many: 64 tokens would take 1.4 us, not 1.3.
    const char* slots = map.slot_at(first);
    Nvfp4Target to = target;
    Nvfp4Quantiser quantise;
    const bool knows_scale = kTokens < kNvfp4Tokens && !scale.data && gridDim.x > kFewBlocks;
    if constexpr (kTokens < kNvfp4Tokens) {
      if (knows_scale) quantise = Nvfp4Quantiser(scale[head], false);
      have_ready(from);
      have_ready(slots);
      have_ready(to.codes);
      have_ready(to.scales);
    }
    begin_dependent();
    if (count <= 0) return;
    uint32_t words[kTokens][4 * sizeof(T)];
    const Slots<kTokens> loaded = map.load_some<kTokens>(slots, count);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      load_block<T>(from, words[i]);
      if (i + 1 < count) from += source.a_token;
    }

    if (!knows_scale) quantise = Nvfp4Quantiser(scale[head], false);
    Nvfp4Quantiser::BlockScale blocks[kTokens];
    bool plain = true;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) plain = quantise.template find_scale<T>(words[i], blocks[i]) && plain;
    if (plain) {
      char* codes[kTokens];
      int64_t page;
      uint32_t offset;
      if (count == kTokens && map.follow(loaded)) {
        if (!map.locate(map.slot(loaded, 0), page, offset)) return;
        codes[0] = to.codes_at(page, offset);
        char* scale_to = to.scale_at(page, offset);
        uint32_t scales = blocks[0].code;
#pragma unroll
        for (int i = 1; i < kTokens; ++i) {
          codes[i] = codes[i - 1] + to.codes_token;
          scales |= blocks[i].code << (8 * i);
        }
        using Word = std::conditional_t<kTokens == 4, uint32_t, std::conditional_t<kTokens == 2, uint16_t, uint8_t>>;
        if (to.scale_in_group == 1) {
          *reinterpret_cast<Word*>(scale_to) = static_cast<Word>(scales);
        } else {
#pragma unroll
          for (int i = 0; i < kTokens; ++i, scale_to += to.scale_in_group)
            *scale_to = static_cast<char>(scales >> (8 * i));
        }
      } else {
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
          codes[i] = nullptr;
          if (i >= count || !map.locate(map.slot(loaded, i), page, offset)) continue;
          codes[i] = to.codes_at(page, offset);
          *to.scale_at(page, offset) = static_cast<char>(blocks[i].code);
        }
      }
#pragma unroll
      for (int i = 0; i < kTokens; ++i)
        if (codes[i]) store_vec(codes[i], quantise.template plain_codes<T>(words[i], blocks[i]));
      return;
    }
  }
  const Nvfp4Quantiser quantise(scale[head], !kAligned && four_over_six);
#pragma unroll 1
  for (int i = 0; i < count; ++i) write_nvfp4_token<T, kAligned>(map, source, target, quantise, first + i);
}

}  // namespace pykv
