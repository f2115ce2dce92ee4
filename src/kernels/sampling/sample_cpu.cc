// A row is one thread's.  Its adjusted logits lie in scratch memory; those that are kept are a sorted list, or all above a bound.
//
// The noise of a token is worked out only where it might win: a bound of it comes from the exponent of its random number.
#include "cpu/parallel.h"
#include "sampling/float_row_cpu.h"
#include "sampling/sample.h"

namespace pykv::PYKV_ISA {
namespace {

class RowSampler {
 public:
  explicit RowSampler(int64_t num_cols) : row_(num_cols) {}

  void draw(const SampleArgs& args, int64_t row, const Launch& launch) {
    const SampleRow r = sample_row(args, row);
    first_token_ = static_cast<uint32_t>(args.first_token);
    row_.load_from(args.dtype, args.logits, row * args.logit_stride);
    if (args.adjustments.any()) {
      const RowAdjustments adjusted(args.adjustments, row);
      for (int64_t i = 0; i < row_.size; ++i) row_.values[i] = adjusted(row_.values[i], static_cast<int>(i));
    }
    row_.find_largest();
    Drawn drawn{0, 0.0f, row_.largest, 0};
    if (row_.has_nan) {
      drawn.entry = entry_of(kKeyOfNan, 0);
    } else if (row_.largest > -__builtin_inff()) {
      drawn = r.greedy ? greedy() : random(r, args.logprobs != nullptr);
    }
    if (drawn.entry != 0) drawn.logit = row_.has_nan ? 0.0f : row_.values[index_of(drawn.entry) - first_token_];
    store_drawn(args, row, r, drawn,
                [&](int64_t value, long long bound) { launch.reporter("sample: logits")(value, bound); });
  }

 private:
  Drawn greedy() const {
    int64_t i = 0;
    while (!(row_.values[i] == row_.largest)) ++i;
    return {entry_of(key_of_logit(row_.largest), first_token_ + static_cast<uint32_t>(i)), 0.0f, row_.largest, 0};
  }

  Drawn random(const SampleRow& r, bool with_total) {
    const float least = r.least_logit(row_.largest);
    const auto mass = [&](float x) { return mass_of(x, row_.largest, r.scale); };
    Drawn drawn{0, 0.0f, row_.largest, 0};
    if (r.k == row_.size && !(r.top_p < 1.0f)) {
      if (with_total) drawn.total = mass_of_all(row_, least, mass);
      drawn.entry = best_of_all(r, least);
      return drawn;
    }
    const Beginning kept = shortest_beginning(row_, candidates_, r.k < row_.size ? r.k : 0, least, r.top_p, mass);
    for (int64_t i = 0; i < kept.count; ++i) {
      const uint32_t column = index_of(kept.entries[i]), token = first_token_ + column;
      const float x = row_.values[column];
      drawn.entry = std::max(drawn.entry, drawn_entry(x, r.inverse_temperature, r.noise.word(token), token));
      drawn.total += mass(x);
    }
    return drawn;
  }

  Entry best_of_all(const SampleRow& r, float least) const {
    constexpr int64_t kSome = 64;
    Entry best = 0;
    float bound = -__builtin_inff();  // what the best one's score is, less what may be rounded
    uint32_t words[kSome + 4];
    for (int64_t first = 0; first < row_.size; first += kSome) {
      const uint32_t token = first_token_ + static_cast<uint32_t>(first), before = token % 4;
      for (uint32_t i = 0; i < (kSome + 4) / 4; ++i) {
        const FourWords four = r.noise.group(token / 4 + i);
        for (int w = 0; w < 4; ++w) words[4 * i + w] = four.w[w];
      }
      const int64_t size = std::min(kSome, row_.size - first);
      for (int64_t i = 0; i < size; ++i) {
        const float x = row_.values[first + i];
        if (x < least || fused(x, r.inverse_temperature, most_noise(words[i + before])) < bound) continue;
        const Entry found = drawn_entry(x, r.inverse_temperature, words[i + before], token + static_cast<uint32_t>(i));
        if (found <= best) continue;
        best = found;
        const float score = logit_of_key(key_of(best));
        bound = score - (0.01f + std::abs(score) * 1e-5f);
      }
    }
    return best;
  }
  // What gumbel_of(word) does not exceed by more than 1e-5: -ln u, by the bits of u as if they were those of log2 u.
  static float most_noise(uint32_t word) {
    const float u = float_of(word >> 9 | 0x3f800000u) - 1.0f;  // rounded down
    return (1065353216.0f - static_cast<float>(bits_of(u))) * (0x1p-23f * 0.693147181f);
  }

  FloatRow row_;
  uint32_t first_token_ = 0;
  Candidates candidates_;
};

}  // namespace

void sample_cpu(const SampleArgs& args, const Launch& launch) {
  parallel_for(args.num_rows, 1, [&](int64_t begin, int64_t end) {
    RowSampler sampler(args.num_cols);
    for (int64_t row = begin; row < end; ++row) sampler.draw(args, row, launch);
  });
}

}  // namespace pykv::PYKV_ISA
