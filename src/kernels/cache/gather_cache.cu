// dst[i] = entry of the cache for token i - start[r] of its request r: copied, times a scale, or from fp8_ds_mla records.
//
// Memory-bound.  A block of threads takes a few neighbouring rows of dst, whatever requests they belong to, so that the work
// is balanced by tokens and not by requests.  One warp finds their entries (locate_rows.cuh); meanwhile all threads work out
// which vectors of these rows they will move, kVectorsPerThread loads in flight each.
//
// The floor is a copy of as many bytes.  On an H200, entries of MLA: 65536 tokens take 40 us, 98 % of such a copy (fp8 95 %,
// records 88 %); 4096 tokens 4.2 us, 100 % (fp8 99 %, records 100 %), by 256 blocks of threads.
// More blocks than it takes to fill the SMs would queue for the same few ids: 512 take 4.8 us, 1024 take 5.8.
#include <algorithm>

#include "cache/dequantise.cuh"
#include "cache/gather_cache.h"
#include "cache/locate_rows.cuh"
#include "cuda/dependent.cuh"

namespace pykv {
namespace {

constexpr int kMostRows = 16, kVectorsPerThread = 4;

struct Plan {
  RowLocator locate;
  const char* src;
  char* dst;
  int64_t src_block, src_token, dst_row;  // bytes
  int rows;                               // of a block of threads
  bool one_piece;
  Divider vectors, in_piece;  // of an entry, of a piece
  int64_t src_piece, dst_piece;
  MlaRecord record;
  Nvfp4Page page;
  int64_t dst_dim;
  uint32_t early;  // bytes of an entry, or of its codes, to prefetch before the wait; 0: none

  template <bool kInPages>
  __device__ void prefetch_entry(const char* entry, uint32_t in_page) const {
    if constexpr (kInPages) {
      prefetch(entry + page.codes_at(in_page, 0, 0), early);
      prefetch(entry + page.scale_at(in_page / kNvfp4TokenGroup * kNvfp4TokenGroup, 0, 0),
               static_cast<uint32_t>(kNvfp4TokenGroup * page.scales_token));
    } else {
      prefetch(entry, early);
    }
  }

  // Where a vector of so many bytes lies in an entry.
  __device__ int64_t offset(uint32_t vector, int64_t piece_bytes, int64_t vector_bytes) const {
    if (one_piece) return vector * vector_bytes;
    uint32_t at;
    const uint32_t piece = in_piece(vector, at);
    return piece * piece_bytes + at * vector_bytes;
  }
};

// Readers: how a vector of an entry is loaded, and stored as a vector of a row.
template <class V>
struct Copy {
  using Loaded = V;
  static __device__ Loaded load(const Plan& plan, const char* entry, uint32_t vector) {
    return *reinterpret_cast<const V*>(entry + plan.offset(vector, plan.src_piece, sizeof(V)));
  }
  static __device__ void store(const Plan& plan, char* row, uint32_t vector, const Loaded& v, float) {
    *reinterpret_cast<V*>(row + plan.offset(vector, plan.dst_piece, sizeof(V))) = v;
  }
};

template <class T, KvFormat kFormat, int kSize>
struct Scaled {
  static constexpr int kSource = kSize, kTarget = kSize * sizeof(T);
  using Loaded = Vec<uint8_t, kSize>;
  static __device__ Loaded load(const Plan& plan, const char* entry, uint32_t vector) {
    return load_vec<Loaded>(entry + plan.offset(vector, plan.src_piece, kSource));
  }
  static __device__ void store(const Plan& plan, char* row, uint32_t vector, const Loaded& v, float scale) {
    store_vec(row + plan.offset(vector, plan.dst_piece, kTarget), dequantise<T, kFormat>(v, scale));
  }
};

// Of a record: 8 codes and their scale, or 8 elements of rope.
template <class T>
struct Records {
  static constexpr int kSize = 8, kTarget = 16;
  struct Loaded {
    Vec<T, kSize> raw;  // codes: the first half
    float scale;
  };
  static __device__ Loaded load(const Plan& plan, const char* record, uint32_t vector) {
    Loaded v;
    const int64_t column = vector * kSize;
    if (column < plan.record.latent) {
      const uint2 codes = *reinterpret_cast<const uint2*>(record + column);
      v.raw.words[0] = codes.x;
      v.raw.words[1] = codes.y;
      v.scale = *reinterpret_cast<const float*>(record + plan.record.scales_at() + column / MlaRecord::kTile * 4);
    } else {
      v.raw = load_vec<Vec<T, kSize>>(record + plan.record.rope_at() + 2 * (column - plan.record.latent));
    }
    return v;
  }
  static __device__ void store(const Plan& plan, char* row, uint32_t vector, const Loaded& v, float) {
    Vec<T, kSize> out = v.raw;
    if (vector * kSize < plan.record.latent)
      out = dequantise<T, KvFormat::kE4M3>(Vec<uint8_t, kSize>{{v.raw.words[0], v.raw.words[1]}}, v.scale);
    store_vec(row + vector * kTarget, out);
  }
};

// The same element by element, whatever the alignment: everything is put together from bytes.
template <class T>
struct RecordElements {
  using Loaded = T;
  static __device__ uint32_t bytes(const char* from, int n) {
    uint32_t bits = 0;
    for (int i = 0; i < n; ++i) bits |= uint32_t{static_cast<uint8_t>(from[i])} << (8 * i);
    return bits;
  }
  static __device__ Loaded load(const Plan& plan, const char* record, uint32_t column) {
    if (column < plan.record.latent) {
      const float scale = __uint_as_float(bytes(record + plan.record.scales_at() + column / MlaRecord::kTile * 4, 4));
      return from_float<T>(fp8_to_float<KvFormat::kE4M3>(static_cast<uint8_t>(record[column])) * scale);
    }
    const uint16_t bits =
        static_cast<uint16_t>(bytes(record + plan.record.rope_at() + 2 * (column - plan.record.latent), 2));
    return reinterpret_cast<const T&>(bits);
  }
  static __device__ void store(const Plan& plan, char* row, uint32_t column, const Loaded& v, float) {
    *reinterpret_cast<T*>(row + column * plan.dst_piece) = v;
  }
};

// Of a page: 16 codes and their scale.  Loads are told the token's place in the page, too.  kAligned: codes are loaded and
// elements stored by vectors.
template <class T, bool kAligned>
struct Pages {
  using Loaded = Nvfp4Codes;
  static __device__ Loaded load(const Plan& plan, const char* page, uint32_t offset, uint32_t vector) {
    uint32_t block;
    const uint32_t head = plan.in_piece(vector, block);
    const char* codes = page + plan.page.codes_at(offset, head, int64_t{block} * kNvfp4Block);
    Loaded v;
    if constexpr (kAligned) {
      v.codes = *reinterpret_cast<const uint2*>(codes);
    } else {
      v.codes = {0, 0};
#pragma unroll
      for (int i = 0; i < 8; ++i)
        (i < 4 ? v.codes.x : v.codes.y) |= uint32_t{static_cast<uint8_t>(codes[i])} << (i % 4 * 8);
    }
    v.scale = static_cast<uint8_t>(page[plan.page.scale_at(offset, head, static_cast<int32_t>(block))]);
    return v;
  }
  static __device__ void store(const Plan& plan, char* row, uint32_t vector, const Loaded& v, float scale) {
    uint32_t block;
    const uint32_t head = plan.in_piece(vector, block);
    char* to = row + head * plan.dst_piece + int64_t{block} * kNvfp4Block * plan.dst_dim;
    const Vec<T, kNvfp4Block> x = dequantise<T>(v, scale);
    if constexpr (kAligned) {
      const auto& vectors = reinterpret_cast<const Vec<uint4, sizeof(T)>&>(x);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) store_vec(to + i * 16, vectors[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kNvfp4Block; ++i) *reinterpret_cast<T*>(to + i * plan.dst_dim) = x[i];
    }
  }
};

// Threads of a block, at most, and blocks that an SM must hold, as far as registers are concerned: what 16 entries of MLA
// take, and as many as leave their loads together, and both halves of a sector that is stored.
template <class Reader>
inline constexpr int kMostThreads = 288;
template <class T, bool kAligned>
inline constexpr int kMostThreads<Pages<T, kAligned>> = 160;
template <class Reader>
inline constexpr int kBlocks = 5;
template <class T>
inline constexpr int kBlocks<Records<T>> = 4;
template <class T, bool kAligned>
inline constexpr int kBlocks<Pages<T, kAligned>> = 6;

struct NoScale {
  __device__ float operator[](int) const { return 1.0f; }
};

template <class Reader, class ScaleType>
__global__ void __launch_bounds__(kMostThreads<Reader>, kBlocks<Reader>)
    gather_cache_kernel(const __grid_constant__ Plan plan, const __grid_constant__ ScaleType scales) {
  // Where the entry of a row is, or its page, and its place there.
  constexpr bool kInPages = requires { Reader::load(plan, nullptr, 0u, 0u); };
  __shared__ const char* entries[kMostRows];
  __shared__ uint32_t offsets[kInPages ? kMostRows : 1];
  const int64_t first = int64_t{blockIdx.x} * plan.rows, left = plan.locate.num_rows() - first;
  const int count = left < plan.rows ? static_cast<int>(left) : plan.rows;
  const uint32_t total = count * plan.vectors.d;
  uint32_t rows[kVectorsPerThread], vectors[kVectorsPerThread];
  const auto choose_vectors = [&](uint32_t n) {
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) rows[i] = plan.vectors(min(n + i * blockDim.x, total - 1), vectors[i]);
  };
  if (threadIdx.x < 32) {
    const RowLocator::Guess guess = plan.locate.guess(first, count);
    const char* entry;
    PagedRequests::Place place;
    bool early = plan.early > 0;
    if (!early) begin_dependent();
#pragma unroll 1
    for (;; early = false) {
      place = plan.locate(first, count, guess, early);
      entry = place.block < 0 ? nullptr : plan.src + place.block * plan.src_block + place.offset * plan.src_token;
      if (!early) break;
      if (entry) plan.template prefetch_entry<kInPages>(entry, static_cast<uint32_t>(place.offset));
      begin_dependent();
    }
    if (static_cast<int>(threadIdx.x) < count) {
      entries[threadIdx.x] = entry;
      if constexpr (kInPages) offsets[threadIdx.x] = static_cast<uint32_t>(place.offset);
    }
    choose_vectors(threadIdx.x);
  } else {
    choose_vectors(threadIdx.x);
    begin_dependent();
  }
  const float scale = scales[0];
  __syncthreads();

  char* to = plan.dst + first * plan.dst_row;
  for (uint32_t n = threadIdx.x; n < total; choose_vectors(n += blockDim.x * kVectorsPerThread)) {
    typename Reader::Loaded loaded[kVectorsPerThread];
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i)
      if (const char* entry = entries[rows[i]]) {
        if constexpr (kInPages) {
          loaded[i] = Reader::load(plan, entry, offsets[rows[i]], vectors[i]);
        } else {
          loaded[i] = Reader::load(plan, entry, vectors[i]);
        }
      }
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i)
      if (n + i * blockDim.x < total && entries[rows[i]])
        Reader::store(plan, to + rows[i] * plan.dst_row, vectors[i], loaded[i], scale);
  }
}

// Of an entry, or of the codes of one; 0 if they lie apart.
int64_t bytes_side_by_side(const GatherCacheArgs& args) {
  switch (args.kind) {
    case GatherKind::kRecords:
      return args.record.bytes();
    case GatherKind::kNvfp4:
      return args.page.codes_token == args.pieces * args.page.codes_head ? args.page.codes_token : 0;
    default:
      return args.pieces == 1 ? args.piece : 0;  // in bytes by now
  }
}

template <class Reader, class ScaleType>
void launch_kernel(const GatherCacheArgs& args, int64_t src_bytes, int64_t dst_bytes, int64_t elements_per_vector,
                   const ScaleType& scales, const Launch& launch) {
  constexpr int64_t kThreads = kMostThreads<Reader>;
  const int64_t vectors = args.pieces * args.piece / elements_per_vector;
  if (vectors * kMostRows >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "entries of 2^27 elements are not supported");
  int64_t rows = std::clamp<int64_t>(kThreads * kVectorsPerThread / vectors, 1, kMostRows);
  while (rows > 1 && args.num_rows < num_sms(launch.device) * rows) rows /= 2;  // so that every SM has work
  const int64_t blocks = (args.num_rows + rows - 1) / rows;
  if (blocks >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "too many tokens for one call");

  // So many threads that they all have the same number of vectors to move, or nearly; few rows are spread out.
  const int64_t total = rows * vectors,
                turns = (total + kThreads * kVectorsPerThread - 1) / (kThreads * kVectorsPerThread);
  const int64_t in_flight = rows == 1 && turns == 1 ? std::max<int64_t>(total / kThreads, 1) : kVectorsPerThread;
  const int64_t threads =
      std::min<int64_t>((total + turns * in_flight * 32 - 1) / (turns * in_flight * 32) * 32, kThreads);

  // Many blocks would still be prefetching when they have nothing left to wait for.
  const int64_t side_by_side = bytes_side_by_side(args);
  const bool early = side_by_side < 1 << 20 && blocks <= 4 * num_sms(launch.device) && overlaps_kernels(launch.device);
  const Plan plan{RowLocator(args.requests, args.num_rows, launch.errors),
                  static_cast<const char*>(args.src),
                  static_cast<char*>(args.dst),
                  args.src_block * src_bytes,
                  args.src_token * src_bytes,
                  args.dst_row * dst_bytes,
                  static_cast<int>(rows),
                  args.pieces == 1,
                  Divider(vectors),
                  Divider(std::max<int64_t>(args.piece / elements_per_vector, 1)),
                  args.src_piece * src_bytes,
                  args.dst_piece * dst_bytes,
                  args.record,
                  args.page,
                  args.dst_dim * dst_bytes,
                  static_cast<uint32_t>(early ? side_by_side : 0)};
  launch_dependent(gather_cache_kernel<Reader, ScaleType>, static_cast<uint32_t>(blocks),
                   static_cast<uint32_t>(threads), launch, "gather_cache", plan, scales);
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
    launch_kernel<Copy<V>>(in_bytes, item, item, sizeof(V), NoScale{}, launch);
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
    return launch_kernel<Scaled<T, kFormat, kSize>>(args, 1, kItem, kSize, args.scale, launch);
  launch_kernel<Scaled<T, kFormat, 1>>(args, 1, kItem, 1, args.scale, launch);
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
    launch_kernel<Pages<T, kAligned>>(in_pages, 1, kItem, kNvfp4Block, args.scale, launch);
  });
}

template <class T>
void read_records(const GatherCacheArgs& args, const Launch& launch) {
  constexpr int64_t kSize = Records<T>::kSize;
  if (args.dst_piece == 1 && args.record.rope % kSize == 0 &&
      is_aligned(16, args.src, {args.src_block, args.src_token, args.record.rope_at()}) &&
      is_aligned(16, args.dst, {2 * args.dst_row}))
    return launch_kernel<Records<T>>(args, 1, 2, kSize, NoScale{}, launch);
  launch_kernel<RecordElements<T>>(args, 1, 2, 1, NoScale{}, launch);
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
    case GatherKind::kRecords:
      return dispatch<half, bf16>(args.dtype, [&]<class T> { read_records<T>(args, launch); });
  }
}

}  // namespace pykv
