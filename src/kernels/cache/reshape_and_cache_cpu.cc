// Twin of reshape_and_cache.cu.  Memory-bound too: whole rows are copied, converted rows pass through a small tile on the
// stack, and where tokens become neighbours (packed values) a square of 16-byte vectors is transposed in registers.
#include <cstring>
#include <utility>

#include "cache/reshape_and_cache.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kColumns = 256;                  // of a head, at once
constexpr int64_t kBytesPerTask = 128 * 1024;  // less is not worth another thread

// Tokens that one 16-byte vector of the cache can hold: the longest run handled at once.
template <class Stored>
constexpr int kRun = 16 / sizeof(Stored);

// `length` tokens in consecutive slots of one block.
struct Run {
  int64_t token, length, block, offset;
};

template <class Stored>
struct VectorOf {
  typedef Stored Type __attribute__((vector_size(16)));
};
template <class Stored>
using Vector = typename VectorOf<Stored>::Type;

// a[kFrom], b[kFrom], a[kFrom + 1], b[kFrom + 1], ...
template <int kFrom, class V, int... kLane>
inline V interleave(V a, V b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, (kFrom + kLane / 2 + kLane % 2 * static_cast<int>(sizeof...(kLane)))...);
}

// log2(n) rounds of interleaving row i with row i + n / 2 turn n rows into n columns.
template <class Stored>
inline void transpose(Vector<Stored> (&v)[kRun<Stored>]) {
  constexpr int n = kRun<Stored>;
  constexpr auto lanes = std::make_integer_sequence<int, n>();
  for (int round = 1; round < n; round *= 2) {
    Vector<Stored> next[n];
    for (int i = 0; i < n / 2; ++i) {
      next[2 * i] = interleave<0>(v[i], v[i + n / 2], lanes);
      next[2 * i + 1] = interleave<n / 2>(v[i], v[i + n / 2], lanes);
    }
    for (int i = 0; i < n; ++i) v[i] = next[i];
  }
}

// Columns [0, n) of `length` rows to a place where tokens are neighbours and columns lie `stride` elements apart.
template <class Stored>
inline void store_transposed(Stored* to, int64_t stride, const Stored* const* rows, int64_t length, int64_t n) {
  int64_t column = 0;
  if (length == kRun<Stored>) {
    for (; column + kRun<Stored> <= n; column += kRun<Stored>) {
      Vector<Stored> v[kRun<Stored>];
      for (int i = 0; i < kRun<Stored>; ++i) v[i] = load_raw<Vector<Stored>>(rows[i] + column);
      transpose<Stored>(v);
      for (int i = 0; i < kRun<Stored>; ++i) std::memcpy(to + (column + i) * stride, &v[i], 16);
    }
  }
  for (; column < n; ++column)
    for (int64_t i = 0; i < length; ++i) to[column * stride + i] = rows[i][column];
}

// How elements become what the cache stores.
template <class T>
struct Copy {
  using Source = T;
  using Stored = T;
  static constexpr bool kIsCopy = true;
  static void row(Stored* to, const T* from, int64_t stride, int64_t n, float) {
    for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
  }
};

template <class T, class Code>
struct Quantise {
  using Source = T;
  using Stored = uint8_t;
  static constexpr bool kIsCopy = false;
  static void row(Stored* to, const T* from, int64_t stride, int64_t n, float scale) {
    Code* codes = reinterpret_cast<Code*>(to);
    if (stride == 1) {
      const Floats divisor = splat(scale);
      for (int64_t i = 0; i < n; i += kWidth) store(codes + i, load(from + i, n - i) / divisor, n - i);
    } else {
      for (int64_t i = 0; i < n; ++i) codes[i] = from_float<Code>(to_float(from[i * stride]) / scale);
    }
  }
};

template <class Convert>
void write_run(const CacheSide& side, int64_t num_heads, const Run& run) {
  using Source = typename Convert::Source;
  using Stored = typename Convert::Stored;
  Stored tile[kRun<Stored>][kColumns];
  const Source* data = static_cast<const Source*>(side.data) + run.token * side.data_token;
  Stored* cache = static_cast<Stored*>(side.cache) + run.block * side.block + run.offset * side.token;
  const int64_t size = side.head_size;

  const bool rows_as_they_are = Convert::kIsCopy && side.data_dim == 1;
  if (rows_as_they_are && side.chunk == size) {
    const bool heads_adjacent = num_heads == 1 || (side.data_head == size && side.head == size);
    const int64_t pieces = heads_adjacent ? 1 : num_heads;
    const size_t bytes = (heads_adjacent ? num_heads : 1) * size * sizeof(Stored);
    for (int64_t i = 0; i < run.length; ++i)
      for (int64_t h = 0; h < pieces; ++h)
        std::memcpy(cache + i * side.token + h * side.head, data + i * side.data_token + h * side.data_head, bytes);
    return;
  }

  for (int64_t h = 0; h < num_heads; ++h) {
    for (int64_t first = 0; first < size; first += kColumns) {
      const int64_t n = size - first < kColumns ? size - first : kColumns;
      const Stored* rows[kRun<Stored>];
      for (int64_t i = 0; i < run.length; ++i) {
        const Source* from = data + i * side.data_token + h * side.data_head + first * side.data_dim;
        if (rows_as_they_are) {
          rows[i] = reinterpret_cast<const Stored*>(from);
        } else {
          Convert::row(tile[i], from, side.data_dim, n, side.scale[h]);
          rows[i] = tile[i];
        }
      }
      Stored* to = cache + h * side.head;
      if (side.chunk == size) {
        for (int64_t i = 0; i < run.length; ++i) std::memcpy(to + i * side.token + first, rows[i], n * sizeof(Stored));
      } else if (side.chunk > 1) {  // x elements, 16 bytes; a tile's columns are a multiple of x
        to += first / side.chunk * side.chunk_stride;
        for (int64_t column = 0; column < n; column += kRun<Stored>, to += side.chunk_stride)
          for (int64_t i = 0; i < run.length; ++i) std::memcpy(to + i * side.token, rows[i] + column, 16);
      } else {
        to += first * side.chunk_stride;
        if (side.token == 1) {
          store_transposed(to, side.chunk_stride, rows, run.length, n);
        } else {
          for (int64_t i = 0; i < run.length; ++i)
            for (int64_t column = 0; column < n; ++column)
              to[i * side.token + column * side.chunk_stride] = rows[i][column];
        }
      }
    }
  }
}

template <class Convert>
void write_all(const ReshapeAndCacheArgs& args, const Launch& launch) {
  const Reporter report = launch.reporter(args.report);
  const int64_t num_slots = args.num_blocks * args.block_size;
  const int64_t token_bytes = args.num_heads * (args.key.head_size + args.value.head_size) *
                              static_cast<int64_t>(sizeof(typename Convert::Source));
  const int64_t grain = kBytesPerTask / (token_bytes + 1) + 1;
  parallel_for(args.num_tokens, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t slot = args.slots[begin];
      Run run{begin++, 1, 0, 0};
      if (slot < 0) continue;
      if (slot >= num_slots) {
        report(slot, num_slots);
        continue;
      }
      run.block = slot / args.block_size;
      run.offset = slot % args.block_size;
      const int64_t left = args.block_size - run.offset;
      const int64_t most = left < kRun<typename Convert::Stored> ? left : kRun<typename Convert::Stored>;
      while (run.length < most && begin < end && args.slots[begin] == slot + run.length) ++run.length, ++begin;
      write_run<Convert>(args.key, args.num_heads, run);
      write_run<Convert>(args.value, args.num_heads, run);
    }
  });
}

template <class Code>
void quantise_all(const ReshapeAndCacheArgs& args, const Launch& launch) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() { write_all<Quantise<T, Code>>(args, launch); });
}

}  // namespace

void reshape_and_cache_cpu(const ReshapeAndCacheArgs& args, const Launch& launch) {
  switch (args.format) {
    case KvFormat::kSame:
      return size_of(args.dtype) == 2 ? write_all<Copy<uint16_t>>(args, launch)
                                      : write_all<Copy<uint32_t>>(args, launch);
    case KvFormat::kE4M3:
      return quantise_all<e4m3>(args, launch);
    case KvFormat::kE5M2:
      return quantise_all<e5m2>(args, launch);
  }
}

}  // namespace pykv::PYKV_ISA
