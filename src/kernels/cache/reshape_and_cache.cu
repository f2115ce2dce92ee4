// cache[slot[t] / BS, slot[t] % BS] = key[t] (and value[t]), as it is or divided by a scale and rounded to fp8.
//
// One launch writes keys and values; a block of threads works on one of them.  Memory-bound: each element is read and
// written once, so the floor is (bytes in + bytes out) / copy bandwidth.  What it takes to get there is that neighbouring
// threads read and write whole 32-byte sectors in every layout: scatter_tokens.cuh where elements of a token stay
// neighbours, transpose_tokens.cuh where tokens become neighbours.
#include <algorithm>
#include <bit>

#include "cache/reshape_and_cache.cuh"
#include "cache/scatter_tokens.cuh"
#include "cache/transpose_tokens.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace pykv {
namespace {

// From sm_89 on conversions to fp8 are instructions; before, they are code that wants registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int kConvertingBlocks = 4;
#else
constexpr int kConvertingBlocks = 5;
#endif

// Tokens of a thread, and blocks that an SM must hold.  Tiles wait for barriers: more threads, with fewer loads each where
// nothing is computed between them.
template <class Mover, bool kTransposes>
struct Shape {
  static constexpr bool kCopies = Mover::kStoredFormat == KvFormat::kSame;
  static constexpr int kTokens = kTransposes && kCopies ? 2 : 4;
  static constexpr int kBlocks = !kTransposes ? 4 : kCopies ? 8 : kConvertingBlocks;
};

template <class Mover, bool kTransposes>
__global__ void __launch_bounds__(kThreads, Shape<Mover, kTransposes>::kBlocks)
    reshape_and_cache_kernel(const __grid_constant__ Plan plan,
                             const __grid_constant__ Scales<Mover::kStoredFormat> scales) {
  // Values first: where they are transposed, they take longer.
  const bool is_key = blockIdx.x >= plan.value.num_blocks;
  const SidePlan& side = is_key ? plan.key : plan.value;
  const uint32_t block = is_key ? blockIdx.x - plan.value.num_blocks : blockIdx.x;
  const Scale* scale = nullptr;
  if constexpr (Mover::kStoredFormat != KvFormat::kSame) scale = is_key ? &scales.key : &scales.value;
  if constexpr (kTransposes) {
    __shared__ TokenTile<typename Mover::Stored> tile;
    if (side.run) return transpose_tokens<Mover>(plan.map, side, scale, block, tile);
  }
  scatter_tokens<Mover, Shape<Mover, kTransposes>::kTokens>(plan.map, side, scale, block);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The lowest set bit: the largest power of two that divides an address and strides or'ed together.
int64_t alignment_of(int64_t bits) { return bits == 0 ? 4096 : bits & -bits; }

int64_t address(const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)); }

bool transposes(const CacheSide& s, int64_t block_size) { return s.chunk == 1 && s.token == 1 && block_size > 1; }

// Elements that may be moved at once, as far as this side is concerned.
int64_t vector_width(const CacheSide& s, int64_t source_size, int64_t stored_size, bool transposed) {
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
int lanes_log2_for(int64_t vectors, int most) {
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
  int tile_tokens_log2;

  bool refine() {
    if (tokens > 1) {
      tokens /= 2;
    } else if (threads > (tile_tokens_log2 ? kThreads : 64)) {
      threads /= 2;
    } else if (tile_tokens_log2 <= 2) {
      return false;
    }
    if (tile_tokens_log2 > 2) --tile_tokens_log2;
    return true;
  }
};

SidePlan plan_side(const CacheSide& s, const ReshapeAndCacheArgs& args, const Widths& w, const Grain& grain) {
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
  p.heads = Divider(args.num_heads);
  const int64_t vectors_per_head = s.head_size / w.vector, vectors = args.num_heads * vectors_per_head;
  if (vectors == 0) return p;
  if (args.num_heads * s.head_size >= int64_t{1} << 31 || args.block_size >= int64_t{1} << 31)
    fail(PYKV_NOT_IMPLEMENTED, "tokens of 2^31 elements and blocks of 2^31 tokens are not supported");
  p.vectors_per_head = Divider(vectors_per_head);
  p.vectors_per_chunk = Divider(s.chunk / w.vector);
  p.num_vectors = static_cast<uint32_t>(vectors);

  int64_t blocks;
  if (transposes(s, args.block_size)) {
    const int64_t bits = address(s.cache) | ((s.block | s.head | s.chunk_stride) * w.stored_size);
    p.run = static_cast<uint32_t>(std::max<int64_t>(std::min<int64_t>(alignment_of(bits), 16) / w.stored_size, 1));
    const int64_t pieces = ceil_div(s.head_size, kTileColumns);
    p.pieces = Divider(pieces);
    while ((1 << p.lanes_log2) < kWarps &&
           (4 << p.lanes_log2) < std::min<int64_t>(kTileColumns, s.head_size) / w.vector)
      ++p.lanes_log2;
    p.tile_tokens_log2 = grain.tile_tokens_log2;
    blocks = ceil_div(args.num_tokens, int64_t{1} << grain.tile_tokens_log2) * args.num_heads * pieces;
  } else {
    // Where the next token is nearer in the cache than the next vector, a warp is best 4 tokens high.
    p.lanes_log2 = lanes_log2_for(vectors, s.chunk < s.head_size ? 3 : 5);
    const int64_t pieces = ceil_div(vectors, 1ll << p.lanes_log2);
    p.pieces = Divider(pieces);
    p.tokens = grain.tokens;
    blocks = ceil_div(args.num_tokens, int64_t{grain.threads >> p.lanes_log2} * grain.tokens) * pieces;
  }
  if (blocks >= int64_t{1} << 30) fail(PYKV_NOT_IMPLEMENTED, "too many tokens for one call");
  p.num_blocks = static_cast<uint32_t>(blocks);
  return p;
}

template <class Mover>
void launch_kernel(const ReshapeAndCacheArgs& args, const Launch& launch) {
  using Stored = typename Mover::Stored;
  const Widths w{Mover::kWidth, sizeof(typename Mover::Loaded) / Mover::kWidth, sizeof(Stored)};
  const bool transposed = transposes(args.key, args.block_size) || transposes(args.value, args.block_size);
  const int64_t num_slots = args.num_blocks * args.block_size;

  Plan plan{};
  plan.map = {args.slots,
              args.num_tokens,
              num_slots,
              Divider(args.block_size),
              num_slots >= int64_t{1} << 31,
              launch.reporter(args.report)};
  Scales<Mover::kStoredFormat> scales;
  if constexpr (Mover::kStoredFormat != KvFormat::kSame) scales = {args.key.scale, args.value.scale};
  dispatch_bool(transposed, [&]<bool kTransposes> {
    // Few tokens are spread over the machine.
    Grain grain{kThreads, Shape<Mover, kTransposes>::kTokens,
                kTransposes ? std::countr_zero(unsigned{kMostTileTokens}) : 0};
    const uint32_t enough = (kTransposes ? 2 : 1) * num_sms(launch.device);
    uint32_t blocks;
    do {
      plan.key = plan_side(args.key, args, w, grain);
      plan.value = plan_side(args.value, args, w, grain);
      blocks = plan.key.num_blocks + plan.value.num_blocks;
    } while (blocks < enough && grain.refine());
    if (blocks == 0) return;
    reshape_and_cache_kernel<Mover, kTransposes><<<blocks, grain.threads, 0, stream_of(launch)>>>(plan, scales);
  });
  check_launch("reshape_and_cache");
}

}  // namespace

void reshape_and_cache_cuda(const ReshapeAndCacheArgs& args, const Launch& launch) {
  const int64_t source_size = static_cast<int64_t>(size_of(args.dtype));
  const int64_t stored_size = args.format == KvFormat::kSame ? source_size : 1;
  int64_t width = 16 / source_size;
  for (const CacheSide* s : {&args.key, &args.value})
    width = std::min(width, vector_width(*s, source_size, stored_size, transposes(*s, args.block_size)));

  const auto quantise = [&]<KvFormat kFormat> {
    dispatch<half, bf16, float>(args.dtype, [&]<class T> {
      if (width == 16 / static_cast<int64_t>(sizeof(T))) {
        launch_kernel<Mover<T, kFormat, 16 / sizeof(T)>>(args, launch);
      } else {
        launch_kernel<Mover<T, kFormat, 1>>(args, launch);
      }
    });
  };
  // Copies ask for the size of an element alone.
  const auto copy = [&]<class T> {
    if (width * sizeof(T) == 16) return launch_kernel<Mover<T, KvFormat::kSame, 16 / sizeof(T)>>(args, launch);
    if constexpr (sizeof(T) == 2)
      if (width >= 2) return launch_kernel<Mover<T, KvFormat::kSame, 2>>(args, launch);
    launch_kernel<Mover<T, KvFormat::kSame, 1>>(args, launch);
  };
  switch (args.format) {
    case KvFormat::kSame:
      return source_size == 2 ? copy.operator()<uint16_t>() : copy.operator()<uint32_t>();
    case KvFormat::kE4M3:
      return quantise.operator()<KvFormat::kE4M3>();
    case KvFormat::kE5M2:
      return quantise.operator()<KvFormat::kE5M2>();
  }
}

}  // namespace pykv
