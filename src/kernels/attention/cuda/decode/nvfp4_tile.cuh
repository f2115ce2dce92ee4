// nvfp4 (core/nvfp4.h) in decoding: a tile of keys or of values in shared memory, codes and scales as they are, and fragments of it.
//
// A code with its scale is exactly a half, in units of kE2m1Unit; a warp makes these of the codes that it has read for its MMAs.
// Which dimension has which place in a fragment is free: a lane reads all codes of a key or of a value that it needs as one piece.
//
//   Keys:    lane 4 r + c has dimensions c kD / 4 and following of the keys at places r and r + 8 of sixteen; a word of eight codes
//            is two steps, its even elements and its odd ones.  Queries are permuted to match.
//   Values:  lane 4 r + c has dimensions r kD / 8 and following of the four tokens at places 2c, 2c + 1, 2c + 8, 2c + 9.
//            Dimension 2n + h of these is row r + 8 h of the n-th fragment of V^T.
#pragma once

#include "attention/cuda/elements.cuh"
#include "cuda/nvfp4.cuh"

namespace pykv::attention {

// kTile: its tokens, 16 or 32.
template <int kD, int kTile>
struct Nvfp4Tile {
  static constexpr int kRowBytes = kD / 2, kPieces = kRowBytes / 16;           // of 16 bytes
  static constexpr int kCodeBytes = kTile * kRowBytes, kScaleBytes = kD / 16;  // of a token
  static constexpr int kKeyWords = kD / 32, kValueWords = kD / 64;             // of a token, for a lane
  static constexpr int kKeyScales = kD / 64, kValueScales = kD == 256 ? 2 : 1;
  static constexpr KvFormat kScaleFormat = KvFormat::kE4M3;

  // Where a token's piece lies, by its place: that among eight, and the eight's.  No two lanes meet in a bank: keys are read by rows,
  // of values those of every second place.
  static __device__ uint32_t code_place(int place, int piece, int eight = 0) {
    const int row = kD == 256 ? place : place ^ (place >> 2 & 1);
    const int moved = kD == 64 ? piece : piece ^ (place & (kD == 128 ? 2 : 7));
    return row * kRowBytes + moved * 16 + eight * 8 * kRowBytes;
  }

  // The scale of block s of a key, by its place among the tokens of the tile.
  static __device__ uint32_t key_scale_place(int token, int s) { return kCodeBytes + token * kScaleBytes + s; }
  // The scales of block s of four values, a byte each.
  static __device__ uint32_t value_scale_place(int group, int s) {
    return kCodeBytes + group * 4 * kScaleBytes + s * 4;
  }

  template <int kWords>
  static __device__ void read(uint32_t at, uint32_t* x) {
    if constexpr (kWords == 1) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x[0]) : "r"(at));
    } else if constexpr (kWords == 2) {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at));
    } else {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(at));
    }
  }

  // So many bytes.
  template <int kBytes>
  static __device__ uint32_t read_bytes(uint32_t at) {
    uint32_t x;
    if constexpr (kBytes == 1) {
      asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(at));
    } else if constexpr (kBytes == 2) {
      asm volatile("ld.shared.u16 %0, [%1];" : "=r"(x) : "r"(at));
    } else {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
    }
    return x;
  }

  static __device__ uint32_t scaled(uint32_t halves, uint32_t scales) {
    const half2 x = __hmul2(reinterpret_cast<const half2&>(halves), reinterpret_cast<const half2&>(scales));
    return reinterpret_cast<const uint32_t&>(x);
  }

  // Two codes of scales, each twice, as halves.
  static __device__ void widen_scales(uint32_t codes, uint32_t& first, uint32_t& second) {
    Element8<kScaleFormat>::widen(codes, first, second);
  }

  // What a lane has of the keys of sixteen places.
  struct Keys {
    uint32_t words[2][kKeyWords], scales[2][(kKeyScales + 1) / 2 * 2];  // [r + 8 h][]

    // At `tile`, from place 16 t on.
    __device__ void read(uint32_t tile, int t, int lane) {
      const int r = lane / 4, c = lane % 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int eight = 2 * t + h;
        if constexpr (kD == 64) {
          Nvfp4Tile::read<2>(tile + code_place(r, c / 2, eight) + c % 2 * 8, words[h]);
        } else {
#pragma unroll
          for (int i = 0; i < kKeyWords / 4; ++i) {
            Nvfp4Tile::read<4>(tile + code_place(r, kKeyWords / 4 * c + i, eight), words[h] + 4 * i);
          }
        }
        const int token = eight * 8 + r % 2 * 4 + r / 2;  // at place r: token_at()
        const uint32_t blocks = read_bytes<kKeyScales>(tile + key_scale_place(token, kKeyScales * c));
#pragma unroll
        for (int i = 0; i < kKeyScales; i += 2) {  // each twice
          widen_scales(__byte_perm(blocks, 0, kKeyScales == 1 ? 0 : 0x1100 + i * 0x1111), scales[h][i],
                       scales[h][i + 1]);
        }
      }
    }

    // The fragments of steps 2m and 2m + 1.
    __device__ void widen(int m, uint32_t (&a)[2][4]) const {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t bytes[2];
        e2m1x8_to_high_bytes(words[h][m], bytes[0], bytes[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          a[j][h] = scaled(__byte_perm(bytes[j], 0, 0x1404), scales[h][m / 2]);
          a[j][2 + h] = scaled(__byte_perm(bytes[j], 0, 0x3424), scales[h][m / 2]);
        }
      }
    }
  };

  // ... of the values.
  struct Values {
    uint32_t words[4][kValueWords];    // [2 h + b]: of the token at place 2c + b + 8 h
    uint32_t scales[2][kValueScales];  // [h]: of b = 0 and b = 1

    // valid: bits of the places with a key; zero times a scale that is none would be none.
    __device__ void read(uint32_t tile, int t, int lane, uint32_t valid) {
      const int r = lane / 4, c = lane % 4;
      uint32_t blocks[4][kValueScales];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int eight = 2 * t + i / 2, offset = r * (kRowBytes / 8);
        Nvfp4Tile::read<kValueWords>(tile + code_place(2 * c + i % 2, offset / 16, eight) + offset % 16, words[i]);
        Nvfp4Tile::read<kValueScales>(tile + value_scale_place(4 * t + i, kD == 64 ? r / 2 : kValueScales * r),
                                      blocks[i]);
      }
      const uint32_t each = c * 0x11 + 0x40;  // their bytes of two words
#pragma unroll
      for (int s = 0; s < kValueScales; ++s) {
        const uint32_t low = __byte_perm(blocks[0][s], blocks[1][s], each);
        const uint32_t high = __byte_perm(blocks[2][s], blocks[3][s], each);
        widen_scales(__byte_perm(low, high, 0x5410), scales[0][s], scales[1][s]);
      }
      if (valid != (kTile == 32 ? ~0u : (1u << kTile % 32) - 1)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t both = valid >> (t * 16 + h * 8 + 2 * c);
          const uint32_t kept = (both & 1 ? 0xffffu : 0) | (both & 2 ? 0xffff0000u : 0);
#pragma unroll
          for (int s = 0; s < kValueScales; ++s) scales[h][s] &= kept;
        }
      }
    }

    // The fragments of dimensions 4i to 4i + 3.
    __device__ void widen(int i, uint32_t (&a)[2][4]) const {
      const int m = i / 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t bytes[2];  // of four dimensions, even and odd ones: two of a token each
        e2m1x8_to_high_bytes(__byte_perm(words[2 * h][m], words[2 * h + 1][m], i % 2 == 0 ? 0x5410 : 0x7632), bytes[0],
                             bytes[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          a[0][2 * h + j] = scaled(__byte_perm(bytes[j], 0, 0x2404), scales[h][m / 2]);
          a[1][2 * h + j] = scaled(__byte_perm(bytes[j], 0, 0x3414), scales[h][m / 2]);
        }
      }
    }
  };
};

}  // namespace pykv::attention
