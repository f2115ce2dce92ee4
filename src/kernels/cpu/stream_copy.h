// Copies past the caches, for results that are too large to stay there.
//
// A plain store first reads the line that it is going to fill, a third of all traffic; a streaming one does not.  memcpy
// streams by itself from some hundred kilobytes on: rows of one or two are left to us.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pykv::PYKV_ISA {

// More than this pushes everything else out of the caches.
inline constexpr int64_t kWorthStreaming = 4 << 20;

inline constexpr int64_t kLine = 64;

// Memory that begins where a line does, in which no vector lies across two.
struct alignas(kLine) Line {
  char bytes[kLine];
};

// A whole line; `from` is anywhere.
inline void stream_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX2__)
  const __m256i *halves = reinterpret_cast<const __m256i*>(from), low = _mm256_loadu_si256(halves),
                high = _mm256_loadu_si256(halves + 1);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, high);
#elif defined(__x86_64__)
  __m128i line[4];
  std::memcpy(line, from, kLine);
  for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line[i]);
#else
  std::memcpy(to, from, kLine);
#endif
}

inline void stream_copy(char* to, const char* from, int64_t bytes) {
  const int64_t to_line = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
  if (bytes >= to_line + kLine) {
    std::memcpy(to, from, to_line);
    int64_t at = to_line;
    for (; at + kLine <= bytes; at += kLine) stream_line(to + at, from + at);
    to += at, from += at, bytes -= at;
  }
  std::memcpy(to, from, bytes);
}

// Streaming stores are ordered by nothing else: to be called by each thread that made some.
inline void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// What one thread writes, mostly piece after piece: where it is to go past the caches, a line that one piece begins and the
// next one ends is put together here first.  All is in its place when the writer is gone.
class LineWriter {
 public:
  static constexpr int64_t kPieceBytes = 4096;

  explicit LineWriter(bool streamed) : streamed_(streamed) {}
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;
  ~LineWriter() {
    flush();
    if (streamed_) finish_streaming();
  }

  bool streamed() const { return streamed_; }

  void put(void* target, const void* source, int64_t bytes) {
    if (!streamed_) {
      std::memcpy(target, source, static_cast<size_t>(bytes));
      return;
    }
    char* to = static_cast<char*>(target);
    const char* from = static_cast<const char*>(source);
    if (to != next_) {
      flush();
      begin_ = end_ = reinterpret_cast<intptr_t>(to) & (kLine - 1);
    }
    next_ = to + bytes;
    if (end_ > 0) {
      const int64_t rest = kLine - end_, some = bytes < rest ? bytes : rest;
      add(from, some);
      end_ += some, to += some, from += some, bytes -= some;
      if (end_ < kLine) return;
      if (begin_ == 0) {
        stream_line(to - kLine, line_);
      } else {
        std::memcpy(to - kLine + begin_, line_ + begin_, static_cast<size_t>(kLine - begin_));
      }
      begin_ = end_ = 0;
    }
    for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) stream_line(to, from);
    add(from, bytes);
    end_ = bytes;
  }

  // n elements that fill(To* to, int64_t first, int64_t count) works out, piece by piece into a buffer if they are streamed.
  template <class To, class Fill>
  void fill(To* to, int64_t n, Fill&& fill) {
    constexpr int64_t kPiece = kPieceBytes / sizeof(To);
    if (!streamed_) return fill(to, int64_t{0}, n);
    alignas(64) To buffer[kPiece];
    for (int64_t first = 0; first < n; first += kPiece) {
      const int64_t count = n - first < kPiece ? n - first : kPiece;
      fill(buffer, first, count);
      put(to + first, buffer, count * static_cast<int64_t>(sizeof(To)));
    }
  }

 private:
  // Bytes to the line, of which there are end_.  With AVX-512 a whole vector is stored, which is read again without a wait for
  // the cache.
  void add(const char* from, int64_t bytes) {
#if defined(__AVX512BW__)
    const __mmask64 these = _bzhi_u64(~uint64_t{}, static_cast<uint32_t>(bytes)) << end_;
    _mm512_store_si512(line_, _mm512_mask_loadu_epi8(_mm512_load_si512(line_), these, from - end_));
#else
    std::memcpy(line_ + end_, from, static_cast<size_t>(bytes));
#endif
  }

  // The line that is not whole yet: bytes [begin_, end_) of it, the last of them before next_.
  void flush() {
    if (end_ > begin_) std::memcpy(next_ - (end_ - begin_), line_ + begin_, static_cast<size_t>(end_ - begin_));
    begin_ = end_ = 0;
  }

  alignas(64) char line_[kLine];
  char* next_ = nullptr;
  int64_t begin_ = 0, end_ = 0;
  const bool streamed_;
};

}  // namespace pykv::PYKV_ISA
