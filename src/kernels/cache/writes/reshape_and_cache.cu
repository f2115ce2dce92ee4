// cache[slot[t] / BS, slot[t] % BS] = key[t] (and value[t]), as it is or divided by a scale and rounded to fp8.
//
// One launch writes keys and values; a block of threads works on one of them.  Memory-bound: each element is read and
// written once, so the floor is (bytes in + bytes out) / copy bandwidth.  What it takes to get there is that neighbouring
// threads read and write whole 32-byte sectors in every layout: scatter_tokens.cuh where elements of a token stay
// neighbours, transpose_tokens.cuh where tokens become neighbours.
#include <algorithm>

#include "cache/writes/write_side.cuh"
#include "cuda/dependent.cuh"
#include "cuda/device.h"

namespace pykv {
namespace {

// Of a block that writes whole tokens, one at a time: smaller blocks end more evenly, and what they touch lies together.  On an
// H200, 8 heads of bf16: 65536 tokens take 133 us by 128 threads, 136 by 256 (of a quarter of each token); 4096 tokens of int8
// 8.7 us, not 9.2.
constexpr uint32_t kScatteringThreads = 128;

// Where tokens are turned around and converted, and so many bytes are to be loaded or more, blocks send for what others will load
// so much later: 65536 tokens of 32 heads to fp8 take 385 us on an H200, not 388.  4096 tokens gain nothing, nor do the flash
// layouts.
constexpr int64_t kMuch = 128 << 20, kAhead = 1 << 20;

// From so many bytes on, which fill the SMs several times over, tiles of 16-bit elements are converted by wide vectors: 65536
// tokens of 8 heads of bf16 to fp8 take 99.0 us on an H200, not 102.2, but 4096 tokens 9.0, not 8.5.  These blocks do not send for
// their share: 4096 tokens of 32 heads take 26.7 us, not 27.1.
constexpr int64_t kMuchToTurn = 32 << 20;

// What the first blocks send for before they wait is 4 MiB of 4096 tokens of 8 heads: fp8 takes 7.9 us on an H200 (flash) and 8.6,
// not 8.2 and 9.0 as where twice as many do, nor 8.4 without.
template <class Mover>
inline constexpr bool kConverts = Mover::kStoredFormat != KvFormat::kSame && !kInPages<Mover>;

template <class Mover, bool kTransposes>
__global__ void __launch_bounds__(Shape<Mover, kTransposes>::kThreads, Shape<Mover, kTransposes>::kBlocks)
    reshape_and_cache_kernel(const __grid_constant__ Plan plan,
                             const __grid_constant__ Scales<Mover::kStoredFormat> scales) {
  // Values first: where they are transposed, they take longer.
  const auto is_key = [&](uint32_t b) { return b >= plan.value.num_blocks; };
  const auto side_of = [&](uint32_t b) -> const SidePlan& { return is_key(b) ? plan.key : plan.value; };
  const auto in_side = [&](uint32_t b) { return is_key(b) ? b - plan.value.num_blocks : b; };
  const SidePlan& side = side_of(blockIdx.x);
  const uint32_t block = in_side(blockIdx.x);
  if constexpr (kConverts<Mover>) {
    if (plan.ahead != 0 && blockIdx.x + plan.ahead < gridDim.x)
      prefetch_share(side_of(blockIdx.x + plan.ahead), in_side(blockIdx.x + plan.ahead));
    if (plan.early && comes_early(kFewBlocks)) prefetch_share(side, block);
  }
  const Scale* scale = nullptr;
  if constexpr (Mover::kStoredFormat != KvFormat::kSame) scale = is_key(blockIdx.x) ? &scales.key : &scales.value;
  write_side<Mover, kTransposes, Shape<Mover, kTransposes>::kThreads>(plan.map, side, scale, block);
}

template <class Mover>
void launch_kernel(const ReshapeAndCacheArgs& args, const Launch& launch) {
  using Stored = typename Mover::Stored;
  const Widths w{Mover::kWidth, sizeof(typename Mover::Loaded) / Mover::kWidth, sizeof(Stored)};

  Plan plan{};
  plan.map = slot_map_of(args, launch);
  Scales<Mover::kStoredFormat> scales;
  if constexpr (Mover::kStoredFormat != KvFormat::kSame) scales = {args.key.scale, args.value.scale};
  const auto launch_with = [&]<bool kTransposes> {
    using OfKernel = Shape<Mover, kTransposes>;
    // Few tokens are spread over the machine.
    Grain grain = Grain::coarsest<Mover, kTransposes>(OfKernel::kThreads);
    if constexpr (!kTransposes && !kInPages<Mover>) {  // whole tokens, few at a time
      grain.threads = kScatteringThreads;
      grain.lanes_log2 = std::countr_zero(unsigned{kScatteringThreads});
    }
    const uint32_t enough = (kTransposes ? 2 : 1) * num_sms(launch.device);
    uint32_t blocks;
    do {
      plan.key = plan_side(args.key, args, w, grain);
      plan.value = plan_side(args.value, args, w, grain);
      blocks = plan.key.num_blocks + plan.value.num_blocks;
    } while (blocks < enough && grain.refine());
    if (blocks == 0) return;
    if constexpr (kConverts<Mover>) {
      plan.early = Mover::kWidth != kWideVector && blocks > kFewBlocks;
      const int64_t share = std::max(plan.key.share.size(), plan.value.share.size());
      if (kTransposes && share > 0 && share * blocks >= kMuch)
        plan.ahead = static_cast<uint32_t>(std::max<int64_t>(kAhead / share, 1));
    }
    launch_dependent(reshape_and_cache_kernel<Mover, kTransposes>, blocks, grain.threads, launch, "reshape_and_cache",
                     plan, scales);
  };
  if constexpr (kInPages<Mover>) {
    launch_with.template operator()<false>();
  } else if constexpr (Mover::kWidth == kWideVector) {
    launch_with.template operator()<true>();
  } else {
    dispatch_bool(transposes(args.key, args.block_size) || transposes(args.value, args.block_size), launch_with);
  }
}

}  // namespace

void reshape_and_cache_cuda(const ReshapeAndCacheArgs& args, const Launch& launch) {
  const int64_t source_size = static_cast<int64_t>(size_of(args.dtype));
  const int64_t stored_size = args.format == KvFormat::kSame ? source_size : 1;
  const bool transposed = transposes(args.key, args.block_size) || transposes(args.value, args.block_size);
  int64_t width = kWideVector, to_load = 0;
  for (const CacheSide* s : {&args.key, &args.value}) {
    width = std::min(width, vector_width(*s, source_size, stored_size, transposes(*s, args.block_size)));
    to_load += args.num_tokens * args.num_heads * s->head_size * source_size;
  }
  const bool wide = width == kWideVector && transposed && to_load >= kMuchToTurn;
  width = std::min(width, 16 / source_size);

  const auto quantise = [&]<KvFormat kFormat> {
    dispatch<half, bf16, float>(args.dtype, [&]<class T> {
      if constexpr (sizeof(T) == 2)
        if (wide) return launch_kernel<Mover<T, kFormat, kWideVector>>(args, launch);
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
  const auto quantise_pages = [&] {
    const auto aligned = [&](const CacheSide& s) {
      return s.data_dim == 1 && is_aligned(16, s.data, {s.data_token * source_size, s.data_head * source_size}) &&
             is_aligned(8, s.cache, {s.block});
    };
    dispatch<half, bf16, float>(args.dtype, [&]<class T> {
      dispatch_bool(aligned(args.key) && aligned(args.value) && !args.key.four_over_six,
                    [&]<bool kAligned> { launch_kernel<Nvfp4Mover<T, kAligned>>(args, launch); });
    });
  };
  switch (args.format) {
    case KvFormat::kSame:
      return source_size == 2 ? copy.operator()<uint16_t>() : copy.operator()<uint32_t>();
    case KvFormat::kE4M3:
      return quantise.operator()<KvFormat::kE4M3>();
    case KvFormat::kE5M2:
      return quantise.operator()<KvFormat::kE5M2>();
    case KvFormat::kInt8:
      return quantise.operator()<KvFormat::kInt8>();
    case KvFormat::kNvfp4:
      return quantise_pages();
  }
}

}  // namespace pykv
