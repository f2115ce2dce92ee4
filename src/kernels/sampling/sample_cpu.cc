// A row is one thread's.  Its adjusted logits lie in scratch memory; those that are kept are a sorted list, or all above a bound.
//
// The noise of a token is worked out only where it might win: a bound comes from the exponent of its group's random number.
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
    const float least = r.least(row_.largest);
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
      drawn.entry = std::max(drawn.entry, drawn_entry(x, r.inverse_temperature, r.noise(token), token));
      drawn.total += mass(x);
    }
    return drawn;
  }

  Entry best_of_all(const SampleRow& r, float least) const {
    constexpr uint32_t kGroup = TokenNoise::kGroup, kGroups = 64;
    const uint32_t end = first_token_ + static_cast<uint32_t>(row_.size), end_group = (end + kGroup - 1) / kGroup;
    Entry best = 0;
    float bound = -__builtin_inff();  // what the best one's score is, less what may be rounded
    uint32_t words[kGroups];
    for (uint32_t first = first_token_ / kGroup; first < end_group; first += kGroups) {
      for (uint32_t i = 0; i < kGroups; ++i) words[i] = r.noise.least_of_group(first + i).w[0];
      for (uint32_t group = first; group < std::min(first + kGroups, end_group); ++group) {
        // Below this no logit wins.
        const auto wanted = [&] { return std::max(least, (bound - most_noise(words[group - first])) * r.temperature); };
        const int64_t from = std::max(group * kGroup, first_token_) - first_token_,
                      to = std::min((group + 1) * kGroup, end) - first_token_;
        if (to - from == kGroup && !any_not_below(row_.values + from, wanted())) continue;
        for (int64_t i = from; i < to; ++i) {
          const float x = row_.values[i];
          if (x < wanted()) continue;
          const uint32_t token = first_token_ + static_cast<uint32_t>(i);
          const Entry found = drawn_entry(x, r.inverse_temperature, r.noise(token), token);
          if (found <= best) continue;
          best = found;
          const float score = logit_of_key(key_of(best));
          bound = score - (0.01f + std::abs(score) * 1e-5f);
        }
      }
    }
    return best;
  }
  static bool any_not_below(const float* group, float bound) {
    bool any = false;
    for (uint32_t i = 0; i < TokenNoise::kGroup; i += kWidth) any |= Candidates::any_not_below(load(group + i), bound);
    return any;
  }
  // What the noise of a group does not exceed by more than 1e-5: -ln (u / 16), by the bits of u as if they were those of log2 u.
  static float most_noise(uint32_t word) {
    const float u = float_of(word >> 9 | 0x3f800000u) - 1.0f;  // rounded down
    return (1065353216.0f + 4 * 0x1p23f - static_cast<float>(bits_of(u))) * (0x1p-23f * 0.693147181f);
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
