// Tokens into pages of nvfp4 (core/nvfp4.h).
//
// A thread takes one block of 16 elements of kNvfp4Tokens neighbouring tokens, so that what is the same for all of them is
// worked out once and all loads are in flight together.  Where these tokens go to the four slots of a group, as they do
// in a prefill, their four scales are one word.
#pragma once

#include "cache/slot_map.cuh"
#include "core/nvfp4.h"
#include "cuda/nvfp4.cuh"

namespace pykv {

inline constexpr int kNvfp4Tokens = kNvfp4TokenGroup;

// Launches have blocks of so many threads, of which an SM must hold as many as registers allow: the conversion is most of the
// time, and hides only behind that of other threads.
inline constexpr int kNvfp4Threads = 128;
template <class T, bool kAligned>
inline constexpr int kNvfp4Blocks = kAligned ? (sizeof(T) == 4 ? 4 : 5) : 2;

// A block of each token, in bytes: its first `split` elements at a, the others at b.  With kAligned they are all at a, side
// by side, and may be loaded by 16 bytes.
struct Nvfp4Source {
  const char *a, *b;
  int64_t a_token, b_token, a_dim, b_dim;
  int split;

  template <class T, bool kAligned>
  __device__ __forceinline__ void load(int64_t token, const char* from, uint32_t (&words)[4 * sizeof(T)]) const {
    if constexpr (kAligned) {
      const auto v = load_vec<Vec<uint4, sizeof(T)>>(from);
      __builtin_memcpy(words, &v, sizeof v);
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

  __device__ Nvfp4Target(char* cache, int64_t from_page_to_page, const Nvfp4Page& places, uint32_t head, uint32_t block)
      : codes(cache + places.codes_at(0, head, int64_t{block} * kNvfp4Block)),
        scales(cache + places.scale_at(0, head, static_cast<int32_t>(block))),
        page(from_page_to_page),
        codes_token(places.codes_token),
        scales_token(places.scales_token) {}

  __device__ char* scale_at(int64_t number, uint32_t offset) const {
    return scales + number * page + offset / kNvfp4TokenGroup * kNvfp4TokenGroup * scales_token +
           offset % kNvfp4TokenGroup;
  }
};

// Tokens [first, end), at most kNvfp4Tokens.  kAligned: of the target, too.
template <class T, bool kAligned>
__device__ __forceinline__ void write_nvfp4(const SlotMap& map, const Nvfp4Source& source, const Nvfp4Target& target,
                                            float global, int64_t first, int64_t end) {
  uint32_t words[kNvfp4Tokens][4 * sizeof(T)];
  const Slots<kNvfp4Tokens> loaded = map.load<kNvfp4Tokens>(first, 1, end);
  const char* from = source.a + first * source.a_token;
#pragma unroll
  for (int i = 0; i < kNvfp4Tokens; ++i, from += source.a_token) {
    have_ready(from);
    if (first + i < end) source.template load<T, kAligned>(first + i, from, words[i]);
  }
  int64_t slots[kNvfp4Tokens];
#pragma unroll
  for (int i = 0; i < kNvfp4Tokens; ++i) slots[i] = map.slot(loaded, i);

  const Nvfp4Quantiser quantise(global);
  bool group = kAligned && slots[0] >= 0 && slots[0] % kNvfp4Tokens == 0;
#pragma unroll
  for (int i = 1; i < kNvfp4Tokens; ++i) group = group && slots[i] == slots[0] + i;
  uint32_t scales = 0;
#pragma unroll
  for (int i = 0; i < kNvfp4Tokens; ++i) {
    int64_t page;
    uint32_t offset;
    if (!map.locate(slots[i], page, offset)) continue;  // all tokens of a group, or none
    const Nvfp4Codes block = quantise.template operator()<T>(words[i]);
    char* codes = target.codes + page * target.page + offset * target.codes_token;
    if constexpr (kAligned) {
      *reinterpret_cast<uint2*>(codes) = block.codes;
    } else {
#pragma unroll
      for (int b = 0; b < 8; ++b) codes[b] = static_cast<char>((b < 4 ? block.codes.x : block.codes.y) >> (b % 4 * 8));
    }
    scales |= uint32_t{block.scale} << (8 * i);
    if (!group) {
      *target.scale_at(page, offset) = static_cast<char>(block.scale);
    } else if (i == kNvfp4Tokens - 1) {
      *reinterpret_cast<uint32_t*>(target.scale_at(page, offset - i)) = scales;
    }
  }
}

}  // namespace pykv
