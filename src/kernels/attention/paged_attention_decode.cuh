// Decoding proper: one query token for each sequence, which sees all its keys, and pages of a multiple of eight tokens.
//
// What paged_attention_mma.cuh does for any batch, in the fewest steps from the start of the kernel to the first copy: a
// warp finds its place from the lengths by itself, walks on in registers, and starts the copies of a tile before it waits
// for the one it works on next.
//
// Floor: KV bytes / bandwidth + the chain length -> page -> tile.
#pragma once

#include "attention/paged_attention_results.cuh"
#include "cuda/dependent.cuh"

namespace pykv::attention {

constexpr int kGroupTokens = 8;  // looked up and addressed as one

template <class Element, int kD, bool kPackedV>
struct DecodeShape : Shape<Element, kD, kPackedV, RowClass::kFew> {
  static constexpr bool kOneToken = true;
};

// A warp's tile, from its copies to its arithmetic.
struct alignas(16) TilePart {
  int sequence, len, kv_head, first_token;
  int slot;
  uint32_t valid;
  bool exists, begins, ends;
};

template <class S>
struct DecodeKernel : SegmentResults<S> {
  using Results = SegmentResults<S>;
  using Results::copies;
  using Results::lane;
  using Results::p;
  using Results::scratch;
  using Results::warp;
  using typename Results::State;
  using typename Results::Valid;
  static constexpr int kD = S::kD, kTile = S::kTile, kStages = S::kStages, kGroups = kTile / kGroupTokens;
  static constexpr int kUnitTokens = S::kUnitTokens;

  TilePart* parts;  // of the warp's stages
  char* rings;      // all warps' stages

  // ---- the walk -----------------------------------------------------------------------------------------------------

  // Where a warp is; all its lanes hold the same.
  struct Walk {
    int sequence, len, kv_head, tile;
    int units;  // of this segment in this share, from `tile` on
    int left;   // places of the share after the segment
    int slot;
    bool exists, begins;
  };

  __device__ int length(int s) const { return static_cast<int>(clamp(p.a.seq_lens[s], 0, p.a.max_seq_len)); }

  // Of one KV head on the line: its tiles and one more.
  static __device__ int places(int len) { return 1 + max(1, (len + kUnitTokens - 1) / kUnitTokens); }

  // 128 sequences, four to a lane, and the places before each.
  struct Scan {
    int len[4], before[4], total;
  };

  __device__ Scan scan(int base) const {
    const int num_seqs = static_cast<int>(p.a.num_seqs);
    Scan x;
    x.total = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int s = base + j * 32 + lane;
      x.len[j] = s < num_seqs ? length(s) : -1;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (base + j * 32 >= num_seqs) break;
      const int own = x.len[j] < 0 ? 0 : places(x.len[j]) * p.a.num_kv_heads;
      int upto = own;
#pragma unroll 1
      for (int delta = 1; delta < 32; delta *= 2) {
        const int below = __shfl_up_sync(~0u, upto, delta);
        if (lane >= delta) upto += below;
      }
      x.before[j] = x.total + upto - own;
      x.total += __shfl_sync(~0u, upto, 31);
    }
    return x;
  }

  __device__ Walk start_line() const {
    const int num_seqs = static_cast<int>(p.a.num_seqs), block = blockIdx.x;
    Scan x = scan(0);
    int total = x.total;
#pragma unroll 1
    for (int base = 128; base < num_seqs; base += 128) total += scan(base).total;
    const int each = p.by_grid.quotient(total), longer = total - each * gridDim.x;
    const int begin = block * each + min(block, longer);
    Unfinished note{-1, false, 0, 0, 0, 0, 0};
    Walk w{};
    w.left = each + (block < longer);
    if (w.left > 0) {
      int before = 0;
#pragma unroll 1
      for (int base = 0; begin >= before + x.total;) {
        before += x.total;
        x = scan(base += 128);
        w.sequence = base;
      }
      int place = 0, all = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (w.sequence + j * 32 >= num_seqs || all > 0) break;
        const int at = begin - before - x.before[j], own = x.len[j] < 0 ? 0 : places(x.len[j]);
        const uint32_t hit = __ballot_sync(~0u, at >= 0 && at < own * p.a.num_kv_heads);
        if (hit == 0) continue;
        const int from = __ffs(hit) - 1;
        w.sequence += j * 32 + from;
        w.len = __shfl_sync(~0u, x.len[j], from);
        place = __shfl_sync(~0u, at, from);
        all = places(w.len);
      }
      w.kv_head = static_cast<uint32_t>(place) / static_cast<uint32_t>(all);
      place -= w.kv_head * all;
      if (enter_segment(w, place, 2 * block) && place > 1) {
        const int first_unit = begin - place + 1, in_longer = longer * (each + 1);
        const int first = first_unit < in_longer ? first_unit / (each + 1) : longer + (first_unit - in_longer) / each;
        note = {first, first * each + min(first, longer) >= first_unit - 1, w.sequence, 1, w.kv_head, 0, 0};
      }
    }
    if (threadIdx.x == 0) p.unfinished[block] = note;
    return w;
  }

  // From this place of the segment on.  Is its end in this share?
  static __device__ bool enter_segment(Walk& w, int place, int slot) {
    w.tile = max(place - 1, 0);
    const int all = places(w.len), here = min(w.left, all - place);
    w.left -= here;
    w.units = place == 0 ? here - 1 : here;
    const bool finishes = place + here == all;
    w.slot = w.tile == 0 && finishes ? -1 : slot;
    w.exists = w.units > 0;
    w.begins = true;
    return finishes;
  }

  __device__ void step(Walk& w) const {
    w.begins = false;
    ++w.tile;
    if (--w.units > 0) return;
    w.exists = false;
    if (w.left <= 1) return;  // no tile of the next segment is this block's
    if (++w.kv_head == p.a.num_kv_heads) {
      w.kv_head = 0;
      w.len = length(++w.sequence);
    }
    enter_segment(w, 0, 2 * blockIdx.x + 1);
  }

  // ---- from the block table to a stage ------------------------------------------------------------------------------

  struct Pages {
    int id[kGroups];  // of eight tokens each; -1: no id of any cache
  };

  __device__ Pages look_up(const Walk& w) const {
    Pages pages;
    const int* words = static_cast<const int*>(p.a.block_tables.data);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int token = w.tile * kUnitTokens + warp * kTile + g * kGroupTokens;
      pages.id[g] = -1;
      if (token >= w.len) continue;
      const int64_t at = w.sequence * p.a.block_table_stride + p.block_size.quotient(token) * p.a.block_tables.stride;
      if (p.a.block_tables.is_int64) {
        pages.id[g] = words[2 * at + 1] == 0 ? words[2 * at] : -1;
      } else {
        pages.id[g] = words[at];
      }
    }
    return pages;
  }

  __device__ __noinline__ void report_page(int sequence, int token) const {
    p.bad_block(load_page(p, sequence, token).id(p), p.a.num_blocks);
  }

  // Bits of the tile's places with a key.
  __device__ uint32_t valid_places(const TilePart& part, const Pages& pages) const {
    const int token = token_at<S::kPermutedTokens>(lane);
    bool ok = false;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const bool good = static_cast<uint32_t>(pages.id[g]) < static_cast<uint32_t>(p.a.num_blocks);
      const int first = part.first_token + g * kGroupTokens;
      if (!good && first < part.len) [[unlikely]]
        report_page(part.sequence, first);
      if (token / kGroupTokens == g) ok = good;
    }
    return __ballot_sync(~0u, ok && lane < kTile && part.first_token + token < part.len);
  }

  // Starts the copies of a tile.
  __device__ void load(uint32_t stage, const TilePart& part, const Pages& pages) const {
    const char *key[kGroups], *value[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t id = pages.id[g];
      const int o = p.block_size.remainder(part.first_token + g * kGroupTokens);
      key[g] = static_cast<const char*>(p.a.key.data) + id * copies.key_block + o * copies.key_token +
               part.kv_head * copies.key_head;
      value[g] = static_cast<const char*>(p.a.value.data) + id * copies.value_block + o * copies.value_token +
                 part.kv_head * copies.value_head;
    }
    const auto copy = [&](uint32_t to, const char* from, bool read) {
      cp_async_16(to, read ? from : static_cast<const char*>(p.a.key.data), read);
    };
    constexpr int kChunks = Results::kChunks, kCopies = Results::kCopies;
    if constexpr (!S::kPackedV) {  // neighbouring lanes take neighbouring chunks of a token
      constexpr int kRows = 32 / kChunks;
      const int chunk = lane % kChunks, r0 = lane / kChunks;
      const bool in_head = chunk * 16 < copies.head_bytes;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int r = r0 + i * kRows, g = i * kRows / kGroupTokens, in_group = r0 + i * kRows % kGroupTokens;
        const bool read = in_head && (part.valid >> r & 1);
        copy(stage + this->key_place(r, chunk), key[g] + in_group * copies.key_token + chunk * 16, read);
        copy(stage + S::kTileBytes + swizzled<S::kRowBytes>(r, chunk),
             value[g] + in_group * copies.value_token + chunk * 16, read);
      }
    } else {
      const auto of_group = [](const char* const(&from)[kGroups], int group) {
        const char* x = from[0];
#pragma unroll
        for (int g = 1; g < kGroups; ++g) x = group == g ? from[g] : x;
        return x;
      };
      const int r = lane % kTile, token = token_at<S::kPermutedTokens>(r);
      const char* row = of_group(key, token / kGroupTokens) + token % kGroupTokens * copies.key_token;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int chunk = lane / kTile + i * (32 / kTile);
        copy(stage + this->key_place(r, chunk), row + chunk * copies.key_chunk,
             chunk * 16 < copies.head_bytes && (part.valid >> r & 1));
      }
      constexpr int kChunk = 16 / S::kBytes;
      const int shift = copies.value_chunk_shift;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int x = (lane + i * 32) >> shift, d = x % kD, c = (lane & ((1 << shift) - 1)) + (x / kD << shift);
        copy(stage + S::kTileBytes + this->packed_value_place(d, c),
             of_group(value, c * kChunk / kGroupTokens) + d * copies.value_dim,
             d < p.a.head_size && (part.valid >> c * kChunk & 1));
      }
    }
  }

  // ---- the loop -----------------------------------------------------------------------------------------------------

  static __device__ Unit unit_of(const TilePart& part) {
    Unit u{};
    u.sequence = u.query_begin = part.sequence;
    u.sequence_len = part.len;
    u.query_len = 1;
    u.kv_head = part.kv_head;
    u.first_token = part.first_token;
    u.slot = part.slot;
    return u;
  }

  __device__ void run() {
    wait_for_previous_kernel();
    State state;
    Walk w = start_line();
    Pages pages;
    if (w.exists) pages = look_up(w);

    // In iteration i the copies of tile i + stages - 1 start and the pages of the next are looked up.
    int at = 0, free = 0;  // the stages of tiles i and i + stages - 1
    const auto after = [](int stage) { return stage + 1 == kStages ? 0 : stage + 1; };
    const uint32_t stage0 = shared_address(rings + warp * S::kRingBytes);
#pragma unroll 1
    for (int i = 1 - kStages;; ++i) {
      TilePart next{w.sequence, w.len,    w.kv_head,   w.tile * kUnitTokens + warp * kTile, w.slot, 0,
                    w.exists,   w.begins, w.units == 1};
      if (w.exists) {
        next.valid = valid_places(next, pages);
        if (next.valid != 0) load(stage0 + free * S::kStageBytes, next, pages);
        if (next.begins && i > 1 - kStages) this->prefetch_queries(unit_of(next));
        step(w);
        if (w.exists) pages = look_up(w);
      }
      cp_async_commit();
      if (lane == 0) parts[free] = next;
      free = after(free);
      if (i < 0) continue;
      __syncwarp();
      const TilePart part = parts[at];
      if (!part.exists) break;
      const Unit unit = unit_of(part);
      if (part.begins) this->begin_segment(unit, state);
      cp_async_wait<kStages - 1>();
      __syncwarp();  // the tile is there
      const Valid valid = {part.valid};
      const int offset = at * S::kStageBytes;
      if constexpr (S::kPackedV) {
        if (!this->is_whole(valid) && part.valid != 0) {
          this->clear_invisible(rings + warp * S::kRingBytes + offset + S::kTileBytes, valid);
          __syncwarp();
        }
      }
      this->compute(stage0 + offset, valid, unit, state);
      if (part.ends) this->end_segment_few(unit, state, rings, offset);
      __syncwarp();  // its stage is free
      at = after(at);
    }
    let_next_kernel_start();
    if (blockIdx.x == 0 && warp == 0) {
      for (int64_t s = lane; s < p.a.num_seqs; s += 32) report_sequence(p, load_sequence(p, s));
    }
  }
};

template <class S>
__global__ void __launch_bounds__(kThreads, S::kBlocksPerSm)
    paged_attention_decode_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies) {
  extern __shared__ __align__(1024) char memory[];
  auto* scratch = reinterpret_cast<Scratch<S>*>(memory + S::kTeams * S::kRingBytes + S::kQueryBytes);
  auto* parts = reinterpret_cast<TilePart*>(scratch + 1) + threadIdx.x / 32 * S::kStages;
  DecodeKernel<S> kernel{{{{p, copies}, *scratch, shared_address(memory + S::kTeams * S::kRingBytes)}}, parts, memory};
  kernel.run();
}

// Can it take this call, whatever the lengths?
template <class S>
bool suits_decode(const Problem& p) {
  const PagedAttentionArgs& a = p.a;
  const bool packed_keys = a.key.chunk < a.head_size;
  const int64_t most_places = (a.max_seq_len / S::kUnitTokens + 2) * a.num_kv_heads;
  return a.cu_query_lens.data == nullptr && p.window == kNoWindow && !p.sparse && a.block_size % kGroupTokens == 0 &&
         packed_keys == S::kPackedV && a.num_blocks < (int64_t{1} << 31) &&
         a.num_seqs * most_places < (int64_t{1} << 31) && a.max_seq_len < kNoWindow - S::kUnitTokens * 64;
}

}  // namespace pykv::attention
