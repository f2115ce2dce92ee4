// Tokens into pages of nvfp4 (core/nvfp4.h): up to four at a time, whose scales are neighbours in pages of values.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cache/writes/reshape_and_cache.h"
#include "cache/writes/token_run_cpu.h"
#include "cpu/nvfp4_encode.h"
#include "cpu/pieces.h"
#include "cpu/prefetch.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {

template <class T>
struct QuantiseBlocks {
  using Source = T;
  using Stored = uint8_t;
  std::vector<Nvfp4Encoder<T>> encoders;  // one for all heads, or one for each

  QuantiseBlocks(const CacheSide& side, KvFormat, int64_t num_heads, int64_t elements) {
    const int64_t scales = side.scale.stride == 0 ? 1 : num_heads;
    for (int64_t h = 0; h < scales; ++h) encoders.emplace_back(side.scale[h], elements / scales, side.four_over_six);
  }

  // What some tokens become.
  struct Scratch {
    std::vector<uint8_t> codes, scales, turned, rows;
    std::vector<T> together;  // elements that are no neighbours
    LineWriter scale_rows;    // those of a page follow one another, as its codes do

    explicit Scratch(bool past_caches) : scale_rows(past_caches) {}
  };

  void run(const CacheSide& side, int64_t num_heads, const Run& run, LineWriter& out, Scratch& some) const {
    uint8_t* page = static_cast<uint8_t*>(side.cache) + run.block * side.block;
    const int64_t fours = side.head_size / kNvfp4Four, most = kNvfp4TokenGroup * num_heads * fours;
    // a scale for all heads: token by token, else head by head
    const bool by_token = encoders.size() == 1;
    const int64_t heads = by_token ? num_heads : 1, row = heads * fours;
    some.codes.resize(nvfp4_whole(most) * kNvfp4FourCodes);
    some.scales.resize(nvfp4_whole(most) * 4 + kColumns);
    some.turned.resize(row * 4 * kNvfp4TokenGroup + kNvfp4TokenGroup * kColumns);
    some.rows.resize(row * 4 * kNvfp4TokenGroup);
    for (int64_t i = 0, n; i < run.length; i += n) {
      const int64_t offset = run.offset + i;
      n = std::min(run.length - i, kNvfp4TokenGroup - offset % kNvfp4TokenGroup);
      for (int64_t h = 0; h < num_heads; h += heads) {
        encode(encoders[by_token ? 0 : h], side, run.token + i, n, h, heads, some);
        // as many codes as lie together: of all tokens, of all heads, or of one
        const bool heads_touch = side.page.codes_head == fours * kNvfp4FourCodes;
        const bool touch = heads_touch && side.page.codes_token == row * kNvfp4FourCodes;
        const int64_t tokens = touch ? 1 : n, parts = heads_touch ? 1 : heads;
        const int64_t bytes = n * row / (tokens * parts) * kNvfp4FourCodes;
        for (int64_t t = 0; t < tokens; ++t)
          for (int64_t p = 0; p < parts; ++p)
            out.put(page + side.page.codes_at(offset + t, h + p, 0), some.codes.data() + (t * parts + p) * bytes,
                    bytes);
        store_scales(page, side.page, offset, n, h, heads, 4 * fours, some);
      }
    }
  }

 private:
  static constexpr int64_t kColumns = kFourColumns;  // scales that are turned at once

  // Heads [head, head + heads) of n tokens.
  static void encode(const Nvfp4Encoder<T>& encoder, const CacheSide& side, int64_t token, int64_t n, int64_t head,
                     int64_t heads, Scratch& some) {
    const int64_t size = side.head_size, fours = size / kNvfp4Four;
    const T* from = static_cast<const T*>(side.data) + token * side.data_token + head * side.data_head;
    uint8_t *codes = some.codes.data(), *scales = some.scales.data();
    if (side.data_dim == 1 && (heads == 1 || side.data_head == size)) {
      // a step reads four tokens before it asks for any: those of the next step, and some behind them
      const int64_t ahead = std::max<int64_t>(rows_ahead<T>(heads * size), kNvfp4TokenGroup + 2) * side.data_token;
      return encoder(codes, scales, {from, n, side.data_token, heads * fours}, ahead);
    }
    some.together.resize(n * heads * size);
    T* to = some.together.data();
    for (int64_t t = 0; t < n; ++t)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < size; ++d) *to++ = from[t * side.data_token + h * side.data_head + d * side.data_dim];
    encoder(codes, scales, {some.together.data(), 1, 0, n * heads * fours}, 0);
  }

#if defined(__AVX512BW__)
  // Those of four tokens, `row` apart, of eight heads of 128, for which a page has four rows: two scales of each head.
  static void turn_heads(uint8_t* to, const uint8_t* from, int64_t row) {
    const auto low = [](__m512i a, __m512i b) { return _mm512_maskz_unpacklo_epi8(~__mmask64{}, a, b); };
    const auto high = [](__m512i a, __m512i b) { return _mm512_maskz_unpackhi_epi8(~__mmask64{}, a, b); };
    __m512i v[4];
    for (int i = 0; i < 4; ++i) v[i] = load_raw<__m512i>(from + i * row);
    // of the even heads of each two, then of the odd ones
    const __m512i even[2] = {low(v[0], v[2]), low(v[1], v[3])}, odd[2] = {high(v[0], v[2]), high(v[1], v[3])};
    const __m512i halves[2][2] = {{low(even[0], even[1]), low(odd[0], odd[1])},
                                  {high(even[0], even[1]), high(odd[0], odd[1])}};
    for (int i = 0; i < 2; ++i) {
      const __m512i a = halves[i][0], b = halves[i][1];
      store_raw(to + 2 * i * row, _mm512_maskz_unpacklo_epi64(0xff, a, b), false);
      store_raw(to + (2 * i + 1) * row, _mm512_maskz_unpackhi_epi64(0xff, a, b), false);
    }
  }
#endif

  // Those of n tokens, `count` for each of some heads.
  static void store_scales(uint8_t* page, const Nvfp4Page& places, int64_t token, int64_t n, int64_t head,
                           int64_t heads, int64_t count, Scratch& some) {
    const int64_t row = heads * count;
    const uint8_t* scales = some.scales.data();
    if (places.quarter == 0) {
      if (heads * count == places.scales_token && count == places.scales_head)
        return some.scale_rows.put(page + places.scale_at(token, head, 0), scales, n * row);
      for (int64_t t = 0; t < n; ++t)
        for (int64_t h = 0; h < heads; ++h, scales += count)
          std::memcpy(page + places.scale_at(token + t, head + h, 0), scales, count);
      return;
    }
    if (n < kNvfp4TokenGroup) {
      for (int64_t t = 0; t < n; ++t) {
        for (int64_t h = 0; h < heads; ++h) {
          Nvfp4Scales at(places, token + t, head + h, 0);
          for (int64_t s = 0; s < count; ++s) page[at.next()] = *scales++;
        }
      }
      return;
    }
    // rows of all heads that touch are brought together, and written as one
    const bool together = heads * places.scales_head == places.scales_token;
    uint8_t* const first = page + places.scale_at(token, head, 0);
    uint8_t* const to = together ? some.rows.data() : first;
    const int64_t quarter = places.quarter;
#if defined(__AVX512BW__)
    if (together && quarter == 2 && row % kLine == 0) {
      for (int64_t c = 0; c < row; c += kLine) turn_heads(to + c, scales + c, row);
      return some.scale_rows.put(first, to, 4 * row);
    }
#endif
    uint8_t* turned = some.turned.data();
    for (int64_t c = 0; c < row; c += kColumns) turn_four(turned + 4 * c, scales + c, row);
    for (int64_t h = 0; h < heads; ++h) {
      uint8_t* part = to + h * places.scales_head;
      for (int q = 0; q < 4; ++q, part += places.scales_token, turned += 4 * quarter)
        std::memcpy(part, turned, 4 * quarter);
    }
    if (together) some.scale_rows.put(first, to, 4 * row);
  }
};

}  // namespace pykv::PYKV_ISA
