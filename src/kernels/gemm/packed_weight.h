// A packed weight: w[n, k] = s * c + m, with a code for each element, and s and m for each row and group of columns.
//
// One array of bytes, the same for CPU and CUDA: a header, then sections that begin at multiples of 256 bytes.
//
//   header    256 bytes: "pykv" and a version, the format as text, a table of 16 floats, the global scale
//   codes     [rows / 16][columns / 64][planes][32][4] words of 32 bits
//   scales    [rows / 32][groups][32]; finite ones below 2^118, for kernels multiply them by up to 512
//   supers    [rows / 32][columns / 256][32] float16, where scales are of two levels
//   minima    [rows / 32][groups][32]
//   lows      as supers, where minima are of two levels
//   columns   [columns] int32, where columns of x are taken in another order; -1: zero
//
// Rows are padded to a multiple of 32, columns to one of 64.  Word [4 g + c'] of what follows is of fragment lane (g, c) of
// mma.m16n8k16 with the weight as first operand (cuda/mma.cuh): it stands at place 8 c + g, with a word for each step j of 16
// columns.  Bits of a word: half, 0 or 1, is row 8 half + g; columns are 16 j + 4 c + 2 h + e, so that what a lane wants of x
// are four neighbours.
//
//   4 bits   one plane;  element (half, h, e) in bits 4 (half + 2 h) + 16 e
//   8 bits   plane h;    element (half, e) in bits 8 half + 16 e
//
// A vector of 4, 8 or 16 words on the CPU holds 1, 2 or 4 rows g of one c, times four steps.
// Of 32 rows, row 16 r + 8 half + g stands at place 4 g + 2 r + half in scales, minima, supers and lows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/launch.h"

namespace pykv {

// What a code stands for.  Integers of fewer bits than are stored have been moved to their middle.
enum class CodeKind : uint8_t {
  kUint4,    // code - 8; u2, u3 and u4
  kUint8,    // code - 128; u5, u6 and u8
  kE4M3,     // float8_e4m3fn; NaN does not occur
  kTable16,  // an entry of the table, which is E2M1's where scales are of e4m3 or e8m0
};
constexpr bool is_integer(CodeKind kind) { return kind == CodeKind::kUint4 || kind == CodeKind::kUint8; }
// s is the global scale times ...
enum class ScaleKind : uint8_t {
  kF16,
  kBF16,
  kF32,
  kE4M3,
  kE8M0,
  kF16U8,  // a float16 for 256 columns times uint8
  kF16I8,  // ... times int8
};
// Of integers alone, others have none.
enum class MinimumKind : uint8_t {
  kNone,   // m = 0
  kZero,   // uint8 z, at most 16 where codes have up to four bits: m = s * (offset - z)
  kF16,    // m = s * offset + a float16
  kF32,    // m = s * offset + a float32
  kF16U8,  // m = s * offset - a float16 for 256 columns times uint8
};

constexpr int bytes_of(ScaleKind kind) {
  return kind == ScaleKind::kF32 ? 4 : kind == ScaleKind::kF16 || kind == ScaleKind::kBF16 ? 2 : 1;
}
constexpr int bytes_of(MinimumKind kind) {
  return kind == MinimumKind::kNone ? 0 : kind == MinimumKind::kF32 ? 4 : kind == MinimumKind::kF16 ? 2 : 1;
}
constexpr bool has_supers(ScaleKind kind) { return kind >= ScaleKind::kF16U8; }

struct PackedWeight {
  static constexpr int64_t kHeaderBytes = 256, kTableAt = 128, kGlobalScaleAt = 192;
  static constexpr int kUnit = 64;  // columns of a tile

  CodeKind codes_kind;
  ScaleKind scales_kind;
  MinimumKind minima_kind;
  float offset;         // what an integer has lost: 2^(bits - 1), 0 for other codes
  int64_t n, k;         // rows and columns
  int64_t padded_k;     // a multiple of 64, more than that of k where groups were padded
  int64_t group_size;   // a multiple of 16
  const uint8_t* data;  // header
  const uint8_t *codes, *scales, *supers, *minima, *lows;
  const int32_t* columns;  // null: in order

  PYKV_HOST_DEVICE int64_t padded_n() const { return (n + 31) / 32 * 32; }
  PYKV_HOST_DEVICE int64_t groups() const { return (padded_k + group_size - 1) / group_size; }
  // Of 16 columns, of those in a unit that have a group in common: what is scaled together on CUDA.
  int steps_of_a_group() const { return group_size % 64 == 0 ? 4 : group_size % 32 == 0 ? 2 : 1; }
  PYKV_HOST_DEVICE int bits() const { return codes_kind == CodeKind::kUint8 || codes_kind == CodeKind::kE4M3 ? 8 : 4; }
};

// The weight that a format describes, as Python writes it: "codes.scales.minima.n<n>.k<k>.g<group>.p<padded>[.columns]".
// Fails with what is wrong with it; `name` is the argument's.
PackedWeight parse_format(const char* format, const char* name = "format");

// Sets where the sections lie from `data` on; returns how many bytes they take.
int64_t place_sections(PackedWeight& weight, const void* data);

}  // namespace pykv
