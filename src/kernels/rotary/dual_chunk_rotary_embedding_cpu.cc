// Twin of dual_chunk_rotary_embedding.cu: the heads of a token are rotated into each copy, past the caches if that is much.
#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/rotation.h"
#include "rotary/dual_chunk_rotary_embedding.h"

namespace pykv::PYKV_ISA {
namespace {

template <class T>
[[gnu::flatten]] void rotate_token(TokenRotator<T>& rotator, const DualChunkRotaryEmbeddingArgs& args, int64_t t,
                                   bool streamed, T* buffer, LineWriter& writer) {
  const int64_t position = args.position(t), rotated = args.rotation.rotary_dim;
  const int64_t own = position < 0 ? position : args.chunks.own(position);
  if (!rotator.is_inside(own < 0 ? own : args.chunks.last(own))) return;
  const RotaryHeads& query = args.query;
  T* copy = static_cast<T*>(args.out.data) + t * args.out.token;
  for (int k = 0; k < DualChunks::kCopies; ++k, copy += args.copy) {
    rotator.take_angles(args.chunks.of_copy(k, own));
    const T* from = static_cast<const T*>(query.data) + t * query.token;
    T* to = copy;
    for (int64_t h = 0; h < query.num_heads; ++h, from += query.head, to += args.out.head) {
      if (streamed && rotated == args.head_size && rotator.lines_are_whole(to)) {
        rotator.template rotate<true>(to, Elements<T>{from});
        continue;
      }
      T* const head = streamed ? buffer : to;
      rotator.rotate(head, Elements<T>{from});
      std::copy(from + rotated, from + args.head_size, head + rotated);
      if (streamed) writer.put(to, head, args.head_size * static_cast<int64_t>(sizeof(T)));
    }
  }
  rotator.take_angles(own);
  rotator.rotate(args.rotation.key, 0, t);
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
      std::vector<T> buffer(args.head_size);
      LineWriter writer(streamed);
      TokenRotator<T> rotator(rotation, report);
      for (int64_t t = begin; t < end; ++t) rotate_token(rotator, args, t, streamed, buffer.data(), writer);
    });
  });
}

}  // namespace pykv::PYKV_ISA
