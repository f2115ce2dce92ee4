// What a call of CPU attention consists of: sequences, and the items that they are cut into.
#pragma once

#include <algorithm>
#include <cmath>
#include <new>

#include "attention/cpu/dot.h"
#include "attention/paged_attention.h"

namespace pykv::PYKV_ISA::attention {

inline constexpr int kRows = 64;  // query rows of an item; a multiple of kQuad

// Keys that one running softmax takes; they begin at a multiple of it, and what comes of them is added up in order.  So a
// row's result is the same whether its chunks are spread over threads or one item has them all.
inline constexpr int64_t kChunk = 2048;

inline int64_t divide_up(int64_t n, int64_t d) { return (n + d - 1) / d; }
inline int64_t round_up(int64_t n, int64_t multiple) { return divide_up(n, multiple) * multiple; }

// An id for whoever checks it: the compiler must not read it again after the check, for it may have changed.
inline int64_t read_once(const Index& ids, int64_t i) {
  const int64_t at = i * ids.stride;
  return ids.is_int64 ? static_cast<const volatile int64_t*>(ids.data)[at]
                      : static_cast<const volatile int32_t*>(ids.data)[at];
}

// Memory that grows as asked and is kept until its owner goes.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer() { ::operator delete(data_, std::align_val_t{64}); }

  template <class T>
  T* at_least(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (bytes > size_) {
      ::operator delete(data_, std::align_val_t{64});
      data_ = nullptr;
      size_ = 0;
      data_ = ::operator new(bytes, std::align_val_t{64});
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

inline thread_local Buffer scratch, folded, apart;

// An unfinished softmax: greatest logit, sum of exp(logit - greatest), and as many values weighted so.  Sum 0: nothing seen.
inline constexpr int kPartialHead = 2;

inline void clear_partial(float* partial, int size) {
  std::fill_n(partial, kPartialHead + size, 0.0f);
  partial[0] = kNegInf;
}

// Adds `from` to `to`.  A function of its own, lest one caller's copy rounds otherwise than another's.
[[gnu::noinline]] inline void add_partial(float* to, const float* from, int size) {
  if (from[1] == 0) return;
  if (to[1] == 0) {
    std::copy_n(from, kPartialHead + size, to);
    return;
  }
  const float top = std::max(to[0], from[0]);
  const float old = to[0] == top ? 1.0f : std::exp(to[0] - top),
              weight = from[0] == top ? 1.0f : std::exp(from[0] - top);
  to[0] = top;
  for (int i = 1; i < kPartialHead + size; ++i) to[i] = to[i] * old + from[i] * weight;
}

struct Span {
  int64_t begin, end;
};

// The queries of one sequence: its last tokens.
struct Sequence {
  int64_t index, first_token, queries, length;

  int64_t position(int64_t query) const { return length - queries + query; }
};

// Row r of a sequence and KV head is query r / group and query head r % group of the group.
struct Item {
  Sequence sequence;
  int64_t first_row;
  int rows;
  int first_head, last_head;  // KV heads, last_head excluded
  Span keys;
  float* partial;  // where the unfinished softmax goes; null: the item writes the output itself
};

// A call, and what all its items have in common.
struct Problem {
  const PagedAttentionArgs& args;
  Reporter bad_block;
  int group;       // query heads of a KV head
  int dims;        // head_size in whole vectors
  int64_t window;  // 0: none; small enough to be added to a position
  bool packed_keys, packed_values;
  bool dot;  // can multiply in bf16, see cpu/dot.h

  Problem(const PagedAttentionArgs& a, const Launch& launch)
      : args(a),
        bad_block(launch.reporter("paged_attention: block_tables")),
        group(a.num_heads / a.num_kv_heads),
        dims(static_cast<int>(round_up(a.head_size, kWidth))),
        window(std::min<int64_t>(a.window, int64_t{1} << 40)),
        packed_keys(a.key.chunk < a.head_size),
        packed_values(a.value.dim != 1),
        dot(kBf16Dot && a.dtype == DType::kBFloat16 && a.head_size % (2 * kWidth) == 0) {}

  // What a query is multiplied with before the softmax.
  float scale(int kv_head) const {
    return args.scale * (args.kv_format == KvFormat::kSame ? 1.0f : args.k_scale[kv_head]);
  }

  Span visible(const Sequence& s, int64_t query) const {
    const int64_t position = s.position(query);
    const int64_t end = args.causal ? position + 1 : window > 0 ? position + window : s.length;
    return {window > 0 ? std::max<int64_t>(0, position - window + 1) : 0, std::clamp<int64_t>(end, 0, s.length)};
  }

  // What at least one row of a block sees.
  Span visible(const Sequence& s, int64_t first_row, int rows) const {
    const Span first = visible(s, first_row / group), last = visible(s, (first_row + rows - 1) / group);
    return {first.begin, std::max(first.begin, last.end)};
  }

  bool sparse() const { return args.sparse.vert_stride > 1; }

  // Whether a query head sees the cache block that starts at `position`.
  bool sees(const Sequence& s, int64_t head, int64_t position) const {
    const BlockSparse& b = args.sparse;
    const int64_t kb = position / b.block_size, qb = (s.length - 1) / b.block_size;
    const int64_t offset = b.sliding_step >= 0 ? (b.tp_rank * args.num_heads + head) * b.sliding_step + 1
                                               : (b.tp_rank * args.num_kv_heads + head / group) * -b.sliding_step + 1;
    return (kb + offset) % b.vert_stride == 0 || kb > qb - b.local_blocks;
  }
};

}  // namespace pykv::PYKV_ISA::attention
