// dst[i] = entry of the cache for token i - start[r] of its request r: copied, times a scale, or from fp8_ds_mla records.
//
// Memory-bound.  A block of threads takes a few neighbouring rows of dst, whatever requests they belong to, so that the work
// is balanced by tokens and not by requests.  One warp finds their entries (locate_rows.cuh); meanwhile each thread works out
// which vector of an entry it will move, and where to: that is the same for all its rows, kRowsPerThread loads in flight.
//
// The floor is a copy of as many bytes.  On an H200, entries of MLA, beside a copy that reads and writes as much as they do:
//
//   tokens   as they are       fp8              records          nvfp4
//   4096      3.7 us, 112 %     3.1 us, 111 %    3.6 us, 100 %    3.0 us, 103 %
//   16384    11.6 us, 102 %     8.8 us, 105 %    9.5 us, 101 %    8.2 us, 101 %
//   65536    39.6 us,  99 %    30.9 us, 100 %   33.0 us,  97 %   27.4 us,  97 %
//
// What is left is the chain of loads before a row is known, which other blocks hide where there are many, and of nvfp4 the
// arithmetic.  More blocks than it takes to fill the SMs would queue for the same few ids: 512 of 4096 tokens take 4.8 us, 1024
// take 5.8.  And of blocks that do not fit at once, the last run alone: nvfp4 of 16384 tokens takes 9.7 us by 1024 blocks, 8.2 by
// 512 of twice the rows; of 12288, 8.0 by 768 and 6.6 by 512.
#include <algorithm>

#include "cache/gathers/gather_cache.h"
#include "cache/gathers/gather_readers.cuh"
#include "cuda/dependent.cuh"
#include "cuda/pinned.h"

namespace pykv {
namespace {

constexpr int kMostRows = 32;

// Threads of a block, at most: they take one vector each of four entries of MLA.
template <class Reader>
inline constexpr int kMostThreads = 288;
template <class T>
inline constexpr int kMostThreads<Records<T>> = 320;
template <class Reader>
inline constexpr int kMostThreads<Mapped<Reader>> = kMostThreads<Reader>;
// Rows of a thread whose loads are under way at once, and where it has more, a load is small and much is computed (pages): 65536
// tokens take 28.2 us, 28.8 by four.  Where it has no more, they are not asked for: 4096 tokens 3.0 us, not 3.4.
constexpr int kRowsPerThread = 4, kMoreRows = 8;
// Of a block, where there are many.
constexpr int kTurnRows = 8;
// Blocks that all prefetch, at most.
constexpr int64_t kMostOverlapping = 1024;
// Bytes of a block to prefetch where only the first do: by 32 KiB copies took longer.  No elements one by one.
constexpr int64_t kMostEarly = 24 << 10;
template <class Reader>
inline constexpr bool kMayPrefetchFirst = sizeof(typename Reader::Loaded) >= 4 && !kIsMapped<Reader>;
// Blocks that an SM must hold, as far as registers are concerned.  With five, loads wait for each other for want of registers.
constexpr int kBlocks = 4;

struct NoScale {
  __device__ float operator[](int) const { return 1.0f; }
};

// kFirstEarly: only the first blocks prefetch before the wait.  Known beforehand, since a gather of one token takes 1.68 us, not
// 1.64, if each block finds out.
template <class Reader, class ScaleType, int kRows, bool kFirstEarly>
__global__ void __launch_bounds__(kMostThreads<Reader>, kBlocks)
    gather_cache_kernel(const __grid_constant__ Plan plan, const __grid_constant__ ScaleType scales) {
  __shared__ Source sources[kMostRows];
  if (blockIdx.x + 1 == gridDim.x) {  // one more than rows want
    if (plan.next_early) let_next_kernel_start();
    begin_dependent();
    return plan.locate.check_starts();
  }
  const int64_t first = int64_t{blockIdx.x} * plan.rows, left = plan.locate.num_rows() - first;
  const uint32_t count = left < plan.rows ? static_cast<uint32_t>(left) : plan.rows;
  uint32_t vector;
  const uint32_t row = plan.vectors(threadIdx.x, vector);
  Reader reader(plan, vector);
  if (plan.next_early) let_next_kernel_start();
  if (threadIdx.x < 32) {
    const bool late = kFirstEarly && !comes_early(kFewBlocks);
    const RowLocator::Guess guess = plan.locate.guess(first, static_cast<int>(count), late || plan.early == 0);
    RowLocator::Seen seen;
    Source source;
    bool early = !late && plan.early > 0;
    if (!early) begin_dependent();
#pragma unroll 1
    for (;; early = false) {
      source = plan.template source_of<kInPages<Reader>, kIsMapped<Reader>>(
          plan.locate(first, static_cast<int>(count), guess, early, seen));
      if (!early) break;
      if (source.entry) plan.template prefetch_entry<kInPages<Reader>>(source);
      begin_dependent();
      if (plan.locate.unchanged(guess, seen)) break;
    }
    if (threadIdx.x < count) sources[threadIdx.x] = source;
  } else {
    begin_dependent();
  }
  const float scale = scales[0];
  __syncthreads();
  if (row >= plan.rows_at_once) return;

  const uint32_t step = plan.rows_at_once;
  const int64_t next = step * plan.dst_row;
  for (;;) {
    for (uint32_t r = row; r < count; r += kRows * step) {
      // Where rows are first, all at once: asked for one by one, each would be waited for before the next is loaded.
      Source from[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) from[i] = r + i * step < count ? sources[r + i * step] : Source{};
      typename Reader::Loaded loaded[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (!from[i].entry) continue;
        __builtin_assume(__isGlobal(from[i].entry));
        __builtin_assume(!kInPages<Reader> || __isGlobal(from[i].scales));
        loaded[i] = reader.load(from[i]);
      }
      char* to = plan.dst + (first + r) * plan.dst_row;
#pragma unroll
      for (int i = 0; i < kRows; ++i, to += next) {
        have_ready(to);  // one addition from the last
        if (from[i].entry) reader.store(to, loaded[i], scale);
      }
    }
    vector += blockDim.x;
    if (vector >= plan.vectors.d) break;
    reader = Reader(plan, vector);
  }
}

// Of an entry, or of the codes of one; 0 if they lie apart.
int64_t bytes_side_by_side(const GatherCacheArgs& args) {
  switch (args.kind) {
    case GatherKind::kRecords:
      return args.record_rows.in_cache.data ? 0 : args.record.bytes();
    case GatherKind::kNvfp4Records:
      return args.nvfp4_record.bytes();
    case GatherKind::kNvfp4:
      return args.page.codes_token == args.pieces * args.page.codes_head ? args.page.codes_token : 0;
    default:
      return args.pieces == 1 ? args.piece : 0;  // in bytes by now
  }
}

template <class Reader, class ScaleType>
void launch_kernel(const GatherCacheArgs& args, int64_t src_bytes, int64_t dst_bytes, int64_t vectors, int64_t in_piece,
                   const ScaleType& scales, const Launch& launch) {
  constexpr int64_t kThreads = kMostThreads<Reader>, kLeastRows = 4, kUsualRows = 16;
  if (vectors * kMostRows >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "entries of 2^26 vectors are not supported");
  // Long entries take turns, of equal length.  Fewer rows a block where that gives every SM work, and more than usual where blocks
  // would else wait for others to end.
  const int64_t at_once = std::max<int64_t>(kThreads / vectors, 1);
  const int64_t most = std::min<int64_t>(at_once * kTurnRows, kMostRows);
  int64_t rows = std::min(most, kUsualRows);
  const int64_t small = std::max<int64_t>(kThreads / (vectors * std::min(at_once, rows / kLeastRows)), 1);
  const int64_t places = small * kBlocks * num_sms(launch.device);  // for blocks
  while (rows > 1 && args.num_rows < num_sms(launch.device) * rows) rows /= 2;
  if (args.num_rows > places * rows) rows = std::min(most, (args.num_rows + 4 * places - 1) / (4 * places) * 4);
  const int64_t blocks = (args.num_rows + rows - 1) / rows;
  if (blocks + 1 >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "too many tokens for one call");
  const int64_t rows_at_once = std::min<int64_t>(at_once, (rows + kLeastRows - 1) / kLeastRows);
  const int64_t turns = (vectors + kThreads - 1) / kThreads;
  const int64_t threads = (rows_at_once * ((vectors + turns - 1) / turns) + 31) / 32 * 32;

  // Blocks that come later would still be prefetching when they have nothing left to wait for; and where there are such, long
  // entries of the first ones would be in the way.
  const int64_t side_by_side = bytes_side_by_side(args);
  const bool all_early = blocks <= std::min(places, kMostOverlapping);
  const bool early = side_by_side < 1 << 20 && overlaps_kernels(launch.device) &&
                     (all_early || (kMayPrefetchFirst<Reader> && rows * side_by_side <= kMostEarly));
  const bool next_early =
      early && all_early && 2 * blocks >= num_sms(launch.device) && args.kind != GatherKind::kRecords;
  const Plan plan{RowLocator(args.requests, args.num_rows, launch.errors),
                  static_cast<const char*>(args.src),
                  static_cast<char*>(args.dst),
                  args.src_block * src_bytes,
                  args.src_token * src_bytes,
                  args.dst_row * dst_bytes,
                  static_cast<uint32_t>(rows),
                  static_cast<uint32_t>(rows_at_once),
                  Divider(vectors),
                  Divider(in_piece),
                  args.src_piece * src_bytes,
                  args.dst_piece * dst_bytes,
                  args.record,
                  args.page,
                  args.dst_dim * dst_bytes,
                  args.record_rows,
                  args.nvfp4_record,
                  static_cast<uint32_t>(early ? side_by_side : 0),
                  next_early};
  const auto launch_with = [&]<int kRows> {
    const auto launch_by = [&](auto kernel) {
      launch_dependent(kernel, static_cast<uint32_t>(blocks + 1), static_cast<uint32_t>(threads), launch,
                       "gather_cache", plan, scales);
    };
    if constexpr (kMayPrefetchFirst<Reader>)
      if (!all_early) return launch_by(gather_cache_kernel<Reader, ScaleType, kRows, true>);
    launch_by(gather_cache_kernel<Reader, ScaleType, kRows, false>);
  };
  if constexpr (kInPages<Reader>)
    if (rows >= rows_at_once * kMoreRows) return launch_with.template operator()<kMoreRows>();
  launch_with.template operator()<kRowsPerThread>();
}

void copy(const GatherCacheArgs& args, const Launch& launch) {
  const int64_t item = args.element_bytes;
  uint64_t bits = 16 | static_cast<uint64_t>(args.piece * item) | reinterpret_cast<uintptr_t>(args.src) |
                  reinterpret_cast<uintptr_t>(args.dst);
  for (int64_t stride : {args.src_block, args.src_token, args.dst_row}) bits |= static_cast<uint64_t>(stride * item);
  if (args.pieces > 1)
    bits |= static_cast<uint64_t>(args.src_piece * item) | static_cast<uint64_t>(args.dst_piece * item);
  const int64_t width = static_cast<int64_t>(bits & -bits);  // bytes
  // an element is never cut: it is aligned to its own size
  const auto launch_with = [&]<class V> {
    GatherCacheArgs in_bytes = args;
    in_bytes.piece *= item;
    const int64_t in_piece = in_bytes.piece / static_cast<int64_t>(sizeof(V));
    launch_kernel<Copy<V>>(in_bytes, item, item, args.pieces * in_piece, in_piece, NoScale{}, launch);
  };
  switch (width) {
    case 16:
      return launch_with.operator()<uint4>();
    case 8:
      return launch_with.operator()<uint2>();
    case 4:
      return launch_with.operator()<uint32_t>();
    case 2:
      return launch_with.operator()<uint16_t>();
    default:
      return launch_with.operator()<uint8_t>();
  }
}

template <class T, KvFormat kFormat>
void scale_codes(const GatherCacheArgs& args, const Launch& launch) {
  constexpr int64_t kSize = 16 / sizeof(T), kItem = sizeof(T);
  const int64_t src_piece = args.pieces > 1 ? args.src_piece : 0, dst_piece = args.pieces > 1 ? args.dst_piece : 0;
  if (args.piece % kSize == 0 && is_aligned(kSize, args.src, {args.src_block, args.src_token, src_piece}) &&
      is_aligned(16, args.dst, {args.dst_row * kItem, dst_piece * kItem}))
    return launch_kernel<Scaled<T, kFormat, kSize>>(args, 1, kItem, args.pieces * args.piece / kSize,
                                                    args.piece / kSize, args.scale, launch);
  launch_kernel<Scaled<T, kFormat, 1>>(args, 1, kItem, args.pieces * args.piece, args.piece, args.scale, launch);
}

template <class T>
void read_pages(const GatherCacheArgs& args, const Launch& launch) {
  constexpr int64_t kItem = sizeof(T);
  if (args.requests.block_size >= int64_t{1} << 31)
    fail(PYKV_NOT_IMPLEMENTED, "blocks of 2^31 tokens are not supported");
  GatherCacheArgs in_pages = args;
  in_pages.src_token = 0;  // rows are told their page
  const bool aligned = args.dst_dim == 1 && is_aligned(16, args.dst, {args.dst_row * kItem, args.dst_piece * kItem}) &&
                       is_aligned(8, args.src, {args.src_block});
  dispatch_bool(aligned, [&]<bool kAligned> {
    launch_kernel<Pages<T, kAligned>>(in_pages, 1, kItem, args.pieces * args.piece / kHalfBlock,
                                      args.piece / kHalfBlock, args.scale, launch);
  });
}

template <class Vectors, class Elements>
void launch_records(const GatherCacheArgs& args, const Launch& launch) {
  const MlaRecord& r = args.record;
  if (args.dst_piece == 1 && r.rope % Vectors::kElements == 0 &&
      is_aligned(8, args.src, {args.src_block, args.src_token, r.rope_at()}) &&
      is_aligned(8, args.record_rows.host, {args.record_rows.host_row}) && is_aligned(16, args.dst, {2 * args.dst_row}))
    return launch_kernel<Vectors>(args, 1, 2, r.latent / Vectors::kCodes + r.rope / Vectors::kElements, 1, NoScale{},
                                  launch);
  launch_kernel<Elements>(args, 1, 2, r.latent + r.rope, 1, NoScale{}, launch);
}

template <class T>
void read_records(GatherCacheArgs args, const Launch& launch) {
  RecordRows& maps = args.record_rows;
  if (!maps.in_cache.data) return launch_records<Records<T>, RecordElements<T>>(args, launch);
  if (maps.num_in_host > 0) {
    maps.host = on_device(maps.host, (maps.num_in_host - 1) * maps.host_row + args.record.bytes());
    if (!maps.host) fail(PYKV_VALUE_ERROR, "host_cache: must lie in pinned host memory");
  }
  launch_records<Mapped<Records<T>>, Mapped<RecordElements<T>>>(args, launch);
}

template <class T>
void read_nvfp4_records(const GatherCacheArgs& args, const Launch& launch) {
  const Nvfp4MlaRecord& r = args.nvfp4_record;
  const bool aligned = args.dst_piece == 1 && is_aligned(16, args.dst, {2 * args.dst_row}) &&
                       is_aligned(4, args.src, {args.src_block, args.src_token});
  dispatch_bool(aligned, [&]<bool kAligned> {
    launch_kernel<Nvfp4Records<T, kAligned>>(args, 1, 2, (r.latent + r.rope) / 8, 1, NoScale{}, launch);
  });
}

}  // namespace

void gather_cache_cuda(const GatherCacheArgs& args, const Launch& launch) {
  switch (args.kind) {
    case GatherKind::kCopy:
      return copy(args, launch);
    case GatherKind::kScaled:
      return dispatch<half, bf16, float>(args.dtype, [&]<class T> {
        return args.format == KvFormat::kE4M3   ? scale_codes<T, KvFormat::kE4M3>(args, launch)
               : args.format == KvFormat::kE5M2 ? scale_codes<T, KvFormat::kE5M2>(args, launch)
                                                : scale_codes<T, KvFormat::kInt8>(args, launch);
      });
    case GatherKind::kNvfp4:
      return dispatch<half, bf16, float>(args.dtype, [&]<class T> { read_pages<T>(args, launch); });
    case GatherKind::kNvfp4Records:
      return dispatch<half, bf16>(args.dtype, [&]<class T> { read_nvfp4_records<T>(args, launch); });
    case GatherKind::kRecords:
      return dispatch<half, bf16>(args.dtype, [&]<class T> { read_records<T>(args, launch); });
  }
}

}  // namespace pykv
