// A row is one thread's.  Its adjusted logits lie in scratch memory; those that are kept are a sorted list, or all above a bound.
//
// The noise of a token is worked out only where it might win: a bound of it comes from the exponent of its random number.
#include "cpu/parallel.h"
#include "sampling/candidates_cpu.h"
#include "sampling/sample.h"

namespace pykv::PYKV_ISA {
namespace {

class RowSampler {
 public:
  explicit RowSampler(int64_t num_cols) : logits_(static_cast<float*>(std::malloc(static_cast<size_t>(num_cols) * 4))) {
    if (!logits_) throw std::bad_alloc();
  }
  RowSampler(const RowSampler&) = delete;
  ~RowSampler() { std::free(logits_); }

  void draw(const SampleArgs& args, int64_t row, const Launch& launch) {
    const SampleRow r = sample_row(args, row);
    first_token_ = static_cast<uint32_t>(args.first_token);
    size_ = args.num_cols;
    dispatch<float, f16, bf16>(args.dtype, [&]<class T>() { load_row<T>(args, row); });
    adjust(args, row);
    Drawn drawn{0, 0.0f, largest_, 0};
    if (has_nan_) {
      drawn.entry = entry_of(kKeyOfNan, 0);
    } else if (largest_ > -__builtin_inff()) {
      drawn = r.greedy ? greedy() : random(r, args.logprobs != nullptr);
    }
    if (drawn.entry != 0) drawn.logit = has_nan_ ? 0.0f : logits_[index_of(drawn.entry) - first_token_];
    store_drawn(args, row, r, drawn,
                [&](int64_t value, long long bound) { launch.reporter("sample: logits")(value, bound); });
  }

 private:
  template <class T>
  void load_row(const SampleArgs& args, int64_t row) {
    const T* from = static_cast<const T*>(args.logits) + row * args.logit_stride;
    int64_t i = 0;
    for (; i + kWidth <= size_; i += kWidth) store(logits_ + i, load(from + i));
    for (; i < size_; ++i) logits_[i] = to_float(from[i]);
  }
  void adjust(const SampleArgs& args, int64_t row) {
    if (args.adjustments.any()) {
      const RowAdjustments adjusted(args.adjustments, row);
      for (int64_t i = 0; i < size_; ++i) logits_[i] = adjusted(logits_[i], static_cast<int>(i));
    }
    float largest = -__builtin_inff();
    bool has_nan = false;
    for (int64_t i = 0; i < size_; ++i) {
      largest = logits_[i] > largest ? logits_[i] : largest;
      has_nan |= logits_[i] != logits_[i];
    }
    largest_ = largest;
    has_nan_ = has_nan;
  }

  Drawn greedy() const {
    int64_t i = 0;
    while (!(logits_[i] == largest_)) ++i;
    return {entry_of(key_of_logit(largest_), first_token_ + static_cast<uint32_t>(i)), 0.0f, largest_, 0};
  }

  Drawn random(const SampleRow& r, bool with_total) {
    const float least = r.least_logit(largest_);
    Drawn drawn{0, 0.0f, largest_, 0};
    if (r.k == size_ && !(r.top_p < 1.0f)) {
      if (with_total) drawn.total = mass_of_all(r, least);
      drawn.entry = best_of_all(r, least);
      return drawn;
    }
    // The list begins with as many as nearly always are enough.
    const bool is_listed = r.k < size_;
    for (int64_t wanted = is_listed ? r.k : std::min<int64_t>(1024, size_);; wanted = std::min(8 * wanted, size_)) {
      candidates_.start(wanted, least);
      candidates_.offer(logits_, 0, size_);
      const Entry* entries = candidates_.take();
      int64_t count = candidates_.count();
      const bool is_complete = is_listed || count < wanted || wanted == size_;
      if (r.top_p < 1.0f) {
        Mass total = is_complete ? 0 : mass_of_all(r, least);
        if (is_complete)
          for (int64_t i = 0; i < count; ++i) total += mass(r, entries[i]);
        const Mass target = share_of(total, r.top_p);
        Mass sum = 0;
        int64_t kept = 0;
        while (kept < count && sum < target) sum += mass(r, entries[kept++]);
        if (sum < target && !is_complete) continue;
        count = kept;
      }
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t column = index_of(entries[i]), token = first_token_ + column;
        const Entry found = drawn_entry(logits_[column], r.inverse_temperature, r.noise.word(token), token);
        drawn.entry = std::max(drawn.entry, found);
        drawn.total += mass(r, entries[i]);
      }
      return drawn;
    }
  }

  Mass mass(const SampleRow& r, Entry entry) const { return mass_of(logits_[index_of(entry)], largest_, r.scale); }
  Mass mass_of_all(const SampleRow& r, float least) const {
    Mass total = 0;
    for (int64_t i = 0; i < size_; ++i) total += logits_[i] < least ? 0 : mass_of(logits_[i], largest_, r.scale);
    return total;
  }

  Entry best_of_all(const SampleRow& r, float least) const {
    constexpr int64_t kSome = 64;
    Entry best = 0;
    float bound = -__builtin_inff();  // what the best one's score is, less what may be rounded
    uint32_t words[kSome + 4];
    for (int64_t first = 0; first < size_; first += kSome) {
      const uint32_t token = first_token_ + static_cast<uint32_t>(first), before = token % 4;
      for (uint32_t i = 0; i < (kSome + 4) / 4; ++i) {
        const FourWords four = r.noise.group(token / 4 + i);
        for (int w = 0; w < 4; ++w) words[4 * i + w] = four.w[w];
      }
      const int64_t size = std::min(kSome, size_ - first);
      for (int64_t i = 0; i < size; ++i) {
        const float x = logits_[first + i];
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

  float* logits_;
  int64_t size_ = 0;
  uint32_t first_token_ = 0;
  float largest_ = 0;
  bool has_nan_ = false;
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
