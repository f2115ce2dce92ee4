// packed_gemm of up to eight tokens on Hopper, where reading the weight is all there is to wait for.
//
// A warp has 16 rows of the weight and a segment of the columns to itself: it copies stages of 128 columns, codes and factors as they
// are stored, into a ring of its own in shared memory, some stages ahead, and waits for nobody.  So all SMs have the same number of
// warps, whatever the shape, and nothing is handed over before the end, when the sums of segments are added.
//
// Of experts with up to eight pairs in a tile, in int4: a block has a tile and rows of its expert, a warp all segments of some blocks of
// rows, one after another, so that it always has stages to ask for.  Few tokens, or an x that leaves room for one block on an SM, are
// quicker where warps share rows (packed_gemm_sm90.cuh).
//
// x lies in shared memory, all of it.  Four neighbours of x are what a lane's codes of a step stand for (packed_weight.h), so that
// products of a step are summed in another order of its 16 columns than packed_gemm_sm90.cuh does it: the matrix units do not tell,
// and a row of out has the same bits.
//
// One token on an H200, us, beside packed_gemm_sm90.cuh and a plain read of the weight: Q4_K 14336 x 4096 14.2 (16.8, 8.8), Q6_K 18.3
// (21.4, 15.1), int4 with groups of 128 12.2 (13.8, 8.0), 4096 x 4096 5.8 (9.1, 3.3).  More stages ahead are slower: 14.6 with four,
// 15.1 with five.
#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "gemm/packed_codes.cuh"
#include "gemm/packed_epilogue.cuh"
#include "gemm/packed_gemm_few_sm90.h"
#include "gemm/tile_map.cuh"

namespace pykv {
namespace packed_gemm_few {

constexpr int kColumns = 128, kTokens = 8, kDepth = 4;  // of a stage; at most; stages of a ring, one of which is read
constexpr int kMostWarps = 16, kMapWarps = 12, kShared = 226 << 10;  // of a block

// Zero points are subtracted as codes are decoded; scales and minima of small groups multiply and are added (Folding).
enum class Minima { kNone, kSubtracted, kFolded };

struct Problem {
  PackedWeight weight;
  const void *x, *bias;
  void* out;
  Epilogue epilogue;
  int64_t x_stride, out_stride;
  int stages_of_group;                        // 1 where they are smaller
  int tokens, units, groups, blocks, stages;  // blocks: of 256 columns
  int steps;                                  // of 16 columns that are scaled together: 1, 2, 4 or 8
  int segments_log2, row_blocks, each;        // blocks of 16 rows; such of a block of threads
  int x_pitch, stage_bytes, minima_at, supers_at, lows_at;
  bool has_units;  // ... of float16, that are to be found
  TileMap map;
  TileRows rows;
  int64_t num_rows;
  int turns;  // blocks of rows of a warp, one after another
};

// kMaps_: rows of x and out are those of a map, whose tiles have weights of their own.  A warp then has all segments of its rows.
template <class T, CodeKind kKind, Minima kMinima, bool kMaps_>
struct Shape {
  using Element = T;
  static constexpr bool kMaps = kMaps_;
  static constexpr int kWarps = kMaps ? kMapWarps : kMostWarps;
  using Code = Codes<T, kKind>;
  static constexpr CodeKind kCodes = kKind;
  static constexpr bool kSubtracts = kMinima == Minima::kSubtracted, kFolds = kMinima == Minima::kFolded;
  static constexpr bool kRunsOn = kFolds && !kIsHalf<T>;  // one sum for all of a segment
  static constexpr int kCodeBytes = Code::kPlanes * 1024;
  static constexpr int kBlocks = kKind == CodeKind::kUint4 ? 2 : 1;  // of an SM, for which there are registers
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// What a warp copies of its rows.  Of 32 factors it needs half.
template <class S>
class Feed {
 public:
  // Of every kMapWarps'th block of rows, where there are maps; shift: bytes from p.weight to the one that is meant.
  __device__ Feed(const Problem& p, int block, int blocks_end, int begin, int end, uint32_t ring, int64_t shift)
      : p_(p), shift_(shift), ring_(ring + threadIdx.x % 32 * 16), next_(block), end_(blocks_end) {
    have_ready(ring_);
    start(begin, end);
  }

 private:
  __device__ __forceinline__ void start(int begin, int end) {
    const Problem& p = p_;
    const PackedWeight& w = p.weight;
    const int lane = threadIdx.x % 32, items = 8 / p.steps, block = next_;
    next_ += kMapWarps;
    left_ = end - begin;
    end_stage_ = end;
    codes_ = w.codes + shift_ + (int64_t{block} * p.units + 2 * begin) * (S::kCodeBytes / 2) + lane * 16;
    // One after another in a stage: scales, minima, those of 256 columns.
    int first = 0;
    const auto section = [&](const uint8_t* from, int of_group, int64_t groups, int bytes, int stages) {
      if (!from) return;
      if (lane >= first && lane < first + bytes / 16) {
        factors_ = from + shift_ + block / 2 * groups * of_group + begin / stages * bytes + (lane - first) * 16;
        bytes_ = bytes;
        stages_ = stages;
        until_ = stages - begin % stages;
      }
      const int more = lane + 32 - first;
      if (S::kFolds && more >= 0 && more < bytes / 16)  // of 256 columns
        more_ = from + shift_ + block / 2 * groups * of_group + begin / 2 * 64 + more * 16;
      first += bytes / 16;
    };
    const int of_scales = 32 * bytes_of(w.scales_kind);
    section(w.scales, of_scales, p.groups, of_scales * items, p.stages_of_group);
    const int of_minima = 32 * bytes_of(w.minima_kind);
    if (S::kSubtracts || S::kFolds) section(w.minima, of_minima, p.groups, of_minima * items, p.stages_of_group);
    section(w.supers, 64, p.blocks, 64, 2);
    if (S::kFolds) section(w.lows, 64, p.blocks, 64, 2);
  }

 public:
  // The next stage to a place of the ring; nothing where there is none.  kMore: it may have more than a piece for each lane.
  template <bool kMore>
  __device__ __forceinline__ void next(int place) {
    if (S::kMaps && left_ == 0 && next_ < end_) start(0, p_.stages);
    if (left_ > 0) {
      --left_;
      const uint32_t to = ring_ + place;
#pragma unroll
      for (int n = 0; n < S::kCodeBytes / 512; ++n) cp_async_16(to + n * 512, codes_ + n * 512);
      codes_ += S::kCodeBytes;
      if (stages_ > 0) cp_async_16(to + S::kCodeBytes, factors_);
      if (kMore && more_) {
        cp_async_16(to + S::kCodeBytes + 512, more_);
        more_ += (left_ ^ end_stage_) & 1 ? 0 : 64;
      }
      const bool was_last = --until_ == 0;
      factors_ += was_last ? bytes_ : 0;
      until_ = was_last ? stages_ : until_;
    }
    cp_async_commit();
  }

 private:
  const Problem& p_;
  const int64_t shift_;
  uint32_t ring_;
  int next_;  // block of rows
  const int end_;
  const uint8_t *codes_, *factors_ = nullptr, *more_ = nullptr;  // more_: of more than 32 lanes
  int end_stage_, left_, bytes_ = 0, stages_ = 0,
                         until_ = 0;  // stages; of factors, which are those of so many stages, and so many more
};

// Rows of x, and zeros behind them.  row: of out, that of a map for token lane % 8, -1: there is none, and nothing is made of it.
template <class S>
__device__ void copy_x(const Problem& p, uint32_t to, int32_t row) {
  using T = typename S::Element;
  const int chunks = p.stages * (kColumns / 8), inside = static_cast<int>(p.weight.k / 8);
#pragma unroll 1
  for (int t = 0; t < p.tokens; ++t) {
    int64_t from = t;
    if constexpr (S::kMaps) {
      const int32_t row_of_out = __shfl_sync(~0u, row, t);
      if (row_of_out < 0) continue;
      from = p.rows.row_of_x(p.map, row_of_out);
    }
    for (int i = threadIdx.x; i < chunks; i += blockDim.x)
      cp_async_16(to + t * p.x_pitch + i * 16,
                  static_cast<const T*>(p.x) + from * p.x_stride + (i < inside ? i * 8 : 0), i < inside);
  }
}

template <class S>
class Multiplier {
  using T = typename S::Element;
  using Code = typename S::Code;

 public:
  float total[4] = {};
  const EntriesOf<T, S::kCodes> entries;

  // row_block: of the warp; x: of its first stage
  __device__ Multiplier(const Problem& p, int row_block, uint32_t x, int64_t shift)
      : p_(p),
        place_((threadIdx.x % 32 / 4 * 2 + row_block % 2) * 2),
        x_(x + min(static_cast<int>(threadIdx.x % 32 / 4), p.tokens - 1) * p.x_pitch + threadIdx.x % 4 * 8),
        global_(__ldg(reinterpret_cast<const float*>(p.weight.data + shift + PackedWeight::kGlobalScaleAt)) *
                Code::kUnit),
        entries(reinterpret_cast<const float*>(p.weight.data + shift + PackedWeight::kTableAt)) {
    if constexpr (S::kFolds) global_ *= entries.unit();
  }

  // Back over all columns, to the next block of rows.
  __device__ void rewind() { x_ -= p_.stages * kColumns * 2; }

  // kSteps: of 16 columns that are scaled together.
  template <int kSteps, Fold kFold>
  __device__ __forceinline__ void multiply(uint32_t stage) {
    const uint32_t lane = threadIdx.x % 32, c = lane % 4;
#pragma unroll
    for (int n = 0; n < 2 * Code::kPlanes; ++n)
      words_[n / Code::kPlanes][n % Code::kPlanes] = load_shared_16(stage + n * 512 + (8 * c + lane / 4) * 16);
    // Lanes of a row share the work: each has the factors of a group, or of two.
    constexpr int kItems = 8 / kSteps, kMine = kItems == 8 ? 2 : 1;
    using Folds = Folding<T, S::kCodes, kFold>;
    float2 scales[kMine];
    uint32_t pairs[kMine][2];
    if constexpr (S::kFolds) {
      fold<kFold, kItems>(stage, scales[0], pairs);
    } else {
      prepare<kItems>(stage, scales, pairs);
    }
    float of_groups[4];
    float (&sum)[4] = S::kRunsOn ? total : of_groups;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int item = j / kSteps, from = item % 4, own = item / 4;
      if (j % kSteps == 0) {
        if constexpr (S::kFolds) {
          now_[0] = __shfl_sync(~0u, pairs[own][0], from, 4);
          now_[1] = Folds::kAdds ? __shfl_sync(~0u, pairs[own][1], from, 4) : Folds::middle(now_[0]);
        } else if constexpr (S::kSubtracts && kItems > 1) {
          now_[0] = __shfl_sync(~0u, pairs[own][0], from, 4);
          now_[1] = __shfl_sync(~0u, pairs[own][1], from, 4);
        } else if constexpr (S::kSubtracts) {
          now_[0] = pairs[0][0];
          now_[1] = pairs[0][1];
        }
        if (!S::kRunsOn && (!S::kFolds || j == 0)) sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
      }
      uint32_t a[4];
      if constexpr (S::kFolds) {
        Folds::fragment(a, words_[j / 4], j % 4, now_[0], now_[1], entries);
      } else {
        decode(a, j);
      }
      const uint2 x = load_shared_8(x_ + j * 32);
      mma_16x8x16<T>(sum, a, x.x, x.y);
      if (S::kRunsOn || (j + 1) % kSteps != 0 || (S::kFolds && j != 7)) continue;
      float2 scale = scales[S::kFolds ? 0 : own];
      if constexpr (!S::kFolds && kItems > 1) {
        scale.x = __shfl_sync(~0u, scale.x, from, 4);
        scale.y = __shfl_sync(~0u, scale.y, from, 4);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] = fmaf(i / 2 ? scale.y : scale.x, sum[i], total[i]);
    }
    x_ += kColumns * 2;
  }

 private:
  // scale: of all sums of the stage; pairs: s and m of groups as they are multiplied.
  template <Fold kFold, int kItems, int kMine>
  __device__ __forceinline__ void fold(uint32_t stage, float2& scale, uint32_t (&pairs)[kMine][2]) const {
    using Folds = Folding<T, S::kCodes, kFold>;
    const PackedWeight& w = p_.weight;
    const auto factors_of = [&](int n) {
      const int at = (threadIdx.x % 4 % kItems + 4 * n) * 32 + place_;
      return typename Folds::Factors(
          w, global_,
          {stage + S::kCodeBytes + at * bytes_of(w.scales_kind), stage + p_.supers_at + place_ * 2,
           stage + p_.minima_at + at * bytes_of(w.minima_kind), stage + p_.lows_at + place_ * 2});
    };
    float2 units = make_float2(1.0f, 1.0f);
    scale = make_float2(Folds::kUnit, Folds::kUnit);
    if (kIsHalf<T> && (is_of_bytes(kFold) || (kFold == Fold::kAny && !p_.has_units))) {
      const uint32_t of_256 = stage + place_ * 2;
      scale = Folds::units_of_256(of_256 + p_.supers_at, of_256 + p_.lows_at, global_);
      units = make_float2(inverse_of_power(scale.x), inverse_of_power(scale.y));
    } else if constexpr (kIsHalf<T>) {
      float2 most = factors_of(0).largest();
      if (kMine == 2) most = larger(most, factors_of(kMine - 1).largest());
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2)
        most = larger(most, make_float2(__shfl_xor_sync(~0u, most.x, mask), __shfl_xor_sync(~0u, most.y, mask)));
      most = make_float2(power_below(most.x), power_below(most.y));
      scale = make_float2(scale.x * most.x, scale.y * most.y);
      units = make_float2(inverse_of_power(most.x), inverse_of_power(most.y));
    }
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      const auto factors = factors_of(n);
      pairs[n][0] = factors.scales(units);
      pairs[n][1] = factors.minima(units);
    }
  }
  __device__ static float2 larger(float2 a, float2 b) { return make_float2(fmaxf(a.x, b.x), fmaxf(a.y, b.y)); }

  template <int kItems, int kMine>
  __device__ __forceinline__ void prepare(uint32_t stage, float2 (&scales)[kMine], uint32_t (&zeros)[kMine][2]) const {
    const ScaleKind kind = p_.weight.scales_kind;
    const int bytes = bytes_of(kind), c = threadIdx.x % 4 % kItems;
    RawFactors raw[kMine];
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      const int item = c + 4 * n;
      const uint32_t at = stage + S::kCodeBytes + (item * 32 + place_) * bytes;
      if (bytes == 2) {
        const uint32_t pair = load_shared_4(at);
        const float2 halves = unpack_pair<half>(pair), others = unpack_pair<bf16>(pair);
        scales[n] = kind == ScaleKind::kF16 ? halves : others;
      } else if (bytes == 4) {
        scales[n] = load_shared_float2(at);
      } else {
        raw[n].scale[0] = load_shared_2(at);
        if (has_supers(kind)) raw[n].super[0] = load_shared_4(stage + p_.supers_at + place_ * 2);
      }
      if constexpr (S::kSubtracts) {
        const uint32_t z = load_shared_2(stage + p_.minima_at + item * 32 + place_);
        const int more = 8 - static_cast<int>(p_.weight.offset);  // what a code is above the base
        zeros[n][0] = Code::zero_of(0, (z & 0xffu) + more);
        zeros[n][1] = Code::zero_of(1, (z >> 8) + more);
      }
    }
    if (bytes == 1) {
      float found[kMine][2];
      scales_of(found, raw, kind);
#pragma unroll
      for (int n = 0; n < kMine; ++n) scales[n] = make_float2(found[n][0], found[n][1]);
    }
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      scales[n] = make_float2(scales[n].x * global_, scales[n].y * global_);
      if constexpr (S::kCodes == CodeKind::kUint4) scales[n].y *= Code::kOfSecond;
    }
  }

  __device__ __forceinline__ void decode(uint32_t (&a)[4], int j) const {
    const auto& words = words_[j / 4];
    if constexpr (S::kSubtracts) {
      Code::fragment_less(a, words, j % 4, now_);
    } else if constexpr (S::kCodes == CodeKind::kUint4) {
      Code::fragment_in_place(a, words, j % 4);
    } else if constexpr (S::kCodes == CodeKind::kTable16) {
      Code::fragment_of(a, words, j % 4, entries.low, entries.high);
    } else {
      Code::fragment(a, words, j % 4, nullptr);
    }
  }

  const Problem& p_;
  const int place_;  // of its two rows among the factors of 32
  uint32_t x_;
  float global_;
  uint4 words_[2][Code::kPlanes];
  uint32_t now_[2];  // factors of the group that is decoded
};

// What a warp has of 16 rows of a map's weight.  Lanes of neighbouring rows exchange what makes pairs: those of even rows keep their
// first token, the others their second.
template <class T>
__device__ void write_own(const Problem& p, const float (&sums)[4], int row_block, int32_t row_of_tile,
                          int32_t weight) {
  const int lane = threadIdx.x % 32, odd = lane / 4 % 2;
  const int32_t row = __shfl_sync(~0u, row_of_tile, lane % 4 * 2 + odd);
  const float factor = row < 0 ? 0.0f : p.map.factor_of(row);
  T* const to = static_cast<T*>(p.out) + row * p.out_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float first = sums[2 * half], second = sums[2 * half + 1];
    const float other = __shfl_xor_sync(~0u, odd ? first : second, 4);
    float v[2] = {odd ? other : first, odd ? second : other};
    const int64_t n = int64_t{row_block} * 16 + half * 8 + lane / 8 * 2;
    const int rows = static_cast<int>(min(p.weight.n - n, int64_t{2}));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool has_bias = p.bias && i < rows;
      v[i] += has_bias ? to_float(static_cast<const T*>(p.bias)[weight * p.map.bias_stride + n + i]) : 0.0f;
      v[i] *= factor;
    }
    if (row < 0 || rows <= 0) continue;
    if (rows == 2 && reinterpret_cast<uintptr_t>(to + n) % 4 == 0) {
      *reinterpret_cast<uint32_t*>(to + n) = pack_pair<T>(v[0], v[1]);
    } else {
      to[n] = from_float<T>(v[0]);
      if (rows == 2) to[n + 1] = from_float<T>(v[1]);
    }
  }
}

// Adds up the sums [block of rows][segment][token][16] of segments, and writes rows of out: a warp for each block of rows.
template <class T>
__device__ void write(const Problem& p, uint32_t sums) {
  const int own = threadIdx.x / 32, token = threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 4;
  const int64_t n = (int64_t{blockIdx.x} * p.each + own) * 16 + row;
  const int rows = static_cast<int>(min(p.weight.n - n, int64_t{4}));
  if (own >= p.each || token >= p.tokens || rows <= 0) return;
  float4 sum{};
  for (int s = 0; s < 1 << p.segments_log2; ++s) {
    const float4 v = load_shared_float4(sums + (((own << p.segments_log2) + s) * kTokens + token) * 64 + row * 4);
    sum = s == 0 ? v : make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
  }
  const auto* const bias = static_cast<const T*>(p.bias);
  T* const to = static_cast<T*>(p.out) + token * p.out_stride + n;
  if (p.epilogue.any || bias || rows < 4 || reinterpret_cast<uintptr_t>(to) % 8 != 0) {
    finish_four<T>(p.epilogue, bias, sum, token, n, rows, p.out, p.out_stride);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair<T>(sum.x, sum.y), pack_pair<T>(sum.z, sum.w));
  }
}
#endif

template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, S::kBlocks)
    packed_gemm_few_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) uint8_t shared[];
  // A warp has a segment of a block of rows, or all of some, in turn.
  const int warp = threadIdx.x / 32, log2 = S::kMaps ? 0 : p.segments_log2, segment = warp & ((1 << log2) - 1);
  const int first = static_cast<int>(blockIdx.x) * p.each * p.turns + (warp >> log2);
  const int row_block = min(first, p.row_blocks - 1);
  const int blocks_end = min(static_cast<int>(blockIdx.x + 1) * p.each * p.turns, p.row_blocks);
  const auto begin_of = [&](int s) { return p.stages * s >> p.segments_log2; };
  const int begin = S::kMaps ? 0 : begin_of(segment);
  const int end = !S::kMaps ? begin_of(segment + 1) : first < blocks_end ? p.stages : 0;
  const uint32_t x = shared_address(shared);
  uint32_t ring = x + p.tokens * p.x_pitch + warp * kDepth * p.stage_bytes;
  have_ready(ring);
  int32_t row = -1, weight = 0;  // of out; of the tile
  if constexpr (S::kMaps) {
    begin_dependent();
    const int64_t at = int64_t{blockIdx.y} * kTokens;
    row = static_cast<int32_t>(TileRows::row_of_out(p.map, at + threadIdx.x % kTokens, p.num_rows));
    weight = p.map.weight_at(at, p.rows.tiles_of_block.quotient(static_cast<int>(blockIdx.y)));
    if (weight < 0) return;
  }
  const int64_t shift = S::kMaps ? weight * p.map.weight_stride : 0;
  Feed<S> feed(p, row_block, blocks_end, begin, end, ring, shift);
  const int last = (kDepth - 1) * p.stage_bytes;
  if constexpr (!S::kMaps) begin_dependent();
#pragma unroll 1
  for (int slot = 0; slot < kDepth - 1; ++slot) {
    feed.template next<S::kFolds>(slot * p.stage_bytes);
    if (slot == 0) copy_x<S>(p, x, row);  // of the second group
  }
  Multiplier<S> multiplier(p, row_block, x + begin * kColumns * 2, shift);
  cp_async_wait<kDepth - 3>();
  __syncthreads();
  const auto run = [&]<int kSteps, Fold kFold = Fold::kHalf>() {
    int free = last, at = 0;
    constexpr float unit = S::kRunsOn ? Folding<typename S::Element, S::kCodes, kFold>::kUnit : 1.0f;
    const auto multiply = [&](int from, int to) {
#pragma unroll 1
      for (int i = from; i < to; ++i) {
        cp_async_wait<kDepth - 2>();
        __syncwarp();  // all lanes have done with the stage before
        feed.template next<S::kFolds && kFold == Fold::kBytesMinima && kSteps == 1>(free);
        multiplier.template multiply<kSteps, kFold>(ring + at);
        free = at;
        at = at == last ? 0 : at + p.stage_bytes;
      }
    };
    if constexpr (!S::kMaps) {
      multiply(begin, end);
    } else {
#pragma unroll 1
      for (int block = first; block < blocks_end; block += kMapWarps) {
        float sums[4];
#pragma unroll 1
        for (int s = 0; s < 1 << p.segments_log2; ++s) {
          multiply(begin_of(s), begin_of(s + 1));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float total = unit * multiplier.total[i];
            sums[i] = s == 0 ? total : sums[i] + total;
            multiplier.total[i] = 0.0f;
          }
        }
        multiplier.rewind();
        write_own<typename S::Element>(p, sums, block, row, weight);
      }
    }
    if constexpr (S::kRunsOn)
      for (float& x : multiplier.total) x *= unit;
  };
  if constexpr (S::kFolds) {
    dispatch_fold<S::kCodes>(p.weight, p.steps, multiplier.entries.are_octets(), [&]<Fold kFold>() {
      if (p.steps == 2) return run.template operator()<2, kFold>();
      if (p.steps == 1) return run.template operator()<1, kFold>();
      if constexpr (!is_of_bytes(kFold)) {
        if (p.steps == 4) return run.template operator()<4, kFold>();
        run.template operator()<8, kFold>();
      }
    });
  } else {
    switch (p.steps) {
      case 8:
        run.template operator()<8>();
        break;
      case 4:
        run.template operator()<4>();
        break;
      case 2:
        run.template operator()<2>();
        break;
      default:
        run.template operator()<1>();
    }
  }
  if constexpr (S::kMaps) return;
  __syncthreads();  // all have done with x
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = threadIdx.x % 4 * 2 + i % 2, row = threadIdx.x % 32 / 4 + i / 2 * 8;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(x + ((warp * kTokens + token) * 16 + row) * 4),
                 "f"(multiplier.total[i])
                 : "memory");
  }
  __syncthreads();
  write<typename S::Element>(p, x);
#endif
}

template <class S>
bool launch_shape(const PackedGemmArgs& args, int segments, const Launch& launch) {
  const PackedWeight& w = args.weight;
  const int64_t row_blocks = (w.n + 15) / 16, sms = num_sms(launch.device);
  Problem p{.weight = w,
            .x = args.x,
            .bias = args.bias,
            .out = args.out,
            .epilogue = args.epilogue,
            .x_stride = args.x_stride,
            .out_stride = args.out_stride,
            .stages_of_group = static_cast<int>(w.group_size > kColumns ? w.group_size / kColumns : 1),
            .tokens = S::kMaps ? kTokens : static_cast<int>(args.num_rows),
            .units = static_cast<int>(w.padded_k / PackedWeight::kUnit),
            .groups = static_cast<int>(w.groups()),
            .blocks = static_cast<int>((w.padded_k + 255) / 256),
            .stages = static_cast<int>(w.padded_k / kColumns),
            .steps = static_cast<int>(w.group_size < kColumns ? w.group_size / 16 : 8),
            .segments_log2 = segments == 4 ? 2 : 1,
            .row_blocks = static_cast<int>(row_blocks),
            .each = static_cast<int>((row_blocks + sms - 1) / sms),
            .x_pitch = 0,
            .stage_bytes = 0,
            .minima_at = 0,
            .supers_at = 0,
            .lows_at = 0,
            .has_units = false,
            .map = args.map,
            .rows = TileRows(args.map, kTokens),
            .num_rows = args.num_rows,
            .turns = 1};
  const int items = 8 / p.steps;
  p.has_units = !are_bytes(w, p.steps);
  p.minima_at = S::kCodeBytes + items * 32 * bytes_of(w.scales_kind);
  p.supers_at = p.minima_at + items * 32 * bytes_of(w.minima_kind);
  p.lows_at = p.supers_at + 64 * has_supers(w.scales_kind);
  p.stage_bytes = p.lows_at + 64 * (w.lows != nullptr);
  // A copy for each lane, and one of 256 columns.
  if (p.stage_bytes - S::kCodeBytes > 32 * 16 && (!S::kFolds || p.supers_at - S::kCodeBytes != 32 * 16)) return false;
  p.x_pitch = p.stages * kColumns * 2 + 32;  // so that lanes of neighbouring tokens read from other banks
  int64_t tiles = 1;
  if constexpr (S::kMaps) {
    constexpr int64_t kLeastStages = 150;  // of an SM: fewer are quicker where warps share rows (packed_gemm_sm90.cuh)
    tiles = args.map.num_blocks * (args.map.block_size / kTokens);
    if (tiles > 65535 || row_blocks * tiles * p.stages < kLeastStages * sms) return false;
    p.each = kMapWarps;
    if (row_blocks * tiles >= 2 * kMapWarps * S::kBlocks * sms) p.turns = 2;
  }
  while (!S::kMaps && p.each * segments > kMostWarps) p.each = (p.each + 1) / 2;
  const int warps = S::kMaps ? kMapWarps : p.each * segments;
  int bytes = p.tokens * p.x_pitch + warps * kDepth * p.stage_bytes;
  if (bytes > (S::kMaps ? kShared / S::kBlocks : kShared)) return false;
  if (bytes < warps * kTokens * 64) bytes = warps * kTokens * 64;
  const int64_t each = int64_t{p.each} * p.turns;
  launch_dependent_shared(packed_gemm_few_kernel<S>,
                          dim3(static_cast<unsigned>((row_blocks + each - 1) / each), static_cast<unsigned>(tiles)),
                          dim3(static_cast<unsigned>(warps * 32)), static_cast<size_t>(bytes), launch, "packed_gemm",
                          p);
  return true;
}

}  // namespace packed_gemm_few

bool packed_gemm_few_sm90(const PackedGemmArgs& args, int segments, const Launch& launch) {
  using namespace packed_gemm_few;
  const PackedWeight& w = args.weight;
  const TileMap& map = args.map;
  if (map.rows ? (map.block_size & -map.block_size) != kTokens || args.epilogue.any : args.num_rows > kTokens)
    return false;
  const bool is_plain = args.x_step == 1 && w.k % 8 == 0 &&
                        ((args.num_rows == 1 && !map.rows) || args.x_stride % 8 == 0) && w.k > 0 && w.k < (1 << 16) &&
                        reinterpret_cast<uintptr_t>(args.x) % 16 == 0;
  const bool has_stages = w.padded_k % kColumns == 0 && (w.group_size % kColumns == 0 || kColumns % w.group_size == 0);
  if (w.columns || !is_plain || !has_stages) return false;
  bool was_launched = false;
  dispatch<half, bf16>(args.dtype, [&]<class T>() {
    const auto run = [&]<CodeKind kKind, Minima kMinima = Minima::kNone>() {
      // Of experts int4, and of what is folded that with scales of float16 alone.
      constexpr bool kHasMaps = kKind == CodeKind::kUint4 && (kMinima != Minima::kFolded || !kIsHalf<T>);
      if (!map.rows)
        was_launched = launch_shape<Shape<T, kKind, kMinima, false>>(args, segments, launch);
      else if constexpr (kHasMaps)
        was_launched = (kMinima != Minima::kFolded || (w.scales_kind == ScaleKind::kF16 && !w.minima)) &&
                       launch_shape<Shape<T, kKind, kMinima, true>>(args, segments, launch);
    };
    const bool is_uint4 = w.codes_kind == CodeKind::kUint4;
    if (is_folded<T>(w, map.rows)) {
      if (is_uint4) return run.template operator()<CodeKind::kUint4, Minima::kFolded>();
      if (w.codes_kind == CodeKind::kUint8) return run.template operator()<CodeKind::kUint8, Minima::kFolded>();
      return run.template operator()<CodeKind::kTable16, Minima::kFolded>();
    }
    if (is_uint4 && w.minima_kind == MinimumKind::kZero)
      return run.template operator()<CodeKind::kUint4, Minima::kSubtracted>();
    if (w.minima_kind != MinimumKind::kNone) return;
    if (is_uint4) return run.template operator()<CodeKind::kUint4>();
    if (w.codes_kind == CodeKind::kUint8) return run.template operator()<CodeKind::kUint8>();
    if (w.codes_kind == CodeKind::kE4M3) return run.template operator()<CodeKind::kE4M3>();
    // packed_gemm_sm90.cu multiplies those with scales of e4m3, and some with e8m0, in another way
    if (w.scales_kind != ScaleKind::kE4M3 && w.scales_kind != ScaleKind::kE8M0)
      return run.template operator()<CodeKind::kTable16>();
  });
  return was_launched;
}

}  // namespace pykv
