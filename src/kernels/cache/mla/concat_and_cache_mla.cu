// cache[slot[t] / BS, slot[t] % BS] = concat(kv_c[t], k_pe[t]): copied, quantised by one scale (concat_rows.cuh), or as
// fp8_ds_mla records (write_mla_records.cuh).
//
// All read each element once and write its bytes once; the floor is that traffic at copy bandwidth.  On an H200, MLA's 512 +
// 64: 65536 tokens take 40 us, 101 % of a copy that reads and writes as much (fp8 97 %, records 98 %, nvfp4 98 %); 4096
// tokens 3.3 us, 115 % (fp8 108 %, records 101 %, nvfp4 100 %, or 108 where the copy's arrays lie so that it takes 3.3 us and
// not 2.95).
#include "cache/mla/concat_and_cache_mla.h"
#include "cache/mla/concat_rows.cuh"
#include "cache/mla/entry_places.cuh"
#include "cache/mla/write_mla_records.cuh"
#include "cache/mla/write_nvfp4_records.cuh"
#include "cache/nvfp4_tokens.cuh"

namespace pykv {
namespace {

constexpr char kOp[] = "concat_and_cache_mla";

template <class Mover, int kRows>
__global__ void __launch_bounds__(kConcatThreads)
    concat_and_cache_mla_kernel(const __grid_constant__ ConcatPlan plan, const __grid_constant__ SlotTarget target,
                                const __grid_constant__ Scales<Mover::kStoredFormat> scales, uint32_t first_row) {
  concat_rows<Mover, kRows>(
      plan, target,
      [&] {
        float scale = 1.0f;
        if constexpr (Mover::kStoredFormat != KvFormat::kSame) scale = scales.key[0];
        return scale;
      },
      first_row);
}

struct PagePlan {
  const char *latent, *rope;
  int64_t latent_row, latent_dim, rope_row, rope_dim;  // bytes
  int64_t latent_size;
  Divider blocks;  // of 16 elements, in an entry
  char* cache;
  int64_t block;
  Nvfp4Page page;
  bool four_over_six;
  SlotMap map;
};

// Small blocks leave less of the last wave idle, where threads are long: 16384 tokens take 7.8 us, 8.5 by blocks of 128.
template <int kTokens>
inline constexpr int kNvfp4Threads = kConcatThreads / kTokens;
// Threads of one token that an SM must hold.  Where there are no more, they take one token each, and two where there are up to
// twice as many: 4096 tokens take 2.9 us, not 3.4, and 8192 take 4.8, not 5.5.
constexpr int kShortThreads = 1280;
template <class T, bool kAligned, int kTokens>
inline constexpr int kThreadsOfSm = kNvfp4ThreadsOfSm<T, kAligned>;
template <class T>
inline constexpr int kThreadsOfSm<T, true, 2> = 1024;
template <class T>
inline constexpr int kThreadsOfSm<T, true, 1> = kShortThreads;

// nvfp4, as of one head.
template <class T, bool kAligned, int kTokens>
__global__ void __launch_bounds__(kNvfp4Threads<kTokens>, kThreadsOfSm<T, kAligned, kTokens> / kNvfp4Threads<kTokens>)
    mla_nvfp4_kernel(const __grid_constant__ PagePlan plan, const __grid_constant__ Scale scale, uint32_t first_token) {
  uint32_t block;
  const uint32_t group = plan.blocks(blockIdx.x * kNvfp4Threads<kTokens> + threadIdx.x, block);
  const uint32_t first = first_token + group * kTokens;
  const int left = static_cast<int>(static_cast<uint32_t>(plan.map.num_tokens) - first);
  const int64_t column = int64_t{block} * kNvfp4Block, in_rope = column - plan.latent_size;
  const bool from_rope = in_rope >= 0;
  const char *latent = plan.latent + column * plan.latent_dim, *rope = plan.rope + in_rope * plan.rope_dim;
  const Nvfp4Source source = {from_rope ? rope : latent,
                              rope,
                              from_rope ? plan.rope_row : plan.latent_row,
                              plan.rope_row,
                              from_rope ? plan.rope_dim : plan.latent_dim,
                              plan.rope_dim,
                              from_rope ? kNvfp4Block : static_cast<int>(min(-in_rope, int64_t{kNvfp4Block}))};
  const Nvfp4Target target(plan.cache, plan.block, plan.page, 0, block);
  write_nvfp4<T, kAligned, kTokens>(plan.map, source, target, scale, plan.four_over_six, 0, first, min(left, kTokens));
}

template <class T, bool kAligned, int kRows>
__global__ void __launch_bounds__(kConcatThreads)
    mla_record_kernel(const __grid_constant__ RecordPlan plan, const __grid_constant__ SlotTarget target,
                      uint32_t first_token) {
  write_mla_records<T, kAligned, kRows>(plan, target, first_token);
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kConcatThreads)
    mla_nvfp4_record_kernel(const __grid_constant__ Nvfp4RecordPlan plan, const __grid_constant__ SlotTarget target,
                            uint32_t first_token) {
  write_nvfp4_record<T, kAligned>(plan, target, first_token);
}

// launch_some.operator()<tokens of a thread>(first token, blocks)
template <int kMostRows, class F>
void for_each_launch(const ConcatAndCacheMlaArgs& args, int64_t lanes, const Launch& launch, F&& launch_some) {
  dispatch_rows_per_thread<kMostRows>(args.num_tokens, lanes, launch, [&]<int kRows> {
    for_each_concat_launch(args.num_tokens, lanes, kRows, [&](uint32_t first, uint32_t blocks) {
      launch_some.template operator()<kRows>(first, blocks);
    });
  });
}

template <class Mover>
void launch_concat(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  constexpr int64_t kWidth = Mover::kWidth, kSource = sizeof(typename Mover::Loaded) / kWidth;
  constexpr int64_t kStored = sizeof(typename Mover::Stored);
  const auto part = [](const MlaPart& p) {
    return ConcatPart{static_cast<const char*>(p.data), RowMap::plain(p.row * kSource), p.dim * kWidth * kSource};
  };
  const int64_t vectors = (args.latent.size + args.rope.size) / kWidth;
  const ConcatPlan plan{part(args.latent),
                        part(args.rope),
                        Divider(vectors),
                        static_cast<uint32_t>(args.latent.size / kWidth),
                        args.dim * kWidth * kStored,
                        static_cast<uint32_t>(args.num_tokens)};
  const SlotTarget target = target_of(args, kStored, launch);
  Scales<Mover::kStoredFormat> scales;
  if constexpr (Mover::kStoredFormat != KvFormat::kSame) scales.key = args.scale;
  for_each_launch<4>(args, vectors, launch, [&]<int kRows>(uint32_t first, uint32_t blocks) {
    launch_dependent(concat_and_cache_mla_kernel<Mover, kRows>, blocks, kConcatThreads, launch, kOp, plan, target,
                     scales, first);
  });
}

template <class T>
void launch_records(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  const RecordPlan plan = record_plan(args, args.rope.size);
  const bool aligned = records_aligned(args);
  const SlotTarget target = target_of(args, 1, launch);
  for_each_launch<2>(args, plan.lanes.d, launch, [&]<int kRows>(uint32_t first, uint32_t blocks) {
    dispatch_bool(aligned, [&]<bool kAligned> {
      launch_dependent(mla_record_kernel<T, kAligned, kRows>, blocks, kConcatThreads, launch, kOp, plan, target, first);
    });
  });
}

template <class T>
void launch_nvfp4_records(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  const MlaPart &latent = args.latent, &rope = args.rope;
  const Nvfp4MlaRecord record{latent.size, rope.size};
  const int64_t pieces = nvfp4_record_pieces(record);
  const Nvfp4RecordPlan plan{static_cast<const char*>(latent.data),
                             static_cast<const char*>(rope.data),
                             2 * latent.row,
                             2 * latent.dim,
                             2 * rope.row,
                             2 * rope.dim,
                             Divider(pieces),
                             record,
                             static_cast<uint32_t>(args.num_tokens)};
  const SlotTarget target = target_of(args, 1, launch);
  const bool aligned = latent.dim == 1 && is_aligned(16, latent.data, {2 * latent.row}) &&
                       is_aligned(8, args.cache, {args.block, args.token});
  for_each_concat_launch(args.num_tokens, pieces, 1, [&](uint32_t first, uint32_t blocks) {
    dispatch_bool(aligned, [&]<bool kAligned> {
      launch_dependent(mla_nvfp4_record_kernel<T, kAligned>, blocks, kConcatThreads, launch, kOp, plan, target, first);
    });
  });
}

template <class T>
void launch_nvfp4(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  constexpr int64_t kSource = sizeof(T);
  const MlaPart &latent = args.latent, &rope = args.rope;
  const int64_t blocks = (latent.size + rope.size) / kNvfp4Block;
  const PagePlan plan{static_cast<const char*>(latent.data),
                      static_cast<const char*>(rope.data),
                      latent.row * kSource,
                      latent.dim * kSource,
                      rope.row * kSource,
                      rope.dim * kSource,
                      latent.size,
                      Divider(blocks),
                      static_cast<char*>(args.cache),
                      args.block,
                      args.page,
                      args.four_over_six,
                      slot_map_of(args, launch)};
  const auto fits = [](const MlaPart& p) {
    return p.size == 0 || (p.size % kNvfp4Block == 0 && p.dim == 1 && is_aligned(16, p.data, {p.row * kSource}));
  };
  const bool aligned = fits(latent) && fits(rope) && is_aligned(8, args.cache, {args.block}) && !args.four_over_six;
  const auto launch_with = [&]<bool kKnownAligned, int kTokens> {
    const auto launch_some = [&](uint32_t first, uint32_t grid) {
      launch_dependent(mla_nvfp4_kernel<T, kKnownAligned, kTokens>, grid, kNvfp4Threads<kTokens>, launch, kOp, plan,
                       args.scale, first);
    };
    for_each_concat_launch(args.num_tokens, blocks, kTokens, launch_some, kNvfp4Threads<kTokens>);
  };
  const int64_t threads = args.num_tokens * blocks / num_sms(launch.device);  // of an SM, were each to take one token
  if (!aligned || threads > 2 * kShortThreads) {
    dispatch_bool(aligned, [&]<bool kAligned> { launch_with.template operator()<kAligned, kNvfp4Tokens>(); });
  } else if (threads > kShortThreads) {
    launch_with.template operator()<true, 2>();
  } else {
    launch_with.template operator()<true, 1>();
  }
}

// Whether vectors of `bytes` of the source fit both parts and the cache.
bool fits(const ConcatAndCacheMlaArgs& args, int64_t bytes, int64_t stored_size) {
  const int64_t size = static_cast<int64_t>(size_of(args.dtype)), width = bytes / size;
  for (const MlaPart* p : {&args.latent, &args.rope}) {
    if (p->size == 0) continue;
    if (p->dim != 1 || p->size % width != 0 || !is_aligned(bytes, p->data, {p->row * size})) return false;
  }
  return args.dim == 1 &&
         is_aligned(width * stored_size, args.cache, {args.block * stored_size, args.token * stored_size});
}

}  // namespace

void concat_and_cache_mla_cuda(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  if (args.latent.size + args.rope.size >= int64_t{1} << 30) fail(PYKV_NOT_IMPLEMENTED, "entries of 2^30 elements");
  if (args.num_tokens >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "2^31 tokens in one call are not supported");
  if (args.entry == MlaEntry::kRecord)
    return dispatch<half, bf16>(args.dtype, [&]<class T> { launch_records<T>(args, launch); });
  if (args.entry == MlaEntry::kNvfp4Record)
    return dispatch<half, bf16>(args.dtype, [&]<class T> { launch_nvfp4_records<T>(args, launch); });
  const bool wide = fits(args, 16, args.format == KvFormat::kSame ? static_cast<int64_t>(size_of(args.dtype)) : 1);
  const auto launch_with = [&]<class T, KvFormat kFormat> {
    return wide ? launch_concat<Mover<T, kFormat, 16 / sizeof(T)>>(args, launch)
                : launch_concat<Mover<T, kFormat, 1>>(args, launch);
  };
  switch (args.format) {
    case KvFormat::kSame:
      return size_of(args.dtype) == 2 ? launch_with.operator()<uint16_t, KvFormat::kSame>()
                                      : launch_with.operator()<uint32_t, KvFormat::kSame>();
    case KvFormat::kE4M3:
      return dispatch<half, bf16, float>(args.dtype,
                                         [&]<class T> { launch_with.template operator()<T, KvFormat::kE4M3>(); });
    case KvFormat::kE5M2:
      return dispatch<half, bf16, float>(args.dtype,
                                         [&]<class T> { launch_with.template operator()<T, KvFormat::kE5M2>(); });
    case KvFormat::kInt8:
      return dispatch<half, bf16, float>(args.dtype,
                                         [&]<class T> { launch_with.template operator()<T, KvFormat::kInt8>(); });
    case KvFormat::kNvfp4:
      return dispatch<half, bf16, float>(args.dtype, [&]<class T> { launch_nvfp4<T>(args, launch); });
  }
}

}  // namespace pykv
