// packed_gemm on Hopper (sm_90a), for any number of tokens, rows of x.
//
// A block computes 128 rows of the weight times 16 to 128 tokens: y^T = w x^T, so that one token is padded to 16, and the codes,
// decoded in registers, are the operand of the matrix units that may lie there.  Eight warps multiply 16 rows each: up to 32
// tokens by mma.sync, which takes fewer instructions, above by wgmma, with the same bits.  One thread fills a ring of stages of
// 128 columns with codes and x by bulk copies.  Three or seven warps make what the sums of groups are multiplied by: of
// whatever kind scales and minima are, the multiplying warps read floats.  They also copy rows of x that a tensor map cannot describe.
//
// Columns of codes lie in the order of packed_weight.h, of x in their own: a lane takes its codes from two lanes' places.
//
// The columns are cut into 2 or 4 segments, by the shape of the weight alone.  With few tokens, eight more warps of the block and
// a second block of a cluster sum some of them; with many, a block sums all, one after another.  They are added in the same
// order: a row of out has the same bits whatever the number of rows.
//
// Few tokens are bound by reading the weight: int4 with groups of 128, 8192 x 8192, 1 token takes 17.4 us on an H200, where a plain
// copy of as many bytes takes 9.3; 64 tokens 24.8.  Many are bound by the matrix units: 4096 tokens take 997 us, 551 TFLOP/s.
#include "cuda/cluster.cuh"
#include "cuda/device.h"
#include "cuda/mbarrier.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/vec.cuh"
#include "cuda/wgmma.cuh"
#include "gemm/packed_gemm_many.cuh"

namespace pykv {
namespace packed_gemm_sm90 {  // not an unnamed one, whose members the compiler would report where code for sm_90a lacks

constexpr int kRows = 128, kUnit = PackedWeight::kUnit;
constexpr int kColumns = 2 * kUnit;  // of a stage
constexpr int kPitch = kRows + 4;    // of the sums of a token
constexpr int kMostStages = 12, kMostSegments = 4;
constexpr int kSharedOfSm = 227 << 10, kAlignment = 1024, kStatic = 3072;  // barriers, rows and the table

template <class T, CodeKind kKind_, int kTokens_>
struct Shape {
  using Element = T;
  static constexpr CodeKind kKind = kKind_;
  using Code = Codes<T, kKind>;
  static constexpr int kTokens = kTokens_;
  static constexpr bool kFew = kTokens <= 32;  // for which mma.sync takes fewer instructions than wgmma
  static constexpr int kParts = kFew ? 2 : 1;  // of the columns, which eight warps each multiply
  static constexpr int kMultipliers = 256 * kParts;
  static constexpr int kPreparers = kTokens <= 16 ? 7 : 3;  // warps
  static constexpr int kThreads = kMultipliers + 32 * (kPreparers + 1);
  static constexpr int kXBytes = kTokens * kUnit * 2;          // of a unit
  static constexpr int kBlockBytes = 2 * Code::kPlanes * 512;  // of 16 rows of the weight
  static constexpr int kCodesAt = 2 * kXBytes, kScalesAt = kCodesAt + kRows / 16 * kBlockBytes;
  static constexpr bool kMaySplit = kTokens <= 64;
  static constexpr int kSumBytes = kTokens * kPitch * 4;
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
  int64_t num_rows, x_stride, out_stride;
  TileMap map;
  TileRows rows;
  Divider groups_by;  // columns of a group
  int tokens;         // of a tile
  uint32_t row_tiles, token_tiles;
  int bands, groups, blocks;  // of 32 rows; of columns; of 256 columns
  int segments, splits;       // of the columns; blocks of a cluster, which have some segments each
  int each;                   // segments of a part
  int steps, items;           // of 16 columns that are scaled together: 1, 2, 4 or 8; such in a stage
  int stages, stage_bytes, minima_at, sums_at;
  bool gathers;       // rows of x are copied one by one, not by the tensor map
  bool whole_chunks;  // ... and eight neighbours at once
  bool whole_stores;  // out: four neighbours can be stored at once

  __device__ void place(uint32_t tile, uint32_t& row_tile, uint32_t& token_tile) const {
    constexpr uint32_t kTogether = 8;  // tiles of tokens that pass over the weight together: they and it stay in the L2
    const uint32_t together = row_tiles * kTogether, pass = tile / together, in_pass = tile % together;
    const uint32_t width = min(token_tiles - pass * kTogether, kTogether);
    row_tile = in_pass / width;
    token_tile = pass * kTogether + in_pass % width;
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

// Of a tile's tokens: the row of out, -1 if there is none, and where that of x begins.
template <class S>
struct Rows {
  int32_t of_out[S::kTokens];
  int64_t of_x[S::kTokens];

  __device__ void find(const Problem& p, uint32_t token_tile) {
    const int token = threadIdx.x;
    if (token >= S::kTokens) return;
    const int64_t at = int64_t{token_tile} * p.tokens + token;
    const int64_t row = token < p.tokens ? TileRows::row_of_out(p.map, at, p.num_rows) : -1;
    of_out[token] = row >= 0 ? static_cast<int32_t>(row) : -1;
    of_x[token] = row >= 0 ? p.rows.row_of_x(p.map, row) * p.x_stride : -1;
  }
};

// A place in the ring, and the parity of the phase that its barriers are in.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance(int count, int stages) {
    for (stage += count; stage >= stages; stage -= stages) parity ^= 1;
  }
};

struct Ring {
  uint32_t data, full, ready, empty;  // addresses in shared memory
  int stage_bytes;

  __device__ uint32_t at(const Turn& turn) const { return data + turn.stage * stage_bytes; }
};

// Calls with(stage of the weight, its turn) in the order of the ring: the parts of a block take turns.
//
// A barrier tells only the parity of a phase.  So whoever waits for one takes part in each of its phases: a place in the ring is
// always of the same part, whose number divides that of the places, and of the same preparing warp.
template <class S, class With>
__device__ void for_stages(const Problem& p, int split, With&& with) {
  const Range range = p.range(split * S::kParts), last = p.range(split * S::kParts + S::kParts - 1);
  const int count = max(range.end - range.begin, last.end - last.begin) * S::kParts;
  Turn turn;
#pragma unroll 1
  for (int i = 0; i < count; ++i, turn.advance(1, p.stages)) {
    const Range& own = i % S::kParts == 0 ? range : last;
    const int stage = own.begin + i / S::kParts;
    if (stage < own.end) with(stage, turn);
  }
}

// One thread: brings the first codes into the L2 while the kernel before still runs.
template <class S>
__device__ void prefetch_codes(const Problem& p, uint32_t row_tile, int split) {
  const int first_block = static_cast<int>(row_tile) * (kRows / 16);
#pragma unroll 1
  for (int part = 0; part < S::kParts; ++part) {
    const Range range = p.range(split * S::kParts + part);
#pragma unroll 1
    for (int i = range.begin; i < min(range.begin + p.stages / S::kParts, range.end); ++i)
      prefetch_box(p.codes, {i * 256, first_block, 0});
  }
}

// One thread: codes and x.
template <class S>
__device__ void fill(const Problem& p, const Ring& ring, uint32_t row_tile, uint32_t token_tile, int split,
                     int32_t weight) {
  constexpr int kCodeBytes = kRows / 16 * S::kBlockBytes;
  const int first_block = static_cast<int>(row_tile) * (kRows / 16);
  const int first_token = static_cast<int>(token_tile) * S::kTokens;
  const uint32_t bytes = kCodeBytes + (p.gathers ? 0 : 2 * S::kXBytes);
  for_stages<S>(p, split, [&](int i, const Turn& turn) {
    const uint32_t stage = ring.at(turn), full = ring.full + turn.stage * 8;
    mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
    cluster_expect(full, bytes);
    copy_box(stage + S::kCodesAt, p.codes, {i * 256, first_block, weight}, full);
    if (p.gathers) return;
    copy_box(stage, p.x, {2 * i * 128, first_token}, full);
    copy_box(stage + S::kXBytes, p.x, {(2 * i + 1) * 128, first_token}, full);
  });
}

// What the tensor map cannot describe of x.
template <class S>
__device__ void copy_rows(const Problem& p, const int64_t (&rows)[S::kTokens], uint32_t to, int column, int64_t shift) {
  using T = typename S::Element;
  const auto* const x = static_cast<const T*>(p.from);
  const auto* const columns = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(p.weight.columns) + shift);
  const int chunk = threadIdx.x % 8;
#pragma unroll 1
  for (int unit = 0; unit < 2; ++unit, column += kUnit, to += S::kXBytes) {
    const int first = column + chunk * 8;
    if (p.whole_chunks) {
#pragma unroll 2
      for (int token = threadIdx.x % 32 / 8; token < S::kTokens; token += 4) {
        const bool inside = rows[token] >= 0 && first < p.weight.k;
        cp_async_16(to + token * 128 + (chunk ^ token % 8) * 16, inside ? x + rows[token] + first : x, inside);
      }
      continue;
    }
#pragma unroll 1
    for (int token = threadIdx.x % 32 / 8; token < S::kTokens; token += 4)
#pragma unroll 1
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t bits[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int from = first + 2 * pair + i;
          if (p.weight.columns) from = from < p.weight.padded_k ? __ldg(columns + from) : -1;
          const bool inside = rows[token] >= 0 && from >= 0 && from < p.weight.k;
          bits[i] = inside ? __ldg(reinterpret_cast<const unsigned short*>(x) + rows[token] + from) : 0;
        }
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + token * 128 + (chunk ^ token % 8) * 16 + pair * 4),
                     "r"(bits[0] | bits[1] << 16)
                     : "memory");
      }
  }
}

// Sums of x over each group of a stage, which minima multiply: products with ones.
template <class S>
__device__ void sum_x(const Problem& p, uint32_t stage) {
  using T = typename S::Element;
  constexpr int kTiles = (S::kTokens + 15) / 16, kAtOnce = kTiles < 4 ? kTiles : 4;  // of 16 tokens
  constexpr uint32_t kOnes = kIsHalf<T> ? 0x3c003c00u : 0x3f803f80u;
  const int lane = threadIdx.x % 32, c = lane % 4, last_step = p.steps - 1;
  const uint32_t token = lane % (S::kTokens < 16 ? 8 : 16);
  uint32_t from = stage + token * 128 + (lane / 16 ^ lane % 8) * 16;
  uint32_t to = stage + p.sums_at + (lane / 4 + c * 8) * 4;
#pragma unroll 1
  for (int first = 0; first < kTiles; first += kAtOnce, from += kAtOnce * 16 * 128, to += kAtOnce * 16 * 4) {
    float sum[kAtOnce][4] = {};
    uint32_t x[2][kAtOnce][4];
    const auto load = [&](int j) {
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t)
        ldmatrix_x4(x[j % 2][t], (from ^ j % 4 * 32) + j / 4 * S::kXBytes + t * 16 * 128);
    };
    load(0);
    uint32_t item_to = to;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < 7) load(j + 1);
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) mma_16x8x16<T>(sum[t], x[j % 2][t], kOnes, kOnes);
      if ((j & last_step) != last_step) continue;
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
        if (c * 8 < (S::kTokens < 16 ? 8 : 16))  // all columns are equal
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(item_to + t * 64), "f"(c == 0 ? sum[t][0] : sum[t][2])
                       : "memory");
        sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
      }
      item_to += S::kTokens * 4;
    }
  }
}

// What sums are multiplied by, of which a lane has four rows of the weight, and rows of x, for each kPreparers-th place in the ring.
template <class S>
class Preparer {
 public:
  // warp: which of them this is; shift: bytes from p.weight to the one that is meant
  __device__ Preparer(const Problem& p, const Ring& ring, uint32_t row_tile, int warp, int64_t shift)
      : p_(p), ring_(ring), warp_(warp), shift_(shift), lane_(threadIdx.x % 32) {
    const PackedWeight& w = p.weight;
    global_ = __ldg(reinterpret_cast<const float*>(w.data + shift + PackedWeight::kGlobalScaleAt)) * S::Code::kUnit;
    const int64_t band = min(static_cast<int>(row_tile) * 4 + lane_ / 8, p.bands - 1);
    factors_ = band * p.groups * 32 + lane_ % 8 * 4;
    supers_ = band * p.blocks * 32 + lane_ % 8 * 4;
  }

  __device__ void run(const int64_t (&rows)[S::kTokens], int split) {
    for_stages<S>(p_, split, [&](int i, const Turn& turn) {
      if (turn.stage % S::kPreparers != warp_) return;
      const uint32_t stage = ring_.at(turn), full = ring_.full + turn.stage * 8;
      if (p_.gathers) {
        mbarrier_wait(ring_.empty + turn.stage * 8, turn.parity ^ 1);
        copy_rows<S>(p_, rows, stage, i * kColumns, shift_);
        cp_async_arrive(full);
        mbarrier_arrive(full);
      }
      if (p_.items == 1) {
        make_factors<1>(i, turn, stage, 0);
      } else if (p_.items == 2) {
        make_factors<2>(i, turn, stage, 0);
      } else {
#pragma unroll 1
        for (int first = 0; first < p_.items; first += 4) make_factors<4>(i, turn, stage, first);
      }
      if (p_.weight.minima) {
        mbarrier_wait(full, turn.parity);
        sum_x<S>(p_, stage);
      }
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive(ring_.ready + turn.stage * 8);
    });
  }

 private:
  // Of so many groups in stage i of the weight.
  template <int kCount>
  __device__ void make_factors(int i, const Turn& turn, uint32_t stage, int first) const {
    const PackedWeight& w = p_.weight;
    RawFactors raw[kCount];
    load_factors_of_block(raw[0], w, supers_ + min(i / 2, p_.blocks - 1) * 32, shift_);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      raw[n] = raw[0];
      const int column = i * kColumns + (first + n) * p_.steps * 16;
      const int64_t group = min(p_.groups_by.quotient(column), p_.groups - 1);
      load_factors_of_group(raw[n], w, factors_ + group * 32, shift_);
    }
    mbarrier_wait(ring_.empty + turn.stage * 8, turn.parity ^ 1);
    float scales[kCount][4], minima[kCount][4];
    scales_of(scales, raw, w.scales_kind);
    const uint32_t to = stage + first * kRows * 4 + lane_ * 16;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (float& s : scales[n]) s *= global_;
      store(to + S::kScalesAt + n * kRows * 4, scales[n]);
    }
    if (!w.minima) return;
    minima_of(minima, raw, w.minima_kind, w.offset, scales);
#pragma unroll
    for (int n = 0; n < kCount; ++n) store(to + p_.minima_at + n * kRows * 4, minima[n]);
  }

  __device__ static void store(uint32_t to, const float (&x)[4]) {
    store_shared(to, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                                __float_as_uint(x[3])));
  }

  const Problem& p_;
  const Ring& ring_;
  const int warp_;
  const int64_t shift_;
  const int lane_;
  float global_;
  int64_t factors_, supers_;
};

__device__ inline float4 load_shared_float4(uint32_t at) {
  const uint4 v = load_shared_16(at);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ inline float2 load_shared_float2(uint32_t at) {
  const uint2 v = load_shared_8(at);
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

// Sums of 16 rows of the weight, of a warp.
template <class S>
class Multiplier {
  using T = typename S::Element;
  using Code = typename S::Code;
  static constexpr int kSums = S::kTokens / 2;         // of a lane
  static constexpr int kPairs = (S::kTokens + 8) / 16;  // of eight tokens

 public:
  float total[kSums] = {};  // over a segment; in the end over all, where one block has all

  // kept: where sums of segments lie
  __device__ Multiplier(const Problem& p, const Ring& ring, uint8_t* kept, const uint32_t* table)
      : p_(p), ring_(ring), kept_(kept), table_(table), warp_(threadIdx.x / 32 % 8) {
    const int lane = threadIdx.x % 32, c = lane % 4;
    constexpr bool kOctets = Code::kPlanes == 2;
    codes_at_ = S::kCodesAt + warp_ * S::kBlockBytes + (8 * (c / 2) + lane / 4) * 16 + (kOctets ? c % 2 * 512 : 0);
    selector_ = c % 2 == 0 ? 0x6240 : 0x7351;
    x_at_ = S::kTokens == 8 ? lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16
                            : (lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16;
    factors_at_ = (warp_ / 2 * 32 + lane / 4 * 4 + warp_ % 2 * 2) * 4;
  }

  // The part'th of all blocks of the cluster.  Inlined by order: otherwise the sums would lie in memory.
  __device__ __forceinline__ void run(int part) {
    switch (p_.steps) {
      case 8:
        return run_steps<8>(part);
      case 4:
        return run_steps<4>(part);
      case 2:
        return run_steps<2>(part);
      default:
        return run_steps<1>(part);
    }
  }

  // To [token][kPitch].
  __device__ void store(float* to) const {
    const int lane = threadIdx.x % 32, row = warp_ * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kSums; ++i) to[(i / 4 * 8 + lane % 4 * 2 + i % 2) * kPitch + row + i / 2 % 2 * 8] = total[i];
  }

 private:
  // kSteps: of 16 columns, that are scaled together.
  template <int kSteps>
  __device__ __forceinline__ void run_steps(int part) {
    const Range range = p_.range(part);
    int segment = part * p_.each, segment_end = p_.begin(segment + 1);
    const auto end_segment = [&] {
      if (S::kMaySplit && p_.keeps()) {
        keep(segment % (p_.each * S::kParts));
      } else {
        join(segment);
      }
      ++segment;
      segment_end = p_.begin(segment + 1);
    };
    while (segment_end == range.begin && segment < (part + 1) * p_.each) end_segment();  // nothing to sum
    if (range.begin == range.end) return;
    Turn turn;
    turn.advance(part % S::kParts, p_.stages);
    if constexpr (!S::kFew) {
      wait_full(turn);
      decode(a_[0], ring_.data, 0);
      if constexpr (kSteps == 8) multiply<0, 4>(a_[0], ring_.data, true);
    }
    const auto end_stage = [&](int i) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(ring_.empty + turn.stage * 8);
      turn.advance(S::kParts, p_.stages);
      if (i + 1 == segment_end) end_segment();
    };
    if constexpr (S::kFew) {
#pragma unroll 1
      for (int i = range.begin; i < range.end; ++i) {
        run_stage_at_once<kSteps>(turn);
        end_stage(i);
      }
    } else {
#pragma unroll 1
      for (int i = range.begin; i < range.end - 1; ++i) {
        run_stage<kSteps, false>(turn);
        end_stage(i);
      }
      run_stage<kSteps, true>(turn);
      end_stage(range.end - 1);
    }
  }

  template <int kSteps>
  __device__ __forceinline__ void run_stage_at_once(const Turn& turn) {
    const uint32_t stage = ring_.at(turn);
    wait_full(turn);
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
      decode(a_[0], stage, unit);
      uint32_t x[kPairs][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        constexpr int kMask = kSteps - 1;
        const int step = unit * 4 + j;
        load_x(x, stage + unit * S::kXBytes, j);
        multiply_at_once(a_[0][j], x, j, (step & kMask) == 0);
        if ((step & kMask) != kMask) continue;
        if (step == kMask) mbarrier_wait(ring_.ready + turn.stage * 8, turn.parity);
        add_scaled(read(stage, step / kSteps), stage, step / kSteps);
      }
    }
  }

  // x: the address of the unit's.  Of eight tokens it loads two steps at once, of more those of two times eight.
  __device__ void load_x(uint32_t (&to)[kPairs][4], uint32_t x, int j) const {
    if (S::kTokens == 8 && j % 2 != 0) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) ldmatrix_x4(to[i], ((x + x_at_) ^ j * 32) + i * 16 * 128);
  }

  // By mma.sync, in the same order as wgmma.
  __device__ void multiply_at_once(const uint32_t (&a)[4], const uint32_t (&x)[kPairs][4], int j, bool anew) {
#pragma unroll
    for (int t = 0; t < S::kTokens / 8; ++t) {
      float (&sum)[4] = reinterpret_cast<float (&)[4]>(sum_[t * 4]);
      if (anew) sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
      const int half = S::kTokens == 8 ? j % 2 : t % 2;
      mma_16x8x16<T>(sum, a, x[t / 2][2 * half], x[t / 2][2 * half + 1]);
    }
  }

  // The first codes of the stage are decoded; decodes those of the next one, and of groups of a whole stage begins to sum them.
  template <int kSteps, bool kLast>
  __device__ __forceinline__ void run_stage(const Turn& turn) {
    const uint32_t stage = ring_.at(turn);
    Turn next = turn;
    next.advance(1, p_.stages);
    const uint32_t next_stage = ring_.at(next);
    if constexpr (kSteps == 8) {
      decode(a_[1], stage, 1);
      multiply<0, 4>(a_[1], stage + S::kXBytes, false);
      if constexpr (!kLast) {
        wgmma_wait<1>();  // of the first unit
        wait_full(next);
        decode(a_[0], next_stage, 0);
      }
      mbarrier_wait(ring_.ready + turn.stage * 8, turn.parity);
      const Factors factors = read(stage, 0);
      wgmma_wait<0>();
      add_scaled(factors, stage, 0);
      if constexpr (!kLast) multiply<0, 4>(a_[0], next_stage, true);
    } else {
      constexpr int kItems = 8 / kSteps;
      multiply_item<kSteps>(stage, 0);
      decode(a_[1], stage, 1);
      mbarrier_wait(ring_.ready + turn.stage * 8, turn.parity);
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        if (item == kItems / 2 && !kLast) {
          wait_full(next);
          decode(a_[0], next_stage, 0);
        }
        const Factors factors = read(stage, item);
        wgmma_wait<0>();
        add_scaled(factors, stage, item);
        if (item + 1 < kItems) multiply_item<kSteps>(stage, item + 1);
      }
    }
  }

  __device__ void wait_full(const Turn& turn) const {
    mbarrier_wait(ring_.full + turn.stage * 8, turn.parity);
    if (!S::kFew && p_.gathers) fence_async_proxy();  // cp.async writes like an ordinary store
  }

  // Codes of a unit to fragments of its four steps.
  __device__ void decode(uint32_t (&a)[4][4], uint32_t stage, int unit) const {
    const uint32_t at = stage + codes_at_ + unit * Code::kPlanes * 512;
    uint4 words[Code::kPlanes];
    if constexpr (Code::kPlanes == 2) {
      words[0] = load_shared_16(at);
      words[1] = load_shared_16(at + 256);
    } else {
      const uint4 a = load_shared_16(at), b = load_shared_16(at + 256);
      words[0] = make_uint4(__byte_perm(a.x, b.x, selector_), __byte_perm(a.y, b.y, selector_),
                            __byte_perm(a.z, b.z, selector_), __byte_perm(a.w, b.w, selector_));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) Code::fragment(a[j], words, j, table_);
  }

  template <int kSteps>
  __device__ void multiply_item(uint32_t stage, int item) {
    const int step = item * kSteps, unit = step / 4;
    const uint32_t x = stage + unit * S::kXBytes;
    if constexpr (kSteps == 4) {
      multiply<0, 4>(a_[unit], x, true);
    } else if constexpr (kSteps == 2) {
      if (step % 4 == 0) {
        multiply<0, 2>(a_[unit], x, true);
      } else {
        multiply<2, 2>(a_[unit], x, true);
      }
    } else {
      if (step % 4 == 0) {
        multiply<0, 1>(a_[unit], x, true);
      } else if (step % 4 == 1) {
        multiply<1, 1>(a_[unit], x, true);
      } else if (step % 4 == 2) {
        multiply<2, 1>(a_[unit], x, true);
      } else {
        multiply<3, 1>(a_[unit], x, true);
      }
    }
  }

  // x: the address of the unit's
  template <int kFirst, int kCount>
  __device__ void multiply(const uint32_t (&a)[4][4], uint32_t x, bool anew) {
    const uint64_t matrix = wgmma_matrix(x, 1024);
    if (anew) wgmma_pin(sum_);
    wgmma_begin();
#pragma unroll
    for (int j = kFirst; j < kFirst + kCount; ++j)
      Wgmma<T, S::kTokens>::template rs<kAlong>(sum_, a[j], wgmma_further(matrix, j * 32), j > kFirst || !anew);
    wgmma_commit();
  }

  struct Factors {
    float2 scale, minimum;
  };

  __device__ Factors read(uint32_t stage, int item) const {
    const uint32_t at = stage + item * kRows * 4 + factors_at_;
    Factors factors{load_shared_float2(at + S::kScalesAt), make_float2(0.0f, 0.0f)};
    if (p_.weight.minima) factors.minimum = load_shared_float2(at + p_.minima_at);
    return factors;
  }

  __device__ void add_scaled(const Factors& factors, uint32_t stage, int item) {
    if constexpr (!S::kFew) wgmma_pin(sum_);
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] = fmaf(i / 2 % 2 ? factors.scale.y : factors.scale.x, sum_[i], total[i]);
    if (!p_.weight.minima) return;
    const uint32_t sums = stage + p_.sums_at + (item * S::kTokens + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const float2 of_x = load_shared_float2(sums + i / 4 * 32);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        total[i + e] = fmaf(e / 2 ? factors.minimum.y : factors.minimum.x, e % 2 ? of_x.y : of_x.x, total[i + e]);
    }
  }

  // Those of a segment, for who adds up those of all.
  __device__ void keep(int piece) {
    store(reinterpret_cast<float*>(kept_ + piece * S::kSumBytes));
#pragma unroll
    for (float& x : total) x = 0.0f;
  }

  // Adds those of a segment to those of the segments before.
  __device__ void join(int segment) {
    const bool is_first = segment == 0, is_last = segment == p_.segments - 1;
    const uint32_t whole = shared_address(kept_) + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const uint32_t own = whole + i / 4 * S::kMultipliers * 16;
      float* const mine = total + i;
      if (!is_first) {
        const float4 sum = load_shared_float4(own);
        mine[0] = sum.x + mine[0];
        mine[1] = sum.y + mine[1];
        mine[2] = sum.z + mine[2];
        mine[3] = sum.w + mine[3];
      }
      if (is_last) continue;
      store_shared(own, make_uint4(__float_as_uint(mine[0]), __float_as_uint(mine[1]), __float_as_uint(mine[2]),
                                   __float_as_uint(mine[3])));
      mine[0] = mine[1] = mine[2] = mine[3] = 0.0f;
    }
  }

  const Problem& p_;
  const Ring& ring_;
  uint8_t* const kept_;
  const uint32_t* const table_;
  const int warp_;
  uint32_t codes_at_, selector_, x_at_, factors_at_;
  float sum_[kSums];
  uint32_t a_[2][4][4];
};

__device__ inline float4 load_cluster_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Rounds sums [piece][token][kPitch], added up over the pieces of all blocks of the cluster, to rows of out: each `splits`-th.
template <class S>
__device__ void write(const Problem& p, const int32_t (&of_out)[S::kTokens], uint32_t sums, int64_t first_row, int rank,
                      int32_t weight) {
  using T = typename S::Element;
  const int lane = threadIdx.x % 32, splits = p.splits;
  const int64_t n = first_row + lane * 4;
  const int rows = static_cast<int>(min(max(p.weight.n - n, int64_t{0}), int64_t{4}));
  float of_row[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (p.bias && i < rows) of_row[i] = to_float(static_cast<const T*>(p.bias)[weight * p.map.bias_stride + n + i]);
#pragma unroll 1
  for (int token = threadIdx.x / 32 * splits + rank; token < p.tokens; token += S::kMultipliers / 32 * splits) {
    const int row = of_out[token];
    if (row < 0) continue;
    const uint32_t at = sums + (token * kPitch + lane * 4) * 4;
    float4 sum;
    if (!p.keeps()) {
      sum = load_shared_float4(at);
    } else {
      const int pieces = p.each * S::kParts;  // of a block
      float4 pieces_of[kMostSegments];
#pragma unroll
      for (int s = 0; s < kMostSegments; ++s)
        if (s < p.segments) {
          const uint32_t piece = at + s % pieces * S::kSumBytes;
          pieces_of[s] =
              splits == 1 ? load_shared_float4(piece) : load_cluster_float4(cluster_address(piece, s / pieces));
        }
      sum = pieces_of[0];
#pragma unroll
      for (int s = 1; s < kMostSegments; ++s)
        if (s < p.segments) {
          sum.x += pieces_of[s].x;
          sum.y += pieces_of[s].y;
          sum.z += pieces_of[s].z;
          sum.w += pieces_of[s].w;
        }
    }
    const float factor = p.map.factor_of(row);
    const float v[4] = {(sum.x + of_row[0]) * factor, (sum.y + of_row[1]) * factor, (sum.z + of_row[2]) * factor,
                        (sum.w + of_row[3]) * factor};
    T* const to = static_cast<T*>(p.out) + row * p.out_stride + n;
    if (p.whole_stores && rows == 4) {
      *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i < rows) to[i] = from_float<T>(v[i]);
    }
  }
}
#endif

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) packed_gemm_sm90_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = typename S::Element;
  extern __shared__ uint8_t unaligned[];
  __shared__ uint64_t barriers[3 * kMostStages];
  __shared__ uint32_t table[S::kKind == CodeKind::kTable16 ? 256 : 1];
  __shared__ Rows<S> rows;
  const uint32_t start = shared_address(unaligned), data = (start + kAlignment - 1) / kAlignment * kAlignment;
  const uint32_t full = shared_address(barriers);
  const Ring ring{data, full, full + kMostStages * 8, full + 2 * kMostStages * 8, p.stage_bytes};
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < p.stages; ++i) {
      mbarrier_init(ring.full + i * 8,
                    p.gathers ? 1 + 2 * 32 : 1);  // with gathers, each lane of a warp, and its copies
      mbarrier_init(ring.ready + i * 8, 1);
      mbarrier_init(ring.empty + i * 8, 8);  // warps of a part
    }
    fence_async_proxy();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    prefetch_map(p.codes);
    if (!p.gathers) prefetch_map(p.x);
  }
  const int split = static_cast<int>(blockIdx.x % p.splits);
  uint32_t row_tile, token_tile;
  p.place(blockIdx.x / p.splits, row_tile, token_tile);
  if (S::kMaySplit && threadIdx.x == 32 && !p.map.rows) prefetch_codes<S>(p, row_tile, split);
  begin_dependent();
  const int32_t weight = p.weight_of(token_tile);
  if (weight < 0) return;  // all blocks of the cluster
  const int64_t shift = weight * p.map.weight_stride;
  rows.find(p, token_tile);
  if constexpr (S::kKind == CodeKind::kTable16) {
    const auto* numbers = reinterpret_cast<const float*>(p.weight.data + shift + PackedWeight::kTableAt);
    if (threadIdx.x < 256)
      table[threadIdx.x] = pack_pair<T>(__ldg(numbers + threadIdx.x % 16), __ldg(numbers + threadIdx.x / 16));
  }
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp >= S::kMultipliers / 32) {
    if constexpr (!S::kFew) give_registers<88>();
    if (warp == S::kMultipliers / 32) {
      if (threadIdx.x % 32 == 0) fill<S>(p, ring, row_tile, token_tile, split, weight);
    } else {
      Preparer<S>(p, ring, row_tile, warp - S::kMultipliers / 32 - 1, shift).run(rows.of_x, split);
    }
    if (p.splits > 1) {  // the sums of all blocks are there
      __syncwarp();
      cluster_announce_all();
      cluster_wait();
    }
  } else {
    if constexpr (!S::kFew) take_registers<208>();
    uint8_t* const ring_memory = unaligned + (data - start);
    uint8_t* const kept = ring_memory + p.stages * p.stage_bytes;
    {
      Multiplier<S> multiplier(p, ring, kept, table);
      multiplier.run(S::kParts == 1 ? split : split * S::kParts + warp / 8);
      if (!p.keeps()) {
        named_barrier_sync(1, S::kMultipliers);  // all have done with the ring
        multiplier.store(reinterpret_cast<float*>(ring_memory));
      }
    }
    if (p.splits > 1) {
      cluster_announce_all();
      cluster_wait();
    } else {
      named_barrier_sync(1, S::kMultipliers);
    }
    const uint32_t sums = p.keeps() ? data + p.stages * p.stage_bytes : data;
    write<S>(p, rows.of_out, sums, int64_t{row_tile} * kRows, split, weight);
  }
  if (p.splits > 1) {  // nobody reads here any more
    __syncwarp();
    cluster_announce();
    cluster_wait();
  }
#endif
}

// Of the columns: what is summed in which order depends on this alone, not on the number of tokens.
int segments_of(const PackedWeight& w, int64_t row_tiles, int sms) {
  return row_tiles * 2 <= sms && w.padded_k >= 4 * kColumns ? kMostSegments : 2;
}

// Lines of the codes of 16 rows, of each weight.
template <class S>
bool make_codes_map(CUtensorMap& map, const PackedGemmArgs& args) {
  const PackedWeight& w = args.weight;
  constexpr int kPlanes = S::Code::kPlanes;
  const int64_t units = w.padded_k / kUnit, blocks = w.padded_n() / 16, line = units * kPlanes * 512;
  const bool several = args.map.rows && args.map.num_weights > 1;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(units * 128), static_cast<cuuint64_t>(blocks),
                               static_cast<cuuint64_t>(several ? args.map.num_weights : 1)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(line),
                                 static_cast<cuuint64_t>(several ? args.map.weight_stride : line * blocks)};
  const cuuint32_t box[3] = {256, kRows / 16, 1}, steps[3] = {1, 1, 1};
  const auto encode = tensor_map_encoder();
  return encode && encode(&map, kPlanes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT64, 3,
                          const_cast<uint8_t*>(w.codes), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class S>
void launch_shape(const PackedGemmArgs& args, const Launch& launch, int splits) {
  const PackedWeight& w = args.weight;
  const TileMap& map = args.map;
  const int64_t per_block = map.rows ? map.block_size & -map.block_size : S::kTokens;
  const int tokens = static_cast<int>(per_block < S::kTokens ? per_block : S::kTokens);
  const int64_t token_tiles =
      map.rows ? map.num_blocks * (map.block_size / tokens) : (args.num_rows + tokens - 1) / tokens;
  const int64_t row_tiles = (w.n + kRows - 1) / kRows;
  const auto aligned = [](const void* pointer, int64_t stride, int count) {
    return reinterpret_cast<uintptr_t>(pointer) % (2 * count) == 0 && stride % count == 0;
  };
  const int64_t x_stride = map.rows || args.num_rows > 1 ? args.x_stride : (w.k + 7) / 8 * 8;
  const int segments = segments_of(w, row_tiles, num_sms(launch.device));
  if (splits > segments / S::kParts) splits = segments / S::kParts;
  CUtensorMap x_map{};
  const bool gathers = map.rows || w.columns || w.k == 0 || !aligned(args.x, x_stride, 8) ||
                       !make_tensor_map(x_map, args.x, {w.k * 2, args.num_rows}, {x_stride * 2}, {S::kTokens});
  CUtensorMap codes{};
  if (w.padded_k > 0 && !make_codes_map<S>(codes, args)) fail(PYKV_RUNTIME_ERROR, "packed_gemm: no tensor map");
  Problem p{.x = x_map,
            .codes = codes,
            .weight = w,
            .from = args.x,
            .out = args.out,
            .bias = args.bias,
            .num_rows = args.num_rows,
            .x_stride = x_stride,
            .out_stride = args.out_stride,
            .map = map,
            .rows = TileRows(map, tokens),
            .groups_by = Divider(w.group_size),
            .tokens = tokens,
            .row_tiles = static_cast<uint32_t>(row_tiles),
            .token_tiles = static_cast<uint32_t>(token_tiles),
            .bands = static_cast<int>(w.padded_n() / 32),
            .groups = static_cast<int>(w.groups()),
            .blocks = static_cast<int>((w.padded_k + 255) / 256),
            .segments = segments,
            .splits = splits,
            .each = segments / splits / S::kParts,
            .steps = w.group_size % kColumns == 0 ? 8 : w.steps_of_a_group(),
            .items = 0,
            .stages = 0,
            .stage_bytes = 0,
            .minima_at = 0,
            .sums_at = 0,
            .gathers = gathers,
            .whole_chunks = !w.columns && w.k % 8 == 0 && aligned(args.x, x_stride, 8),
            .whole_stores = aligned(args.out, args.out_stride, 4)};
  p.items = 8 / p.steps;
  p.minima_at = S::kScalesAt + p.items * kRows * 4;
  p.sums_at = p.minima_at + (w.minima ? p.items * kRows * 4 : 0);
  p.stage_bytes = p.sums_at + (w.minima ? p.items * S::kTokens * 4 : 0);
  p.stage_bytes = (p.stage_bytes + kAlignment - 1) / kAlignment * kAlignment;
  // Sums of segments: of each that this block has, or of those so far.
  const int whole = p.each < segments ? segments / splits * S::kSumBytes : S::kTokens * kRows * 4;
  const int most = kSharedOfSm - kAlignment - kStatic - whole;
  p.stages = most / p.stage_bytes < kMostStages ? most / p.stage_bytes : kMostStages;
  p.stages -= p.stages % S::kParts;
  const int64_t blocks = row_tiles * token_tiles * splits;
  if (blocks > INT32_MAX || row_tiles * 8 > INT32_MAX || args.num_rows > INT32_MAX - S::kTokens)
    fail(PYKV_VALUE_ERROR, "x: has too many rows: %lld", static_cast<long long>(args.num_rows));
  int bytes = kAlignment + p.stages * p.stage_bytes + whole;
  const int for_sums = kAlignment + S::kTokens * kPitch * 4;
  if (bytes < for_sums) bytes = for_sums;
  const auto kernel = packed_gemm_sm90_kernel<S>;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "packed_gemm");
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream_of(launch);
  config.attrs = attributes;
  config.numAttrs = splits > 1 ? 2 : 1;
  cuda_check(cudaLaunchKernelEx(&config, kernel, p), "packed_gemm");
}

template <class T, CodeKind kKind>
void launch_kind(const PackedGemmArgs& args, const Launch& launch) {
  const TileMap& map = args.map;
  const int64_t row_tiles = (args.weight.n + kRows - 1) / kRows, sms = num_sms(launch.device);
  const int64_t tokens = map.rows ? map.block_size & -map.block_size : args.num_rows;
  const auto tiles = [&](int64_t of) {
    return row_tiles *
           (map.rows ? map.num_blocks * map.block_size / (tokens < of ? tokens : of) : (args.num_rows + of - 1) / of);
  };
  const auto run = [&]<int kTokens>() {
    launch_shape<Shape<T, kKind, kTokens>>(args, launch, kTokens <= 64 && tiles(kTokens) * 2 <= sms ? 2 : 1);
  };
  if (tokens <= 8) return run.template operator()<8>();
  if (tokens <= 16) return run.template operator()<16>();
  if (tokens <= 32) return run.template operator()<32>();
  if (tokens <= 64 || tiles(64) <= sms) return run.template operator()<64>();
  run.template operator()<128>();
}

}  // namespace packed_gemm_sm90

void packed_gemm_sm90_cuda(const PackedGemmArgs& args, const Launch& launch) {
  using packed_gemm_sm90::launch_kind;
  dispatch<half, bf16>(args.dtype, [&]<class T>() {
    switch (args.weight.codes_kind) {
      case CodeKind::kUint4:
        return launch_kind<T, CodeKind::kUint4>(args, launch);
      case CodeKind::kUint8:
        return launch_kind<T, CodeKind::kUint8>(args, launch);
      case CodeKind::kE4M3:
        return launch_kind<T, CodeKind::kE4M3>(args, launch);
      default:
        return launch_kind<T, CodeKind::kTable16>(args, launch);
    }
  });
}

}  // namespace pykv
