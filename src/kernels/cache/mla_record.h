// The fp8_ds_mla record of a token, in bytes, for `latent` latent and `rope` rope elements:
//
//   [0, latent)                         E4M3 codes of the latent, in tiles of 128
//   [latent, latent + latent / 32)      a float32 scale for each tile: the least power of two that is at least
//                                       max(amax / 448, 1e-4), NaN not counted
//   then 2 * rope                       rope, as it is: 16-bit floats of the dtype that was written
//
// latent 512 and rope 64 make the 656 bytes of DeepSeek V3.2.
//
// The nvfp4_ds_mla record of a token: `latent` a multiple of 64, `rope` of 8
//
//   [0, latent / 2)                     e2m1 codes of the latent, the even element in the lower half of a byte
//   then rope                           E4M3 of the rope
//   then latent / 16                    an E4M3 scale for each 16 elements, the four of 64 elements latent / 64 apart
//
// with scale = E4M3(max(amax / 6, 2^-9)), NaN not counted, and codes as core/nvfp4.h says of a global scale of 1.  latent 512
// and rope 64 make 352 bytes.
#pragma once

#include <cstdint>

namespace pykv {

struct MlaRecord {
  static constexpr int64_t kTile = 128;
  static constexpr float kLargest = 448.0f, kLeastScale = 1e-4f;  // before it is rounded up

  int64_t latent, rope;  // elements

  constexpr int64_t scales_at() const { return latent; }
  constexpr int64_t rope_at() const { return latent + latent / (kTile / 4); }
  constexpr int64_t bytes() const { return rope_at() + 2 * rope; }
};

// The record of so many bytes that holds `width` elements, latent and rope together; latent -1 if there is none.
constexpr MlaRecord mla_record(int64_t bytes, int64_t width) {
  // bytes = latent * 33 / 32 + 2 * (width - latent)
  const int64_t saved = 32 * (2 * width - bytes);
  if (saved < 0 || saved % (31 * MlaRecord::kTile) != 0 || saved / 31 > width) return {-1, 0};
  return {saved / 31, width - saved / 31};
}
struct Nvfp4MlaRecord {
  static constexpr int64_t kLatentMultiple = 64, kRopeMultiple = 8, kBlock = 16;
  static constexpr uint8_t kLeastScale = 1;  // the code of 2^-9

  int64_t latent, rope;  // elements

  constexpr int64_t rope_at() const { return latent / 2; }
  constexpr int64_t scales_at() const { return rope_at() + rope; }
  constexpr int64_t scale_at(int64_t block) const { return scales_at() + block % 4 * (latent / 64) + block / 4; }
  constexpr int64_t bytes() const { return scales_at() + latent / kBlock; }
};

// The record of so many bytes that holds `width` elements; latent -1 if there is none.
constexpr Nvfp4MlaRecord nvfp4_mla_record(int64_t bytes, int64_t width) {
  // bytes = latent * 9 / 16 + width - latent
  const int64_t latent = (width - bytes) * 16 / 7;
  const Nvfp4MlaRecord record{latent, width - latent};
  if (latent < 0 || record.rope < 0 || latent % Nvfp4MlaRecord::kLatentMultiple != 0 ||
      record.rope % Nvfp4MlaRecord::kRopeMultiple != 0 || record.bytes() != bytes)
    return {-1, 0};
  return record;
}
static_assert(nvfp4_mla_record(352, 576).latent == 512 && Nvfp4MlaRecord{512, 64}.scale_at(5) == 320 + 8 + 1);

static_assert(mla_record(656, 576).latent == 512 && MlaRecord{512, 64}.bytes() == 656);

}  // namespace pykv
