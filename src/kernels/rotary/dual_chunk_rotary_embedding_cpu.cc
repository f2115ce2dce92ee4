// Twin of dual_chunk_rotary_embedding.cu: each copy of a token's heads is made and then rotated in the cache.
#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/rotation.h"
#include "rotary/dual_chunk_rotary_embedding.h"

namespace pykv::PYKV_ISA {
namespace {

template <class T>
void rotate_token(TokenRotator<T>& rotator, const DualChunkRotaryEmbeddingArgs& args, int64_t t) {
  const int64_t position = args.position(t);
  const int64_t own = position < 0 ? position : args.chunks.own(position);
  if (!rotator.is_inside(own < 0 ? own : args.chunks.last(own))) return;
  const RotaryHeads& query = args.query;
  RotaryHeads copy = args.out;
  for (int k = 0; k < DualChunks::kCopies; ++k) {
    const T* from = static_cast<const T*>(query.data) + t * query.token;
    T* to = static_cast<T*>(copy.data) + t * copy.token;
    for (int64_t h = 0; h < query.num_heads; ++h)
      std::copy_n(from + h * query.head, args.head_size, to + h * copy.head);
    rotator.take_angles(args.chunks.of_copy(k, own));
    rotator.rotate(copy, 0, t);
    copy.data = static_cast<T*>(copy.data) + args.copy;
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
    parallel_for(rotation.num_tokens, grain, [&](int64_t begin, int64_t end) {
      TokenRotator<T> rotator(rotation, report);
      for (int64_t t = begin; t < end; ++t) rotate_token(rotator, args, t);
    });
  });
}

}  // namespace pykv::PYKV_ISA
