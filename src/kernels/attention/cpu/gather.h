// Tiles of packed caches, put together as NHD and HND have them.  Not inlined, for the sake of the loops that those take.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "attention/cpu/places.h"
#include "attention/cpu/problem.h"
#include "attention/cpu/tile.h"
#include "cpu/pieces.h"

namespace pykv::PYKV_ISA::attention {

// Packed keys, put together row by row.
template <class T>
[[gnu::noinline]] void gather_keys(const Problem& p, const TileRows<T>& rows, Fetch::Cursor& fetch, T* to) {
  const KeyCacheView& key = p.args.key;
  const int size = p.args.head_size;
  int j = 0;
#if defined(__AVX512BW__)
  // four chunks of four neighbouring tokens at a time: the first and the last tell, where four lie in two blocks at most
  constexpr int kChunk = 16 / sizeof(T);
  const bool whole = !rows.some_hidden && key.token == kChunk && p.args.block_size >= 4 && size % (4 * kChunk) == 0;
  for (; whole && j + 4 <= rows.padded && rows.key[j + 3] == rows.key[j] + 3 * kChunk; j += 4, to += 4 * size) {
    fetch.ahead(4 * size * sizeof(T));
    for (int c = 0; c < size; c += 4 * kChunk) {
      __m512i v[4];
      for (int g = 0; g < 4; ++g) v[g] = _mm512_loadu_si512(rows.key[j] + (c / kChunk + g) * key.chunk_stride);
      transpose_pieces(v);
      for (int i = 0; i < 4; ++i) _mm512_storeu_si512(to + i * size + c, v[i]);
    }
  }
#endif
  for (; j < rows.padded; ++j, to += size) {
    fetch.ahead(size * sizeof(T));
    if (rows.some_hidden && rows.hidden[j]) {
      std::memset(to, 0, size * sizeof(T));
      continue;
    }
    for (int c = 0; c * key.chunk < size; ++c) {
      constexpr int kElements = 16 / sizeof(T);  // of a chunk in the packed layout
      std::memcpy(to + c * kElements, rows.key[j] + c * key.chunk_stride, 16);
    }
  }
}

// Packed values, turned: 16 bytes are neighbouring tokens of a dimension, of one page or of two that have eight tokens.
template <class T>
[[gnu::noinline]] void gather_values(const Problem& p, const TileRows<T>& rows, Fetch::Cursor& fetch, T* to) {
  using Stored = std::conditional_t<sizeof(T) == 1, uint8_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;
  using Piece = Vector<Stored>;
  constexpr int kSide = sizeof(Piece) / sizeof(T);
  const int size = p.args.head_size;
  const int64_t step = p.args.value.dim;
  for (int j = 0; j < rows.padded; j += kSide, to += kSide * size) {
    const T* const* const from = rows.value + j;
    const int tokens = std::min(kSide, rows.padded - j);
    const auto in_runs = [&](int length) {
      bool all = tokens == kSide;
      for (int i = 0; i < tokens; ++i) all = all && from[i] == from[i / length * length] + i % length;
      return all;
    };
    int done = 0;
    const auto turn_squares = [&]<int kRuns> {
      constexpr int kRun = kSide / kRuns;
      for (; done + kSide <= size; done += kSide) {
        fetch.ahead(kSide * sizeof(Piece));
        Piece square[kSide];
        for (int i = 0; i < kSide; ++i)
          for (int run = 0; run < kSide; run += kRun)
            __builtin_memcpy(reinterpret_cast<T*>(&square[i]) + run, from[run] + (done + i) * step, kRun * sizeof(T));
        transpose<Stored>(square);
        for (int i = 0; i < kSide; ++i) __builtin_memcpy(to + i * size + done, &square[i], sizeof(Piece));
      }
    };
    if (in_runs(kSide)) {
      turn_squares.template operator()<1>();
    } else if (in_runs(kSide / 2)) {
      turn_squares.template operator()<2>();
    }
    for (int i = 0; i < tokens; ++i) {
      fetch.ahead((size - done) * sizeof(T));
      const bool hidden = rows.some_hidden && rows.hidden[j + i];
      for (int d = done; d < size; ++d) to[i * size + d] = hidden ? T{} : from[i][d * step];
    }
  }
}

}  // namespace pykv::PYKV_ISA::attention
