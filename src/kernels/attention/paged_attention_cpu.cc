// Attention over a paged KV cache on the CPU.
//
//   out = sum_j p_j v_j / (sum_j p_j + epsilon),  p_j = exp(x_j - max x),  x_j = logit of key j (see paged_attention.h)
//
// NaN is not greater than any number, so the maximum leaves it out; but its weight is NaN, and so is the sum.  A sum of zero, not a
// maximum of -inf, therefore says that nothing was seen.
//
// Work: the query rows of a sequence and KV head (queries x heads of the group) form blocks of at most kRows rows.  An
// item is one block, for some KV heads and, where a sequence has a single block (decode), for one chunk of kChunk keys.
// Within an item tiles of kTile keys are walked once, and for each tile the heads, so that a page is read as it lies in
// memory.  Chunks leave partial sums that a second pass merges in order: results depend neither on the number of
// threads nor on the rest of the batch; and with batch_invariant, which keeps blocks of many rows from taking quicker
// loops than those of few, nor on the number of queries.
//
// Decode is bound by memory: each byte of the cache is read once, and since jumps between pages defeat the hardware's
// prefetcher, every loop asks for the rows that the next head or tile will need.  Floor: bytes of K and V / bandwidth.
// Prefill is bound by arithmetic: a tile becomes floats once and serves all rows of the block.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "attention/cpu/item.h"
#include "attention/paged_attention.h"
#include "cpu/parallel.h"

namespace pykv::PYKV_ISA {
namespace attention {
namespace {

// A sequence whose keys are spread over several items.
struct Merge {
  Sequence sequence;
  int64_t chunks;
  float* partials;  // [chunks][num_kv_heads][rows][kPartialHead + head_size]
};

struct Sequences {
  const Sequence* first;
  int64_t count;
};

// The sequences with queries, in memory of num_seqs.  Bounds that make no sense are clamped and reported.  Each is read once: the
// caller's arrays may change while the call runs, and all that follows is sized by this copy.
Sequences read_sequences(const PagedAttentionArgs& a, const Launch& launch, Sequence* to) {
  const Reporter bad_length = launch.reporter("paged_attention: seq_lens");
  const Reporter bad_bound = launch.reporter("paged_attention: cu_query_lens");
  const auto bound = [&](int64_t s, int64_t least) {
    const int64_t value = a.cu_query_lens.data ? read_once(a.cu_query_lens, s) : s;
    if (value < least || value > a.num_tokens) bad_bound(value, a.num_tokens + 1);
    return std::clamp(value, least, a.num_tokens);
  };
  int64_t begin = bound(0, 0), count = 0;
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const int64_t end = bound(s + 1, begin);
    const int64_t length = read_once(a.seq_lens, s);
    if (length < 0 || length > a.max_seq_len) bad_length(length, a.max_seq_len + 1);
    if (end > begin) to[count++] = {s, begin, end - begin, std::clamp<int64_t>(length, 0, a.max_seq_len)};
    begin = end;
  }
  return {to, count};
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
Plan cut(const Problem& p, const Sequences& sequences, int64_t heads_per_item, Item* items, Merge* merges,
         float* partials) {
  const PagedAttentionArgs& a = p.args;
  Plan plan;
  const auto emit = [&](const Sequence& s, int64_t first_row, int rows, Span keys, float* partial) {
    ++plan.blocks;
    const int64_t fitting = std::max<int64_t>(1, kRows / round_up(rows, kQuad));
    const int step = static_cast<int>(std::min(heads_per_item, fitting));
    for (int h = 0; h < a.num_kv_heads; h += step, ++plan.items)
      if (items) items[plan.items] = {s, first_row, rows, h, std::min(h + step, a.num_kv_heads), keys, partial};
  };
  const auto add = [&](const Sequence& s) {
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
    const int64_t size = a.num_kv_heads * rows * (kPartialHead + a.head_size);
    if (merges) merges[plan.merges] = {s, chunks.count, partials + plan.floats};
    ++plan.merges;
    for (int64_t c = 0; c < chunks.count; ++c, plan.floats += size)
      emit(s, 0, static_cast<int>(rows), chunks.keys(c, all), partials + plan.floats);
  };
  for (int64_t i = 0; i < sequences.count; ++i) add(sequences.first[i]);
  return plan;
}

void merge(const Problem& p, const Merge& m, int kv_head, float* sum) {
  const int64_t rows = m.sequence.queries * p.group, size = kPartialHead + p.args.head_size;
  for (int64_t row = 0; row < rows; ++row) {
    clear_partial(sum, p.dims);
    for (int64_t c = 0; c < m.chunks; ++c)
      add_partial(sum, m.partials + ((c * p.args.num_kv_heads + kv_head) * rows + row) * size, p.args.head_size);
    finish_row(p, m.sequence, row, kv_head, sum[0], sum[1], sum + kPartialHead);
  }
}

}  // namespace
}  // namespace attention

void paged_attention_cpu(const PagedAttentionArgs& args, const Launch& launch) {
  using namespace attention;
  const Problem p(args, launch);
  // Enough items for all threads to end together, and otherwise as many heads in each as its state allows.
  Buffer sequence_memory;
  const Sequences sequences = read_sequences(args, launch, sequence_memory.at_least<Sequence>(args.num_seqs));
  const Plan whole = cut(p, sequences, args.num_kv_heads, nullptr, nullptr, nullptr);
  const int64_t heads = std::max<int64_t>(1, args.num_kv_heads * whole.blocks / (4 * num_threads()));
  const Plan plan = cut(p, sequences, heads, nullptr, nullptr, nullptr);
  Buffer item_memory, merge_memory, partial_memory;
  Item* items = item_memory.at_least<Item>(plan.items);
  Merge* merges = merge_memory.at_least<Merge>(plan.merges);
  cut(p, sequences, heads, items, merges, partial_memory.at_least<float>(plan.floats));

  const auto with_cache_type = [&](auto&& body) {
    if (args.kv_format == KvFormat::kE4M3) return body.template operator()<e4m3>();
    if (args.kv_format == KvFormat::kE5M2) return body.template operator()<e5m2>();
    if (args.kv_format == KvFormat::kInt8) return body.template operator()<i8>();
    if (args.kv_format == KvFormat::kNvfp4) return body.template operator()<Nvfp4>();
    dispatch<float, f16, bf16>(args.dtype, body);
  };
  parallel_for(plan.items, 1, [&](int64_t begin, int64_t end) {
    with_cache_type([&]<class T> {
      for (int64_t i = begin; i < end; ++i) run_item<T>(p, items[i]);
    });
  });
  parallel_for(plan.merges * args.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      merge(p, merges[i / args.num_kv_heads], static_cast<int>(i % args.num_kv_heads),
            scratch.at_least<float>(kPartialHead + p.dims));
  });
}

}  // namespace pykv::PYKV_ISA
