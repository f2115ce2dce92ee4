// Twin of group_quant.cu: some groups of a row at once.  First their numbers, if an activation makes them, then the largest of
// all, then all scales, then all codes: what one waits for is worked out while others are.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/codes.h"
#include "cpu/nvfp4_encode.h"
#include "cpu/parallel.h"
#include "cpu/silu.h"
#include "quantization/group_quant.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kBlock = 16;  // of four-bit codes
constexpr int64_t kElementsAtOnce = 4096;

// Sixteen numbers times a factor as four-bit codes; NaN becomes 6.
template <class T>
void store_nibbles(uint8_t* codes, const T* from, float factor) {
  uint8_t bytes[kBlock];
  for (int64_t i = 0; i < kBlock; i += kWidth) {
    const Floats x = load(from + i);
    const Words signs = __builtin_bit_cast(Words, x) >> 28 & 8u;
    const Floats within = lesser(abs(x) * factor, splat(6.0f));
    const Bytes some = narrow_to_bytes(narrow_e2m1_magnitude<Floats, Words>(within) | signs);
    __builtin_memcpy(bytes + i, &some, sizeof some);
  }
  for (int i = 0; i < 2; ++i) {
    uint64_t eight;
    __builtin_memcpy(&eight, bytes + 8 * i, 8);
    const uint32_t packed = pack_nibbles(eight);
    __builtin_memcpy(codes + 4 * i, &packed, 4);
  }
}

// By how much codes are wrong: the sum of the squares, one after another.
template <class T>
float error_of(const uint8_t* codes, const T* from, float unit) {
  static constexpr float kValues[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  float squares[kBlock], sum = 0.0f;
  for (int64_t i = 0; i < kBlock; ++i) {
    // In steps that are rounded each: a product of its own first, by way of memory.
    const float value = kValues[codes[i / 2] >> (i % 2 * 4) & 7] * unit;
    squares[i] = value;
  }
  asm volatile("" : "+m"(squares));
  for (int64_t i = 0; i < kBlock; ++i) {
    const float d = std::fabs(to_float(from[i])) - squares[i];
    squares[i] = d * d;
  }
  asm volatile("" : "+m"(squares));
  for (int64_t i = 0; i < kBlock; ++i) sum += squares[i];
  return sum;
}

// Groups of 16 or 32: the largest of up to kWidth of them, as find_largest has it.
template <class T>
void find_largest_of_blocks(float* most, const T* from, int64_t n, int64_t groups) {
  Words lanes[kWidth] = {};
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = 0; i < n; i += kWidth) {
      const Words x = __builtin_bit_cast(Words, abs(load(from + g * n + i)));
      lanes[g] = x > lanes[g] ? x : lanes[g];
    }
  }
  store(most, __builtin_bit_cast(Floats, largest_lanes(lanes)));
  for (int64_t g = 0; g < groups; ++g)
    if (!(most[g] == most[g])) most[g] = largest_number(from + g * n, n);
}

template <class T>
class Groups {
 public:
  Groups(const GroupQuantArgs& args, const Reporter& report)
      : args_(args),
        report_(report),
        nibbles_(args.codes == CodeKind::kE2M1),
        real_(args.width / args.group_size),
        at_once_(std::clamp<int64_t>(kElementsAtOnce / args.group_size, 1, kWidth)),
        global_(args.rule.kind == ScaleKind::kE4M3 && !args.globals ? float{args.global} : 1.0f) {
    if (args.source != RowSource::kElements) values_.resize(at_once_ * args.group_size * sizeof(T) / sizeof(Line) + 2);
  }

  // [begin, end) of all rows' groups, with those of padding.
  void operator()(int64_t begin, int64_t end) {
    const int64_t groups = args_.groups();
    while (begin < end) {
      const int64_t row = begin / groups, group = begin % groups;
      int64_t count = std::min(groups - group, end - begin);
      if (group < real_) {
        count = std::min({count, real_ - group, at_once_});
        encode(row, group, count);
      } else {
        pad(row, group, count);
      }
      begin += count;
    }
  }

 private:
  int64_t group_bytes() const { return nibbles_ ? args_.group_size / 2 : args_.group_size; }
  uint8_t* codes_at(int64_t row, int64_t group) const {
    return static_cast<uint8_t*>(args_.out) + args_.out_rows.offset(row) + group * group_bytes();
  }

  void encode(int64_t row, int64_t group, int64_t count) {
    const int64_t n = args_.group_size;
    if (!args_.is_valid(row)) {
      if (args_.fill_scales)
        for (int64_t g = group; g < group + count; ++g) args_.store_scale(row, g, bits_of(1.0f));
      return;
    }
    const ScaleRow at = args_.scale_row_of(row, report_);
    if (!at.there) return;
    const T* const from = values(row, group * n, count * n);
    float most[kWidth], inside[kWidth];
    if (nibbles_) {
      find_largest_of_blocks(most, from, n, count);
    } else {
      find_largest(most, inside, from, n, count);
    }
    const float global = args_.globals ? args_.globals[at.expert] : global_;
    GroupScale scales[kWidth];
    for (int64_t g = 0; g < count; ++g) scales[g] = args_.rule(most[g], global, 6.0f);
    uint8_t* const codes = codes_at(row, group);
    for (int64_t g = 0; g < count; ++g) {
      const T* x = from + g * n;
      uint8_t* to = codes + g * group_bytes();
      if (!nibbles_) {
        codes_times(args_.codes, to, x, n, scales[g].factor, is_inside(inside[g]));
        continue;
      }
      for (int64_t i = 0; i < n; i += kBlock) store_nibbles(to + i / 2, x + i, scales[g].factor);
      if (args_.four_over_six) choose(to, x, most[g], global, scales[g]);
    }
    for (int64_t g = 0; g < count; ++g) args_.store_scale(at.row, group + g, scales[g].stored);
    fill_behind(row, at, group, count);
  }

  // That a largest magnitude of this kind, NaN where any number is, leaves no product beyond the largest code.
  bool is_inside(float inside) const {
    const bool grows = args_.rule.kind == ScaleKind::kMx && args_.rule.exponent != ExponentRule::kCeil;
    return inside < INFINITY && !grows;
  }

  // Of both scales the one that leads closer.
  void choose(uint8_t* codes, const T* x, float most, float global, GroupScale& scale) const {
    const float inverse = 1.0f / std::fabs(global);
    const auto unit = [=](const GroupScale& s) { return magnitude_of_e4m3(s.stored & 0x7fu) * inverse; };
    const GroupScale other = args_.rule(most, global, 4.0f);
    uint8_t others[kBlock / 2];
    store_nibbles(others, x, other.factor);
    if (!(error_of(others, x, unit(other)) < error_of(codes, x, unit(scale)))) return;
    __builtin_memcpy(codes, others, sizeof others);
    scale = other;
  }

  // Groups of padding.
  void pad(int64_t row, int64_t group, int64_t count) const {
    if (!args_.is_valid(row)) return;
    const ScaleRow at = args_.scale_row_of(row, report_);
    if (!at.there) return;
    const int64_t scales = std::min(group + count, args_.scale_groups),
                  codes = std::min(group + count, args_.code_groups);
    for (int64_t g = group; g < scales; ++g) args_.store_scale(at.row, g, 0);
    if (codes > group) __builtin_memset(codes_at(row, group), 0, static_cast<size_t>((codes - group) * group_bytes()));
    fill_behind(row, at, group, count);
  }

  // Rows behind the last one: of scales, up to a whole tile, and of codes.
  void fill_behind(int64_t row, const ScaleRow& at, int64_t group, int64_t count) const {
    if (args_.swizzled && at.last)
      for (int64_t g = group; g < std::min(group + count, args_.scale_groups); ++g) args_.clear_behind(at, g);
    if (row != args_.rows - 1) return;
    const int64_t codes = std::min(count, args_.code_groups - group);
    for (int64_t r = row + 1; codes > 0 && r <= row + args_.zero_rows; ++r)
      __builtin_memset(codes_at(r, group), 0, static_cast<size_t>(codes * group_bytes()));
  }

  const T* values(int64_t row, int64_t first, int64_t count) {
    const T* const gate = static_cast<const T*>(args_.input) + args_.input_rows.offset(row) + first;
    if (args_.source == RowSource::kElements) return gate;
    T* const to = reinterpret_cast<T*>(values_.data());
    const T* const up = gate + args_.width;
    if (args_.source == RowSource::kSiluAndMul) {
      each_pair(0, count,
                [=](int64_t i, int64_t some) { store_pair(to + i, exact_silu(load_pair<T>(gate + i, some)), some); });
      each_pair(0, count, [=](int64_t i, int64_t some) {
        const Pair<T> factor = load_pair<T>(up + i, some) + 0.0f;  // -0 counts as 0
        store_pair(to + i, load_pair<T>(static_cast<const T*>(to) + i, some) * factor, some);
      });
    } else {
      each_pair(0, count, [=, situ = Situ{plain(args_.beta), plain(args_.linear_beta)}](int64_t i, int64_t some) {
        store_pair(to + i, situ(load_pair<T>(gate + i, some), load_pair<T>(up + i, some)), some);
      });
    }
    return to;
  }

  const GroupQuantArgs& args_;
  const Reporter report_;
  const bool nibbles_;
  const int64_t real_, at_once_;
  const float global_;
  std::vector<Line> values_;
};

}  // namespace

void group_quant_cpu(const GroupQuantArgs& args, const Launch& launch) {
  constexpr int64_t kElementsWorthAThread = 8192;
  const Reporter report = launch.reporter(args.of_experts.report);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    parallel_for(args.rows * args.groups(), std::max<int64_t>(1, kElementsWorthAThread / args.group_size),
                 [&](int64_t begin, int64_t end) { Groups<T>(args, report)(begin, end); });
  });
}

}  // namespace pykv::PYKV_ISA
