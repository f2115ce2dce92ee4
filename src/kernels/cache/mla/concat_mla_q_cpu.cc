// Twin of concat_mla_q.cu: heads shared out among threads.
#include "cache/mla/concat_mla_q.h"
#include "cpu/parallel.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kBytesPerTask = 64 * 1024;  // less is not worth another thread

void copy_part(const QueryPart& from, const QueryPart& to, int64_t token, int64_t head, int64_t item, LineWriter& out) {
  const char* source = from.data + token * from.token + head * from.head;
  char* target = to.data + token * to.token + head * to.head;
  if (from.dim != item || to.dim != item) {
    for (int64_t i = 0; i < from.size; ++i) std::memcpy(target + i * to.dim, source + i * from.dim, item);
  } else {
    out.put(target, source, from.size * item);
  }
}

}  // namespace

void concat_mla_q_cpu(const ConcatMlaQArgs& args, const Launch&) {
  const int64_t row_bytes = (args.nope.size + args.pe.size) * args.element_bytes;
  const int64_t rows = args.num_tokens * args.num_heads;
  const bool streamed = rows * row_bytes > kWorthStreaming;
  parallel_for(rows, kBytesPerTask / row_bytes + 1, [&](int64_t begin, int64_t end) {
    LineWriter out(streamed);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = row / args.num_heads, head = row % args.num_heads;
      copy_part(args.nope, args.nope_to, token, head, args.element_bytes, out);
      copy_part(args.pe, args.pe_to, token, head, args.element_bytes, out);
    }
  });
}

}  // namespace pykv::PYKV_ISA
