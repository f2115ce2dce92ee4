// One item of CPU attention: some query rows of a sequence, for some KV heads, over some of its keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

#include "attention/cpu/dot.h"
#include "attention/cpu/gather.h"
#include "attention/cpu/nvfp4.h"
#include "attention/cpu/places.h"
#include "attention/cpu/problem.h"
#include "attention/cpu/tile.h"

namespace pykv::PYKV_ISA::attention {

// The rows of an array [kTile][dims].
template <class T>
struct RowsOf {
  T* array;
  const T* row[kTile];

  RowsOf(float* memory, int dims) : array(reinterpret_cast<T*>(memory)) {
    for (int j = 0; j < kTile; ++j) row[j] = array + j * dims;
  }
};

// A thread's memory for one item.
struct Workspace {
  float* next;                             // of what is not taken yet
  QuadSoftmax* softmax;                    // [heads][rows / kQuad]
  float* scores;                           // [kTile][kQuad]
  float* q;                                // [heads][rows][dims], scaled; bf16 and as they are for the dot loops
  float* acc;                              // [heads][rows][dims]
  RowsOf<float> wide_keys, wide_values;    // a tile as floats
  RowsOf<bf16> short_keys, short_values;   // or, in the same memory, as bf16
  float *gathered_keys, *gathered_values;  // packed ones, row by row

  Workspace(Buffer& buffer, int64_t heads, int64_t rows, const Problem& p)
      : next(buffer.at_least<float>(heads * rows * (2 * p.dims + 2 * kWidth / kQuad) + kTile * (4 * p.dims + kQuad))),
        softmax(reinterpret_cast<QuadSoftmax*>(take(heads * rows * 2 * kWidth / kQuad))),
        scores(take(kTile * kQuad)),
        q(take(heads * rows * p.dims)),
        acc(take(heads * rows * p.dims)),
        wide_keys(take(kTile * p.dims), p.dims),
        wide_values(take(kTile * p.dims), p.dims),
        short_keys(wide_keys.array, p.dims),
        short_values(wide_values.array, p.dims),
        gathered_keys(take(kTile * p.dims)),
        gathered_values(take(kTile * p.dims)) {}

  float* take(int64_t count) { return std::exchange(next, next + count); }
};

// What each row of an item sees.
struct Sight {
  int64_t begin[kRows], end[kRows], position[kRows];                 // keys begin <= j < end
  int head[kRows];                                                   // of the group
  int64_t latest_begin[kRows / kQuad], earliest_end[kRows / kQuad];  // of a quad

  Sight(const Problem& p, const Item& item, int padded_rows) {
    for (int r = 0; r < padded_rows; ++r) {
      const int64_t row = item.first_row + std::min(r, item.rows - 1), query = row / p.group;
      const Span visible = p.visible(item.sequence, query);
      begin[r] = visible.begin;
      end[r] = visible.end;
      position[r] = item.sequence.position(query);
      head[r] = static_cast<int>(row % p.group);
      int64_t &latest = latest_begin[r / kQuad], &earliest = earliest_end[r / kQuad];
      latest = r % kQuad ? std::max(latest, begin[r]) : begin[r];
      earliest = r % kQuad ? std::min(earliest, end[r]) : end[r];
    }
  }
};

// Where arithmetic decides, so that converting a tile once for all quads pays.
inline bool many_rows(const Item& item) { return item.rows > 2 * kQuad; }

// Whether scores and sums of values are made in bf16.
template <class T>
bool dot_scores(const Problem& p) {
  return p.dot && sizeof(T) <= sizeof(bf16) && !std::is_same_v<T, f16>;
}
template <class T>
bool dot_values(const Problem& p, const Item& item) {
  return dot_scores<T>(p) && many_rows(item) && !p.args.batch_invariant;
}

// Calls body<kUsed> for a quad of so many rows: 1, 2 or up to all.
template <class Body>
void with_used(int rows, Body&& body) {
  if (rows == 1) return body.template operator()<1>();
  if (rows == 2) return body.template operator()<2>();
  body.template operator()<kQuad>();
}

// The part of it that belongs to one head.
struct HeadState {
  const float* q;
  float* acc;
  QuadSoftmax* softmax;
};

// The queries of one KV head as the loops want them; zeros beyond the head size, the last row again beyond the rows.
inline void load_queries(const Problem& p, const Item& item, int kv_head, int padded_rows, bool dot, float* q) {
  const PagedAttentionArgs& a = p.args;
  dispatch<float, f16, bf16>(a.dtype, [&]<class T> {
    for (int r = 0; r < padded_rows; ++r) {
      const int64_t row = item.first_row + std::min(r, item.rows - 1);
      const int64_t token = item.sequence.first_token + row / p.group, head = kv_head * p.group + row % p.group;
      const T* from = static_cast<const T*>(a.query) + token * a.query_token_stride + head * a.query_head_stride;
      if (dot) {
        std::memcpy(reinterpret_cast<bf16*>(q) + r * p.dims, from, a.head_size * sizeof(bf16));
      } else {
        for (int d = 0; d < p.dims; d += kWidth)
          store(q + r * p.dims + d, load(from + d, a.head_size - d) * p.scale(kv_head));
      }
    }
  });
}

// out = values / denominator, and lse.
[[gnu::noinline]] inline void finish_row(const Problem& p, const Sequence& s, int64_t row, int kv_head, float top,
                                         float total, const float* values) {
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

// Does row r of the item see this key of the tile, if it can be seen at all?
inline bool row_sees(const Problem& p, const Item& item, const Sight& sight, const Tile& tile, int kv_head, int r,
                     int j) {
  const int64_t key = tile.first + j;
  return key >= sight.begin[r] && key < sight.end[r] &&
         (!p.sparse() || p.sees(item.sequence, kv_head * p.group + sight.head[r], key - tile.slot[j]));
}

// From dot products to logits: soft cap, ALiBi, and -inf for what a row does not see.  Returns whether rows may see less than others.
template <class T>
bool shape_logits(const Problem& p, const Item& item, const Sight& sight, const Tile& tile, int kv_head,
                  const TileRows<T>& rows, int first_row, float* scores) {
  const PagedAttentionArgs& a = p.args;
  const bool differ = sight.latest_begin[first_row / kQuad] > tile.first ||
                      sight.earliest_end[first_row / kQuad] < tile.first + rows.count;
  if (a.softcap > 0 || a.alibi_slopes || differ) {
    QuadMask mask{a.softcap, {}, {}, {}, {}};
    for (int i = 0; i < kQuad; ++i) {
      const int r = first_row + i;
      mask.slopes[i] = a.alibi_slopes ? a.alibi_slopes[kv_head * p.group + sight.head[r]] : 0.0f;
      mask.distance[i] = static_cast<int32_t>(tile.first - sight.position[r]);
      mask.low[i] = static_cast<int32_t>(std::clamp<int64_t>(sight.begin[r] - tile.first, 0, kTile));
      mask.high[i] = static_cast<int32_t>(std::clamp<int64_t>(sight.end[r] - tile.first, 0, kTile));
    }
    mask_quad(mask, rows.padded, scores);
  }
  if (!rows.some_hidden) return differ;
  for (int j = 0; j < rows.padded; ++j)
    for (int i = 0; i < kQuad; ++i)
      if (rows.hidden[j] || (p.sparse() && !row_sees(p, item, sight, tile, kv_head, first_row + i, j)))
        scores[j * kQuad + i] = kNegInf;
  return differ || p.sparse();
}

// The rows of a tile, but zeros in place of those whose bits `hidden` has.
template <class T>
class ShownRows {
 public:
  ShownRows(RowPointers<T> rows, uint32_t hidden) : rows_(rows) {
    if (hidden == 0) return;
    for (int j = 0; j < kTile; ++j) chosen_[j] = hidden >> j & 1 ? reinterpret_cast<const T*>(kZeros) : rows[j];
    rows_ = chosen_;
  }
  operator RowPointers<T>() const { return rows_; }

 private:
  RowPointers<T> rows_;
  const T* chosen_[kTile];
};

inline bool are_finite(const float* x, int count) {
  Floats zero{};
  for (int i = 0; i < count; i += kWidth) zero += load(x + i) * 0.0f;
  return sum(zero) == 0;
}

// accumulate(hidden) for rows that do not see all keys: a hidden value has weight zero, but zero times NaN or infinity would reach
// the row.  Sums that are not finite are made again, row by row, without the values that hidden_from(row) names.
template <class Accumulate, class HiddenFrom>
[[gnu::noinline]] void accumulate_apart(float* acc, int rows, int dims, Accumulate accumulate, HiddenFrom hidden_from) {
  const int all = kQuad * dims;
  float *const before = apart.at_least<float>(2 * all), *const done = before + all;
  std::copy_n(acc, all, before);
  accumulate(0);
  if (are_finite(acc, rows * dims)) return;
  for (int r = 0; r < rows; ++r) {
    std::copy_n(before, all, acc);
    accumulate(hidden_from(r));
    std::copy_n(acc + r * dims, dims, done + r * dims);
  }
  std::copy_n(done, rows * dims, acc);
}

// All query rows of one KV head against one tile.
template <class T>
void attend(const Problem& p, const Item& item, const Sight& sight, const Tile& tile, int kv_head,
            const TileRows<T>& rows, Fetch::Cursor next_keys, Fetch::Cursor next_values, const Workspace& w,
            const HeadState& state) {
  const int size = p.args.head_size, dims = p.dims;
  std::optional<RowsOf<T>> gathered_keys, gathered_values;
  if (p.packed_keys) gather_keys(p, rows, next_keys, gathered_keys.emplace(w.gathered_keys, size).array);
  if (p.packed_values) gather_values(p, rows, next_values, gathered_values.emplace(w.gathered_values, size).array);
  const RowPointers<T> keys = gathered_keys ? gathered_keys->row : rows.key;
  const RowPointers<T> values = gathered_values ? gathered_values->row : rows.value;

  // The inner loops, given below: score<kUsed>(first row) and accumulate<kUsed>(first row, decay, hidden), where `hidden` has bits of
  // keys whose values are left out.
  const auto for_each_quad = [&](auto score, auto accumulate) {
    for (int first = 0; first < item.rows; first += kQuad) {
      with_used(item.rows - first, [&]<int kUsed> {
        score.template operator()<kUsed>(first);
        const bool differ = shape_logits(p, item, sight, tile, kv_head, rows, first, w.scores);
        float decay[kQuad];
        softmax_quad(state.softmax[first / kQuad], rows.padded, w.scores, decay);
        if (!differ) return accumulate.template operator()<kUsed>(first, decay, 0u);
        const auto hidden_from = [&](int r) {
          uint32_t bits = 0;
          for (int j = 0; j < rows.count; ++j)
            bits |= uint32_t{!row_sees(p, item, sight, tile, kv_head, first + r, j)} << j;
          return bits;
        };
        accumulate_apart(
            state.acc + first * dims, std::min(item.rows - first, kQuad), dims,
            [&](uint32_t hidden) { accumulate.template operator()<kUsed>(first, decay, hidden); }, hidden_from);
      });
    }
  };

  const bool widen = size % kWidth != 0 || (many_rows(item) && sizeof(T) < sizeof(float));
  const bool widen_keys = widen && !dot_scores<T>(p);
  // bf16 can be a tile of nvfp4, which lies where the floats would go.
  const bool widen_values = std::is_same_v<T, bf16> ? widen_keys : widen && !dot_values<T>(p, item);
  if (widen_values) widen_rows(values, next_values, rows.count, size, dims, w.wide_values.array);
  const auto accumulate = [&]<int kUsed>(int first, const float* decay, uint32_t hidden) {
    float* const acc = state.acc + first * dims;
    if (widen_values) {
      const ShownRows<float> shown(w.wide_values.row, hidden);
      accumulate_quad<kUsed, float>(w.scores, shown, next_values, rows.count, dims, decay, acc);
    } else {
      const ShownRows<T> shown(values, hidden);
      accumulate_quad<kUsed, T>(w.scores, shown, next_values, rows.count, dims, decay, acc);
    }
  };

#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16> || sizeof(T) == 1) {
    const auto by_dot = [&](auto keys, RowPointers<bf16> short_values) {
      const auto score = [&]<int kUsed>(int first) {
        score_quad_dot<kUsed>(reinterpret_cast<const bf16*>(state.q) + first * dims, p.scale(kv_head), keys, next_keys,
                              rows.padded, dims, w.scores);
      };
      if (!dot_values<T>(p, item)) return for_each_quad(score, accumulate);
      for_each_quad(score, [&]<int>(int first, const float* decay, uint32_t hidden) {
        const ShownRows<bf16> shown(short_values, hidden);
        accumulate_quad_dot(w.scores, shown, rows.padded, dims, decay, state.acc + first * dims);
      });
    };
    if (dot_scores<T>(p)) {
      if constexpr (std::is_same_v<T, bf16>) {
        return by_dot(keys, values);
      } else {
        if (!many_rows(item)) return by_dot(keys, nullptr);
        narrow_rows(keys, next_keys, rows.padded, dims, w.short_keys.array);
        if (dot_values<T>(p, item)) narrow_rows(values, next_values, rows.padded, dims, w.short_values.array);
        return by_dot(RowPointers<bf16>(w.short_keys.row), w.short_values.row);
      }
    }
  }
#endif

  if (widen_keys) widen_rows(keys, next_keys, rows.padded, size, dims, w.wide_keys.array);
  for_each_quad(
      [&]<int kUsed>(int first) {
        if (widen_keys) {
          score_quad<kUsed>(state.q + first * dims, w.wide_keys.row, next_keys, rows.padded, dims, w.scores);
        } else {
          score_quad<kUsed>(state.q + first * dims, keys, next_keys, rows.padded, dims, w.scores);
        }
      },
      accumulate);
}

// Some rows of nvfp4 as Wide.  `offsets` are those of their codes.
template <class View, class Wide>
void widen_nvfp4(const Problem& p, const Tile& tile, const TileRows<Nvfp4>& rows, int kv_head, const View& view,
                 const Nvfp4Page& page, const int64_t* offsets, Fetch::Cursor& fetch, Wide* to) {
  const int size = p.args.head_size;
  const Nvfp4Rows from(page, kv_head, size);
  for (int j = 0; j < rows.padded; ++j, to += size) {
    fetch.ahead(size / 2);
    if (rows.some_hidden && rows.hidden[j]) {
      std::memset(to, 0, size * sizeof(Wide));
    } else {
      const int64_t start = offsets[j] - tile.slot[j] * view.token;  // of the page
      from.widen(static_cast<const uint8_t*>(view.data) + start, tile.slot[j], to);
    }
  }
}

// The same for a cache of nvfp4: its tile becomes one of Wide first.
template <class Wide>
void attend_nvfp4(const Problem& p, const Item& item, const Sight& sight, const Tile& tile, int kv_head,
                  const TileRows<Nvfp4>& rows, Fetch::Cursor next_keys, Fetch::Cursor next_values, const Workspace& w,
                  const HeadState& state) {
  const int size = p.args.head_size;
  const RowsOf<Wide> keys(w.wide_keys.array, size), values(w.wide_values.array, size);
  widen_nvfp4(p, tile, rows, kv_head, p.args.key, p.args.key_page, tile.key, next_keys, keys.array);
  widen_nvfp4(p, tile, rows, kv_head, p.args.value, p.args.value_page, tile.value, next_values, values.array);
  TileRows<Wide> wide{rows.count, rows.padded, rows.some_hidden, {}, {}, {}};
  if (rows.some_hidden) std::copy_n(rows.hidden, rows.padded, wide.hidden);
  std::copy_n(keys.row, kTile, wide.key);
  std::copy_n(values.row, kTile, wide.value);
  attend(p, item, sight, tile, kv_head, wide, next_keys, next_values, w, state);
}

template <class T>
void run_item(const Problem& p, const Item& item) {
  const int heads = item.last_head - item.first_head;
  const int padded_rows = static_cast<int>(round_up(item.rows, kQuad)), quads = padded_rows / kQuad;
  const int64_t size = int64_t{padded_rows} * p.dims;  // of one head's queries
  const Workspace w(scratch, heads, padded_rows, p);
  const Sight sight(p, item, padded_rows);
  const bool dot = dot_scores<T>(p);
  for (int h = 0; h < heads; ++h) load_queries(p, item, item.first_head + h, padded_rows, dot, w.q + h * size);

  const auto begin_chunk = [&] {
    std::fill_n(w.acc, heads * size, 0.0f);
    for (int i = 0; i < heads * quads; ++i) w.softmax[i] = {splat(kNegInf), Floats{}};
  };
  // The rows go to `partials`, [heads of the item][rows][kPartialHead + dims], to be added up there.
  const int64_t pitch = kPartialHead + p.dims;
  const auto end_chunk = [&](float* partials) {
    float* const one = w.gathered_keys;  // tiles are done with
    for (int h = 0; h < heads; ++h) {
      for (int r = 0; r < item.rows; ++r, partials += pitch) {
        float* const values = w.acc + h * size + r * p.dims;
#if defined(__AVX512BF16__)
        if (dot_values<T>(p, item)) restore_order(values, p.dims);
#endif
        one[0] = w.softmax[h * quads + r / kQuad].top[r % kQuad];
        one[1] = w.softmax[h * quads + r / kQuad].total[r % kQuad];
        std::memcpy(one + kPartialHead, values, p.dims * sizeof(float));
        add_partial(partials, one, p.args.head_size);
      }
    }
  };
  float* const partials = folded.at_least<float>(heads * item.rows * pitch);
  for (int i = 0; i < heads * item.rows; ++i) clear_partial(partials + i * pitch, p.dims);
  begin_chunk();

  // While one tile is worked on, the next is fetched.
  Tile tiles[2];
  int current = 0;
  if (item.keys.begin < item.keys.end) locate(p, item.sequence, item.keys, tiles[current]);
  for (Span left = item.keys; left.begin < left.end; current ^= 1) {
    const Tile &tile = tiles[current], &next = tiles[current ^ 1];
    left.begin = tile.first + tile.count;
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
      const HeadState state{w.q + h * size, w.acc + h * size, w.softmax + h * quads};
      const auto attend_to = [&](auto function) {
        function(p, item, sight, tile, item.first_head + h, rows, keys.cursor(), values.cursor(), w, state);
      };
      if constexpr (!kIsNvfp4<T>) {
        attend_to(attend<T>);
      } else if (p.dot) {
        attend_to(attend_nvfp4<bf16>);
      } else {
        attend_to(attend_nvfp4<float>);
      }
    }
    if (!last && left.begin % kChunk == 0) {
      end_chunk(partials);
      begin_chunk();
    }
  }
  end_chunk(partials);

  for (int h = 0; h < heads; ++h) {
    for (int r = 0; r < item.rows; ++r) {
      const float* const done = partials + (h * item.rows + r) * pitch;
      if (item.partial) {
        const int64_t row = kPartialHead + p.args.head_size;
        std::copy_n(done, row, item.partial + (int64_t{item.first_head + h} * item.rows + r) * row);
      } else {
        finish_row(p, item.sequence, item.first_row + r, item.first_head + h, done[0], done[1], done + kPartialHead);
      }
    }
  }
}

}  // namespace pykv::PYKV_ISA::attention
