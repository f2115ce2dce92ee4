// Keys or values into their cache, by some of the blocks of a launch: how the work is cut, and the work itself.
#pragma once

#include <algorithm>
#include <bit>

#include "cache/nvfp4_tokens.cuh"
#include "cache/writes/reshape_and_cache.cuh"
#include "cache/writes/scatter_tokens.cuh"
#include "cache/writes/transpose_tokens.cuh"

namespace pykv {

// From sm_89 on conversions to fp8 are instructions; before, they are code that wants registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
inline constexpr int kConvertingBlocks = 4, kWideConvertingBlocks = 6;
#else
inline constexpr int kConvertingBlocks = 5, kWideConvertingBlocks = 8;
#endif

// Instead of a Mover, for nvfp4: 16 elements become 9 bytes.
template <class T, bool kAlignedAccess>
struct Nvfp4Mover {
  static constexpr KvFormat kStoredFormat = KvFormat::kNvfp4;
  static constexpr int kWidth = kNvfp4Block;
  static constexpr bool kAligned = kAlignedAccess;
  using Element = T;
  using Stored = uint8_t;
  struct Loaded {
    T elements[kWidth];
  };
};

template <class Mover>
inline constexpr bool kInPages = Mover::kStoredFormat == KvFormat::kNvfp4;

// Tokens of a thread, threads of a block, at most, and blocks that an SM must hold: more threads, with fewer loads each, where
// nothing is computed between them.  Tiles that are converted are best turned around by few threads, of which none waits long for
// the others: 4096 tokens of 8 heads of bf16 to int8 take 8.3 us on an H200, not 8.7.
template <class Mover, bool kTransposes>
struct Shape {
  static constexpr bool kCopies = Mover::kStoredFormat == KvFormat::kSame, kConvertsTiles = kTransposes && !kCopies;
  static constexpr int kTokens = kCopies ? 2 : 4;
  static constexpr int kThreads = kConvertsTiles ? 128 : 256;
  static constexpr int kBlocks = kCopies                        ? 8
                                 : !kConvertsTiles              ? kConvertingBlocks
                                 : Mover::kWidth == kWideVector ? kWideConvertingBlocks
                                                                : 2 * kConvertingBlocks;
};

// Sixteen elements of four tokens are many registers; put together one by one, even more.  Small blocks leave less of the last
// wave idle: 4096 tokens of 8 heads of bf16 take 7.8 us on an H200, 8.1 by blocks of 128.
template <class T, bool kAligned>
struct Shape<Nvfp4Mover<T, kAligned>, false> {
  static constexpr int kTokens = kNvfp4Tokens;
  static constexpr int kThreads = 64;
  static constexpr int kBlocks = kNvfp4ThreadsOfSm<T, kAligned> / kThreads;
};

template <class Mover>
__device__ __forceinline__ void write_pages(const SlotMap& map, const SidePlan& side, const Scale& scale,
                                            uint32_t block) {
  const uint32_t lane = threadIdx.x & ((1u << side.lanes_log2) - 1), row = threadIdx.x >> side.lanes_log2;
  const uint32_t rows = blockDim.x >> side.lanes_log2;
  uint32_t piece, in_head;
  const uint32_t group = side.pieces(block, piece);
  const uint32_t vector = (piece << side.lanes_log2) + lane;
  const uint32_t head = side.vectors_per_head(vector, in_head);

  const char* from = side.data + head * side.data_head + in_head * side.data_vector;
  const Nvfp4Source source{from, from, side.data_token, 0, side.data_vector / kNvfp4Block, 0, kNvfp4Block};
  const Nvfp4Target target(side.cache, side.block, side.page, head, in_head);
  const int64_t first = (int64_t{group} * rows + row) * side.tokens, left = map.num_tokens - first;
  const int most = vector < side.num_vectors ? static_cast<int>(side.tokens) : 0;
  write_nvfp4<typename Mover::Element, Mover::kAligned>(map, source, target, scale, side.four_over_six, head, first,
                                                        left < most ? static_cast<int>(left) : most);
}

// `block` counts from the first block that works on this side.
template <class Mover, bool kTransposes, int kThreads>
__device__ __forceinline__ void write_side(const SlotMap& map, const SidePlan& side, const Scale* scale,
                                           uint32_t block) {
  if constexpr (kInPages<Mover>) {
    return write_pages<Mover>(map, side, *scale, block);
  } else if constexpr (kTransposes) {
    __shared__ TokenTile<typename Mover::Stored> tile;
    if (side.run) return transpose_tokens<Mover, kThreads>(map, side, scale, block, tile);
  }
  if constexpr (!kInPages<Mover>) scatter_tokens<Mover, Shape<Mover, kTransposes>::kTokens>(map, side, scale, block);
}

inline SlotMap slot_map_of(const ReshapeAndCacheArgs& args, const Launch& launch) {
  return slot_map_of(args.slots, args.num_tokens, args.num_blocks, args.block_size, launch.reporter(args.report));
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The lowest set bit: the largest power of two that divides an address and strides or'ed together.
inline int64_t alignment_of(int64_t bits) { return bits == 0 ? 4096 : bits & -bits; }

inline int64_t address(const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)); }

inline bool transposes(const CacheSide& s, int64_t block_size) {
  return s.chunk == 1 && s.token == 1 && block_size > 1;
}

// Elements that may be moved at once, as far as this side is concerned.
inline int64_t vector_width(const CacheSide& s, int64_t source_size, int64_t stored_size, bool transposed) {
  if (s.head_size == 0) return 16;
  if (s.data_dim != 1 && s.head_size > 1) return 1;
  int64_t width =
      std::min(alignment_of(s.head_size),
               alignment_of(address(s.data) | s.data_token * source_size | s.data_head * source_size) / source_size);
  if (!transposed) {
    width = std::min(width, alignment_of(s.chunk));
    const int64_t distances = s.block | s.token | s.head | (s.chunk < s.head_size ? s.chunk_stride : 0);
    width = std::min(width, alignment_of(address(s.cache) | distances * stored_size) / stored_size);
  }
  return std::max<int64_t>(width, 1);
}

// The threads along a token: as many as possible (2^most) with at least three in four at work.
inline int lanes_log2_for(int64_t vectors, int most) {
  int log2 = most;
  while (3 * (ceil_div(vectors, 1ll << log2) << log2) > 4 * vectors) --log2;
  return log2;
}

struct Widths {
  int64_t vector, source_size, stored_size;
};

// How finely the tokens are cut: steps from long pieces of work to many.
struct Grain {
  uint32_t threads, tokens;  // of a block; of a thread
  int tile_tokens_log2;      // 0: nothing is transposed
  int lanes_log2 = 5;        // threads along a token, at most

  template <class Mover, bool kTransposes>
  static Grain coarsest(uint32_t threads) {
    return {threads, Shape<Mover, kTransposes>::kTokens, kTransposes ? std::countr_zero(unsigned{kMostTileTokens}) : 0};
  }

  bool refine() {
    if (tokens > 1) {
      tokens /= 2;
    } else if (tile_tokens_log2 == 0 && threads > 64) {
      threads /= 2;
      lanes_log2 = std::min(lanes_log2, std::countr_zero(threads));
    } else if (tile_tokens_log2 <= 2) {
      return false;
    }
    if (tile_tokens_log2 > 2) --tile_tokens_log2;
    return true;
  }
};

// The share of a block, if so many tokens are the work of so many blocks one after another.
inline Share share_of(const CacheSide& s, const ReshapeAndCacheArgs& args, int64_t source_size, int64_t tokens,
                      int64_t blocks) {
  const int64_t row = args.num_heads * s.head_size * source_size, step = s.data_token * source_size;
  if ((s.data_dim != 1 && s.head_size > 1) || (s.data_head != s.head_size && args.num_heads > 1) || step < row ||
      !is_aligned(16, s.data, {row, step}))
    return {};
  const int64_t end = (args.num_tokens - 1) * step + row;
  if (step == row && tokens * row % (16 * blocks) == 0 && tokens * row / blocks < int64_t{1} << 20)
    return {tokens * row / blocks, end, static_cast<uint32_t>(tokens * row / blocks), 1};
  if (row >= int64_t{1} << 20 || tokens / blocks > 64) return {};  // blocks have as many threads
  return {step, end, static_cast<uint32_t>(row), static_cast<uint32_t>(tokens / blocks)};
}

inline SidePlan plan_side(const CacheSide& s, const ReshapeAndCacheArgs& args, const Widths& w, const Grain& grain) {
  SidePlan p{};
  p.data = static_cast<const char*>(s.data);
  p.cache = static_cast<char*>(s.cache);
  p.data_token = s.data_token * w.source_size;
  p.data_head = s.data_head * w.source_size;
  p.data_vector = s.data_dim * w.vector * w.source_size;
  p.block = s.block * w.stored_size;
  p.token = s.token * w.stored_size;
  p.head = s.head * w.stored_size;
  p.chunk = s.chunk_stride * w.stored_size;
  p.head_size = static_cast<uint32_t>(s.head_size);
  p.page = s.page;
  p.four_over_six = s.four_over_six;
  p.heads = Divider(args.num_heads);
  const int64_t vectors_per_head = s.head_size / w.vector, vectors = args.num_heads * vectors_per_head;
  if (vectors == 0) return p;
  if (args.num_heads * s.head_size >= int64_t{1} << 31 || args.block_size >= int64_t{1} << 31)
    fail(PYKV_NOT_IMPLEMENTED, "tokens of 2^31 elements and blocks of 2^31 tokens are not supported");
  p.vectors_per_head = Divider(vectors_per_head);
  p.vectors_per_chunk = Divider(s.chunk / w.vector);
  p.num_vectors = static_cast<uint32_t>(vectors);

  int64_t blocks;
  if (grain.tile_tokens_log2 > 0 && transposes(s, args.block_size)) {
    const int64_t bits = address(s.cache) | ((s.block | s.head | s.chunk_stride | s.group) * w.stored_size);
    p.group_log2 = s.group_tokens ? std::countr_zero(static_cast<uint64_t>(s.group_tokens)) : 31;
    p.group = s.group * w.stored_size;
    p.run = static_cast<uint32_t>(std::max<int64_t>(std::min<int64_t>(alignment_of(bits), 16) / w.stored_size, 1));
    const int64_t pieces = ceil_div(s.head_size, kTileColumns);
    p.pieces = Divider(pieces);
    while ((32u << p.lanes_log2) < grain.threads &&
           (4 << p.lanes_log2) < std::min<int64_t>(kTileColumns, s.head_size) / w.vector)
      ++p.lanes_log2;
    p.tile_tokens_log2 = grain.tile_tokens_log2;
    blocks = ceil_div(args.num_tokens, int64_t{1} << grain.tile_tokens_log2) * args.num_heads * pieces;
    p.share = share_of(s, args, w.source_size, int64_t{1} << grain.tile_tokens_log2, args.num_heads * pieces);
  } else {
    // Where the next token is nearer in the cache than the next vector, a warp is best 4 tokens high.
    p.lanes_log2 = lanes_log2_for(vectors, s.chunk < s.head_size ? 3 : grain.lanes_log2);
    const int64_t pieces = ceil_div(vectors, 1ll << p.lanes_log2);
    p.pieces = Divider(pieces);
    p.tokens = grain.tokens;
    const int64_t tokens = int64_t{grain.threads >> p.lanes_log2} * grain.tokens;
    blocks = ceil_div(args.num_tokens, tokens) * pieces;
    p.share = share_of(s, args, w.source_size, tokens, pieces);
  }
  if (blocks >= int64_t{1} << 30) fail(PYKV_NOT_IMPLEMENTED, "too many tokens for one call");
  p.num_blocks = static_cast<uint32_t>(blocks);
  return p;
}

}  // namespace pykv
