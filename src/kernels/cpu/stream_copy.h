// Copies past the caches, for results that are too large to stay there.
//
// A plain store first reads the line that it is going to fill, a third of all traffic; a streaming one does not.  memcpy
// streams by itself from some hundred kilobytes on: rows of one or two are left to us.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace pykv::PYKV_ISA {

// More than this pushes everything else out of the caches.
inline constexpr int64_t kWorthStreaming = 16 << 20;

inline void stream_copy(char* to, const char* from, int64_t bytes) {
#if defined(__x86_64__)
  const int64_t to_line = -reinterpret_cast<intptr_t>(to) & 63;
  if (bytes >= to_line + 64) {
    std::memcpy(to, from, to_line);
    int64_t at = to_line;
    for (; at + 64 <= bytes; at += 64) {
      __m128i line[4];
      std::memcpy(line, from + at, 64);
      for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + i, line[i]);
    }
    to += at, from += at, bytes -= at;
  }
#endif
  std::memcpy(to, from, bytes);
}

// Streaming stores are ordered by nothing else: to be called by each thread that made some.
inline void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// n elements that fill(To* to, int64_t first, int64_t count) works out: where they are to go past the caches, piece by
// piece into a buffer first.
template <class To, class Fill>
inline void write_worked_out(To* to, int64_t n, bool streamed, Fill&& fill) {
  constexpr int64_t kPiece = 4096 / sizeof(To);
  if (!streamed) return fill(to, int64_t{0}, n);
  alignas(64) To buffer[kPiece];
  for (int64_t first = 0; first < n; first += kPiece) {
    const int64_t count = n - first < kPiece ? n - first : kPiece;
    fill(buffer, first, count);
    stream_copy(reinterpret_cast<char*>(to + first), reinterpret_cast<const char*>(buffer), count * sizeof(To));
  }
}

}  // namespace pykv::PYKV_ISA
