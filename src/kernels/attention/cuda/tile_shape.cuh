// Sizes of one instantiation of the tensor-core kernels, and what lies in its shared memory.
//
// A team of threads shares a ring of stages and works on one tile after another.  With many rows the team is the block; with few,
// which are columns of the products (decode/shape.cuh), it is a warp.
#pragma once

#include <type_traits>

#include "attention/cuda/elements.cuh"
#include "attention/cuda/problem.cuh"
#include "cuda/mma.cuh"

namespace pykv::attention {

// Weights of bf16 have 8 bits, which alone would be an error of 1e-3.  Few rows wait for memory and can afford to add the other 8;
// prefill cannot, and with batch_invariant all rows are computed alike.
template <class Mma>
constexpr bool splits_weights(bool invariant) {
  return std::is_same_v<Mma, bf16> && !invariant;
}

// kD: head size rounded up to 64, 128 or 256.
template <class KvElement, int kHeadSize, bool kPacked, RowClass kRowClass>
struct Shape {
  using Element = KvElement;
  using Mma = typename Element::Mma;
  static constexpr int kD = kHeadSize;
  static constexpr bool kPackedV = kPacked;
  static constexpr bool kFew = kRowClass == RowClass::kFew;
  static constexpr bool kMore = kRowClass == RowClass::kMore || kRowClass == RowClass::kInvariantMore;
  static constexpr bool kMany = kRowClass == RowClass::kMany || kMore;
  // With batch_invariant each row is computed in the steps of decode/columns.cuh, to the last bit, and a warp has all parts of a chunk.
  static constexpr bool kInvariant = kRowClass == RowClass::kInvariantMore;
  static constexpr int kBytes = Element::kBytes;
  static constexpr bool kNarrow = kBytes == 1;  // elements that registers widen
  static constexpr bool kNvfp4 = std::is_same_v<Element, ElementNvfp4>;
  static constexpr bool kScaled = kNarrow || kNvfp4;  // not of the queries' dtype
  static constexpr bool kPermutedTokens = kNarrow && kPackedV;
  static constexpr bool kPermutedOutput = kNarrow && !kPackedV;

  static constexpr bool kOneRowTile = kFew || kMore;
  static constexpr int kRowTiles = kOneRowTile || kD == 256 ? 1 : 2;  // 16-row tiles of a warp
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kMany ? 4 * kWarpRows : kWarpRows;
  static constexpr bool kSplitWeights = splits_weights<Mma>(kInvariant) && kRowClass != RowClass::kMany;
  static constexpr bool kReadOnce = kFew;        // nearly every key is for one query tile alone
  static constexpr bool kWarpgroup = false;      // stages as wgmma reads them: verify/kernel.cuh
  static constexpr bool kRaw = false;            // codes and scales of nvfp4 as they are: decode/nvfp4_tile.cuh
  static constexpr int kHeads = 1;               // KV heads of a segment
  static constexpr bool kManyTokens = false;     // queries as columns: of several tokens, each of which sees other keys
  static constexpr bool kHidesKeys = false;      // decoding proper: windows
  static constexpr bool kHalfLinesMeet = false;  // ... reads heads of 64 bytes with their neighbours
  static constexpr bool kFolded = false;         // ... takes two KV heads as one: decode/shape.cuh
  static constexpr bool kByToken = false;        // ... looks up a page for each token: decode/shape.cuh
  static constexpr bool kQueriesInRegisters = kMore && kBytes == 2 && kD <= 128;

  static constexpr int kBlock = kThreads;
  static constexpr int kGroups = 1;  // that compute, of four warps each: verify/cluster.cuh
  static constexpr int kTeam = kMany ? kThreads : 32;
  static constexpr int kTeams = kThreads / kTeam;
  static constexpr int kTile = kMany ? (kD == 256 && kBytes == 2 ? 32 : 64) : 32 / kBytes;  // tokens
  static constexpr int kUnitTokens = kTeams * kTile;
  static constexpr int kStep =
      kInvariant || kTile < 32 ? 32 / kBytes : 32;  // tokens between two updates of the softmax
  static constexpr int kRowBytes = kD * kBytes;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;  // keys, then values

  static constexpr int kBlocksPerSm = kFew || (kInvariant && kD == 256) ? 1 : 2;
  // Chips with 99 KB of shared memory for a block have room for two of 32 KB.
  static constexpr bool kThreeStages = kFew || (kMore && !kInvariant && kStageBytes < 32 << 10);
  static constexpr int kStages = kThreeStages ? 3 : 2;
  static constexpr int kSlots = kStages + 2;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kQueryBytes = kQueriesInRegisters ? 0 : kRows * kD * 2;
  static constexpr int kWaitingBytes = kInvariant && kD <= 128 ? (kD / 8 + 1) * kThreads * 16 : 0;  // a chunk's sums
};

// Of the warps that work on a tile together: which one a thread belongs to.
template <class S>
__device__ inline int warp_of_group() {
  return S::kGroups > 1 ? threadIdx.x / 32 % 4 : threadIdx.x / 32;
}

struct alignas(16) TokenPointers {
  const char *key, *value;  // of the slot's KV head; null: nothing to read
};

template <int kTile>
struct Slot {
  TokenPointers tokens[kTile];
  Unit unit;  // first_token: of the team's tile
  uint32_t valid[kTile < 32 ? 1 : kTile / 32];
};

// Byte offset of a 16-byte chunk in a tile whose rows have kRowBytes bytes: eight neighbouring rows at one chunk index
// lie in eight different groups of banks.
template <int kRowBytes>
__device__ inline int swizzled(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0);
  const int moved = kRowBytes == 64 ? chunk ^ (row >> 1 & 3) : chunk ^ (row & 7);
  return row * kRowBytes + moved * 16;
}

// Where the sum of a column, which is a query, for a dimension lies among those that others read; lanes that store together
// meet no bank twice.
template <int kD>
__device__ inline int sum_place(int column, int d) {
  return column * kD + (d ^ column / 2 % 4 * 8);
}

// The token at a place of a tile.  With packed V and one-byte elements, a lane's four bytes of V are four neighbouring tokens, so
// K's tokens are laid out to bring the scores of the same four to that lane.  Of codes of nvfp4 neighbouring places have tokens
// that are four apart: a lane has the values of four tokens, of which scales lie at one place in their words.
template <class S>
__device__ inline int token_at(int place) {
  if (S::kRaw) return (place & ~7) + (place & 1) * 4 + (place & 6) / 2;
  if (S::kPermutedTokens) return (place & ~15) + (place & 6) * 2 + (place & 1) + (place & 8) / 4;
  return place;
}

// The other way round.
template <class S>
__device__ inline int place_of(int token) {
  if (S::kRaw) return (token & ~7) + (token & 3) * 2 + (token & 4) / 4;
  if (S::kPermutedTokens) return (token & ~15) + (token / 2 & 6) + (token & 1) + (token & 2) * 4;
  return token;
}

}  // namespace pykv::attention
