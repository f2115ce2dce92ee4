// What a block of packed_gemm_sm90.cuh computes, and the ring in shared memory that its warps share.
#pragma once

#include "cuda/divider.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/turn.cuh"
#include "gemm/packed_codes.cuh"
#include "gemm/packed_gemm.h"
#include "gemm/tile_map.cuh"

namespace pykv {
namespace packed_gemm_sm90 {

constexpr int kRows = 128, kUnit = PackedWeight::kUnit;
constexpr int kColumns = 2 * kUnit;            // of a stage
constexpr int kPitch = kRows + 4;              // of the sums of a token
constexpr int kRoundedPitch = kRows * 2 + 16;  // bytes, of those of a token that are rounded
constexpr int kMostStages = 12;
constexpr int kMostFew = 32;                              // tokens, which have room for two blocks on an SM
constexpr int kSharedOfSm = 228 << 10, kOfSystem = 1024;  // of each block
constexpr int kAlignment = 1024, kStatic = 3072;          // barriers, rows and the table

// What is done besides the scaling of sums of groups by s: nothing; zero points are subtracted from codes of integers as they are
// decoded.  kScaled: codes are multiplied by s as they are decoded, since 16 bits hold that: then there are no sums of groups.  kFolded:
// the same of integers and tables, with what is added; 16 bits do not hold that: weights are rounded (Folding).
// kQ4K: the same, where nothing but Q4_K is meant.
enum class Minima { kNone, kSubtracted, kScaled, kFolded, kQ4K };

// kWalks: blocks compute several tiles, one after another, and round sums before they exchange them.  kParts: of the columns, which
// eight warps each multiply: two, for the more warps the sooner codes are decoded.  Of few tokens one where there are two blocks for an
// SM, so that one begins and ends while the other multiplies; of more where sums of groups are scaled, for two would not have
// the registers.
template <class T, CodeKind kKind_, int kTokens_, Minima kMinima, int kParts_, bool kWalks_ = false>
struct Shape {
  using Element = T;
  static constexpr CodeKind kKind = kKind_;
  using Code = Codes<T, kKind>;
  static constexpr int kTokens = kTokens_;
  static constexpr bool kFew = kTokens <= kMostFew;
  static constexpr bool kWalks = kWalks_;
  static constexpr int kParts = kParts_, kBlocks = kFew && kParts == 1 ? 2 : 1;  // of an SM
  // Multiplying warps read factors as they are stored.
  static constexpr bool kIsQ4K = kMinima == Minima::kQ4K, kFolds = kMinima == Minima::kFolded || kIsQ4K;
  // One sum for all of a segment: there are no factors of groups, nor powers of two that float16 asks for.
  static constexpr bool kRunsOn = kMinima == Minima::kScaled || (kFolds && !kIsHalf<T>);
  // Multiplies by wgmma, not by mma.sync.
  static constexpr bool kByWarpgroups = !kFew || (kParts == 2 && kTokens > 8 && kRunsOn && kFolds);
  static constexpr int kMultipliers = 256 * kParts;
  // Warps: more where they make factors of each group.
  static constexpr int kPreparers = kParts == 2 && (kTokens == 64 ? !kFolds : kTokens <= 16 && !kByWarpgroups) ? 7 : 3;
  // Registers of who multiplies, and of the others.
  static constexpr int kTaken = kParts == 1 ? 200 : kPreparers == 7 ? 96 : 104, kGiven = kPreparers == 7 ? 48 : 64;
  // Warps that copy rows of x one by one; of few tokens, preparers do; of two parts of more tokens, nobody.
  static constexpr int kGatherers = kFew || kParts == 2 ? 0 : 4;
  static constexpr int kThreads = kMultipliers + 32 * (1 + kPreparers + kGatherers);
  static constexpr int kCopiers = kGatherers == 0 ? 32 : 32 * kGatherers;  // threads that copy them for a stage
  static constexpr int kXBytes = kTokens * kUnit * 2;                      // of a unit
  static constexpr int kBlockBytes = 2 * Code::kPlanes * 512;              // of 16 rows of the weight
  static constexpr int kCodesAt = 2 * kXBytes, kScalesAt = kCodesAt + kRows / 16 * kBlockBytes;
  static constexpr bool kSubtracts = kMinima == Minima::kSubtracted;
  static constexpr bool kHasUnits = kFolds && kIsHalf<T>;
  // The warp that asks for codes copies factors; otherwise preparing warps do.
  static constexpr bool kFillsFactors = kHasUnits || kIsQ4K;
  static constexpr bool kScalesCodes = kMinima == Minima::kScaled || kFolds,
                        kHasTable = kKind == CodeKind::kTable16 && !kScalesCodes;
  // Groups of whole stages have a loop of their own.
  static constexpr bool kHasStages = kMinima == Minima::kFolded && kKind == CodeKind::kUint4 && !kIsHalf<T>;
  static constexpr bool kOfBytes = kKind == CodeKind::kUint4 && !kFolds;  // CodesOfBytes
  // Of segments of a block that shares the columns, the sums of the last lie where the ring was: for those of 128 tokens there is no
  // room beside it.  Those of both parts of 64 tokens, which have one segment each, lie there, too: that leaves room for more stages.
  static constexpr bool kLastInRing = kTokens > 64, kAllInRing = kTokens == 64 && kParts == 2;
  static constexpr int kSumBytes = kTokens * kPitch * 4;
  using OfOnePart = Shape<T, kKind_, kTokens_, kMinima, 1>;

  // shift: bytes from w to the one that is meant
  __device__ static EntriesOf<T, kKind> entries(const PackedWeight& w, int64_t shift) {
    return EntriesOf<T, kKind>(reinterpret_cast<const float*>(w.data + shift + PackedWeight::kTableAt));
  }
};

struct Range {
  int begin, end;
};

struct Problem {
  CUtensorMap x, codes;
  PackedWeight weight;
  const void* from;
  void* out;
  const void* bias;
  Epilogue epilogue;
  int64_t num_rows, x_stride, x_step, out_stride;
  TileMap map;
  TileRows rows;
  Divider groups_by;  // columns of a group
  int tokens;         // of a tile
  uint32_t row_tiles, token_tiles;
  int bands, groups, blocks;  // of 32 rows; of columns; of 256 columns
  int segments, splits;       // of the columns; blocks of a cluster, which have some segments each
  int each;                   // segments of a part
  int steps, items;           // of 16 columns that have factors in common: 1, 2, 4 or 8; such in a stage
  int stages, stage_bytes, scales_at, minima_at, supers_at, lows_at, units_at;
  bool has_units;     // preparing warps find what factors of a stage have in common
  bool gathers;       // rows of x are copied one by one, not by the tensor map
  bool whole_chunks;  // ... and eight neighbours at once
  bool whole_stores;  // out: four neighbours can be stored at once

  // Tiles of tokens that are taken.
  __device__ uint32_t used_token_tiles() const {
    if (!map.taken) return token_tiles;
    return min(token_tiles, static_cast<uint32_t>((max(*map.taken, 0) + tokens - 1) / tokens));
  }
  // used: tiles of tokens
  __device__ void place(uint32_t tile, uint32_t used, uint32_t& row_tile, uint32_t& token_tile) const {
    constexpr uint32_t kTogether = 8;  // tiles of tokens that pass over the weight together: they and it stay in the L2
    const uint32_t together = row_tiles * kTogether, pass = tile / together, in_pass = tile % together;
    const uint32_t width = min(used - pass * kTogether, kTogether);
    row_tile = in_pass / width;
    token_tile = pass * kTogether + in_pass % width;
  }
  // The row of out of one of a tile's tokens, -1: there is none.
  __device__ int32_t row(uint32_t token_tile, int token) const {
    const int64_t at = int64_t{token_tile} * tokens + token;
    return token < tokens ? static_cast<int32_t>(TileRows::row_of_out(map, at, num_rows)) : -1;
  }
  // The weight of a tile of tokens, -1: there is nothing to do.
  __device__ int32_t weight_of(uint32_t token_tile) const {
    if (!map.rows) return 0;
    const int block = rows.tiles_of_block.quotient(static_cast<int>(token_tile));
    return map.weight_at(int64_t{token_tile} * tokens, block);
  }
  // The first stage of a segment.
  __device__ int begin(int segment) const {
    return static_cast<int>((weight.padded_k + kColumns - 1) / kColumns) * segment / segments;
  }
  // Several blocks or parts have sums; otherwise one adds them up as they come.
  __device__ bool keeps() const { return each < segments; }
  __device__ Range range(int part) const { return {begin(part * each), begin((part + 1) * each)}; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

struct Ring {
  uint32_t data, full, empty;  // addresses in shared memory
  int stage_bytes;

  __device__ uint32_t at(const Turn& turn) const { return data + turn.stage * stage_bytes; }
};

// The tiles of this block, one after another.
template <class S>
class Tiles {
 public:
  uint32_t row, token;  // of rows, of tokens
  int32_t weight;

  // After the map is there.  Where blocks do not walk, it is at the only one; otherwise before the first.
  __device__ explicit Tiles(const Problem& p) : p_(p), next_(blockIdx.x / p.splits) {
    if constexpr (S::kWalks) {
      used_ = p.used_token_tiles();
    } else {
      p.place(next_, p.token_tiles, row, token);
      weight = p.weight_of(token);
    }
  }

  // Goes to the first one.
  __device__ bool begins() { return S::kWalks ? next() : true; }
  // Goes to the next one; whether there is one.
  __device__ bool next() {
    if constexpr (S::kWalks) {
      for (; next_ < p_.row_tiles * used_; next_ += gridDim.x) {
        p_.place(next_, used_, row, token);
        weight = p_.weight_of(token);
        if (weight < 0) continue;
        next_ += gridDim.x;
        return true;
      }
    }
    return false;
  }
  // Bytes from the first weight.
  __device__ int64_t shift() const { return weight * p_.map.weight_stride; }

 private:
  const Problem& p_;
  uint32_t used_, next_;
};

// Calls with(stage of the weight, its turn) in the order of the ring, from a turn on: the parts of a block take turns.
//
// A barrier tells only the parity of a phase.  So whoever waits for one takes part in each of its phases: a place in the ring is
// always of the same part, whose number divides that of the places, and of the same preparing warp.
template <class S, class With>
__device__ void for_stages(const Problem& p, int split, Turn& turn, With&& with) {
  const Range range = p.range(split * S::kParts), last = p.range(split * S::kParts + S::kParts - 1);
  const int count = max(range.end - range.begin, last.end - last.begin) * S::kParts;
#pragma unroll 1
  for (int i = 0; i < count; ++i, turn.advance(1, p.stages)) {
    const Range& own = i % S::kParts == 0 ? range : last;
    const int stage = own.begin + i / S::kParts;
    if (stage < own.end) with(stage, turn);
  }
}

#endif
}  // namespace packed_gemm_sm90
}  // namespace pykv
