// Twin of rotary_embedding.cu: tokens are shared out among the threads.
#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/rotation.h"
#include "rotary/rotary_embedding.h"

namespace pykv::PYKV_ISA {
namespace {

// Angles of all axes, then the heads.
template <class T>
void rotate_by_axes(TokenRotator<T>& rotator, const RotaryEmbeddingArgs& args, int64_t t) {
  const int64_t b = t / args.rotation.seq, s = t % args.rotation.seq;
  int64_t positions[RotaryAxes::kMost];
  for (int axis = 0; axis < args.axes.count; ++axis) {
    positions[axis] = args.position(axis, b, s);
    if (!rotator.is_inside(positions[axis])) return;
  }
  rotator.gather_angles([&](int64_t i) { return positions[args.axes(static_cast<int>(i))]; });
  rotator.rotate(args.rotation.query, b, s);
  rotator.rotate(args.rotation.key, b, s);
}

}  // namespace

void rotary_embedding_cpu(const RotaryEmbeddingArgs& args, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  const Reporter report = launch.reporter(rotation.report);
  constexpr int64_t kElementsWorthAThread = 32768;
  const int64_t elements = (rotation.query.num_heads + rotation.key.num_heads) * rotation.rotary_dim;
  const int64_t grain = std::max<int64_t>(1, kElementsWorthAThread / elements);
  dispatch<float, f16, bf16>(rotation.dtype, [&]<class T>() {
    parallel_for(rotation.num_tokens, grain, [&](int64_t begin, int64_t end) {
      TokenRotator<T> rotator(rotation, report);
      for (int64_t t = begin; t < end; ++t) {
        if (args.is_plain()) {
          rotator(t);
        } else {
          rotate_by_axes(rotator, args, t);
        }
      }
    });
  });
}

}  // namespace pykv::PYKV_ISA
