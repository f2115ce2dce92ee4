// Twin of rotary_embedding.cu: tokens are shared out among the threads.
#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/rotation.h"
#include "rotary/rotary_embedding.h"

namespace pykv::PYKV_ISA {
namespace {

// Whether the whole next token is brought into the first cache before one is rotated.  16 threads of a Xeon do 93 to 108 % of a
// copy so, not 70 to 86 (some heads at a time: 75 to 88; into the second cache: 85 to 99).  It costs a fifth of the time of what
// is in the caches anyway, and on a Zen 3, whose first cache is smaller, as much of the time of what is not.
bool asks_for_tokens(int64_t num_tokens, int64_t bytes) {
  return num_tokens * bytes > kWorthStreaming && 2 * bytes <= first_cache_bytes() / 2;
}

// Takes the angles of token t, if its positions are in the cache.
template <class T>
bool take_angles(TokenRotator<T>& rotator, const RotaryEmbeddingArgs& args, const uint8_t* axes, int64_t t) {
  const int64_t b = t / args.rotation.seq, s = t % args.rotation.seq;
  if (args.axes.count == 1) return rotator.take_angles(args.position(0, b, s));
  int64_t positions[RotaryAxes::kMost] = {};
  for (int axis = 0; axis < args.axes.count; ++axis) {
    positions[axis] = args.position(axis, b, s);
    if (!rotator.is_inside(positions[axis])) return false;
  }
  rotator.gather_angles(positions, axes);
  return true;
}

}  // namespace

void rotary_embedding_cpu(const RotaryEmbeddingArgs& args, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  const Reporter report = launch.reporter(rotation.report);
  constexpr int64_t kElementsWorthAThread = 32768;
  const int64_t elements = (rotation.query.num_heads + rotation.key.num_heads) * rotation.rotary_dim;
  const int64_t grain = std::max<int64_t>(1, kElementsWorthAThread / elements);
  std::vector<uint8_t> axes(args.axes.count > 1 ? rotation.rotary_dim / 2 : 0);  // of each frequency
  for (size_t i = 0; i < axes.size(); ++i) axes[i] = static_cast<uint8_t>(args.axes(static_cast<int>(i)));
  dispatch<float, f16, bf16>(rotation.dtype, [&]<class T>() {
    const bool asks = asks_for_tokens(rotation.num_tokens, elements * static_cast<int64_t>(sizeof(T)));
    parallel_for(rotation.num_tokens, grain, [&](int64_t begin, int64_t end) {
      TokenRotator<T> rotator(rotation, report);
      for (int64_t t = begin; t < end; ++t) {
        if (asks && t + 1 < end) rotator.template prefetch<1>(t + 1);
        if (!take_angles(rotator, args, axes.data(), t)) continue;
        rotator.rotate(rotation.query, t);
        rotator.rotate(rotation.key, t);
      }
    });
  });
}

}  // namespace pykv::PYKV_ISA
