// Twin of gather_cache.cu: rows shared out among threads, found together where they lie in one block.
#include <algorithm>

#include "cache/gathers/gather_cache.h"
#include "cpu/decode.h"
#include "cpu/nvfp4_decode.h"
#include "cpu/parallel.h"
#include "cpu/prefetch.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kBytesPerTask = 64 * 1024;   // less is not worth another thread
constexpr int64_t kBytesPerRange = 16 * 1024;  // of more: threads that end together
constexpr int64_t kRowsAhead = 4;              // those that are asked for

// Where rows lie, one after another: found together where they are in one block.
class Places {
 public:
  Places(const PagedRequests& requests, int64_t first, ErrorWord* errors)
      : requests_(requests), errors_(errors), row_(first) {}

  // The next row's, block -1 if it has none.
  PagedRequests::Place next() {
    if (at_.run == 0) at_ = requests_.locate(row_, errors_);
    const PagedRequests::Place place = at_;
    ++row_, ++at_.offset, --at_.run;
    return place;
  }

 private:
  const PagedRequests& requests_;
  ErrorWord* const errors_;
  int64_t row_;
  PagedRequests::Place at_{-1, 0, 0};
};

// read(block, offset, row, out): for every row that a request has, of so many bytes in the cache and here.  Rows that follow may
// lie anywhere: they are asked for, where they are whole in the cache.
template <class Read>
void for_each_place(const GatherCacheArgs& args, int64_t src_bytes, int64_t dst_bytes, const Launch& launch,
                    Read&& read) {
  const int64_t row = args.pieces * args.piece;
  const bool nvfp4_records = args.kind == GatherKind::kNvfp4Records;
  const bool records = nvfp4_records || args.kind == GatherKind::kRecords, pages = args.kind == GatherKind::kNvfp4;
  const bool mapped = args.record_rows.in_cache.data != nullptr;
  const bool whole_rows =
      (records && !mapped) || (!records && !pages && (args.pieces == 1 || args.src_piece == args.piece));
  const int64_t row_bytes = nvfp4_records ? args.nvfp4_record.bytes() : records ? args.record.bytes() : row * src_bytes;
  const char* const cache = static_cast<const char*>(args.src);
  const bool streamed = args.num_rows * row * dst_bytes > kWorthStreaming;
  const int64_t at_least = args.num_rows * row * src_bytes > kBytesPerTask ? kBytesPerRange : kBytesPerTask;
  parallel_for(args.num_rows, at_least / (row * src_bytes) + 1, [&](int64_t begin, int64_t end) {
    LineWriter out(streamed);
    Places places(args.requests, begin, launch.errors);
    PagedRequests::Place coming[kRowsAhead + 1];
    const auto place_of = [&](int64_t row) -> PagedRequests::Place& { return coming[row % (kRowsAhead + 1)]; };
    for (int64_t row = begin, found = begin; row < end; ++row) {
      for (; found < end && found <= row + kRowsAhead; ++found) {
        const auto [block, offset, run] = place_of(found) = places.next();
        if (whole_rows && block >= 0)
          prefetch_bytes(cache + (block * args.src_block + offset * args.src_token) * src_bytes, row_bytes);
      }
      const auto [block, offset, run] = place_of(row);
      if (block >= 0) read(block, offset, row, out);
    }
  });
}

// read(from, row, out); from: its entry in the cache.
template <class Read>
void for_each_row(const GatherCacheArgs& args, int64_t src_bytes, int64_t dst_bytes, const Launch& launch,
                  Read&& read) {
  for_each_place(args, src_bytes, dst_bytes, launch, [&](int64_t block, int64_t offset, int64_t row, LineWriter& out) {
    read(static_cast<const char*>(args.src) + (block * args.src_block + offset * args.src_token) * src_bytes, row, out);
  });
}

void copy_rows(const GatherCacheArgs& args, const Launch& launch) {
  const int64_t item = args.element_bytes, bytes = args.piece * item;
  for_each_row(args, item, item, launch, [&](const char* from, int64_t row, LineWriter& out) {
    char* to = static_cast<char*>(args.dst) + row * args.dst_row * item;
    for (int64_t i = 0; i < args.pieces; ++i, from += args.src_piece * item, to += args.dst_piece * item)
      out.put(to, from, bytes);
  });
}

template <class T, class Code>
void scale_rows(const GatherCacheArgs& args, const Launch& launch) {
  const Decoder<T, Code> decode(args.scale[0]);
  for_each_row(args, 1, sizeof(T), launch, [&](const char* from, int64_t row, LineWriter& out) {
    T* to = static_cast<T*>(args.dst) + row * args.dst_row;
    for (int64_t i = 0; i < args.pieces; ++i) {
      const Code* codes = reinterpret_cast<const Code*>(from) + i * args.src_piece;
      out.fill(to + i * args.dst_piece, args.piece,
               [&](T* part, int64_t first, int64_t count) { decode(part, codes + first, count); });
    }
  });
}

template <class T>
void read_pages(const GatherCacheArgs& args, const Launch& launch) {
  const Nvfp4Decoder<T> decode(args.scale[0], args.num_rows * args.pieces * args.piece);
  for_each_place(args, 1, sizeof(T), launch, [&](int64_t block, int64_t offset, int64_t row, LineWriter&) {
    const uint8_t* page = static_cast<const uint8_t*>(args.src) + block * args.src_block;
    T* to = static_cast<T*>(args.dst) + row * args.dst_row;
    for (int64_t head = 0; head < args.pieces; ++head)
      load_nvfp4_row(decode, to + head * args.dst_piece, args.dst_dim, page, args.page, offset, head, args.piece);
  });
}

// The same where records may lie in host memory.
template <class Read>
void for_each_record(const GatherCacheArgs& args, int64_t dst_bytes, const Launch& launch, Read&& read) {
  if (!args.record_rows.in_cache.data) return for_each_row(args, 1, dst_bytes, launch, read);
  const int64_t block_size = args.requests.block_size;
  for_each_place(args, 1, dst_bytes, launch, [&](int64_t block, int64_t offset, int64_t row, LineWriter& out) {
    int64_t slot = block * block_size + offset;
    const char* from;
    if (!args.record_rows.find(slot, from, launch.errors)) return;
    const char* cache = static_cast<const char*>(args.src);
    if (!from) from = cache + slot / block_size * args.src_block + slot % block_size * args.src_token;
    read(from, row, out);
  });
}

template <class T>
void read_records(const GatherCacheArgs& args, const Launch& launch) {
  const MlaRecord& record = args.record;
  const Decoder<T, e4m3> decode(1.0f);
  for_each_record(args, sizeof(T), launch, [&](const char* from, int64_t row, LineWriter& out) {
    T* to = static_cast<T*>(args.dst) + row * args.dst_row;
    const e4m3* codes = reinterpret_cast<const e4m3*>(from);
    const char* rope = from + record.rope_at();
    const auto scale_of = [&](int64_t first) {
      float scale;
      std::memcpy(&scale, from + record.scales_at() + first / (MlaRecord::kTile / 4), 4);
      return scale;
    };
    if (args.dst_piece == 1) {
      out.fill(to, record.latent, [&](T* part, int64_t first, int64_t size) {  // of whole tiles
        for (int64_t i = 0; i < size; i += MlaRecord::kTile)
          decode.tile(part + i, codes + first + i, MlaRecord::kTile, scale_of(first + i));
      });
      out.put(to + record.latent, rope, 2 * record.rope);
    } else {
      for (int64_t i = 0; i < record.latent; ++i)
        to[i * args.dst_piece] = from_float<T>(to_float(codes[i]) * scale_of(i / MlaRecord::kTile * MlaRecord::kTile));
      for (int64_t i = 0; i < record.rope; ++i) std::memcpy(to + (record.latent + i) * args.dst_piece, rope + 2 * i, 2);
    }
  });
}

template <class T>
void read_nvfp4_records(const GatherCacheArgs& args, const Launch& launch) {
  static constexpr float kValues[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const Nvfp4MlaRecord& record = args.nvfp4_record;
  for_each_row(args, 1, sizeof(T), launch, [&](const char* from, int64_t row, LineWriter&) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(from);
    T* to = static_cast<T*>(args.dst) + row * args.dst_row;
    for (int64_t i = 0; i < record.latent; ++i) {
      const int code = bytes[i / 2] >> (i % 2 * 4) & 15;
      const float value = kValues[code & 7] * to_float(e4m3{bytes[record.scale_at(i / kNvfp4Block)]});
      to[i * args.dst_piece] = from_float<T>(code & 8 ? -value : value);
    }
    for (int64_t i = 0; i < record.rope; ++i)
      to[(record.latent + i) * args.dst_piece] = from_float<T>(to_float(e4m3{bytes[record.rope_at() + i]}));
  });
}

}  // namespace

void gather_cache_cpu(const GatherCacheArgs& args, const Launch& launch) {
  args.requests.check_starts(args.num_rows, 0, 1, launch.errors);
  switch (args.kind) {
    case GatherKind::kCopy:
      return copy_rows(args, launch);
    case GatherKind::kScaled:
      return dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
        return args.format == KvFormat::kE4M3   ? scale_rows<T, e4m3>(args, launch)
               : args.format == KvFormat::kE5M2 ? scale_rows<T, e5m2>(args, launch)
                                                : scale_rows<T, i8>(args, launch);
      });
    case GatherKind::kRecords:
      return dispatch<f16, bf16>(args.dtype, [&]<class T>() { read_records<T>(args, launch); });
    case GatherKind::kNvfp4Records:
      return dispatch<f16, bf16>(args.dtype, [&]<class T>() { read_nvfp4_records<T>(args, launch); });
    case GatherKind::kNvfp4:
      return dispatch<float, f16, bf16>(args.dtype, [&]<class T>() { read_pages<T>(args, launch); });
  }
}

}  // namespace pykv::PYKV_ISA
