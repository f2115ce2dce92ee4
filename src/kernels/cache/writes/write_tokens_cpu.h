// Runs of tokens into their slots: whole rows are copied (past the caches, if there are many).  Where tokens of a head
// become neighbours, some heads of all tokens of the run are first brought into a tile, converted, in the order in which
// they lie, which the processor fetches ahead; from there 16 bytes a token are spread, or (packed values) a square of
// 16-byte vectors is transposed in registers; with AVX-512 four of either at once, into whole lines.  A head that begins
// within a line is put together in a buffer first, so that all lines but those of the ends go past the caches.  Entries of MLA, a
// value and a key behind it, are written whole, one after another.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <variant>
#include <vector>

#include "cache/writes/reshape_and_cache.h"
#include "cache/writes/token_run_cpu.h"
#include "cache/writes/token_writer_cpu.h"
#include "cache/writes/write_nvfp4_cpu.h"
#include "cpu/encode.h"
#include "cpu/pieces.h"
#include "cpu/prefetch.h"
#include "cpu/simd.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {

inline constexpr int64_t kTileBytes = 64 * 1024;  // of some heads, or more for one head

// Sixteen bytes.  Past the caches only if the stores around it fill the line.
inline void store16(void* to, const void* from, [[maybe_unused]] bool past_caches) {
#if defined(__x86_64__)
  if (past_caches && (reinterpret_cast<uintptr_t>(to) & 15) == 0) {
    __m128i v;
    std::memcpy(&v, from, 16);
    return _mm_stream_si128(static_cast<__m128i*>(to), v);
  }
#endif
  std::memcpy(to, from, 16);
}

// Tokens that one 16-byte vector of the cache can hold, and how many are handled at once.
template <class Stored>
constexpr int kTokens = 16 / sizeof(Stored);
template <class Stored>
constexpr int kMostTokens = 4 * kTokens<Stored>;

#if defined(__AVX512BW__)
// Columns [0, n), as many as make whole vectors, of kSquares * kTokens rows, to a place where columns touch: whole lines.
// Gives how many.
template <int kSquares, class Stored>
inline int64_t store_lines(Stored* to, const Stored* from, int64_t row, int64_t n, bool past_caches) {
  constexpr int kSide = kTokens<Stored>, kColumns = 4 * kSide, kLength = kSquares * kSide;
  int64_t column = 0;
  for (; column + kColumns <= n; column += kColumns) {
    __m512i v[kSquares][kSide];
    for (int k = 0; k < kSquares; ++k) {
      for (int i = 0; i < kSide; ++i) v[k][i] = _mm512_loadu_si512(from + (k * kSide + i) * row + column);
      transpose<Stored>(v[k]);
    }
    for (int u = 0; u < kLength; u += 4) {  // piece u of a column group: column u / kSquares, square u % kSquares
      __m512i line[4];
      for (int j = 0; j < 4; ++j) line[j] = v[(u + j) % kSquares][(u + j) / kSquares];
      transpose_pieces(line);
      for (int g = 0; g < 4; ++g) store_raw(to + (column + g * kSide) * kLength + u * kSide, line[g], past_caches);
    }
  }
  return column;
}
#endif

// Columns [0, n) of `length` rows, which lie `row` elements apart, to a place where tokens are neighbours and columns lie
// `stride` elements apart.
template <class Stored>
inline void store_transposed(Stored* to, int64_t stride, const Stored* from, int64_t row, int64_t length, int64_t n,
                             bool past_caches) {
  constexpr int kSide = kTokens<Stored>;
  const int64_t squares = length / kSide;
  past_caches = past_caches && length == stride;  // columns touch, and all of each is written
  int64_t column = 0;
#if defined(__AVX512BW__)
  const bool aligned = (reinterpret_cast<uintptr_t>(to) & (kLine - 1)) == 0, touching = length == stride;
  if (touching && length == kSide) column = store_lines<1>(to, from, row, n, past_caches && aligned);
  if (touching && length == 2 * kSide) column = store_lines<2>(to, from, row, n, past_caches && aligned);
  if (touching && length == 4 * kSide) column = store_lines<4>(to, from, row, n, past_caches && aligned);
#endif
  for (; column + kSide <= n && squares > 0; column += kSide) {
    Vector<Stored> v[kMostTokens<Stored> / kSide][kSide];
    for (int64_t k = 0; k < squares; ++k) {
      for (int i = 0; i < kSide; ++i) v[k][i] = load_raw<Vector<Stored>>(from + (k * kSide + i) * row + column);
      transpose<Stored>(v[k]);
    }
    for (int i = 0; i < kSide; ++i) {
      Stored* tokens = to + (column + i) * stride;
      for (int64_t k = 0; k < squares; ++k) store16(tokens + k * kSide, &v[k][i], past_caches);
      for (int64_t t = squares * kSide; t < length; ++t) tokens[t] = from[t * row + column + i];
    }
  }
  for (; column < n; ++column)
    for (int64_t i = 0; i < length; ++i) to[column * stride + i] = from[i * row + column];
}

// A tile, and (where the cache's lines are not those of a head) what is spread of a head.
template <class Stored>
struct TileScratch {
  std::vector<Stored> tile, head;
  explicit TileScratch(bool) {}  // past the caches or not
};

// How elements of a head become what the cache stores: made once for a side and all of its elements.
template <class T>
struct Copy {
  using Source = T;
  using Stored = T;
  static constexpr bool kIsCopy = true;
  using Scratch = TileScratch<T>;
  Copy(const CacheSide&, KvFormat, int64_t, int64_t) {}
  static void row(Stored* to, const T* from, int64_t stride, int64_t n, int64_t) {
    if (stride == 1) {
      std::memcpy(to, from, n * sizeof(T));
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
    }
  }
};

// One-byte codes.  Which ones is asked once for each row: what moves rows is the same for all.
template <class T>
struct Quantise {
  using Source = T;
  using Stored = uint8_t;
  static constexpr bool kIsCopy = false;
  using Scratch = TileScratch<uint8_t>;
  template <class Code>
  using Encoders = std::vector<Encoder<T, Code>>;  // one for all heads, or one for each

  const Scale& scale;
  std::variant<Encoders<e4m3>, Encoders<e5m2>, Encoders<i8>> encoders;

  Quantise(const CacheSide& side, KvFormat format, int64_t num_heads, int64_t elements) : scale(side.scale) {
    if (format == KvFormat::kE5M2) encoders.template emplace<1>();
    if (format == KvFormat::kInt8) encoders.template emplace<2>();
    const int64_t scales = scale.stride == 0 ? 1 : num_heads;
    std::visit(
        [&](auto& of) {
          for (int64_t h = 0; h < scales; ++h) of.emplace_back(scale[h], elements / scales);
        },
        encoders);
  }
  void row(Stored* to, const T* from, int64_t stride, int64_t n, int64_t head) const {
    with_encoder(head, [&]<class Code>(const Encoder<T, Code>& encode) {
      Code* codes = reinterpret_cast<Code*>(to);
      if (stride == 1) return encode(codes, from, n);
      const float divisor = scale[head];
      for (int64_t i = 0; i < n; ++i) codes[i] = from_float<Code>(to_float(from[i * stride]) / divisor);
    });
  }
  // Neighbours; what lies `ahead` of them is asked for.
  void row(Stored* to, const T* from, int64_t ahead, int64_t n, int64_t head, LineWriter& out) const {
    with_encoder(head, [&]<class Code>(const Encoder<T, Code>& encode) {
      write_converted(out, encode, reinterpret_cast<Code*>(to), from, n, ahead);
    });
  }

 private:
  template <class F>
  void with_encoder(int64_t head, F&& f) const {
    std::visit([&](const auto& of) { f(of[of.size() == 1 ? 0 : head]); }, encoders);
  }
};

// Heads lie in the cache as they do in the token: no tile is needed.
template <class Convert>
void write_rows(const Convert& convert, const CacheSide& side, int64_t num_heads, const Run& run, LineWriter& out) {
  using Source = typename Convert::Source;
  using Stored = typename Convert::Stored;
  const int64_t size = side.head_size, row = num_heads * size;
  // as much at once as lies together on both sides: all heads, or even all tokens
  const bool by_the_row =
      (num_heads == 1 || (side.data_head == size && side.head == size)) && side.data_dim == 1 && side.scale.stride == 0;
  const bool at_once = by_the_row && side.data_token == row && side.token == row;
  const int64_t tokens = at_once ? 1 : run.length, heads = by_the_row ? 1 : num_heads;
  const int64_t n = (at_once ? run.length : 1) * (by_the_row ? row : size);
  const int64_t ahead = rows_ahead<Source>(row) * side.data_token;
  for (int64_t i = 0; i < tokens; ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      Stored* to =
          static_cast<Stored*>(side.cache) + run.block * side.block + (run.offset + i) * side.token + h * side.head;
      const Source* from =
          static_cast<const Source*>(side.data) + (run.token + i) * side.data_token + h * side.data_head;
      if (side.data_dim != 1) {
        convert.row(to, from, side.data_dim, n, h);
      } else if constexpr (!Convert::kIsCopy) {
        convert.row(to, from, ahead, n, h, out);
      } else {
        out.put(to, from, n * static_cast<int64_t>(sizeof(Stored)));
      }
    }
  }
}

// Rows that are read next: while a tile is spread, nothing else would fetch them.  Into the second cache: the first one holds
// the tile.
struct Ahead {
  const char* from;
  int64_t stride, row, length;  // bytes, bytes, rows

  template <class T>
  static Ahead rows(const CacheSide& side, int64_t num_heads, int64_t token, int64_t length) {
    constexpr int64_t kBytes = sizeof(T);
    const bool compact = side.data_dim == 1 && side.data_head == side.head_size;
    return {static_cast<const char*>(side.data) + token * side.data_token * kBytes, side.data_token * kBytes,
            num_heads * side.head_size * kBytes, compact ? length : 0};
  }
  // Part i of n, in lines.
  void fetch(int64_t i, int64_t n) const {
    const int64_t of_row = (row + kLine - 1) / kLine, all = length * of_row, end = (i + 1) * all / n;
    int64_t line = i * all / n;
    if (line == end) return;
    for (int64_t r = line / of_row, at = line % of_row; line < end; ++r, at = 0)
      for (; at < of_row && line < end; ++at, ++line) prefetch<2>(from + r * stride + at * kLine);
    keep_prefetches();
  }
};

// Tokens of a tile, a row each, to where they are neighbours in a head.
template <class Stored>
void spread(const CacheSide& side, Stored* to, const Stored* from, int64_t row, int64_t length, bool past_caches) {
  const int64_t size = side.head_size;
  if (side.chunk > 1) {  // x elements, 16 bytes
    const bool whole_lines = past_caches && length % 4 == 0 && side.token == side.chunk;
    int64_t column = 0;
#if defined(__AVX512BW__)
    // four chunks of four tokens at a time, if those are neighbours
    const auto chunk_bytes = static_cast<uintptr_t>(side.chunk_stride) * sizeof(Stored);
    const bool aligned = ((reinterpret_cast<uintptr_t>(to) | chunk_bytes) & (kLine - 1)) == 0;
    const bool fours = length % 4 == 0 && side.token == side.chunk;
    for (; fours && column + 4 * side.chunk <= size; column += 4 * side.chunk, to += 4 * side.chunk_stride) {
      for (int64_t i = 0; i < length; i += 4) {
        __m512i line[4];
        for (int j = 0; j < 4; ++j) line[j] = _mm512_loadu_si512(from + (i + j) * row + column);
        transpose_pieces(line);
        for (int g = 0; g < 4; ++g)
          store_raw(to + g * side.chunk_stride + i * side.token, line[g], past_caches && aligned);
      }
    }
#endif
    for (; column < size; column += side.chunk, to += side.chunk_stride)
      for (int64_t i = 0; i < length; ++i) store16(to + i * side.token, from + i * row + column, whole_lines);
  } else if (side.token == 1) {
    store_transposed(to, side.chunk_stride, from, row, length, size, past_caches);
  } else {
    for (int64_t i = 0; i < length; ++i)
      for (int64_t column = 0; column < size; ++column)
        to[i * side.token + column * side.chunk_stride] = from[i * row + column];
  }
}

template <class Convert>
void write_tiles(const Convert& convert, const CacheSide& side, int64_t num_heads, const Run& run, LineWriter& out,
                 bool past_caches, TileScratch<typename Convert::Stored>& scratch, const Ahead& ahead) {
  using Source = typename Convert::Source;
  using Stored = typename Convert::Stored;
  constexpr int64_t kOfLine = kLine / sizeof(Stored);
  const int64_t size = side.head_size, head_bytes = run.length * size * static_cast<int64_t>(sizeof(Stored));
  const int64_t heads_at_once = std::clamp<int64_t>(kTileBytes / std::max<int64_t>(head_bytes, 1), 1, num_heads);
  const int64_t row = heads_at_once * size + kOfLine;  // a power of two apart they would share few lines of the cache
  std::vector<Stored>& tile = scratch.tile;
  if (static_cast<int64_t>(tile.size()) < run.length * row) tile.resize(run.length * row);
  const bool by_the_row = side.data_head == size && side.data_dim == 1 && side.scale.stride == 0;
  const Source* data = static_cast<const Source*>(side.data) + run.token * side.data_token;
  const int64_t groups = side.group_tokens ? run.offset / side.group_tokens : 0;
  Stored* cache = static_cast<Stored*>(side.cache) + run.block * side.block + groups * side.group +
                  (run.offset - groups * side.group_tokens) * side.token;
  // a head in one piece, but not in whole lines
  const bool one_piece = side.token == side.chunk && side.chunk_stride == run.length * side.token;
  const bool by_writer = past_caches && one_piece && (reinterpret_cast<uintptr_t>(cache) & (kLine - 1)) != 0;
  Stored* head = nullptr;
  if (by_writer) {
    scratch.head.resize(run.length * size + kOfLine);
    head = scratch.head.data() + (-reinterpret_cast<intptr_t>(scratch.head.data()) & (kLine - 1)) / sizeof(Stored);
  }
  // no more of them than memory brings meanwhile: some with each token's conversion, too
  const int64_t parts = (num_heads + heads_at_once - 1) / heads_at_once * run.length + num_heads;
  int64_t part = 0;
  for (int64_t first = 0; first < num_heads; first += heads_at_once) {
    const int64_t heads = num_heads - first < heads_at_once ? num_heads - first : heads_at_once;
    for (int64_t i = 0; i < run.length; ++i) {
      const Source* from = data + i * side.data_token + first * side.data_head;
      Stored* to = tile.data() + i * row;
      ahead.fetch(part++, parts);
      if (by_the_row) {
        convert.row(to, from, 1, heads * size, 0);
      } else {
        for (int64_t h = 0; h < heads; ++h)
          convert.row(to + h * size, from + h * side.data_head, side.data_dim, size, first + h);
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      ahead.fetch(part++, parts);
      Stored* to = cache + (first + h) * side.head;
      spread(side, by_writer ? head : to, tile.data() + h * size, row, run.length, past_caches && !by_writer);
      if (by_writer) out.put(to, head, head_bytes);
    }
  }
}

template <class Convert>
void write_run(const Convert& convert, const CacheSide& side, int64_t num_heads, const Run& run, LineWriter& out,
               bool past_caches, typename Convert::Scratch& scratch, const Ahead& ahead) {
  if (num_heads == 0 || side.head_size == 0) return;
  if constexpr (requires { &Convert::run; }) {
    convert.run(side, num_heads, run, out, scratch);
  } else if (side.chunk == side.head_size && !side.group_tokens) {
    write_rows(convert, side, num_heads, run, out);
  } else {
    const int64_t group = side.group_tokens ? side.group_tokens : run.length + run.offset;
    for (int64_t i = 0, n; i < run.length; i += n) {  // groups are written apart
      n = std::min(run.length - i, group - (run.offset + i) % group);
      write_tiles(convert, side, num_heads, {run.token + i, n, run.block, run.offset + i}, out, past_caches, scratch,
                  ahead);
    }
  }
}

// Tokens into caches of one format.
template <class Convert>
class FormatWriter : public TokenWriter {
 public:
  using Source = typename Convert::Source;

  FormatWriter(const ReshapeAndCacheArgs& args, const Reporter& report, bool past_caches)
      : args_(args),
        report_(report),
        past_caches_(past_caches),
        entries_(are_entries(args)),
        key_(args.key, args.format, args.num_heads, args.num_tokens * args.num_heads * args.key.head_size),
        value_(args.value, args.format, args.num_heads, args.num_tokens * args.num_heads * args.value.head_size) {}

  bool writes_entries() const override { return entries_; }

  std::unique_ptr<Buffers> buffers() const override { return std::make_unique<OfThread>(past_caches_); }

  void write(Buffers& of_thread, int64_t begin, int64_t end) const override {
    OfThread& buffers = static_cast<OfThread&>(of_thread);
    constexpr int64_t kMost = kMostTokens<typename Convert::Stored>;
    const int64_t num_slots = args_.num_blocks * args_.block_size;
    while (begin < end) {
      const int64_t slot = args_.slots[begin];
      Run run{begin++, 1, 0, 0};
      if (slot < 0) continue;
      if (slot >= num_slots) {
        report_(slot, num_slots);
        continue;
      }
      run.block = slot / args_.block_size;
      run.offset = slot % args_.block_size;
      const int64_t left = args_.block_size - run.offset, most = left < kMost ? left : kMost;
      while (run.length < most && begin < end && args_.slots[begin] == slot + run.length) ++run.length, ++begin;
      if (entries_) {
        write_entries(buffers, run);
        continue;
      }
      const int64_t num_heads = args_.num_heads, next = std::min(run.length, end - begin);
      write_run(key_, args_.key, num_heads, run, buffers.out, past_caches_, buffers.scratch,
                Ahead::rows<Source>(args_.value, num_heads, run.token, run.length));
      write_run(value_, args_.value, num_heads, run, buffers.out, past_caches_, buffers.scratch,
                Ahead::rows<Source>(args_.key, num_heads, begin, next));
    }
  }

 private:
  struct OfThread : Buffers {
    LineWriter out;
    typename Convert::Scratch scratch;
    explicit OfThread(bool past_caches) : out(past_caches), scratch(past_caches) {}
  };

  static bool are_entries(const ReshapeAndCacheArgs& args) {
    const auto is_row = [](const CacheSide& side) { return side.chunk == side.head_size; };
    constexpr int64_t kBytes = sizeof(typename Convert::Stored);
    return args.num_heads == 1 && is_row(args.key) && is_row(args.value) && args.key.token == args.value.token &&
           static_cast<char*>(args.value.cache) + args.value.head_size * kBytes == args.key.cache;
  }

  void write_entries(OfThread& buffers, const Run& run) const {
    for (Run one{run.token, 1, run.block, run.offset}; one.token < run.token + run.length; ++one.token, ++one.offset) {
      write_run(value_, args_.value, 1, one, buffers.out, past_caches_, buffers.scratch, Ahead{});
      write_run(key_, args_.key, 1, one, buffers.out, past_caches_, buffers.scratch, Ahead{});
    }
  }

  const ReshapeAndCacheArgs& args_;
  const Reporter report_;
  const bool past_caches_, entries_;
  const Convert key_, value_;
};

}  // namespace pykv::PYKV_ISA
