// Decoding proper: which keys a query sees, and where their pages are.
//
// The lanes look up the pages of the warp's next tiles together, a page for each eight tokens; or, where pages are no multiple
// of that, the page of each token of the next tile.
#pragma once

#include "attention/cuda/decode/shape.cuh"
#include "attention/cuda/tile_loader.cuh"
#include "cuda/dependent.cuh"

namespace pykv::attention {

template <class S>
struct DecodePages {
  static constexpr int kD = S::kD, kTile = S::kTile, kGroups = kTile / kGroupTokens;

  const Problem& p;
  const CacheCopies& copies;
  const int lane = threadIdx.x % 32;
  TileLoader<S> tiles{p, copies};

  __device__ int length(int s) const { return bounded(p.a.seq_lens[s]); }
  __device__ int bounded(int64_t len) const { return static_cast<int>(clamp(len, 0, p.a.max_seq_len)); }

  // The first key that a query at the sequence's last token sees.
  __device__ int first_key(int len) const { return S::kHidesKeys ? max(0, len - p.window) : 0; }

  // Is this token behind the first key that a query sees?
  static __device__ bool is_seen(const TilePart& part, int token) { return !S::kHidesKeys || token >= part.first_key; }

  struct Pages {
    int id[kGroups];  // of eight tokens each; -1: no id of any cache
    int own;          // the lane's token's, with kRaw
  };

  // kEarly: before the kernel before has ended.
  template <bool kEarly = false>
  __device__ int look_up(int sequence, int token) const {
    const auto [words, step] = place_in_table(p, sequence, token);
    const auto word = [](const int* from) { return kEarly ? __ldcg(from) : *from; };
    const int low = word(words), high = step > 1 ? word(words + 1) : 0;  // both are asked for at once
    return high == 0 ? low : -1;
  }

  // A page's id as the table has it.  Nobody waits for it before id().
  struct PageWords {
    int low = -1, high = 0;

    __device__ int id() const { return high == 0 ? low : -1; }
  };

  // Asks for the page of a token, if it is wanted, else it is -1.  The words come where they stay: the compiler would move
  // them on at once, and so wait for them.
  __device__ PageWords ask_for_page(int sequence, int token, bool wanted) const {
    return ask_for_page(place_in_table(p, sequence, token), wanted);
  }
  static __device__ PageWords ask_for_page(const PlaceInTable& place, bool wanted) {
    const auto [words, step] = place;
    PageWords page;
    const auto load = [](int& to, const int* from, bool wanted) {
      asm volatile("{.reg .pred wanted; setp.ne.s32 wanted, %2, 0; @wanted ld.global.b32 %0, [%1];}"
                   : "+r"(to)
                   : "l"(from), "r"(static_cast<int>(wanted)));
    };
    load(page.low, words, wanted);
    load(page.high, words + 1, wanted && step > 1);
    return page;
  }

  // What a warp asks for first: a sequence's length, and a page for each lane.  Where these are, in words behind what the problem
  // says, can be found out before the kernel before has ended.
  struct FirstLoads {
    int64_t len, page;
    bool has_page;
  };
  __device__ FirstLoads find_first_loads(int sequence, int token, bool has_page) const {
    // As differences of pointers: what ptxas makes of words_before() takes 0.1 us longer, for it asks for constants later.
    const auto from = [](const Index& ids, const int* words) { return words - static_cast<const int*>(ids.data); };
    FirstLoads first{from(p.a.seq_lens, words_at(p.a.seq_lens, sequence)),
                     from(p.a.block_tables, place_in_table(p, sequence, token).words), has_page};
    have_ready(first.len);
    have_ready(first.page);
    return first;
  }
  __device__ PageWords ask_for_pages(const FirstLoads& first) const {
    return ask_for_page(place_in_table(p, first.page), first.has_page);
  }
  __device__ int length(const FirstLoads& first) const {
    const int* words = static_cast<const int*>(p.a.seq_lens.data) + first.len;
    const int low = words[0], high = p.a.seq_lens.is_int64 ? words[1] : low >> 31;
    return bounded(static_cast<int64_t>(high) << 32 | static_cast<uint32_t>(low));
  }

  // A guess: what the length is before the kernel before has ended.
  __device__ int early_length(int s) const { return __ldcg(words_at(p.a.seq_lens, s)); }

  // While the kernel before still runs, brings a tile into the L2, if these are the length and the place of its keys.
  // Whatever that kernel may yet write to the table is read again after it; nothing of this stays in the L1.
  __device__ void foresee(int sequence, int kv_head, int len, int first_token) const {
    const int token0 = first_token + (S::kByToken ? lane % kTile : lane % kGroups * kGroupTokens);
    const int page = token0 < p.a.max_seq_len ? look_up<true>(sequence, token0) : -1;
    constexpr int kLines = S::kRowBytes < 128 ? 1 : S::kRowBytes / 128;  // of the L2, in a row
#pragma unroll
    for (int i = 0; i < (kTile * kLines + 31) / 32; ++i) {
      const int x = i * 32 + lane, r = x / kLines, token = first_token + r, at = x % kLines * 128;
      const int id = __shfl_sync(~0u, page, S::kByToken ? r : r / kGroupTokens);
      if (r >= kTile || token >= len || at >= copies.head_bytes ||
          static_cast<uint32_t>(id) >= static_cast<uint32_t>(p.a.num_blocks)) {
        continue;
      }
      prefetch(tiles.key_row(id, token, kv_head) + at);
      prefetch(tiles.value_row(id, token, kv_head) + at);
    }
  }

  __device__ __noinline__ void report_page(int sequence, int token) const {
    p.bad_block(load_page(p, sequence, token).id(p), p.a.num_blocks);
  }

  // Bits of the tile's places with a key.
  __device__ uint32_t valid_places(const TilePart& part, const Pages& pages) const {
    const int token = token_at<S>(lane);
    bool ok = false;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const bool good = static_cast<uint32_t>(pages.id[g]) < static_cast<uint32_t>(p.a.num_blocks);
      const int first = part.first_token + g * kGroupTokens;
      if (!good && first < part.len && is_seen(part, first + kGroupTokens - 1)) [[unlikely]]
        report_page(part.sequence, first);
      if (token / kGroupTokens == g) ok = good;
    }
    const int key = part.first_token + token;
    return __ballot_sync(~0u, ok && lane < kTile && key < part.len && is_seen(part, key));
  }

  static constexpr int kAtOnce = S::kByToken ? 1 : 32 / kGroups;  // tiles whose pages the lanes look up together

  // Tile i and those after it: whose page this lane looks up.  first_token(i): of a tile.
  __device__ int token_to_look_up(int i, auto&& first_token) const {
    return S::kByToken ? first_token(i) + lane % kTile
                       : first_token(i + lane / kGroups) + lane % kGroups * kGroupTokens;
  }

  // From what look_up gave to the lanes, kGroups each, the pages of tile i.
  static __device__ Pages pages_of(int ids, int i) {
    Pages pages;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) pages.id[g] = __shfl_sync(~0u, ids, i * kGroups + g);
    if (S::kRaw) pages.own = __shfl_sync(~0u, ids, i * kGroups + threadIdx.x % kTile / kGroupTokens);
    return pages;
  }
};

}  // namespace pykv::attention
