// Twin of dual_chunk_rotary_embedding.cu: the heads of a token are rotated into each copy, past the caches if that is much.
#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/rotation.h"
#include "rotary/dual_chunk_rotary_embedding.h"

namespace pykv::PYKV_ISA {
namespace {

// Heads that do not begin with lines are put together in a buffer, so many at once: what is read from there has long been stored,
// and stores past the caches take turns with arithmetic.
constexpr int64_t kHeadsAtOnce = 8;

// The heads of token t; those of the next one are asked for meanwhile.
template <class T>
[[gnu::flatten]] void rotate_token(TokenRotator<T>& rotator, const DualChunkRotaryEmbeddingArgs& args, int64_t t,
                                   int64_t next, T* buffer, LineWriter& writer) {
  const int64_t position = args.position(t), rotated = args.rotation.rotary_dim, size = args.head_size;
  const int64_t own = position < 0 ? position : args.chunks.own(position);
  if (!rotator.is_inside(own < 0 ? own : args.chunks.last(own))) return;
  const RotaryHeads &query = args.query, &out = args.out;
  const T* const token = static_cast<const T*>(query.data) + t * query.token;
  const int64_t ahead = (next - t) * query.token;
  T* copy = static_cast<T*>(out.data) + t * out.token;
  for (int k = 0; k < DualChunks::kCopies; ++k, copy += args.copy) {
    rotator.take_angles(args.chunks.of_copy(k, own));
    const bool past = writer.streamed() && rotated == size && rotator.lines_are_whole(copy) &&
                      rotator.lines_are_whole(copy + out.head);
    const bool buffered = writer.streamed() && !past;
    for (int64_t first = 0; first < query.num_heads; first += kHeadsAtOnce) {
      const int64_t count = std::min(kHeadsAtOnce, query.num_heads - first);
      const T* from = token + first * query.head;
      T *const target = copy + first * out.head, *to = buffered ? buffer : target;
      for (int64_t h = 0; h < count; ++h, from += query.head, to += buffered ? size : out.head) {
        if (k == 0) prefetch_bytes(from + ahead, size * static_cast<int64_t>(sizeof(T)));
        if (past) {
          rotator.template rotate<true>(to, Elements<T>{from});
        } else {
          rotator.rotate(to, Elements<T>{from});
          std::copy(from + rotated, from + size, to + rotated);
        }
      }
      if (!buffered) continue;
      const int64_t together = out.head == size ? count : 1;  // heads side by side
      for (int64_t h = 0; h < count; h += together)
        writer.put(target + h * out.head, buffer + h * size, together * size * static_cast<int64_t>(sizeof(T)));
    }
  }
  rotator.take_angles(own);
  rotator.rotate(args.rotation.key, t);
}

}  // namespace

void dual_chunk_rotary_embedding_cpu(const DualChunkRotaryEmbeddingArgs& args, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  const Reporter report = launch.reporter(rotation.report);
  constexpr int64_t kElementsWorthAThread = 32768;
  const int64_t elements = (DualChunks::kCopies * args.query.num_heads + rotation.key.num_heads) * args.head_size;
  const int64_t grain = std::max<int64_t>(1, kElementsWorthAThread / elements);
  dispatch<float, f16, bf16>(rotation.dtype, [&]<class T>() {
    const bool streamed = rotation.num_tokens * elements * static_cast<int64_t>(sizeof(T)) > kWorthStreaming;
    parallel_for(rotation.num_tokens, grain, [&](int64_t begin, int64_t end) {
      std::vector<Line> buffer(kHeadsAtOnce * args.head_size * sizeof(T) / kLine + 1);
      LineWriter writer(streamed);
      TokenRotator<T> rotator(rotation, report);
      for (int64_t t = begin; t < end; ++t)
        rotate_token(rotator, args, t, std::min(t + 1, end - 1), reinterpret_cast<T*>(buffer.data()), writer);
    });
  });
}

}  // namespace pykv::PYKV_ISA
