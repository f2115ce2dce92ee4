// Attention over a paged cache on tensor cores (mma.sync, sm_80 and later), for 16-bit data and 16-bit, fp8 or int8 caches.
//
//   out = softmax(logit(q . k)) . v      by the online softmax, one KV tile after another
//
// Work: see paged_attention_plan.cuh; every block walks a contiguous share of all KV tiles.
//   Few, Some  16 or 32 rows (query tokens x the heads of a KV head), so that decode reads each KV byte once for a KV
//              head; the four warps split a KV tile's tokens and add up once, at the end of a segment.
//   Many       64 or 128 rows; a warp owns 16 or 32 of them against all tokens of the tile.
// Data: K and V tiles come by 16-byte asynchronous copies into a ring of stages; the look-up of the block table runs one
// tile ahead of the copies, into a ring of slots.  A stage holds rows of tokens, swizzled so that ldmatrix meets no bank
// twice, or, for packed caches, their own order.
// A one-byte element is widened to half once, in registers: ldmatrix hands a lane neighbouring bytes, so the dimensions (or
// tokens) of a fragment are permuted, and Q (or the order of K's tokens) is permuted to match.  Queries of dtype bf16
// against such a cache become halves too, scaled row by row by a power of two.
//
// Bottleneck: decode is bound by memory, floor = KV bytes / bandwidth; it lives by the bytes in flight, (stages - 1) *
// 32 KB * blocks per SM.  Prefill is bound by mma.sync and by shared-memory reads: a warp of 32 rows uses each K or V
// fragment twice.
#pragma once

#include "attention/paged_attention_launch.cuh"
#include "attention/paged_attention_plan.cuh"
#include "cuda/cp_async.cuh"
#include "cuda/dependent.cuh"
#include "cuda/int8.cuh"
#include "cuda/launch.h"
#include "cuda/mma.cuh"

namespace pykv::attention {

// Kinds of cache element: storage size, the type that tensor cores see, and how a register of elements becomes fragments.
template <class T>
struct Element16 {
  using Mma = T;
  static constexpr int kBytes = 2;
};

template <KvFormat kFormat>
struct Element8 {
  using Mma = half;
  static constexpr int kBytes = 1;

  // Four codes to two pairs of halves.
  static __device__ void widen(uint32_t codes, uint32_t& low, uint32_t& high) {
    if constexpr (kFormat == KvFormat::kE5M2) {
      spread(codes, low, high);
    } else if constexpr (kFormat == KvFormat::kInt8) {
      half2 pairs[2];
      int8x4_to_half2x2(codes, pairs[0], pairs[1]);
      low = reinterpret_cast<const uint32_t&>(pairs[0]);
      high = reinterpret_cast<const uint32_t&>(pairs[1]);
    } else {
#if __CUDA_ARCH__ >= 890
      asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
          : "=r"(low), "=r"(high)
          : "r"(codes));
#else
      spread(codes, low, high);
      low = from_e4m3(low);
      high = from_e4m3(high);
#endif
    }
  }

 private:
  // Each code as the upper byte of a half: for E5M2 that is its value.
  static __device__ void spread(uint32_t codes, uint32_t& low, uint32_t& high) {
    low = __byte_perm(codes, 0, 0x1404);
    high = __byte_perm(codes, 0, 0x3424);
  }

  // E4M3 has one exponent bit less than a half: shifted by one place its value is 256 times too small, and its NaN
  // reads as 1.875.
  static __device__ uint32_t from_e4m3(uint32_t spread_codes) {
    const uint32_t magnitude = (spread_codes & 0x7f007f00u) >> 1, is_nan = 0x3f803f80u;
    const uint32_t small = (spread_codes & 0x80008000u) | magnitude, scale = 0x5c005c00u;  // 256
    const __half2 value = __hmul2(reinterpret_cast<const __half2&>(small), reinterpret_cast<const __half2&>(scale));
    return reinterpret_cast<const uint32_t&>(value) |
           __heq2_mask(reinterpret_cast<const __half2&>(magnitude), reinterpret_cast<const __half2&>(is_nan));
  }
};

// Sizes of one instantiation.  kD: head size rounded up to 64, 128 or 256.
template <class Element, int kD, RowClass kRowClass>
struct Shape {
  static constexpr bool kMany = kRowClass == RowClass::kMany;
  static constexpr int kBytes = Element::kBytes;
  static constexpr int kRowTiles = kRowClass == RowClass::kFew || kD == 256 ? 1 : 2;  // 16-row tiles of a warp
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kMany ? 4 * kWarpRows : kWarpRows;
  static constexpr int kTile = kMany ? (kD == 256 && kBytes == 2 ? 32 : 64) : 128 / kBytes;  // tokens
  static constexpr int kWarpTokens = kMany ? kTile : kTile / 4;
  static constexpr int kStep = kWarpTokens < 32 ? kWarpTokens : 32;  // tokens between two updates of the softmax
  static constexpr int kRowBytes = kD * kBytes;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kQueryBytes = kRows * kD * 2;
  static constexpr int kBlocksPerSm = kRowClass != RowClass::kFew ? (kRowClass == RowClass::kSome && kD == 64 ? 3 : 2)
                                      : kD == 64                  ? 4
                                      : kD == 256                 ? 1
                                      : kBytes == 2               ? 3
                                                                  : 2;
  static constexpr int kStages = kRowClass != RowClass::kFew || kBlocksPerSm > 2 ? 2 : 3;
  static constexpr int kSlots = kStages + 2;
};

struct alignas(16) TokenPointers {
  const char *key, *value;  // of the slot's KV head; null: nothing to read
};

template <int kTile>
struct Slot {
  TokenPointers tokens[kTile];
  Unit unit;
  uint32_t valid[kTile / 32];
};

struct RowState {
  int position;
  float slope, scale;
  int sparse_offset;
};

template <class S>
struct alignas(16) Scratch {
  PlanScratch plan;
  Walker walker;
  float2 stats[4][S::kWarpRows];
  RowState rows[4][S::kWarpRows];
};

// Byte offset of a 16-byte chunk in a tile whose rows have kRowBytes bytes: eight neighbouring rows at one chunk index
// lie in eight different groups of banks.
template <int kRowBytes>
__device__ inline int swizzled(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0);
  const int moved = kRowBytes == 64 ? chunk ^ (row >> 1 & 3) : chunk ^ (row & 7);
  return row * kRowBytes + moved * 16;
}

// The token at place r of a tile.  With packed V and fp8, a lane's four bytes of V are four neighbouring tokens, so K's
// tokens are laid out to bring the scores of the same four to that lane.
template <bool kPermuted>
__device__ inline int token_at(int r) {
  if (!kPermuted) return r;
  return (r & ~15) + (r & 6) * 2 + (r & 1) + (r & 8) / 4;
}

// Problem's cache views in bytes, for the copies.
struct CacheCopies {
  int64_t key_block, key_token, key_head, value_block, value_token, value_head;
  int head_bytes;
  bool key_token_fast;    // packed K: copy a chunk index's tokens side by side
  uint32_t key_chunk;     // packed K: from one 16-byte chunk of a key to the next
  uint32_t value_dim;     // packed V: from one dimension to the next
  int value_chunk_shift;  // packed V: log2 of the 16-byte chunks of a dimension that lie side by side
};

template <class Element, int kD, bool kPackedV, RowClass kRowClass>
struct Kernel {
  using S = Shape<Element, kD, kRowClass>;
  using Mma = typename Element::Mma;
  static constexpr int kTile = S::kTile;
  static constexpr bool kMany = S::kMany;
  static constexpr bool kFp8 = S::kBytes == 1;
  static constexpr bool kPermutedTokens = kFp8 && kPackedV;
  static constexpr bool kPermutedOutput = kFp8 && !kPackedV;
  static constexpr int kSteps = kD / 16;

  const Problem& p;
  const CacheCopies& copies;
  Slot<kTile>* slots;
  Scratch<S>& scratch;
  uint32_t stage0, queries;  // shared addresses
  float* merge0;             // stage 0 as memory for the sum over warps
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // ---- look-up of pages ---------------------------------------------------------------------------------------------

  struct Lookup {
    PageEntry page;
    int token;
    bool wanted, visible;
  };

  __device__ Lookup begin_lookup(const Unit& u) const {
    Lookup x{{0, 0}, 0, false, false};
    if (threadIdx.x >= kTile) return x;
    x.token = u.first_token + token_at<kPermutedTokens>(threadIdx.x);
    x.visible = x.wanted = is_wanted(p, u, x.token);
    if (kPackedV && !x.visible) {  // a chunk of V is read whole; its invisible tokens are zeroed afterwards
      constexpr int kChunk = 16 / S::kBytes;
      const int chunk = x.token / kChunk * kChunk, first = max(chunk, u.first_key);
      x.wanted = first < chunk + kChunk && is_wanted(p, u, first);
    }
    if (x.wanted) x.page = load_page(p, u.sequence, x.token);
    return x;
  }

  __device__ void end_lookup(const Lookup& x, Slot<kTile>& slot) const {
    if (threadIdx.x >= kTile) return;
    const int64_t id = x.page.id(p);
    const bool ok = x.wanted && id >= 0 && id < p.a.num_blocks;
    if (x.wanted && !ok) p.bad_block(id, p.a.num_blocks);
    TokenPointers at{nullptr, nullptr};
    if (ok) {
      const int o = p.block_size.remainder(x.token), kv_head = slot.unit.kv_head;
      const char* key = static_cast<const char*>(p.a.key.data);
      const char* value = static_cast<const char*>(p.a.value.data);
      if (x.visible) at.key = key + id * copies.key_block + o * copies.key_token + kv_head * copies.key_head;
      at.value = value + id * copies.value_block + o * copies.value_token + kv_head * copies.value_head;
    }
    slot.tokens[threadIdx.x] = at;
    const uint32_t valid = __ballot_sync(~0u, ok && x.visible);
    if (lane == 0) slot.valid[warp] = valid;
  }

  __device__ bool is_whole(const Slot<kTile>& slot) const {
    bool whole = true;
    for (int w = 0; w < kTile / 32; ++w) whole = whole && slot.valid[w] == ~0u;
    return whole;
  }

  // ---- copies into a stage ------------------------------------------------------------------------------------------

  static constexpr int kChunks = S::kRowBytes / 16;           // of a token's row
  static constexpr int kCopies = kTile * kChunks / kThreads;  // by each thread, for K as for V

  // Packed tiles keep in shared memory the order of the cache, so that a copy by neighbouring threads is one line to one
  // line, and ldmatrix, too, reads whole lines: K as [chunk][token], V as [group of chunks][dimension][chunk of the
  // group], the last place swizzled so that eight neighbouring dimensions at one chunk lie in different banks.
  static __device__ int key_place(int row, int chunk) {
    return kPackedV ? (chunk * kTile + row) * 16 : swizzled<S::kRowBytes>(row, chunk);
  }

  __device__ int packed_value_place(int d, int chunk) const {
    const int shift = copies.value_chunk_shift, mask = (1 << shift) - 1;
    const int x = ((chunk >> shift) * kD + d) << shift | (chunk & mask);
    return (x ^ (x >> 3 & mask)) * 16;
  }

  // Copies 16 bytes from `row` + offset; nothing is read, and zeros written, if the row is null or the chunk past the head.
  template <bool kChecked>
  __device__ void copy(uint32_t to, const char* row, uint32_t offset, bool in_head) const {
    const bool read = !kChecked || (row != nullptr && in_head);
    cp_async_16(to, read ? row + offset : static_cast<const char*>(p.a.key.data), read);
  }

  // Pointers are fetched a few at a time, ahead of the copies that use them.
  static constexpr int kBatch = kCopies < 4 ? kCopies : 4;

  // Neighbouring threads take neighbouring chunks of a token.
  template <bool kChecked, bool kKeys, bool kValues>
  __device__ void load_token_rows(uint32_t stage, const Slot<kTile>& slot) const {
    const int chunk = threadIdx.x % kChunks, r0 = threadIdx.x / kChunks;
    const bool in_head = chunk * 16 < copies.head_bytes;
#pragma unroll(kChecked ? 1 : kCopies / kBatch)
    for (int batch = 0; batch < kCopies; batch += kBatch) {
      TokenPointers at[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) at[i] = slot.tokens[r0 + (batch + i) * (kThreads / kChunks)];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int r = r0 + (batch + i) * (kThreads / kChunks);
        if (kKeys) copy<kChecked>(stage + key_place(r, chunk), at[i].key, chunk * 16, in_head);
        if (kValues) {
          copy<kChecked>(stage + S::kTileBytes + swizzled<S::kRowBytes>(r, chunk), at[i].value, chunk * 16, in_head);
        }
      }
    }
  }

  // Packed K: neighbouring threads take neighbouring tokens at one chunk index.
  template <bool kChecked>
  __device__ void load_packed_keys(uint32_t stage, const Slot<kTile>& slot) const {
    const int r = threadIdx.x % kTile, chunk0 = threadIdx.x / kTile;
    const char* row = slot.tokens[r].key;
#pragma unroll(kChecked ? 1 : kCopies)
    for (int i = 0; i < kCopies; ++i) {
      const int chunk = chunk0 + i * (kThreads / kTile);
      copy<kChecked>(stage + key_place(r, chunk), row, chunk * copies.key_chunk, chunk * 16 < copies.head_bytes);
    }
  }

  // Packed V: order within a page: its chunks of one dimension, then the next dimension.
  template <bool kChecked>
  __device__ void load_packed_values(uint32_t stage, const Slot<kTile>& slot) const {
    const int shift = copies.value_chunk_shift, low = threadIdx.x & ((1 << shift) - 1);
    const auto position = [&](int i, int& d, int& chunk) {
      const int x = (threadIdx.x + i * kThreads) >> shift;
      d = x % kD;
      chunk = low + (x / kD << shift);
    };
#pragma unroll(kChecked ? 1 : kCopies / kBatch)
    for (int batch = 0; batch < kCopies; batch += kBatch) {
      const char* at[kBatch];
      int d, chunk;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        position(batch + i, d, chunk);
        at[i] = slot.tokens[chunk * (16 / S::kBytes)].value;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        position(batch + i, d, chunk);
        copy<kChecked>(stage + S::kTileBytes + packed_value_place(d, chunk), at[i], d * copies.value_dim,
                       d < p.a.head_size);
      }
    }
  }

  template <bool kChecked>
  __device__ void load_checked(uint32_t stage, const Slot<kTile>& slot) const {
    if constexpr (kPackedV) {
      load_packed_values<kChecked>(stage, slot);
      if (copies.key_token_fast) {
        load_packed_keys<kChecked>(stage, slot);
      } else {
        load_token_rows<kChecked, true, false>(stage, slot);
      }
    } else if (!copies.key_token_fast) {
      load_token_rows<kChecked, true, true>(stage, slot);
    } else {
      load_packed_keys<kChecked>(stage, slot);
      load_token_rows<kChecked, false, true>(stage, slot);
    }
  }

  __device__ void load_stage(uint32_t stage, const Slot<kTile>& slot) const {
    if (is_whole(slot) && copies.head_bytes == S::kRowBytes) {
      load_checked<false>(stage, slot);
    } else {
      load_checked<true>(stage, slot);
    }
  }

  // Packed V: what lies past the end of a sequence may be NaN, and 0 * NaN is not 0.
  __device__ void clear_invisible(char* value_stage, const Slot<kTile>& slot) const {
    constexpr int kChunk = 16 / S::kBytes;
#pragma unroll 1
    for (int r = 0; r < kTile; ++r) {
      if (slot.valid[r / 32] >> r % 32 & 1 || slot.tokens[r].value == nullptr) continue;
      const int t = token_at<kPermutedTokens>(r);
      for (int d = threadIdx.x; d < kD; d += kThreads) {
        char* at = value_stage + packed_value_place(d, t / kChunk) + t % kChunk * S::kBytes;
        if constexpr (kFp8) {
          *at = 0;
        } else {
          *reinterpret_cast<uint16_t*>(at) = 0;
        }
      }
    }
  }

  // ---- queries ------------------------------------------------------------------------------------------------------

  // Scaling a row by a power of two brings its largest element to [1, 2).
  static __device__ void power_of_two(float largest, float& factor, float& inverse) {
    const uint32_t bits = __float_as_uint(largest) & 0x7f800000u;
    const bool usual = bits > 0 && bits < 0x7e000000u;
    factor = usual ? __uint_as_float(bits) : 1.f;
    inverse = usual ? __uint_as_float(0x7f000000u - bits) : 1.f;
  }

  static __device__ float largest_of(uint32_t pair) {
    const float2 x = unpack_pair<bf16>(pair);
    return fmaxf(fabsf(x.x), fabsf(x.y));
  }

  static __device__ uint32_t to_half(uint32_t pair, float inverse) {
    const float2 x = unpack_pair<bf16>(pair);
    return pack_pair<half>(x.x * inverse, x.y * inverse);
  }

  __device__ const uint16_t* query_row(const Row& row) const {
    return static_cast<const uint16_t*>(p.a.query) + row.token * p.a.query_token_stride +
           row.head * p.a.query_head_stride;
  }

  // The warp's rows into shared memory.  With many rows a warp touches its own alone; with few, all write the same.
  __device__ void load_query_rows(const Unit& u, int row0) {
    constexpr int kQueryChunks = kD / 8, kLoads = S::kWarpRows * kQueryChunks / 32, kBatch = kLoads < 8 ? kLoads : 8;
#pragma unroll 1
    for (int batch = 0; batch < kLoads; batch += kBatch) {
      uint4 v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int x = (batch + i) * 32 + lane, chunk = x % kQueryChunks;
        const Row row = row_of(p, u, row0 + x / kQueryChunks);
        v[i] = {0, 0, 0, 0};
        if (row.valid && chunk * 8 < p.a.head_size) v[i] = *reinterpret_cast<const uint4*>(query_row(row) + chunk * 8);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int x = (batch + i) * 32 + lane, chunk = x % kQueryChunks, r = x / kQueryChunks;
        store_query_chunk(v[i], r, row0 + r, chunk);
      }
    }
  }

  __device__ void store_query_chunk(uint4 v, int warp_row, int r, int chunk) {
    if (kFp8 && p.a.dtype == DType::kBFloat16) {
      float largest = fmaxf(fmaxf(largest_of(v.x), largest_of(v.y)), fmaxf(largest_of(v.z), largest_of(v.w)));
      float factor, inverse;
      for (int m = 1; m < kD / 8; m *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, m));
      power_of_two(largest, factor, inverse);
      v = {to_half(v.x, inverse), to_half(v.y, inverse), to_half(v.z, inverse), to_half(v.w, inverse)};
      if (chunk == 0) scratch.rows[warp][warp_row].scale *= factor;
    }
    if constexpr (kFp8) {  // dimensions 4c .. 4c + 3 of 16 to places 2c, 2c + 1, 2c + 8, 2c + 9
      const uint32_t even = queries + swizzled<2 * kD>(r, chunk & ~1) + (chunk & 1) * 8;
      const uint32_t odd = queries + swizzled<2 * kD>(r, chunk | 1) + (chunk & 1) * 8;
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(even), "r"(v.x), "r"(v.z) : "memory");
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(odd), "r"(v.y), "r"(v.w) : "memory");
    } else {
      const uint32_t at = queries + swizzled<2 * kD>(r, chunk);
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                   : "memory");
    }
  }

  // ---- one segment's running state ----------------------------------------------------------------------------------

  struct State {
    float o[S::kRowTiles][kD / 8][4];
    float maximum[S::kRowTiles][2];
    float sum[S::kRowTiles][2];         // of this lane's columns
    int first_position, last_position;  // of the warp's rows
    bool idle;                          // none of the warp's rows exists
    bool plain;                         // scores become logits by a positive factor alone
  };

  __device__ void begin_segment(const Unit& u, State& s) {
    const int row0 = kMany ? warp * S::kWarpRows : 0;
    const int rows = min(p.tile_tokens, u.query_len - u.query_tile * p.tile_tokens) * p.tile_heads;
    s.idle = row0 >= rows;
    if (s.idle) return;
    const float k_scale = kFp8 ? p.a.k_scale[u.kv_head] : 1.f;
    s.plain = p.plain_logits && k_scale > 0;
    __syncwarp();
    if (lane < S::kWarpRows) {
      const Row row = row_of(p, u, row0 + lane);
      RowState state{row.position, 0, p.a.scale * k_scale * (s.plain ? kLog2e : 1.f), 0};
      if (p.a.alibi_slopes && row.valid) state.slope = p.a.alibi_slopes[row.head];
      if (p.sparse) state.sparse_offset = sparse_offset(p, row.head, u.kv_head);
      scratch.rows[warp][lane] = state;
    }
    __syncwarp();
    load_query_rows(u, row0);
    __syncwarp();
    s.first_position = scratch.rows[warp][0].position;
    s.last_position = scratch.rows[warp][S::kWarpRows - 1].position;
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        for (int e = 0; e < 4; ++e) s.o[i][n][e] = 0;
      }
      for (int h = 0; h < 2; ++h) {
        s.maximum[i][h] = -INFINITY;
        s.sum[i][h] = 0;
      }
    }
  }

  // In these two, the address of a row's chunk differs from that of its first chunks by an exclusive or: stages and rows
  // are aligned so that the chunk's index has its bits to itself.

  // s = q . k for kStep tokens from place r0 of the tile
  __device__ void scores(uint32_t key_stage, int r0, float (&s)[S::kRowTiles][S::kStep / 8][4]) const {
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < S::kStep / 8; ++n) {
        for (int e = 0; e < 4; ++e) s[i][n][e] = 0;
      }
    }
    const uint32_t query_row0 = queries + swizzled<2 * kD>((kMany ? warp * S::kWarpRows : 0) + lane % 16, lane / 16);
    const uint32_t key_row0 = key_stage + key_place(r0 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    constexpr int kAtOnce = kFp8 ? 2 : 1;  // k-steps of one ldmatrix
#pragma unroll
    for (int k = 0; k < kSteps; k += kAtOnce) {
      uint32_t a[kAtOnce][S::kRowTiles][4];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < S::kRowTiles; ++i) {
          ldmatrix_x4(a[j][i], (query_row0 ^ (k + j) * 32) + i * 16 * 2 * kD);
        }
      }
#pragma unroll
      for (int t = 0; t < S::kStep / 16; ++t) {
        uint32_t b[4];
        ldmatrix_x4(b, kPackedV ? key_row0 + k * S::kBytes * kTile * 16 + t * 256
                                : (key_row0 ^ k * 16 * S::kBytes) + t * 16 * S::kRowBytes);
#pragma unroll
        for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            if constexpr (kFp8) {
#pragma unroll
              for (int j = 0; j < 2; ++j) {
                uint32_t b0, b1;
                Element::widen(b[2 * n + j], b0, b1);
                mma_16x8x16<Mma>(s[i][2 * t + n], a[j][i], b0, b1);
              }
            } else {
              mma_16x8x16<Mma>(s[i][2 * t + n], a[0][i], b[2 * n], b[2 * n + 1]);
            }
          }
        }
      }
    }
  }

  // o += p . v, with p the fragments of kStep tokens
  __device__ void add_values(uint32_t value_stage, int r0, const uint32_t (&probs)[S::kRowTiles][S::kStep / 16][4],
                             State& state) const {
    const auto multiply = [&](int t, int n, uint32_t b0, uint32_t b1) {
#pragma unroll
      for (int i = 0; i < S::kRowTiles; ++i) mma_16x8x16<Mma>(state.o[i][n], probs[i][t], b0, b1);
    };
    uint32_t row0 = value_stage;
    if constexpr (!kPackedV) {
      row0 += swizzled<S::kRowBytes>(r0 + lane % 16, lane / 16);
    }
#pragma unroll
    for (int t = 0; t < S::kStep / 16; ++t) {
      uint32_t b[4];
      if constexpr (!kPackedV) {
        constexpr int kPerLoad = kFp8 ? 4 : 2;  // 8-wide column tiles
#pragma unroll
        for (int n = 0; n < kD / 8; n += kPerLoad) {
          ldmatrix_x4_trans(b, (row0 ^ n * 8 * S::kBytes) + t * 16 * S::kRowBytes);
          if constexpr (kFp8) {  // [token 2c: d, d + 1; token 2c + 1: d, d + 1] to [d: two tokens; d + 1: two tokens]
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              uint32_t even0, odd0, even1, odd1;
              Element::widen(__byte_perm(b[2 * h], 0, 0x3120), even0, odd0);
              Element::widen(__byte_perm(b[2 * h + 1], 0, 0x3120), even1, odd1);
              multiply(t, n + 2 * h, even0, even1);
              multiply(t, n + 2 * h + 1, odd0, odd1);
            }
          } else {
            multiply(t, n, b[0], b[1]);
            multiply(t, n + 1, b[2], b[3]);
          }
        }
      } else {
        const int d0 = kFp8 ? lane : lane / 16 * 8 + lane % 8;
        const int chunk = (r0 + t * 16) * S::kBytes / 16 + (kFp8 ? 0 : lane / 8 % 2);
        const uint32_t packed_row0 = row0 + packed_value_place(d0, chunk);
        constexpr int kPerLoad = kFp8 ? 4 : 2;
#pragma unroll
        for (int n = 0; n < kD / 8; n += kPerLoad) {
          ldmatrix_x4(b, packed_row0 + (n * 128 << copies.value_chunk_shift));
          if constexpr (kFp8) {
#pragma unroll
            for (int h = 0; h < 4; ++h) {
              uint32_t b0, b1;
              Element::widen(b[h], b0, b1);
              multiply(t, n + h, b0, b1);
            }
          } else {
            multiply(t, n, b[0], b[1]);
            multiply(t, n + 1, b[2], b[3]);
          }
        }
      }
    }
  }

  // This lane's scores of one row, with their places in the step.
  __device__ void for_each_score(float (&s)[S::kStep / 8][4], int h, auto&& body) const {
#pragma unroll
    for (int n = 0; n < S::kStep / 8; ++n) {
      body(s[n][2 * h], n * 8 + lane % 4 * 2);
      body(s[n][2 * h + 1], n * 8 + lane % 4 * 2 + 1);
    }
  }

  // Bits of this lane's places in a step that a row may see, whatever the pages say.
  __device__ uint32_t visible_places(const Unit& u, const RowState& row, int first) const {
    const int low = row.position - p.window + 1;
    const int high = p.a.causal ? row.position : row.position + p.window - 1;
    uint32_t bits = 0;
#pragma unroll 1
    for (int n = 0; n < S::kStep / 4; ++n) {
      const int r = n / 2 * 8 + lane % 4 * 2 + n % 2;
      const int key = first + token_at<kPermutedTokens>(r);
      bool seen = key >= low && key <= high;
      if (p.sparse) seen = seen && sparse_attends(p, row.sparse_offset, u.sequence_len, key);
      bits |= static_cast<uint32_t>(seen) << r;
    }
    return bits;
  }

  // What is not the same for all scores of a tile: soft cap, ALiBi, masks.
  __device__ void adjust_scores(const Unit& u, const State& state, int first, uint32_t valid, bool masked,
                                float (&s)[S::kRowTiles][S::kStep / 8][4]) const {
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowState& row = scratch.rows[warp][i * 16 + h * 8 + lane / 4];
        if (!state.plain) {
          const float scale = row.scale, slope = row.slope;
          const int distance = first - row.position;
          for_each_score(s[i], h, [&](float& x, int r) {
            x = logit(p, x * scale, slope, distance + token_at<kPermutedTokens>(r));
          });
        }
        if (masked) {
          const uint32_t seen = valid & visible_places(u, row, first);
          for_each_score(s[i], h, [&](float& x, int r) {
            if (!(seen >> r & 1)) x = -INFINITY;
          });
        }
      }
    }
  }

  __device__ void compute(uint32_t stage, const Slot<kTile>& slot, const Unit& u, State& state) {
    if (state.idle) return;
    const int warp_r0 = kMany ? 0 : warp * S::kWarpTokens;
#pragma unroll 1
    for (int r0 = warp_r0; r0 < warp_r0 + S::kWarpTokens; r0 += S::kStep) {
      constexpr uint32_t kAll = S::kStep == 32 ? ~0u : (1u << S::kStep) - 1;
      const uint32_t valid = slot.valid[r0 / 32] >> r0 % 32 & kAll;
      const int first = u.first_token + r0, last = first + S::kStep - 1;
      const bool hidden = p.a.causal ? first > state.last_position : false;
      if (valid == 0 || hidden) continue;
      const bool masked = valid != kAll || (p.a.causal && last > state.first_position) || p.sparse ||
                          (p.window != kNoWindow &&
                           (state.last_position - first >= p.window || last - state.first_position >= p.window));

      float s[S::kRowTiles][S::kStep / 8][4];
      scores(stage, r0, s);
      if (masked || !state.plain) [[unlikely]]
        adjust_scores(u, state, first, masked ? valid : kAll, masked, s);

      // The sums are kept relative to a maximum that may lag behind by kLag (a factor of 256): following it is rare.
      constexpr float kLag = 8;
      uint32_t probs[S::kRowTiles][S::kStep / 16][4];
#pragma unroll
      for (int i = 0; i < S::kRowTiles; ++i) {
        float top[2], base[2], scale[2];
        bool rose = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          scale[h] = state.plain ? scratch.rows[warp][i * 16 + h * 8 + lane / 4].scale : 1.f;
          float x = -INFINITY;
#pragma unroll
          for (int n = 0; n < S::kStep / 8; ++n) x = fmaxf(x, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
          x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
          x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
          top[h] = fmaxf(x * scale[h], state.maximum[i][h]);
          rose = rose || top[h] > state.maximum[i][h] + kLag;
        }
        if (__any_sync(~0u, rose)) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float rescale = exp2_fast(state.maximum[i][h] - (top[h] == -INFINITY ? 0.f : top[h]));
            state.maximum[i][h] = top[h];
            state.sum[i][h] *= rescale;
#pragma unroll
            for (int n = 0; n < kD / 8; ++n) {
              state.o[i][n][2 * h] *= rescale;
              state.o[i][n][2 * h + 1] *= rescale;
            }
          }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) base[h] = state.maximum[i][h] == -INFINITY ? 0.f : state.maximum[i][h];
#pragma unroll
        for (int n = 0; n < S::kStep / 8; ++n) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float a = exp2_fast(fmaf(s[i][n][2 * h], scale[h], -base[h]));
            const float b = exp2_fast(fmaf(s[i][n][2 * h + 1], scale[h], -base[h]));
            state.sum[i][h] += a + b;
            probs[i][n / 2][n % 2 * 2 + h] = pack_pair<Mma>(a, b);
          }
        }
      }
      add_values(stage + S::kTileBytes, r0, probs, state);
    }
  }

  // ---- results ------------------------------------------------------------------------------------------------------

  // Column of o[.][n][e] (e 0 or 1) in the head.
  __device__ int column(int n, int e) const {
    const int c = lane % 4;
    return kPermutedOutput ? n / 2 * 16 + c * 4 + e * 2 + n % 2 : n * 8 + c * 2 + e;
  }

  template <class T>
  __device__ void store(T* out, int d, float4 x) const {
    if (d >= p.a.head_size) return;
    *reinterpret_cast<uint2*>(out + d) = {pack_pair<T>(x.x, x.y), pack_pair<T>(x.z, x.w)};
  }

  __device__ void store_output(const Row& row, int d, float4 x) const {
    if constexpr (!kFp8) {
      store(output_row<Mma>(p, row), d, x);
    } else if (p.a.dtype == DType::kBFloat16) {
      store(output_row<bf16>(p, row), d, x);
    } else {
      store(output_row<half>(p, row), d, x);
    }
  }

  __device__ float* partial_row(int slot, int r) const {
    return p.partial + (static_cast<int64_t>(slot) * p.rows + r) * p.pitch;
  }

  static __device__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }

  // Four neighbouring columns of this lane, from two column tiles, for the row half h.
  __device__ void for_each_four(const float (&o)[kD / 8][4], int h, auto&& body) const {
    const int c = lane % 4;
#pragma unroll
    for (int n = 0; n < kD / 8; n += 2) {
      const float a0 = o[n][2 * h], a1 = o[n][2 * h + 1], b0 = o[n + 1][2 * h], b1 = o[n + 1][2 * h + 1];
      if constexpr (kPermutedOutput) {
        body(n * 8 + 4 * c, float4{a0, b0, a1, b1});
      } else {  // lanes trade pairs: even ones take four columns of the first tile, odd ones of the second
        const bool odd = c & 1;
        const float send0 = odd ? a0 : b0, send1 = odd ? a1 : b1;
        const float got0 = __shfl_xor_sync(~0u, send0, 1), got1 = __shfl_xor_sync(~0u, send1, 1);
        const int d = n * 8 + (odd ? 8 : 0) + c / 2 * 4;
        body(d, odd ? float4{got0, got1, b0, b1} : float4{a0, a1, got0, got1});
      }
    }
  }

  __device__ void end_segment_many(const Unit& u, State& state) {
    if (state.idle) return;
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = warp * S::kWarpRows + i * 16 + h * 8 + lane / 4;
        const Row row = row_of(p, u, r);
        const float sum = quad_sum(state.sum[i][h]);
        float factor = 1;
        if (u.slot < 0 && row.valid) factor = finish_row(p, row, u.kv_head, state.maximum[i][h], sum);
        if (u.slot >= 0 && lane % 4 == 0) {
          p.partial_stats[u.slot * p.rows + r] = {state.maximum[i][h], sum};
        }
        for_each_four(state.o[i], h, [&](int d, float4 x) {
          if (!row.valid) return;
          if (u.slot >= 0) {
            *reinterpret_cast<float4*>(partial_row(u.slot, r) + d) = x;
          } else {
            store_output(row, d, {x.x * factor, x.y * factor, x.z * factor, x.w * factor});
          }
        });
      }
    }
  }

  // Adds the four warps' results up in `merge`, [warp][row][kD] with its 8-wide column tiles swizzled by row; sixteen
  // rows at a time.
  __device__ void end_segment_few(const Unit& u, State& state, float* merge) {
    const auto place = [](int w, int r, int d) { return ((w * 16 + r) * (kD / 8) + (d / 8 ^ (r & 7))) * 8 + d % 8; };
    const int rows = min(p.tile_tokens, u.query_len - u.query_tile * p.tile_tokens) * p.tile_heads;
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
      __syncthreads();  // every warp is done with the stage that `merge` lies in, or with the rows before
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = h * 8 + lane / 4;
        const float sum = quad_sum(state.sum[i][h]);
        if (lane % 4 == 0) scratch.stats[warp][i * 16 + r] = {state.maximum[i][h], sum};
#pragma unroll
        for (int n = 0; n < kD / 8; ++n) {
          for (int e = 0; e < 2; ++e) merge[place(warp, r, column(n, e))] = state.o[i][n][2 * h + e];
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int x = threadIdx.x; x < min(rows - i * 16, 16) * (kD / 4); x += kThreads) {
        const int r = x / (kD / 4), d = x % (kD / 4) * 4;
        add_warps(u, i * 16 + r, d, merge + place(0, r, d));
      }
    }
  }

  // Four columns of one row; `parts` are those of the first warp.
  __device__ void add_warps(const Unit& u, int r, int d, const float* parts) const {
    const Row row = row_of(p, u, r);
    if (!row.valid) return;
    float maximum = -INFINITY, sum = 0;
    for (int w = 0; w < 4; ++w) maximum = fmaxf(maximum, scratch.stats[w][r].x);
    float4 o = {0, 0, 0, 0};
    for (int w = 0; w < 4; ++w) {
      const float2 stats = scratch.stats[w][r];
      const float weight = stats.x == -INFINITY ? 0.f : exp2_fast(stats.x - maximum);
      const float4 part = *reinterpret_cast<const float4*>(parts + w * 16 * kD);
      sum += weight * stats.y;
      o = {o.x + weight * part.x, o.y + weight * part.y, o.z + weight * part.z, o.w + weight * part.w};
    }
    if (u.slot >= 0) {
      if (d == 0) p.partial_stats[u.slot * p.rows + r] = {maximum, sum};
      *reinterpret_cast<float4*>(partial_row(u.slot, r) + d) = o;
    } else {
      const float factor = finish_row(p, row, u.kv_head, maximum, sum);
      store_output(row, d, {o.x * factor, o.y * factor, o.z * factor, o.w * factor});
    }
  }

  // ---- the walk -----------------------------------------------------------------------------------------------------

  // One thread: the next unit into its slot.
  __device__ void describe_next(Slot<kTile>& slot) {
    slot.unit = scratch.walker.unit;
    if (slot.unit.exists) scratch.walker.next(p);
  }

  // Unit j is described in iteration j - stages - 1, its pages are looked up in iteration j - stages, its copies start in
  // iteration j - stages + 1.
  __device__ void run() {
    constexpr int kStages = S::kStages;
    wait_for_previous_kernel();  // (starting the next kernel early, too, made most calls slower)
    const SharePosition share = find_share(p, scratch.plan);
    if (threadIdx.x == 0) {
      scratch.walker.start(p, share);
#pragma unroll 1
      for (int i = 0; i < kStages + 1; ++i) describe_next(slots[i]);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      if (slots[i].unit.exists) end_lookup(begin_lookup(slots[i].unit), slots[i]);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      if (slots[i].unit.exists) load_stage(stage0 + i * S::kStageBytes, slots[i]);
      cp_async_commit();
    }

    State state;
    int at = 0, slot_at = 0;  // the unit's stage and slot
    const auto slot_after = [&](int k) -> Slot<kTile>& {
      return slots[slot_at + k >= S::kSlots ? slot_at + k - S::kSlots : slot_at + k];
    };
    if (slots[0].unit.exists) begin_segment(slots[0].unit, state);
    for (int i = 0; slots[slot_at].unit.exists; ++i) {
      cp_async_wait<kStages - 2>();
      __syncthreads();  // the unit's stage is filled, the last one's free
      Slot<kTile>& lookup_slot = slot_after(kStages);
      const bool looks_up = lookup_slot.unit.exists;
      Lookup lookup;
      if (looks_up) lookup = begin_lookup(lookup_slot.unit);
      const int free = at == 0 ? kStages - 1 : at - 1;
      const Slot<kTile>& load_slot = slot_after(kStages - 1);
      if (load_slot.unit.exists) load_stage(stage0 + free * S::kStageBytes, load_slot);
      cp_async_commit();
      if (threadIdx.x == i % 4 * 32) describe_next(slot_after(kStages + 1));

      const Slot<kTile>& slot = slots[slot_at];
      const Unit& unit = slot.unit;
      const uint32_t stage = stage0 + at * S::kStageBytes;
      char* stage_memory = reinterpret_cast<char*>(merge0) + at * S::kStageBytes;
      if constexpr (kPackedV) {
        if (!is_whole(slot)) {
          clear_invisible(stage_memory + S::kTileBytes, slot);
          __syncthreads();
        }
      }
      __syncwarp();
      if (unit.begins && i > 0) begin_segment(unit, state);
      compute(stage, slot, unit, state);
      if (unit.ends) {
        if constexpr (kMany) {
          end_segment_many(unit, state);
        } else {
          end_segment_few(unit, state, reinterpret_cast<float*>(stage_memory));
        }
      }
      if (looks_up) end_lookup(lookup, lookup_slot);
      at = at + 1 == kStages ? 0 : at + 1;
      slot_at = slot_at + 1 == S::kSlots ? 0 : slot_at + 1;
    }
  }
};

template <class Element, int kD, bool kPackedV, RowClass kRowClass>
__global__ void __launch_bounds__(kThreads, (Shape<Element, kD, kRowClass>::kBlocksPerSm))
    paged_attention_mma_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies) {
  using S = Shape<Element, kD, kRowClass>;
  extern __shared__ __align__(1024) char memory[];
  char* after = memory + S::kStages * S::kStageBytes;
  auto* scratch = reinterpret_cast<Scratch<S>*>(after + S::kQueryBytes);
  auto* slots = reinterpret_cast<Slot<S::kTile>*>(scratch + 1);
  Kernel<Element, kD, kPackedV, kRowClass> kernel{
      p, copies, slots, *scratch, shared_address(memory), shared_address(after), reinterpret_cast<float*>(memory)};
  kernel.run();
}

template <class Element, int kD, bool kPackedV, RowClass kRowClass>
bool launch_mma_kernel(Problem p, const Launch& launch) {
  using S = Shape<Element, kD, kRowClass>;
  static_assert(S::kMany || S::kStageBytes >= 4 * 16 * kD * 4, "a stage holds the four warps' results");
  const auto kernel = paged_attention_mma_kernel<Element, kD, kPackedV, kRowClass>;

  constexpr int kSharedBytes =
      S::kStages * S::kStageBytes + S::kQueryBytes + sizeof(Scratch<S>) + S::kSlots * sizeof(Slot<S::kTile>);
  if (kSharedBytes > shared_memory_limit(launch.device)) return false;
  static PerDevice resident_blocks;
  const int blocks_per_sm = resident_blocks.get(launch.device, [&] {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), p.a.op);
    return count_resident_blocks(reinterpret_cast<const void*>(kernel), kSharedBytes);
  });

  constexpr int kChunk = 16 / S::kBytes;
  const KeyCacheView& k = p.a.key;
  CacheCopies copies{};
  copies.key_block = k.block * S::kBytes;
  copies.key_token = k.token * S::kBytes;
  copies.key_head = k.head * S::kBytes;
  copies.value_block = p.a.value.block * S::kBytes;
  copies.value_token = p.a.value.token * S::kBytes;
  copies.value_head = p.a.value.head * S::kBytes;
  copies.head_bytes = p.a.head_size * S::kBytes;
  copies.key_token_fast = k.chunk < p.a.head_size;
  copies.key_chunk = static_cast<uint32_t>(k.chunk_stride * S::kBytes);
  copies.value_dim = static_cast<uint32_t>(p.a.value.dim * S::kBytes);
  const int page_chunks = p.a.block_size / kChunk;
  while (kPackedV && page_chunks % (2 << copies.value_chunk_shift) == 0 &&
         2 << copies.value_chunk_shift <= S::kTile / kChunk) {
    ++copies.value_chunk_shift;
  }

  p.kv_tile = S::kTile;
  const int grid = set_tiling(p, tiling_of(kRowClass, p.a.head_size), blocks_per_sm, launch.device);
  launch_after(kernel, dim3(grid), kSharedBytes, launch, p.a.op, p, copies);
  combine(p, grid, launch);
  return true;
}

template <class Element, RowClass kRowClass>
bool launch_rows(const Problem& p, const Launch& launch) {
  bool done = false;
  dispatch_bool(p.a.value.dim != 1, [&]<bool kPackedV> {
    if (p.a.head_size <= 64) {
      done = launch_mma_kernel<Element, 64, kPackedV, kRowClass>(p, launch);
    } else if (p.a.head_size <= 128) {
      done = launch_mma_kernel<Element, 128, kPackedV, kRowClass>(p, launch);
    } else if constexpr (kRowClass != RowClass::kSome) {
      done = launch_mma_kernel<Element, 256, kPackedV, kRowClass>(p, launch);
    }
  });
  return done;
}

template <class Element>
bool launch_mma(const Problem& p, RowClass rows, const Launch& launch) {
  switch (rows) {
    case RowClass::kFew:
      return launch_rows<Element, RowClass::kFew>(p, launch);
    case RowClass::kSome:
      return launch_rows<Element, RowClass::kSome>(p, launch);
    default:
      return launch_rows<Element, RowClass::kMany>(p, launch);
  }
}

}  // namespace pykv::attention
