// packed_gemm on Hopper's asynchronous matrix units (sm_90a), for any number of rows of x that begin at multiples of 16 bytes.
//
// A block computes 128 rows of the weight times 16 to 128 tokens: y^T = w x^T, so that one token is padded to 16, and the codes,
// decoded in registers, are the operand of wgmma that may lie there.  Two warpgroups multiply.  Of a third, one warp fills a ring
// of stages of 128 columns with codes and x by bulk copies; the others make what the sums of groups are multiplied by: of
// whatever kind scales and minima are, the multiplying warps read floats.
//
// Columns of codes lie in the order of packed_weight.h, of x in their own: a lane takes its codes from two lanes' places.
//
// The columns are cut into segments, of which there are so many that few tokens occupy all multiprocessors twice: the blocks of a
// cluster then sum one each.  With many tokens a block sums all of them, in the same order: a row of out has the same bits
// whatever the number of rows.
#include "cuda/cluster.cuh"
#include "cuda/device.h"
#include "cuda/mbarrier.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/vec.cuh"
#include "cuda/wgmma.cuh"
#include "gemm/packed_gemm_many.cuh"

namespace pykv {
namespace packed_gemm_sm90 {  // not an unnamed one, whose members the compiler would report where code for sm_90a lacks

constexpr int kRows = 128, kMultipliers = 256, kThreads = kMultipliers + 128, kUnit = PackedWeight::kUnit;
constexpr int kColumns = 2 * kUnit;  // of a stage
constexpr int kPitch = kRows + 4;    // of the sums of a token
constexpr int kMostStages = 8, kMostSegments = 8;
constexpr int kSharedOfSm = 227 << 10, kAlignment = 1024, kStatic = 3072;  // barriers, rows and the table

template <class T, CodeKind kKind_, int kTokens_, int kHalves_>
struct Shape {
  using Element = T;
  static constexpr CodeKind kKind = kKind_;
  using Code = Codes<T, kKind>;
  static constexpr int kTokens = kTokens_;
  static constexpr int kHalves = kHalves_,
                       kTokensOfHalf = kTokens / kHalves;  // one is multiplied while the other is scaled
  static constexpr int kPerSm = kTokens <= 32 ? 2 : 1;
  static constexpr int kMultiplierRegisters = kPerSm == 2 ? 96 : 208, kOtherRegisters = kPerSm == 2 ? 48 : 88;
  static constexpr int kXBytes = kTokens * kUnit * 2;          // of a unit
  static constexpr int kBlockBytes = 2 * Code::kPlanes * 512;  // of 16 rows of the weight
  static constexpr int kCodesAt = 2 * kXBytes, kScalesAt = kCodesAt + kRows / 16 * kBlockBytes;
  static constexpr int kWholeBytes = kTokens * kRows * 4;  // sums of the segments so far
};

struct Problem {
  CUtensorMap x;
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
  int segments, splits;       // of the columns; blocks of a cluster, 1 or as many
  int sharers;                // blocks of a cluster that have the same tokens: 2 read half of x each for both
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

__device__ inline void copy_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// One warp: codes and x.
template <class S>
__device__ void fill(const Problem& p, const Ring& ring, uint32_t row_tile, uint32_t token_tile, int rank, int begin,
                     int end, int64_t shift) {
  constexpr int kPlaneBytes = S::Code::kPlanes * 512;
  const int lane = threadIdx.x % 32, units = static_cast<int>(p.weight.padded_k / kUnit);
  const int64_t block =
      min(int64_t{row_tile} * 8 + lane % 8, p.weight.padded_n() / 16 - 1);  // later ones are not stored
  const uint8_t* const codes = p.weight.codes + shift + block * units * kPlaneBytes;
  Turn turn;
#pragma unroll 1
  for (int i = begin; i < end; ++i, turn.advance(1, p.stages)) {
    const uint32_t stage = ring.at(turn), full = ring.full + turn.stage * 8;
    const int bytes = min(units - 2 * i, 2) * kPlaneBytes;
    if (p.sharers > 1) {
      cluster_await(ring.empty + turn.stage * 8, turn.parity ^ 1);
    } else {
      mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
    }
    if (lane == 0) cluster_expect(full, 8 * bytes + (p.gathers ? 0 : 2 * S::kXBytes));
    __syncwarp();
    if (lane < 8) {
      copy_bytes(stage + S::kCodesAt + lane * S::kBlockBytes, codes + int64_t{2 * i} * kPlaneBytes, bytes, full);
    } else if (lane < 10 && !p.gathers) {
      const int unit = lane - 8, first_token = static_cast<int>(token_tile) * S::kTokens;
      if (p.sharers == 1) {
        copy_box(stage + unit * S::kXBytes, p.x, {(2 * i + unit) * 128, first_token}, full);
      } else if (unit == rank) {
        copy_box_to_all(stage + unit * S::kXBytes, p.x, {(2 * i + unit) * 128, first_token}, full, 3);
      }
    }
    __syncwarp();
  }
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

// Sums of x over each group of a stage, which minima multiply.
template <class S>
__device__ void sum_x(const Problem& p, uint32_t stage) {
  using T = typename S::Element;
  constexpr int kTiles = S::kTokens / 8, kAtOnce = S::kTokens >= 64 ? 4 : 2;
  constexpr uint32_t kOnes = kIsHalf<T> ? 0x3c003c00u : 0x3f803f80u;
  constexpr uint32_t kAll[4] = {kOnes, kOnes, kOnes, kOnes};
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0; first < kTiles; first += kAtOnce) {
    float sum[kAtOnce][4] = {};
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t x[kAtOnce][4];
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t)
        ldmatrix_x4(x[t], stage + j / 4 * S::kXBytes + ((first + t) * 8 + lane % 8) * 128 +
                              ((2 * (j % 4) + lane / 8) ^ lane % 8) * 16);
#pragma unroll
      for (int next = 0; next < 2; ++next) {
#pragma unroll
        for (int t = 0; t < kAtOnce; ++t) mma_16x8x16<T>(sum[t], kAll, x[t][2 * next], x[t][2 * next + 1]);
        if (((j + next + 1) & (p.steps - 1)) != 0) continue;
        const int item = (j + next) / p.steps;
#pragma unroll
        for (int t = 0; t < kAtOnce; ++t) {
          if (lane < 4)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(stage + p.sums_at +
                                                                  (item * S::kTokens + (first + t) * 8 + 2 * lane) * 4),
                         "f"(sum[t][0]), "f"(sum[t][1])
                         : "memory");
#pragma unroll
          for (float& v : sum[t]) v = 0.0f;
        }
      }
    }
  }
}

// Three warps, each for a stage of three: what sums are multiplied by, of which a lane has four rows of the weight, and rows
// of x.
template <class S>
__device__ void prepare(const Problem& p, const Ring& ring, const int64_t (&rows)[S::kTokens], uint32_t row_tile,
                        int begin, int end, int warp, int64_t shift) {
  const PackedWeight& w = p.weight;
  const int lane = threadIdx.x % 32;
  const float global =
      __ldg(reinterpret_cast<const float*>(w.data + shift + PackedWeight::kGlobalScaleAt)) * S::Code::kUnit;
  const int64_t band = min(static_cast<int>(row_tile) * 4 + lane / 8, p.bands - 1);
  const int64_t factors = band * p.groups * 32 + lane % 8 * 4, supers = band * p.blocks * 32 + lane % 8 * 4;
  Turn turn;
  turn.advance(warp, p.stages);
#pragma unroll 1
  for (int i = begin + warp; i < end; i += 3, turn.advance(3, p.stages)) {
    const uint32_t stage = ring.at(turn);
    if (p.gathers) {
      mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
      copy_rows<S>(p, rows, stage, i * kColumns, shift);
      cp_async_arrive(ring.full + turn.stage * 8);
      mbarrier_arrive(ring.full + turn.stage * 8);
    }
#pragma unroll 1
    for (int first = 0; first < p.items; first += 2) {
      RawFactors raw[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (first + n >= p.items) break;
        const int column = i * kColumns + (first + n) * p.steps * 16;
        const int64_t group = min(p.groups_by.quotient(column), p.groups - 1), block = min(column / 256, p.blocks - 1);
        load_factors(raw[n], w, factors + group * 32, supers + block * 32, shift);
      }
      mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (first + n >= p.items) break;
        const uint32_t to = stage + (first + n) * kRows * 4 + lane * 16;
        float scales[4], minima[4];
        scales_of(scales, raw[n], w.scales_kind);
#pragma unroll
        for (float& s : scales) s *= global;
        store_shared(to + S::kScalesAt, make_uint4(__float_as_uint(scales[0]), __float_as_uint(scales[1]),
                                                   __float_as_uint(scales[2]), __float_as_uint(scales[3])));
        if (!w.minima) continue;
        minima_of(minima, raw[n], w.minima_kind, w.offset, scales);
        store_shared(to + p.minima_at, make_uint4(__float_as_uint(minima[0]), __float_as_uint(minima[1]),
                                                  __float_as_uint(minima[2]), __float_as_uint(minima[3])));
      }
    }
    if (w.minima) {
      mbarrier_wait(ring.full + turn.stage * 8, turn.parity);
      sum_x<S>(p, stage);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.ready + turn.stage * 8);
  }
}

__device__ inline float4 load_shared_float4(uint32_t at) {
  const uint4 v = load_shared_16(at);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ inline float2 load_shared_float2(uint32_t at) {
  const uint2 v = load_shared_8(at);
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

// A warpgroup's sums of 64 rows of the weight.
template <class S>
class Multiplier {
  using T = typename S::Element;
  using Code = typename S::Code;
  static constexpr int kSums = S::kTokensOfHalf / 2;  // of a lane and a half of the tokens

 public:
  float total[S::kHalves][kSums] = {};

  __device__ Multiplier(const Problem& p, const Ring& ring, uint32_t whole, const uint32_t* table)
      : p_(p), ring_(ring), whole_(whole + threadIdx.x * 16), table_(table) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane % 4;
    constexpr bool kOctets = Code::kPlanes == 2;
    codes_at_ = S::kCodesAt + warp * S::kBlockBytes + (8 * (c / 2) + lane / 4) * 16 + (kOctets ? c % 2 * 512 : 0);
    selector_ = c % 2 == 0 ? 0x6240 : 0x7351;
    factors_at_ = (warp / 2 * 32 + lane / 4 * 4 + warp % 2 * 2) * 4;
  }

  // Stages [begin, end), of segments from `segment` on.
  __device__ void run(int begin, int end, int segment) {
    switch (p_.steps) {
      case 8:
        return run_steps<8>(begin, end, segment);
      case 4:
        return run_steps<4>(begin, end, segment);
      case 2:
        return run_steps<2>(begin, end, segment);
      default:
        return run_steps<1>(begin, end, segment);
    }
  }

  // To [token][kPitch].
  __device__ void store(float* to) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        to[(h * S::kTokensOfHalf + i / 4 * 8 + lane % 4 * 2 + i % 2) * kPitch + row + i / 2 % 2 * 8] = total[h][i];
  }

 private:
  // kSteps: of 16 columns, that are scaled together.
  template <int kSteps>
  __device__ void run_steps(int begin, int end, int segment) {
    if (begin == end) return;
    Turn turn;
    wait_full(turn);
    decode(a_[0], ring_.data, 0);
    if constexpr (kSteps == 8)
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) multiply<0, 4>(h, a_[0], ring_.data, true);
    int segment_end = p_.begin(segment + 1);
    const auto end_stage = [&](int i) {
      __syncwarp();
      const int lane = threadIdx.x % 32;
      if (p_.sharers == 1) {
        if (lane == 0) mbarrier_arrive(ring_.empty + turn.stage * 8);
      } else if (lane < 2) {
        cluster_arrive(cluster_address(ring_.empty + turn.stage * 8, lane));
      }
      turn.advance(1, p_.stages);
      if (p_.splits == 1 && i + 1 == segment_end) {
        join(segment++);
        segment_end = p_.begin(segment + 1);
      }
    };
#pragma unroll 1
    for (int i = begin; i < end - 1; ++i) {
      run_stage<kSteps, false>(turn);
      end_stage(i);
    }
    run_stage<kSteps, true>(turn);
    end_stage(end - 1);
  }

  // The first codes of the stage are decoded; decodes those of the next one, and of groups of a whole stage begins to sum them.
  template <int kSteps, bool kLast>
  __device__ void run_stage(const Turn& turn) {
    const uint32_t stage = ring_.at(turn);
    Turn next = turn;
    next.advance(1, p_.stages);
    const uint32_t next_stage = ring_.at(next);
    if constexpr (kSteps == 8) {
      decode(a_[1], stage, 1);
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) multiply<0, 4>(h, a_[1], stage + S::kXBytes, false);
      if constexpr (!kLast) {
        wgmma_wait<S::kHalves>();  // of the first unit
        wait_full(next);
        decode(a_[0], next_stage, 0);
      }
      mbarrier_wait(ring_.ready + turn.stage * 8, turn.parity);
      const Factors factors = read(stage, 0);
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) {
        wgmma_wait<kLast ? 0 : S::kHalves - 1>();
        add_scaled(h, factors, stage, 0);
        if constexpr (!kLast) multiply<0, 4>(h, a_[0], next_stage, true);
      }
    } else {
      constexpr int kItems = 8 / kSteps;
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) multiply_item<kSteps>(h, stage, 0);
      decode(a_[1], stage, 1);
      mbarrier_wait(ring_.ready + turn.stage * 8, turn.parity);
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        if (item == kItems / 2 && !kLast) {
          wait_full(next);
          decode(a_[0], next_stage, 0);
        }
        const Factors factors = read(stage, item);
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h) {
          if (item + 1 < kItems || h + 1 < S::kHalves) {
            wgmma_wait<S::kHalves - 1>();
          } else {
            wgmma_wait<0>();
          }
          add_scaled(h, factors, stage, item);
          if (item + 1 < kItems) multiply_item<kSteps>(h, stage, item + 1);
        }
      }
    }
  }

  __device__ void wait_full(const Turn& turn) const {
    mbarrier_wait(ring_.full + turn.stage * 8, turn.parity);
    if (p_.gathers) fence_async_proxy();  // cp.async writes like an ordinary store
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
  __device__ void multiply_item(int h, uint32_t stage, int item) {
    const int step = item * kSteps, unit = step / 4;
    const uint32_t x = stage + unit * S::kXBytes;
    if constexpr (kSteps == 4) {
      multiply<0, 4>(h, a_[unit], x, true);
    } else if constexpr (kSteps == 2) {
      if (step % 4 == 0) {
        multiply<0, 2>(h, a_[unit], x, true);
      } else {
        multiply<2, 2>(h, a_[unit], x, true);
      }
    } else {
      if (step % 4 == 0) {
        multiply<0, 1>(h, a_[unit], x, true);
      } else if (step % 4 == 1) {
        multiply<1, 1>(h, a_[unit], x, true);
      } else if (step % 4 == 2) {
        multiply<2, 1>(h, a_[unit], x, true);
      } else {
        multiply<3, 1>(h, a_[unit], x, true);
      }
    }
  }

  // x: the address of the unit's
  template <int kFirst, int kCount>
  __device__ void multiply(int h, const uint32_t (&a)[4][4], uint32_t x, bool anew) {
    const uint64_t matrix = wgmma_matrix(x + h * S::kTokensOfHalf * 128, 1024);
    if (anew) wgmma_pin(sum_[h]);
    wgmma_begin();
#pragma unroll
    for (int j = kFirst; j < kFirst + kCount; ++j)
      Wgmma<T, S::kTokensOfHalf>::template rs<kAlong>(sum_[h], a[j], wgmma_further(matrix, j * 32),
                                                      j > kFirst || !anew);
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

  __device__ void add_scaled(int h, const Factors& factors, uint32_t stage, int item) {
    wgmma_pin(sum_[h]);
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      total[h][i] = fmaf(i / 2 % 2 ? factors.scale.y : factors.scale.x, sum_[h][i], total[h][i]);
    if (!p_.weight.minima) return;
    const uint32_t sums = stage + p_.sums_at + (item * S::kTokens + h * S::kTokensOfHalf + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const float2 of_x = load_shared_float2(sums + i / 4 * 32);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        total[h][i + e] = fmaf(e / 2 ? factors.minimum.y : factors.minimum.x, e % 2 ? of_x.y : of_x.x, total[h][i + e]);
    }
  }

  // Adds those of a segment to those of the segments before.
  __device__ void join(int segment) {
    if (p_.segments == 1) return;
    const bool is_first = segment == 0, is_last = segment == p_.segments - 1;
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        const uint32_t own = whole_ + (h * kSums + i) / 4 * kMultipliers * 16;
        float* const mine = total[h] + i;
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
  const uint32_t whole_;
  const uint32_t* const table_;
  uint32_t codes_at_, selector_, factors_at_;
  float sum_[S::kHalves][kSums];
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

// Rounds sums [token][kPitch], added up over the blocks of the cluster, to rows of out; this block writes each `splits`-th.
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
  for (int token = threadIdx.x / 32 * splits + rank; token < p.tokens; token += kMultipliers / 32 * splits) {
    const int row = of_out[token];
    if (row < 0) continue;
    const uint32_t at = sums + (token * kPitch + lane * 4) * 4;
    float4 sum = splits == 1 ? load_shared_float4(at) : load_cluster_float4(cluster_address(at, 0));
    if (splits > 1) {
      float4 others[kMostSegments - 1];
#pragma unroll
      for (int s = 1; s < kMostSegments; ++s)
        if (s < splits) others[s - 1] = load_cluster_float4(cluster_address(at, s));
#pragma unroll
      for (int s = 1; s < kMostSegments; ++s)
        if (s < splits) {
          sum.x += others[s - 1].x;
          sum.y += others[s - 1].y;
          sum.z += others[s - 1].z;
          sum.w += others[s - 1].w;
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
__global__ void __launch_bounds__(kThreads, S::kPerSm) packed_gemm_sm90_kernel(const __grid_constant__ Problem p) {
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
      mbarrier_init(ring.empty + i * 8, kMultipliers / 32 * p.sharers);
    }
    fence_async_proxy();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    prefetch_map(p.x);
  }
  begin_dependent();
  const int in_cluster = p.splits * p.sharers, rank = static_cast<int>(blockIdx.x % in_cluster);
  uint32_t row_tile, token_tile;
  p.place(blockIdx.x / in_cluster, row_tile, token_tile);
  if (p.sharers > 1) row_tile = 2 * row_tile + rank;
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
  if (p.sharers > 1) {  // all barriers are there
    cluster_announce();
    cluster_wait();
  }
  const int segment = p.splits == 1 ? 0 : rank;
  const int begin = p.begin(segment), end = p.begin(p.splits == 1 ? p.segments : segment + 1);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp >= kMultipliers / 32) {
    give_registers<S::kOtherRegisters>();
    if (warp == kMultipliers / 32) {
      fill<S>(p, ring, row_tile, token_tile, rank, begin, end, shift);
    } else {
      prepare<S>(p, ring, rows.of_x, row_tile, begin, end, warp - kMultipliers / 32 - 1, shift);
    }
    if (p.splits > 1) {  // the sums of all blocks are there, and have been read
      __syncwarp();
      cluster_announce_all();
      cluster_wait();
      cluster_announce();
      cluster_wait();
    }
    if (p.sharers > 1) {  // nobody copies to this block any more, or arrives at its barriers
      __syncwarp();
      cluster_announce();
      cluster_wait();
    }
  } else {
    take_registers<S::kMultiplierRegisters>();
    {
      Multiplier<S> multiplier(p, ring, data + p.stages * p.stage_bytes, table);
      multiplier.run(begin, end, segment);
      named_barrier_sync(1, kMultipliers);  // all have done with the ring
      multiplier.store(reinterpret_cast<float*>(unaligned + (data - start)));
    }
    if (p.splits > 1) {
      cluster_announce_all();
      cluster_wait();
    } else {
      named_barrier_sync(1, kMultipliers);
    }
    write<S>(p, rows.of_out, data, int64_t{row_tile} * kRows, p.splits > 1 ? rank : 0, weight);
    if (in_cluster > 1) {
      __syncwarp();
      cluster_announce();
      cluster_wait();
    }
  }
#endif
}

// Of the columns: what is summed in which order depends on this alone, not on the number of tokens.
int segments_of(const PackedWeight& w, int64_t row_tiles, int sms) {
  const int64_t stages = (w.padded_k + kColumns - 1) / kColumns;
  int segments = 1;
  while (segments < kMostSegments && row_tiles * segments * 10 < int64_t{sms} * 16 && stages >= 8 * segments)
    segments *= 2;
  return segments;
}

template <class S>
void launch_shape(const PackedGemmArgs& args, const Launch& launch, bool split) {
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
  CUtensorMap x_map{};
  const bool gathers = map.rows || w.columns || w.k == 0 || !aligned(args.x, x_stride, 8) ||
                       !make_tensor_map(x_map, args.x, {w.k * 2, args.num_rows}, {x_stride * 2}, {S::kTokens});
  const bool shares = false;
  Problem p{.x = x_map,
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
            .row_tiles = static_cast<uint32_t>(shares ? (row_tiles + 1) / 2 : row_tiles),
            .token_tiles = static_cast<uint32_t>(token_tiles),
            .bands = static_cast<int>(w.padded_n() / 32),
            .groups = static_cast<int>(w.groups()),
            .blocks = static_cast<int>((w.padded_k + 255) / 256),
            .segments = segments,
            .splits = split ? segments : 1,
            .sharers = shares ? 2 : 1,
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
  const int whole = p.segments > p.splits ? S::kWholeBytes : 0;
  const int most = (kSharedOfSm - (S::kPerSm - 1) * 1024) / S::kPerSm - kAlignment - kStatic - whole;
  p.stages = most / p.stage_bytes < kMostStages ? most / p.stage_bytes : kMostStages;
  const int64_t blocks = int64_t{p.row_tiles} * token_tiles * p.splits * p.sharers;
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
  attributes[1].val.clusterDim = {static_cast<unsigned>(p.splits * p.sharers), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream_of(launch);
  config.attrs = attributes;
  config.numAttrs = p.splits * p.sharers > 1 ? 2 : 1;
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
  const auto run = [&]<int kTokens, int kHalves>() {
    launch_shape<Shape<T, kKind, kTokens, kHalves>>(args, launch, tiles(kTokens) * 2 <= sms);
  };
  if (tokens <= 16) return run.template operator()<16, 1>();
  if (tokens <= 64 || tiles(64) <= sms) return run.template operator()<64, 1>();
  run.template operator()<128, 1>();
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
