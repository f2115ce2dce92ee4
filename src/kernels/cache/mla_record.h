// The fp8_ds_mla record of a token, in bytes, for `latent` latent and `rope` rope elements:
//
//   [0, latent)                         E4M3 codes of the latent, in tiles of 128
//   [latent, latent + latent / 32)      a float32 scale for each tile: max(amax / 448, FLT_MIN), NaN not counted
//   then 2 * rope                       rope, as it is: 16-bit floats of the dtype that was written
//
// latent 512 and rope 64 make the 656 bytes of DeepSeek V3.2.
#pragma once

#include <cstdint>

namespace pykv {

struct MlaRecord {
  static constexpr int64_t kTile = 128;
  static constexpr float kLargest = 448.0f, kLeastScale = 0x1p-126f;

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
static_assert(mla_record(656, 576).latent == 512 && MlaRecord{512, 64}.bytes() == 656);

}  // namespace pykv
