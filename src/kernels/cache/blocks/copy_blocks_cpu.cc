// Twin of copy_blocks.cu: the pieces of all blocks of all arrays, shared out among threads.
#include "cache/blocks/copy_blocks.h"
#include "cpu/parallel.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kBytesPerTask = 1 << 20;  // long pieces are cut here

void copy_part(const CopyBlocksArgs& args, const BlockPair* pairs, int64_t num_pairs) {
  const BlockShape& s = args.shape;
  const int64_t cuts = (s.piece + kBytesPerTask - 1) / kBytesPerTask, pieces = s.num_pieces() * cuts;
  const int64_t grain = kBytesPerTask / 8 / (s.piece < kBytesPerTask ? s.piece : kBytesPerTask) + 1;
  const bool streamed = args.num_arrays * num_pairs * s.num_pieces() * s.piece > kWorthStreaming;
  parallel_for(args.num_arrays * num_pairs * pieces, grain, [&](int64_t begin, int64_t end) {
    LineWriter out(streamed);
    for (int64_t i = begin; i < end; ++i) {
      const BlockArray& array = args.arrays[i / pieces / num_pairs];
      const BlockPair& pair = pairs[i / pieces % num_pairs];
      const int64_t piece = i % pieces / cuts, first = i % cuts * kBytesPerTask;
      const int64_t offset = piece % s.sizes[0] * s.strides[0] + piece / s.sizes[0] % s.sizes[1] * s.strides[1] +
                             piece / s.sizes[0] / s.sizes[1] * s.strides[2] + first;
      const int64_t bytes = s.piece - first < kBytesPerTask ? s.piece - first : kBytesPerTask;
      out.put(array.to + pair.to * s.stride + offset, array.from + pair.from * s.stride + offset, bytes);
    }
  });
}

}  // namespace

void copy_blocks_cpu(const CopyBlocksArgs& args, const Launch&) {
  for (int64_t part = 0, first = 0; part < args.num_parts; first = args.part_ends[part++])
    copy_part(args, args.pairs + first, args.part_ends[part] - first);
}

}  // namespace pykv::PYKV_ISA
