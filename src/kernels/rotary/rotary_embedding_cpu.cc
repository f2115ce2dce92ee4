// Twin of rotary_embedding.cu: tokens are shared out among the threads.
#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/rotation.h"
#include "rotary/rotary_embedding.h"

namespace pykv::PYKV_ISA {

void rotary_embedding_cpu(const Rotation& args, const Launch& launch) {
  const Reporter report = launch.reporter(args.report);
  constexpr int64_t kElementsWorthAThread = 32768;
  const int64_t elements = (args.query.num_heads + args.key.num_heads) * args.rotary_dim;
  const int64_t grain = std::max<int64_t>(1, kElementsWorthAThread / elements);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    parallel_for(args.num_tokens, grain, [&](int64_t begin, int64_t end) {
      TokenRotator<T> rotate(args, report);
      for (int64_t t = begin; t < end; ++t) rotate(t);
    });
  });
}

}  // namespace pykv::PYKV_ISA
