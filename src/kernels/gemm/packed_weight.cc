#include "gemm/packed_weight.h"

#include <cstring>

#include "core/error.h"

namespace pykv {
namespace {

constexpr const char* kCodes[] = {"u2", "u3", "u4", "u5", "u6", "u8", "e4m3", "t4"};
constexpr CodeKind kKinds[] = {CodeKind::kUint4, CodeKind::kUint4, CodeKind::kUint4, CodeKind::kUint8,
                               CodeKind::kUint8, CodeKind::kUint8, CodeKind::kE4M3,  CodeKind::kTable16};
constexpr float kOffsets[] = {2, 4, 8, 16, 32, 128, 0, 0};
constexpr const char* kScales[] = {"f16", "bf16", "f32", "e4m3", "e8m0", "f16u8", "f16i8"};
constexpr const char* kMinima[] = {"none", "zero", "f16", "f32", "f16u8"};
constexpr int64_t kLargest = int64_t{1} << 30;  // of any size

[[noreturn]] void bad_format(const char* name, const char* format, const char* wanted) {
  fail(PYKV_VALUE_ERROR, "%s: must be codes.scales.minima.n<n>.k<k>.g<group>.p<padded k>[.columns]: %s, got \"%s\"",
       name, wanted, format);
}

class Reader {
 public:
  Reader(const char* name, const char* format) : name_(name), whole_(format), rest_(format) {}

  template <class Kind, size_t kCount>
  Kind kind(const char* const (&names)[kCount], const char* wanted) {
    const size_t length = std::strcspn(rest_, ".");
    for (size_t i = 0; i < kCount; ++i)
      if (std::strlen(names[i]) == length && std::memcmp(names[i], rest_, length) == 0) {
        rest_ += length + (rest_[length] == '.');
        return static_cast<Kind>(i);
      }
    bad_format(name_, whole_, wanted);
  }
  int64_t size(char name, const char* wanted) {
    int64_t value = 0;
    const char* at = rest_;
    if (*at++ != name || *at < '0' || *at > '9') bad_format(name_, whole_, wanted);
    for (; *at >= '0' && *at <= '9' && value < kLargest; ++at) value = value * 10 + (*at - '0');
    if ((*at && *at != '.') || value >= kLargest) bad_format(name_, whole_, wanted);
    rest_ = at + (*at == '.');
    return value;
  }
  bool ends_with(const char* word) {
    if (std::strcmp(rest_, word) == 0) return true;
    if (*rest_) bad_format(name_, whole_, "the last field must be \"columns\" or missing");
    return false;
  }

 private:
  const char *name_, *whole_, *rest_;
};

}  // namespace

PackedWeight parse_format(const char* format, const char* name) {
  Reader reader(name, format);
  PackedWeight w{};
  const int codes = reader.kind<int>(kCodes, "codes must be u2, u3, u4, u5, u6, u8, e4m3 or t4");
  w.codes_kind = kKinds[codes];
  w.offset = kOffsets[codes];
  w.scales_kind = reader.kind<ScaleKind>(kScales, "scales must be f16, bf16, f32, e4m3, e8m0, f16u8 or f16i8");
  w.minima_kind = reader.kind<MinimumKind>(kMinima, "minima must be none, zero, f16, f32 or f16u8");
  if (!is_integer(w.codes_kind) && w.minima_kind != MinimumKind::kNone)
    bad_format(name, format, "minima of codes that are no integers must be none");
  w.n = reader.size('n', "rows must be n<number>");
  w.k = reader.size('k', "columns must be k<number>");
  w.group_size = reader.size('g', "the group size must be g<number>");
  w.padded_k = reader.size('p', "padded columns must be p<number>");
  static const int32_t kGiven = 0;
  w.columns = reader.ends_with("columns") ? &kGiven : nullptr;
  if (w.group_size < 16 || w.group_size % 16 != 0) bad_format(name, format, "the group size must be a multiple of 16");
  const int64_t least = (w.k + PackedWeight::kUnit - 1) / PackedWeight::kUnit * PackedWeight::kUnit;
  if (w.padded_k % PackedWeight::kUnit != 0 || w.padded_k < least || (!w.columns && w.padded_k != least))
    bad_format(name, format, "padded columns must be the columns, padded to a multiple of 64");
  return w;
}

int64_t place_sections(PackedWeight& w, const void* data) {
  const auto* const start = static_cast<const uint8_t*>(data);
  int64_t at = PackedWeight::kHeaderBytes;
  const auto place = [&](int64_t bytes) -> const uint8_t* {
    const uint8_t* const section = bytes && start ? start + at : nullptr;
    at += (bytes + 255) / 256 * 256;
    return section;
  };
  const int64_t rows = w.padded_n(), blocks = (w.padded_k + 255) / 256;
  w.data = start;
  w.codes = place(rows * w.padded_k / 8 * w.bits());
  w.scales = place(rows * w.groups() * bytes_of(w.scales_kind));
  w.supers = place(has_supers(w.scales_kind) ? rows * blocks * 2 : 0);
  w.minima = place(rows * w.groups() * bytes_of(w.minima_kind));
  w.lows = place(w.minima_kind == MinimumKind::kF16U8 ? rows * blocks * 2 : 0);
  w.columns = reinterpret_cast<const int32_t*>(place(w.columns ? w.padded_k * 4 : 0));
  return at;
}

}  // namespace pykv
