// Attention over a paged KV cache on the CPU.
//
//   out = sum_j p_j v_j / (sum_j p_j + epsilon),  p_j = exp(x_j - max x),  x_j = logit of key j (see paged_attention.h)
//
// Work: the query rows of a sequence and KV head (queries x heads of the group) form blocks of at most kRows rows.  An
// item is one block, for some KV heads and, where a sequence has a single block (decode), for one chunk of kChunk keys.
// Within an item tiles of kTile keys are walked once, and for each tile the heads, so that a page is read as it lies in
// memory.  Chunks leave partial sums that a second pass merges in order: results depend neither on the number of
// threads nor on the rest of the batch.
//
// Decode is bound by memory: each byte of the cache is read once, and since jumps between pages defeat the hardware's
// prefetcher, every loop asks for the rows that the next head or tile will need.  Floor: bytes of K and V / bandwidth.
// Prefill is bound by arithmetic: a tile becomes floats once and serves all rows of the block.
#include <algorithm>
#include <cstring>
#include <new>

#include "attention/paged_attention.h"
#include "attention/paged_attention_tile_cpu.h"
#include "cpu/parallel.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kRows = 64;
constexpr int64_t kChunk = 2048;  // keys
constexpr int kMaxHeadSize = 1024;

// The row of a key that must not be read: zero bits are zero in every type.
alignas(64) constexpr float kZeros[kMaxHeadSize] = {};

int64_t divide_up(int64_t n, int64_t d) { return (n + d - 1) / d; }
int64_t round_up(int64_t n, int64_t multiple) { return divide_up(n, multiple) * multiple; }

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

thread_local Buffer scratch;

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

// A sequence whose keys are spread over several items.
struct Merge {
  Sequence sequence;
  int64_t chunks;
  float* partials;  // [chunks][num_kv_heads][rows][2 + head_size]: greatest logit, sum, unnormalised values
};

// A call, and what all its items have in common.
struct Problem {
  const PagedAttentionArgs& args;
  Reporter bad_block;
  int group;       // query heads of a KV head
  int dims;        // head_size in whole vectors
  int64_t window;  // 0: none; small enough to be added to a position
  bool packed_keys, packed_values;

  Problem(const PagedAttentionArgs& a, const Launch& launch)
      : args(a),
        bad_block(launch.reporter("paged_attention: block_tables")),
        group(a.num_heads / a.num_kv_heads),
        dims(static_cast<int>(round_up(a.head_size, kWidth))),
        window(std::min<int64_t>(a.window, int64_t{1} << 40)),
        packed_keys(a.key.chunk < a.head_size),
        packed_values(a.value.dim != 1) {}

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

// ---- One tile of keys
// ------------------------------------------------------------------------------------------------

// Where some neighbouring keys lie, before a head is chosen.  They do not cross a multiple of kTile.
struct Tile {
  int64_t first;
  int count;
  bool some_missing;
  bool missing[kTile];               // the block id is out of range
  int slot[kTile];                   // within the block
  int64_t key[kTile], value[kTile];  // elements from the start of the cache
};

void locate(const Problem& p, const Sequence& s, Span keys, Tile& tile) {
  const PagedAttentionArgs& a = p.args;
  const Index table = {a.block_tables.data, 1, a.block_tables.is_int64};
  tile.first = keys.begin;
  tile.count = static_cast<int>(std::min(keys.end, (keys.begin / kTile + 1) * kTile) - keys.begin);
  tile.some_missing = false;
  int64_t page = keys.begin / a.block_size;
  int slot = static_cast<int>(keys.begin % a.block_size);
  for (int j = 0; j < tile.count; ++page, slot = 0) {
    const int64_t block = table[s.index * a.block_table_stride + page * a.block_tables.stride];
    const bool missing = block < 0 || block >= a.num_blocks;
    if (missing) p.bad_block(block, a.num_blocks);
    tile.some_missing |= missing;
    for (; j < tile.count && slot < a.block_size; ++j, ++slot) {
      tile.missing[j] = missing;
      tile.slot[j] = slot;
      tile.key[j] = missing ? 0 : block * a.key.block + slot * a.key.token;
      tile.value[j] = missing ? 0 : block * a.value.block + slot * a.value.token;
    }
  }
}

// The same for one KV head, ready to be read.
template <class T>
struct TileRows {
  int count;   // keys
  int padded;  // rows, in whole vectors of scores
  bool some_hidden;
  bool hidden[kTile];
  const T* key[kTile];
  const T* value[kTile];
};

template <class T>
void point_at(const Problem& p, const Sequence& s, const Tile& tile, int kv_head, TileRows<T>& rows) {
  const PagedAttentionArgs& a = p.args;
  const T* const keys = static_cast<const T*>(a.key.data) + kv_head * a.key.head;
  const T* const values = static_cast<const T*>(a.value.data) + kv_head * a.value.head;
  rows.count = tile.count;
  rows.padded = static_cast<int>(round_up(tile.count, kKeys));
  for (int j = 0; j < tile.count; ++j) {
    rows.key[j] = keys + tile.key[j];
    rows.value[j] = values + tile.value[j];
  }
  rows.some_hidden = tile.some_missing || p.sparse() || rows.padded > rows.count;
  if (!rows.some_hidden) return;
  for (int j = 0; j < rows.padded; ++j) {
    bool hidden = j >= tile.count || tile.missing[j];
    if (!hidden && p.sparse()) {
      hidden = true;
      for (int g = 0; g < p.group && hidden; ++g)
        hidden = !p.sees(s, kv_head * p.group + g, tile.first + j - tile.slot[j]);
    }
    rows.hidden[j] = hidden;
    if (hidden) rows.key[j] = rows.value[j] = reinterpret_cast<const T*>(kZeros);
  }
}

// The part of head number h of `heads` in fetching a tile.  Where the heads of a token lie side by side, a head takes some
// tokens with all heads, otherwise all tokens of that head.  In the packed layouts a row is scattered over its page, and
// each token answers for an equal part of the page.
template <class T, class View>
void share(const Problem& p, const Item& item, const Tile& tile, const int64_t* offsets, const View& view, bool packed,
           int h, Fetch& fetch) {
  const int heads = item.last_head - item.first_head, size = p.args.head_size;
  const bool side_by_side = !packed && view.head < view.token;
  const int head = item.first_head + (side_by_side ? 0 : h);
  const int begin = side_by_side ? tile.count * h / heads : 0;
  const int end = side_by_side ? tile.count * (h + 1) / heads : tile.count;
  const int64_t row = (side_by_side ? (heads - 1) * view.head : 0) + size;  // elements for one token
  const int64_t token = packed ? size : view.token;
  for (int j = begin; j < end;) {
    const int run = token == row ? std::min(end - j, p.args.block_size - tile.slot[j]) : 1;  // tokens without a gap
    const int64_t offset = offsets[j] + head * view.head + tile.slot[j] * (token - view.token);
    if (!tile.missing[j]) fetch.add(static_cast<const T*>(view.data) + offset, run * row * sizeof(T));
    j += run;
  }
}

// ---- One item
// --------------------------------------------------------------------------------------------------------

// A thread's memory for one item, all in floats.
struct Workspace {
  float* q;              // [heads][rows][dims], times all scales that apply before the softmax
  float* acc;            // [heads][rows][dims]
  float* keys;           // [kTile][dims] a tile as floats
  float* values;         // [kTile][dims]
  float* gathered;       // [kTile][head_size] of the cache's type: packed keys, row by row
  float* scores;         // [kTile][kQuad]
  QuadSoftmax* softmax;  // [heads][rows / kQuad]

  Workspace(Buffer& buffer, int64_t heads, int64_t rows, int64_t dims) {
    const int64_t state = heads * rows * dims, tile = kTile * dims;
    float* next = buffer.at_least<float>(2 * state + 3 * tile + kTile * kQuad + heads * rows / kQuad * 2 * kWidth);
    const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    softmax = reinterpret_cast<QuadSoftmax*>(take(heads * rows / kQuad * 2 * kWidth));
    scores = take(kTile * kQuad);
    q = take(state);
    acc = take(state);
    keys = take(tile);
    values = take(tile);
    gathered = take(tile);
  }
};

// q[row] = query * scale, zeros beyond the head size and beyond the last row.
void load_queries(const Problem& p, const Item& item, int kv_head, int padded_rows, float* q) {
  const PagedAttentionArgs& a = p.args;
  const float scale = a.scale * (a.kv_format == KvFormat::kSame ? 1.0f : a.k_scale[kv_head]);
  dispatch<float, f16, bf16>(a.dtype, [&]<class T> {
    for (int r = 0; r < padded_rows; ++r, q += p.dims) {
      const int64_t row = item.first_row + std::min(r, item.rows - 1);
      const int64_t token = item.sequence.first_token + row / p.group, head = kv_head * p.group + row % p.group;
      const T* from = static_cast<const T*>(a.query) + token * a.query_token_stride + head * a.query_head_stride;
      for (int d = 0; d < p.dims; d += kWidth) store(q + d, load(from + d, a.head_size - d) * scale);
    }
  });
}

// out = values / denominator, and lse.
void finish_row(const Problem& p, const Sequence& s, int64_t row, int kv_head, float top, float total,
                const float* values) {
  const PagedAttentionArgs& a = p.args;
  const int64_t token = s.first_token + row / p.group, head = kv_head * p.group + row % p.group;
  float weight = a.kv_format == KvFormat::kSame ? 1.0f : a.v_scale[kv_head];
  if (a.sinks && a.sinks[head] != kNegInf) {
    const float joint = std::max(top, a.sinks[head]);
    weight *= std::exp(top - joint);
    total = total * std::exp(top - joint) + std::exp(a.sinks[head] - joint);
    top = joint;
  }
  weight /= total + a.denominator_epsilon;
  const bool empty = total == 0;
  if (a.lse) a.lse[head * a.lse_head_stride + token * a.lse_token_stride] = empty ? kNegInf : top + std::log(total);
  dispatch<float, f16, bf16>(a.dtype, [&]<class T> {
    T* to = static_cast<T*>(a.out) + token * a.out_token_stride + head * a.out_head_stride;
    for (int d = 0; d < a.head_size; d += kWidth)
      store(to + d, empty ? Floats{} : load(values + d, a.head_size - d) * weight, a.head_size - d);
  });
}

// Packed keys, put together row by row.
template <class T>
void gather_keys(const Problem& p, const TileRows<T>& rows, Fetch::Cursor& fetch, T* to) {
  const KeyCacheView& key = p.args.key;
  const int size = p.args.head_size;
  for (int j = 0; j < rows.padded; ++j, to += size) {
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

// From dot products to logits: soft cap, ALiBi, and -inf for what a row does not see.
template <class T>
void shape_logits(const Problem& p, const Item& item, const Tile& tile, int kv_head, const TileRows<T>& rows,
                  int first_row, float* scores) {
  const PagedAttentionArgs& a = p.args;
  QuadMask mask{a.softcap, {}, {}, {}, {}};
  bool plain = a.softcap == 0 && !a.alibi_slopes;
  int64_t head[kQuad];
  for (int r = 0; r < kQuad; ++r) {
    const int64_t row = item.first_row + std::min(first_row + r, item.rows - 1);
    const Span visible = p.visible(item.sequence, row / p.group);
    head[r] = kv_head * p.group + row % p.group;
    mask.slopes[r] = a.alibi_slopes ? a.alibi_slopes[head[r]] : 0.0f;
    mask.distance[r] = static_cast<int32_t>(tile.first - item.sequence.position(row / p.group));
    mask.low[r] = static_cast<int32_t>(std::clamp<int64_t>(visible.begin - tile.first, 0, kTile));
    mask.high[r] = static_cast<int32_t>(std::clamp<int64_t>(visible.end - tile.first, 0, kTile));
    plain = plain && mask.low[r] == 0 && mask.high[r] >= rows.count;
  }
  if (!plain) mask_quad(mask, rows.padded, scores);
  if (!rows.some_hidden && !p.sparse()) return;
  for (int j = 0; j < rows.padded; ++j)
    for (int r = 0; r < kQuad; ++r)
      if (rows.hidden[j] || (p.sparse() && !p.sees(item.sequence, head[r], tile.first + j - tile.slot[j])))
        scores[j * kQuad + r] = kNegInf;
}

// All query rows of one KV head against one tile.
template <class T>
void attend(const Problem& p, const Item& item, const Tile& tile, int kv_head, const TileRows<T>& rows,
            Fetch::Cursor next_keys, Fetch::Cursor next_values, const Workspace& w, const float* q, float* acc,
            QuadSoftmax* softmax) {
  const PagedAttentionArgs& a = p.args;
  const bool widen = a.head_size % kWidth != 0 || (item.rows > 2 * kQuad && sizeof(T) < sizeof(float));

  const float* float_keys[kTile];
  const float* float_values[kTile];
  for (int j = 0; j < kTile; ++j) float_keys[j] = w.keys + j * p.dims, float_values[j] = w.values + j * p.dims;

  const T* gathered[kTile];
  RowPointers<T> keys = rows.key;
  if (p.packed_keys) {
    T* const to = reinterpret_cast<T*>(w.gathered);
    gather_keys(p, rows, next_keys, to);
    for (int j = 0; j < rows.padded; ++j) gathered[j] = to + j * a.head_size;
    keys = gathered;
  }
  if (widen) widen_rows(keys, next_keys, rows.padded, a.head_size, p.dims, w.keys);
  if (p.packed_values) {
    widen_columns(rows.value, next_values, rows.count, a.head_size, p.dims, a.value.dim,
                  reinterpret_cast<const T*>(kZeros), w.values);
  } else if (widen) {
    widen_rows(rows.value, next_values, rows.count, a.head_size, p.dims, w.values);
  }

  for (int first = 0; first < item.rows; first += kQuad, q += kQuad * p.dims, acc += kQuad * p.dims, ++softmax) {
    if (widen) {
      score_quad(q, float_keys, next_keys, rows.padded, p.dims, w.scores);
    } else {
      score_quad(q, keys, next_keys, rows.padded, p.dims, w.scores);
    }
    shape_logits(p, item, tile, kv_head, rows, first, w.scores);
    float decay[kQuad];
    softmax_quad(*softmax, rows.padded, w.scores, decay);
    if (widen || p.packed_values) {
      accumulate_quad(w.scores, float_values, next_values, rows.count, p.dims, decay, acc);
    } else {
      accumulate_quad(w.scores, rows.value, next_values, rows.count, p.dims, decay, acc);
    }
  }
}

template <class T>
void run_item(const Problem& p, const Item& item) {
  const int heads = item.last_head - item.first_head;
  const int padded_rows = static_cast<int>(round_up(item.rows, kQuad)), quads = padded_rows / kQuad;
  const int64_t state = int64_t{padded_rows} * p.dims;  // of one head
  const Workspace w(scratch, heads, padded_rows, p.dims);
  for (int h = 0; h < heads; ++h) load_queries(p, item, item.first_head + h, padded_rows, w.q + h * state);
  std::fill_n(w.acc, heads * state, 0.0f);
  for (int i = 0; i < heads * quads; ++i) w.softmax[i] = {splat(kNegInf), Floats{}};

  // While one tile is worked on, the next is fetched.
  Tile tiles[2];
  int current = 0;
  if (item.keys.begin < item.keys.end) locate(p, item.sequence, item.keys, tiles[current]);
  for (Span left = item.keys; left.begin < left.end; current ^= 1) {
    const Tile &tile = tiles[current], &next = tiles[current ^ 1];
    left.begin += tile.count;
    const bool last = left.begin >= left.end;
    if (!last) locate(p, item.sequence, left, tiles[current ^ 1]);
    for (int h = 0; h < heads; ++h) {
      TileRows<T> rows;
      point_at(p, item.sequence, tile, item.first_head + h, rows);
      Fetch keys, values;
      if (!last) {
        share<T>(p, item, next, next.key, p.args.key, p.packed_keys, h, keys);
        share<T>(p, item, next, next.value, p.args.value, p.packed_values, h, values);
      }
      attend(p, item, tile, item.first_head + h, rows, keys.cursor(), values.cursor(), w, w.q + h * state,
             w.acc + h * state, w.softmax + h * quads);
    }
  }

  for (int h = 0; h < heads; ++h) {
    for (int r = 0; r < item.rows; ++r) {
      const QuadSoftmax& softmax = w.softmax[h * quads + r / kQuad];
      const float top = softmax.top[r % kQuad], total = softmax.total[r % kQuad];
      const float* values = w.acc + h * state + r * p.dims;
      if (item.partial) {
        const int64_t size = p.args.head_size + 2;
        float* to = item.partial + (int64_t{item.first_head + h} * item.rows + r) * size;
        to[0] = top;
        to[1] = total;
        std::memcpy(to + 2, values, p.args.head_size * sizeof(float));
      } else {
        finish_row(p, item.sequence, item.first_row + r, item.first_head + h, top, total, values);
      }
    }
  }
}

// ---- The batch
// -------------------------------------------------------------------------------------------------------

// Calls body(sequence) for each sequence with queries.  Bounds that make no sense are clamped and reported.
template <class Body>
void for_each_sequence(const PagedAttentionArgs& a, const Launch& launch, Body&& body) {
  const Reporter bad_length = launch.reporter("paged_attention: seq_lens");
  const Reporter bad_bound = launch.reporter("paged_attention: cu_query_lens");
  const auto bound = [&](int64_t s, int64_t least) {
    const int64_t value = a.cu_query_lens.data ? a.cu_query_lens[s] : s;
    if (value < least || value > a.num_tokens) bad_bound(value, a.num_tokens + 1);
    return std::clamp(value, least, a.num_tokens);
  };
  int64_t begin = bound(0, 0);
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const int64_t end = bound(s + 1, begin);
    const int64_t length = a.seq_lens[s];
    if (length < 0 || length > a.max_seq_len) bad_length(length, a.max_seq_len + 1);
    if (end > begin) body(Sequence{s, begin, end - begin, std::clamp<int64_t>(length, 0, a.max_seq_len)});
    begin = end;
  }
}

// Chunks of a sequence whose rows are a single block; they start at multiples of kChunk whatever the window.
struct Chunks {
  int64_t first, count;

  Chunks(Span keys) : first(keys.begin / kChunk), count(std::max<int64_t>(1, divide_up(keys.end, kChunk) - first)) {}

  Span keys(int64_t i, Span all) const {
    return {std::max(all.begin, (first + i) * kChunk), std::min(all.end, (first + i + 1) * kChunk)};
  }
};

struct Plan {
  int64_t blocks = 0, items = 0, merges = 0, floats = 0;  // blocks: items that all KV heads in one would make
};

// Cuts the batch into items.  Without arrays to write to it only counts.
Plan cut(const Problem& p, const Launch& launch, int64_t heads_per_item, Item* items, Merge* merges, float* partials) {
  const PagedAttentionArgs& a = p.args;
  Plan plan;
  const auto emit = [&](const Sequence& s, int64_t first_row, int rows, Span keys, float* partial) {
    ++plan.blocks;
    const int64_t fitting = std::max<int64_t>(1, kRows / round_up(rows, kQuad));
    const int step = static_cast<int>(std::min(heads_per_item, fitting));
    for (int h = 0; h < a.num_kv_heads; h += step, ++plan.items)
      if (items) items[plan.items] = {s, first_row, rows, h, std::min(h + step, a.num_kv_heads), keys, partial};
  };
  for_each_sequence(a, launch, [&](const Sequence& s) {
    const int64_t rows = s.queries * p.group;
    if (rows > kRows) {  // the last rows see most: they come first
      for (int64_t first = round_up(rows, kRows) - kRows; first >= 0; first -= kRows) {
        const int count = static_cast<int>(std::min<int64_t>(kRows, rows - first));
        emit(s, first, count, p.visible(s, first, count), nullptr);
      }
      return;
    }
    const Span all = p.visible(s, 0, static_cast<int>(rows));
    const Chunks chunks(all);
    if (chunks.count == 1) return emit(s, 0, static_cast<int>(rows), all, nullptr);
    const int64_t size = a.num_kv_heads * rows * (a.head_size + 2);
    if (merges) merges[plan.merges] = {s, chunks.count, partials + plan.floats};
    ++plan.merges;
    for (int64_t c = 0; c < chunks.count; ++c, plan.floats += size)
      emit(s, 0, static_cast<int>(rows), chunks.keys(c, all), partials + plan.floats);
  });
  return plan;
}

void merge(const Problem& p, const Merge& m, int kv_head, float* values) {
  const int64_t rows = m.sequence.queries * p.group, size = p.args.head_size + 2;
  for (int64_t row = 0; row < rows; ++row) {
    const auto partial = [&](int64_t c) {
      return m.partials + ((c * p.args.num_kv_heads + kv_head) * rows + row) * size;
    };
    float top = kNegInf, total = 0;
    for (int64_t c = 0; c < m.chunks; ++c) top = std::max(top, partial(c)[0]);
    std::fill_n(values, p.dims, 0.0f);
    for (int64_t c = 0; c < m.chunks; ++c) {
      const float* from = partial(c);
      const float weight = from[0] == top ? 1.0f : std::exp(from[0] - top);  // also when nothing was seen at all
      total += from[1] * weight;
      for (int d = 0; d < p.args.head_size; ++d) values[d] += from[2 + d] * weight;
    }
    finish_row(p, m.sequence, row, kv_head, top, total, values);
  }
}

}  // namespace

void paged_attention_cpu(const PagedAttentionArgs& args, const Launch& launch) {
  const Problem p(args, launch);
  // Enough items for all threads to end together, and otherwise as many heads in each as its state allows.
  const Plan whole = cut(p, launch, args.num_kv_heads, nullptr, nullptr, nullptr);
  const int64_t heads = std::max<int64_t>(1, args.num_kv_heads * whole.blocks / (4 * num_threads()));
  const Plan plan = cut(p, launch, heads, nullptr, nullptr, nullptr);
  Buffer item_memory, merge_memory, partial_memory;
  Item* items = item_memory.at_least<Item>(plan.items);
  Merge* merges = merge_memory.at_least<Merge>(plan.merges);
  cut(p, launch, heads, items, merges, partial_memory.at_least<float>(plan.floats));

  const auto with_cache_type = [&](auto&& body) {
    if (args.kv_format == KvFormat::kE4M3) return body.template operator()<e4m3>();
    if (args.kv_format == KvFormat::kE5M2) return body.template operator()<e5m2>();
    dispatch<float, f16, bf16>(args.dtype, body);
  };
  parallel_for(plan.items, 1, [&](int64_t begin, int64_t end) {
    with_cache_type([&]<class T> {
      for (int64_t i = begin; i < end; ++i) run_item<T>(p, items[i]);
    });
  });
  parallel_for(plan.merges * args.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      merge(p, merges[i / args.num_kv_heads], static_cast<int>(i % args.num_kv_heads), scratch.at_least<float>(p.dims));
  });
}

}  // namespace pykv::PYKV_ISA
