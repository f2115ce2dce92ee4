// Twin of sum_rows.cu: a token after another, a vector of its elements over all rows.
#include <vector>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "moe/sum_rows.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kElementsPerTask = 32 * 1024;  // fewer are not worth another thread

struct Part {
  int64_t begin;
  float weight;
};

template <class T>
void sum_rows(const SumRowsArgs& a, const Launch& launch) {
  const auto* rows = static_cast<const T*>(a.rows);
  const int64_t num_places = a.end_of_places();
  parallel_for(a.num_tokens, kElementsPerTask / (a.width * (a.top_k + 1)) + 1, [&](int64_t first, int64_t end) {
    std::vector<Part> parts;
    for (int64_t t = first; t < end; ++t) {
      parts.clear();
      for (int64_t j = 0; j < a.top_k; ++j) {
        const int64_t number = a.number_of(t, j), begin = a.begin_of(t, j, number, num_places);
        if (number >= a.bound() && number < num_places) launch.reporter(a.report_of())(number, a.bound());
        const float weight = a.weights ? a.weights[t * a.weights_token_stride + j * a.weights_stride] : 1.0f;
        if (begin != a.kNoRow) parts.push_back({begin, weight});
      }
      T* out = static_cast<T*>(a.out) + t * a.out_stride;
      for (int64_t i = 0; i < a.width; i += kWidth) {
        Floats sum{};
        for (const Part& p : parts) sum += load(rows + p.begin + i, a.width - i) * p.weight;
        store(out + i, sum, a.width - i);
      }
    }
  });
}

}  // namespace

void sum_rows_cpu(const SumRowsArgs& args, const Launch& launch) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T> { sum_rows<T>(args, launch); });
}

}  // namespace pykv::PYKV_ISA
