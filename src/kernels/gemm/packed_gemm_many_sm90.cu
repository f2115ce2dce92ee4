// packed_gemm of many tokens on Hopper (sm_90a), of weights that are multiplied by the scales of their groups as they are decoded, so that
// one sum runs on through a segment of the columns.  The same bits as from packed_gemm_sm90.cuh.
//
// A block computes 128 rows of the weight times up to 256 tokens of x: y^T = w x^T.  Eight warps decode units of 64 columns, once for
// all of these tokens, to shared memory, where both operands of the matrix units lie, and ask for x.  Two warpgroups multiply, and do
// nothing else: what they hold are the sums of a segment and those of all segments so far, which are in shared memory where
// registers do not hold them.  Blocks go from tile to tile, and results are written by the copy engine while the next tile is decoded.
//
// Tokens may lie in groups, each of which has a weight of its own, as those of experts do.  All tokens, or those of a group, are cut into
// tiles of nearly the same height: x is asked for by the height, for what lies beyond x takes the copy engine longer than x.  Of groups,
// products are as wide as a tile asks for: a tile of few tokens takes half as long as a whole one, for it is decoded.
//
// Four warps would decode a unit in more time than its products take: an instruction of a warp takes four to five cycles beside the
// matrix units, but those of two warps as long together (docs/log/packed_gemm.md).
#include <algorithm>

#include "cuda/cluster.cuh"
#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"
#include "cuda/divider.cuh"
#include "cuda/silu.cuh"
#include "cuda/straight_ring.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma.cuh"
#include "gemm/packed_codes.cuh"
#include "gemm/packed_gemm_many_sm90.h"

namespace pykv {
namespace packed_many_sm90 {

// Of a tile; columns of a stage; bytes of a line of both operands.
inline constexpr int kRows = 128, kTokens = 256, kUnit = PackedWeight::kUnit, kLine = 128;
// Sums of a lane; of those of all segments so far, in shared memory.
inline constexpr int kSums = kTokens / 2, kMostParked = 76;
inline constexpr int kThreads = 4 * 128;
inline constexpr int kPiece = 32;  // tokens that a warpgroup writes at once, to one of two places
inline constexpr int kStages = 3;
inline constexpr int kOfBox = kTokens / 8;  // tokens whose x a decoding warp asks for, where there are groups
inline constexpr int kPrefetch = 4;         // units of groups, whose codes are brought to the L2 before they are loaded
inline constexpr uint32_t kXBytes = kTokens * kLine, kWBytes = kRows * kLine, kPieceBytes = kPiece * kLine;
inline constexpr uint32_t kParkedBytes = 128 * kMostParked * 4;  // of a warpgroup; results are written from there
// In shared memory.
inline constexpr uint32_t kWAt = kStages * kXBytes, kParkedAt = kWAt + kStages * kWBytes,
                          kFullAt = kParkedAt + 2 * kParkedBytes, kEmptyAt = kFullAt + kStages * 8,
                          kFactorsAt = kEmptyAt + kStages * 8;
static_assert(kFactorsAt % 16 == 0);
inline constexpr int kMostPieces = 32;  // of 16 bytes, of the factors of a unit's 32 rows
inline constexpr uint32_t kMostShared = 227 << 10;
static_assert(2 * kPieceBytes <= kParkedBytes);

// Tokens have one weight; or groups of them lie one behind another, each with a weight of its own, and out is silu_and_mul of the
// product, or not.
enum class Out { kOfOne, kOfGroups, kOfGroupsActivated };
// kScales: codes times scales are exact; otherwise they are rounded.
template <class T, CodeKind kKind_, bool kScales_, Out kOut>
struct Shape {
  static constexpr bool kGroups = kOut != Out::kOfOne, kActivates = kOut == Out::kOfGroupsActivated;
  using Element = T;
  using Code = Codes<T, kKind_>;
  static constexpr CodeKind kKind = kKind_;
  static constexpr bool kScales = kScales_;
  // Registers.
  static constexpr int kOfMultipliers = Code::kPlanes == 2 ? 192 : 200, kOfDecoders = 256 - kOfMultipliers;
};

struct Problem {
  CUtensorMap x, out;
  PackedWeight weight;
  const void* bias;
  Divider units_by;  // of 64 columns, of a group
  uint32_t row_tiles, token_tiles;
  int tokens;                     // of a tile, a multiple of kPiece; not of groups
  int units, groups, blocks;      // of 64 columns; of columns; of 256 columns
  int segments;                   // of the columns, whose sums are added in order
  int begins[kMostSegments + 1];  // in units
  int steps, items;               // of 16 columns of a group in a unit; groups of a unit
  int pieces;                     // of the factors of a unit
  int minima_at, supers_at, lows_at;
  // Of groups.
  CUtensorMap out_row;          // of one token
  const int32_t* group_begins;  // [token_groups + 1]
  int token_groups;
  int bands_of_gates;                  // of 32 rows, which those of ups follow
  int64_t weight_stride, bias_stride;  // bytes, elements
  uint32_t tables_at;  // in shared memory, [token_groups + 1] each: tiles of tokens before a group, and where it begins

  __device__ uint32_t tiles() const { return row_tiles * token_tiles; }
  // Tiles of eight tiles of tokens pass over the weight together: they and it stay in the L2.
  __device__ void place(uint32_t tile, int& row_tile, int& token_tile) const {
    constexpr uint32_t kTogether = 8;
    const uint32_t together = row_tiles * kTogether, pass = tile / together, in_pass = tile % together;
    const uint32_t width = min(token_tiles - pass * kTogether, kTogether);
    row_tile = static_cast<int>(in_pass / width);
    token_tile = static_cast<int>(pass * kTogether + in_pass % width);
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Tells a barrier of bytes to come, which is no arrival.
__device__ inline void expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Writes the tables of groups, by all threads.
__device__ inline void make_tables(const Problem& p, uint32_t shared) {
  const uint32_t tiles = shared + p.tables_at, begins = tiles + (p.token_groups + 1) * 4;
  const auto put = [](uint32_t at, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
  };
  for (int i = threadIdx.x; i <= p.token_groups; i += kThreads) put(begins + i * 4, p.group_begins[i]);
  __syncthreads();
  if (threadIdx.x >= 32) return;
  uint32_t before = 0;
#pragma unroll 1
  for (int first = 0; first <= p.token_groups; first += 32) {
    const int i = first + static_cast<int>(threadIdx.x);
    uint32_t own = 0;
    if (i < p.token_groups)
      own = (load_shared_4(begins + i * 4 + 4) - load_shared_4(begins + i * 4) + kTokens - 1) / kTokens;
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t lower = __shfl_up_sync(~0u, sum, step);
      if (static_cast<int>(threadIdx.x) >= step) sum += lower;
    }
    if (i <= p.token_groups) put(tiles + i * 4, before + sum - own);
    before += __shfl_sync(~0u, sum, 31);
  }
}

// The units of a block's tiles, one after another.
template <class S>
class Cursor {
 public:
  int unit = 0, row_tile = 0, token = 0, count = kTokens, group = 0;  // token: the first one

  __device__ Cursor(const Problem& p, uint32_t shared) : p_(p), tables_(shared + p.tables_at), tile_(blockIdx.x) {
    if constexpr (S::kGroups) tiles_ = __shfl_sync(~0u, load_shared_4(tables_ + p.token_groups * 4), 0) * p.row_tiles;
    begin();
  }
  __device__ bool inside() const { return tile_ < (S::kGroups ? tiles_ : p_.tiles()); }
  // Whether it came to another tile.
  __device__ bool advance() {
    if (++unit < p_.units) return false;
    unit = 0;
    next_tile();
    return true;
  }
  __device__ void next_tile() {
    tile_ += gridDim.x;
    begin();
  }

 private:
  __device__ void begin() {
    if (!inside()) return;
    if constexpr (S::kGroups) {
      const uint32_t of_tokens = tile_ / p_.row_tiles;
      uint32_t first = load(group), end = load(group + 1);
      while (end <= of_tokens) {
        ++group;
        first = end;
        end = load(group + 1);
      }
      const uint32_t in_group = tile_ - first * p_.row_tiles, tiles = end - first;
      row_tile = static_cast<int>(in_group / tiles);
      const int own = static_cast<int>(in_group % tiles), begin = load(p_.token_groups + 1 + group),
                size = load(p_.token_groups + 2 + group) - begin, each = (size + tiles - 1) / tiles;
      token = begin + own * each;
      count = min(size - own * each, each);
    } else {
      int token_tile;
      p_.place(tile_, row_tile, token_tile);
      token = token_tile * p_.tokens;
      count = p_.tokens;
    }
  }
  // From a lane, so that the compiler sees that all have the same.
  __device__ int load(int i) const { return __shfl_sync(~0u, load_shared_4(tables_ + i * 4), 0); }

  const Problem& p_;
  const uint32_t tables_;
  uint32_t tile_, tiles_ = 0;
};

// Codes that are multiplied by their scales without an error: what packed_gemm_sm90.cuh does of Minima::kScaled, as Folding.
template <class T>
struct Scaling {
  static constexpr bool kAdds = false;
  struct Factors {
    float2 scale;

    __device__ Factors(const PackedWeight& w, float, const FactorPlaces& at)
        : scale(load_two_scales<Fold::kAny, false>(at.scales, at.supers, w.scales_kind)) {}
    __device__ uint32_t scales(float2) const { return pack_pair<T>(scale.x, scale.y); }
    __device__ uint32_t minima(float2) const { return 0; }
  };
  __device__ static uint32_t middle(uint32_t) { return 0; }
  __device__ static void fragment(uint32_t (&a)[4], const uint4 (&words)[1], int j, uint32_t scales, uint32_t,
                                  const EntriesOf<T, CodeKind::kTable16>&) {
    Codes<T, CodeKind::kTable16>::fragment_scaled(a, words, j, {twice(scales, 0), twice(scales, 1)});
  }
};

// A warp decodes half of the columns of 32 rows of a unit: lane 16 b + 8 c + g those codes of rows g and 8 + g of the b-th sixteen rows
// that lanes 2 c and 2 c + 1 of a fragment have (packed_weight.h).  What it decodes in the next two units is on its way meanwhile:
// codes to registers, factors, a piece by each lane, to shared memory.
template <class S>
class Decoder {
  using T = typename S::Element;
  static constexpr int kPlanes = S::Code::kPlanes;

 public:
  // warp: of eight
  __device__ Decoder(const Problem& p, uint32_t shared, int warp)
      : p_(p),
        shared_(shared),
        factors_(shared + kFactorsAt + warp * 2 * p.pieces * 16),
        warp_(warp % 4),
        half_(warp / 4),
        b_(threadIdx.x % 32 / 16),
        c_(threadIdx.x % 16 / 8),
        g_(threadIdx.x % 8),
        entries_(reinterpret_cast<const float*>(p.weight.data + PackedWeight::kTableAt)),
        ahead_(p, shared) {
    if constexpr (!S::kGroups) global_ = global_of(0);
  }

  __device__ bool are_octets() const { return entries_.are_octets(); }

  // kBytes: factors are bytes
  template <class Folds, bool kBytes>
  __device__ __forceinline__ void run() {
    if (S::kGroups && !ahead_.inside()) return;  // there are fewer tiles than there might be
    find();
    enter();
    load(words_[0], 0);
    load(words_[1], 1);
    Cursor<S> at(p_, shared_);
#pragma unroll 1
    while (true) {
      run_unit<Folds, kBytes>(words_[0], 0, at);
      if (at.advance()) enter();
      if (!at.inside()) break;
      run_unit<Folds, kBytes>(words_[1], 1, at);
      if (at.advance()) enter();
      if (!at.inside()) break;
    }
  }

 private:
  using Words = uint2[2][kPlanes];  // of two lanes of a fragment

  // The tile that is loaded: it has more units than are loaded ahead.
  __device__ void enter() {
    if constexpr (S::kGroups) global_ = next_global_;
  }

  // Brings codes of units behind these to the L2: those of a group are read but once or twice.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void prefetch_codes(const uint8_t* from) const {
#pragma unroll
    for (int unit = kFirst; unit < kFirst + kCount; ++unit)
#pragma unroll
      for (int n = 0; n < 2 * kPlanes; ++n)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + unit * (kPlanes * 512) + n % 2 * 128 + n / 2 * 512));
  }
  // shift: bytes from p_.weight to the one that is meant
  __device__ float global_of(int64_t shift) const {
    return __ldg(reinterpret_cast<const float*>(p_.weight.data + shift + PackedWeight::kGlobalScaleAt)) *
           entries_.unit();
  }
  // Where what this lane copies of a tile begins.
  __device__ void find() {
    const PackedWeight& w = p_.weight;
    const int64_t band = min(S::kActivates ? ahead_.row_tile * 2 + warp_ % 2 + warp_ / 2 * p_.bands_of_gates
                                           : ahead_.row_tile * (kRows / 32) + warp_,
                             static_cast<int>(w.padded_n() / 32) - 1);
    const int64_t shift = S::kGroups ? ahead_.group * p_.weight_stride : 0;
    codes_ = w.codes + shift + (band * 2 + b_) * p_.units * (kPlanes * 512) + (c_ * 16 + g_) * 16 + half_ * 8;
    // Of groups [band][group][32], or of 256 columns [band][block][32].
    int piece = threadIdx.x % 32;
    const int of_scales = p_.items * 2 * bytes_of(w.scales_kind), of_minima = p_.items * 2 * bytes_of(w.minima_kind);
    from_ = nullptr;
    is_of_256_ = piece >= of_scales + of_minima;
    if (piece < of_scales) {
      step_ = of_scales * 16;
      from_ = w.scales + band * p_.groups * 32 * bytes_of(w.scales_kind) + piece * 16;
    } else if (piece < of_scales + of_minima) {
      step_ = of_minima * 16;
      from_ = w.minima + band * p_.groups * 32 * bytes_of(w.minima_kind) + (piece - of_scales) * 16;
    } else if (piece < p_.pieces) {
      piece -= of_scales + of_minima;
      step_ = 64;
      from_ = (w.supers && piece < 4 ? w.supers : w.lows) + band * p_.blocks * 64 + piece % 4 * 16;
    }
    if constexpr (S::kGroups) {
      if (from_) from_ += shift;
      next_global_ = global_of(shift);
      prefetch_codes<0, kPrefetch>(codes_);
    }
  }
  // The next unit.
  __device__ __forceinline__ void load(Words& words, int slot) {
    if (ahead_.inside()) {
      const int unit = ahead_.unit, at = is_of_256_ ? unit / 4 : p_.steps < 4 ? unit : p_.units_by.quotient(unit);
      if (from_) cp_async_16(slot_at(slot) + threadIdx.x % 32 * 16, from_ + int64_t{at} * step_);
      const uint8_t* const from = codes_ + unit * (kPlanes * 512);
      if constexpr (S::kGroups) prefetch_codes<kPrefetch, 1>(from);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
          words[n][plane] = __ldg(reinterpret_cast<const uint2*>(from + plane * 512 + n * 128));
      if (ahead_.advance() && ahead_.inside()) find();
    }
    cp_async_commit();
  }
  __device__ uint32_t slot_at(int slot) const { return factors_ + slot * p_.pieces * 16; }

  // Of a group of a unit, for rows g and 8 + g, as Folding::fragment() wants them.
  template <class Folds, bool kBytes>
  __device__ __forceinline__ void fold(uint32_t (&own)[2], int slot, int item) const {
    const PackedWeight& w = p_.weight;
    const uint32_t from = slot_at(slot);
    const int row = 4 * g_ + 2 * b_, at = item * 32 + row;
    const typename Folds::Factors found(
        w, global_,
        {from + at * (kBytes ? 1 : bytes_of(w.scales_kind)), from + p_.supers_at + row * 2,
         from + p_.minima_at + at * (kBytes ? 1 : bytes_of(w.minima_kind)), from + p_.lows_at + row * 2});
    const float2 one = make_float2(1.0f, 1.0f);
    own[0] = found.scales(one);
    own[1] = found.minima(one);
  }

  template <class Folds, bool kBytes>
  __device__ __forceinline__ void run_unit(Words& given, int slot, const Cursor<S>& at) {
    cp_async_wait<1>();
    __syncwarp();
    // Where groups have 16 columns, two lanes of a row have one each.
    uint32_t own[2];
    const bool are_small = p_.steps == 1;
    fold<Folds, kBytes>(own, slot, are_small ? 2 * half_ + c_ : p_.steps == 2 ? half_ : 0);
    const uint32_t stage = turn_.stage, full = shared_ + kFullAt + stage * 8;
    wait_for(shared_ + kEmptyAt + stage * 8, turn_.parity ^ 1);
    if constexpr (S::kGroups) {
      const int first = (half_ * 4 + warp_) * kOfBox;
      if (threadIdx.x % 32 == 0 && first < at.count) {
        expect(full, kOfBox * kLine);
        copy_box(shared_ + stage * kXBytes + first * kLine, p_.x, {at.unit * kLine, at.token + first}, full);
      }
    } else if (warp_ == 0 && half_ == 0 && threadIdx.x % 32 == 0) {
      cluster_expect(full, p_.tokens * kLine);
      copy_box(shared_ + stage * kXBytes, p_.x, {at.unit * kLine, at.token}, full);
    }
    __syncwarp();
    turn_.next();
    const uint32_t to =
        shared_ + kWAt + stage * kWBytes + (warp_ * 32 + b_ * 16 + g_) * kLine + (c_ ^ g_ ^ 4 * half_) * 16;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int from = are_small ? b_ * 16 + j * 8 + g_ : threadIdx.x % 32;
      const uint32_t scale = __shfl_sync(~0u, own[0], from);
      const uint32_t minimum = Folds::kAdds ? __shfl_sync(~0u, own[1], from) : Folds::middle(scale);
      uint32_t a[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint4 words[kPlanes];
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
          words[plane] = make_uint4(given[n][plane].x, given[n][plane].y, 0, 0);
        Folds::fragment(a[n], words, j, scale, minimum, entries_);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_shared((to ^ j * 32) + h * 8 * kLine, make_uint4(a[0][h], a[0][2 + h], a[1][h], a[1][2 + h]));
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
    load(given, slot);
  }

  const Problem& p_;
  const uint32_t shared_, factors_;
  const int warp_, half_, b_, c_, g_;
  const EntriesOf<T, S::kKind> entries_;
  StraightTurn<kStages> turn_;
  Cursor<S> ahead_;  // what is loaded next
  const uint8_t *codes_, *from_;
  int step_;
  bool is_of_256_;
  float global_, next_global_;
  Words words_[2];
};

template <class S>
class Multiplier {
  using T = typename S::Element;

 public:
  // warp: of eight
  __device__ Multiplier(const Problem& p, uint32_t shared, int warp)
      : p_(p), shared_(shared), group_(warp / 4), warp_(warp), parked_(shared + kParkedAt + warp / 4 * kParkedBytes) {}

  // unit: what sums are multiplied by
  __device__ __forceinline__ void run(float unit) {
#pragma unroll 1
    for (Cursor<S> at(p_, shared_); at.inside(); at.next_tile()) {
      if constexpr (S::kScales)
        unit = __ldg(reinterpret_cast<const float*>(p_.weight.data + (S::kGroups ? at.group * p_.weight_stride : 0) +
                                                    PackedWeight::kGlobalScaleAt));
      if constexpr (S::kGroups) {
        if (at.count > 192)
          run_tile<128, 128>(at, unit);
        else if (at.count > 144)
          run_tile<128, 64>(at, unit);
        else if (at.count > 128)
          run_tile<128, 16>(at, unit);
        else if (at.count > 64)
          run_tile<128, 0>(at, unit);
        else if (at.count > 32)
          run_tile<64, 0>(at, unit);
        else
          run_tile<32, 0>(at, unit);
      } else {
        run_tile<128, 128>(at, unit);
      }
    }
    if (writes()) wait_until_written();  // shared memory has to stay until it has been read
  }

 private:
  template <int kFirst, int kSecond>
  __device__ __forceinline__ void run_tile(const Cursor<S>& at, float unit) {
    bool has_total = false;
#pragma unroll 1
    for (int segment = 0; segment < p_.segments; ++segment) {
      const int count = p_.begins[segment + 1] - p_.begins[segment];
      if (count == 0) continue;
      multiply<kFirst, kSecond>(count);
      scale(unit);
      if (has_total) take_total<kFirst + kSecond>();
      if (segment + 1 < p_.segments) keep_total<kFirst + kSecond>();
      has_total = true;
    }
    store<kFirst + kSecond>(at);
  }

  // A warpgroup, or both.
  __device__ void meet() const {
    if (S::kActivates)
      named_barrier_sync(3, 256);
    else
      named_barrier_sync(1 + group_, 128);
  }
  // Who asks the copy engine: of groups a warp, whose lanes write a row each where a tile ends.
  __device__ bool writes() const { return S::kGroups ? threadIdx.x % 128 < 32 : leads(); }
  __device__ bool leads() const { return threadIdx.x % 128 == 0; }
  __device__ static void wait_until_written() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

  __device__ float& sum(int i) { return sum_[i / (kSums / 2)][i % (kSums / 2)]; }
  __device__ void scale(float unit) {
    if (unit == 1.0f) return;
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum(i) = __fmul_rn(unit, sum(i));
  }

  __device__ uint32_t own_place(int i) const { return parked_ + i / 4 * (128 * 16) + threadIdx.x % 128 * 16; }

  // Sums of the segments so far: what registers do not hold lies where results are written from.
  template <int kWidth>
  __device__ void keep_total() {
    constexpr int kSums = kWidth / 2, kParked = std::min(kSums, kMostParked);
    if (writes()) wait_until_written();
    named_barrier_sync(1 + group_, 128);
#pragma unroll
    for (int i = 0; i < kParked; i += 4)
      store_shared(own_place(i), make_uint4(__float_as_uint(sum(i)), __float_as_uint(sum(i + 1)),
                                            __float_as_uint(sum(i + 2)), __float_as_uint(sum(i + 3))));
#pragma unroll
    for (int i = kParked; i < kSums; ++i) total_[i - kParked] = sum(i);
  }
  template <int kWidth>
  __device__ void take_total() {
    constexpr int kSums = kWidth / 2, kParked = std::min(kSums, kMostParked);
#pragma unroll
    for (int i = 0; i < kParked; i += 4) {
      const float4 v = load_shared_float4(own_place(i));
      sum(i) = __fadd_rn(v.x, sum(i));
      sum(i + 1) = __fadd_rn(v.y, sum(i + 1));
      sum(i + 2) = __fadd_rn(v.z, sum(i + 2));
      sum(i + 3) = __fadd_rn(v.w, sum(i + 3));
    }
#pragma unroll
    for (int i = kParked; i < kSums; ++i) sum(i) = __fadd_rn(total_[i - kParked], sum(i));
  }

  __device__ void release(uint32_t stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_ + kEmptyAt + stage * 8);
  }

  // Of kFirst tokens and the kSecond that follow.
  template <int kFirst, int kSecond>
  __device__ __forceinline__ void begin(bool add) {
    wait_for(shared_ + kFullAt + turn_.stage * 8, turn_.parity);
    // What decoders have stored.  A fence of theirs would wait for what they load.
    fence_async_proxy();
    const uint64_t w = wgmma_matrix(shared_ + kWAt + turn_.stage * kWBytes + group_ * 64 * kLine, 8 * kLine);
    const uint64_t x = wgmma_matrix(shared_ + turn_.stage * kXBytes, 8 * kLine);
    wgmma_begin();
    // Half of the tokens at once: ptxas refuses more, for 512 threads have 128 registers before they share them out.
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      Wgmma<T, kFirst>::ss(reinterpret_cast<float (&)[kFirst / 2]>(sum_[0]), wgmma_further(w, 32 * j),
                           wgmma_further(x, 32 * j), j > 0 || add);
      if constexpr (kSecond != 0)
        Wgmma<T, kSecond>::ss(reinterpret_cast<float (&)[kSecond / 2]>(sum_[1]), wgmma_further(w, 32 * j),
                              wgmma_further(x, 32 * j + kFirst * kLine), j > 0 || add);
    }
    wgmma_commit();
  }

  // So many units.
  template <int kFirst, int kSecond>
  __device__ __forceinline__ void multiply(int count) {
    wgmma_pin(sum_);
    begin<kFirst, kSecond>(false);
    // Of narrow products a free place in the ring is worth more than that they overlap.
    constexpr bool kWaits = kFirst + kSecond <= 192;
#pragma unroll 1
    for (int unit = 1; unit < count; ++unit) {
      const uint32_t before = turn_.stage;
      turn_.next();
      if constexpr (kWaits) {
        wgmma_wait<0>();
        release(before);
      }
      begin<kFirst, kSecond>(true);
      if constexpr (!kWaits) {
        wgmma_wait<1>();
        release(before);
      }
    }
    wgmma_wait<0>();
    wgmma_pin(sum_);
    release(turn_.stage);
    turn_.next();
  }

  // By the copy engine, which leaves out what is outside: 64 rows of the weight and some tokens at once.
  template <int kWidth>
  __device__ __forceinline__ void store(const Cursor<S>& at) {
    const int lane = threadIdx.x % 32, column = S::kActivates ? at.row_tile * 64 : at.row_tile * kRows + group_ * 64;
    const int first_row = S::kActivates ? column + group_ * p_.bands_of_gates * 32 : column;
    const int line = lane / 16 * 8 + lane % 8, chunk = warp_ % 4 * 2 + lane / 8 % 2;
    float bias[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = first_row + warp_ % 4 * 16 + i * 8 + lane / 4;
      if (p_.bias && own < p_.weight.n)
        bias[i] = to_float(static_cast<const T*>(p_.bias)[at.group * p_.bias_stride + own]);
    }
#pragma unroll
    for (int piece = 0; piece < (kWidth + kPiece - 1) / kPiece; ++piece) {
      if (piece * kPiece >= at.count) break;
      const uint32_t to = parked_ + piece % 2 * kPieceBytes;
      if (writes()) {
        if (piece == 0)
          wait_until_written();
        else
          asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      }
      meet();
#pragma unroll
      for (int sixteen = 0; sixteen < kPiece; sixteen += 16) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int first = (piece * kPiece + sixteen) / 2 + 2 * i;
          pairs[i] = pack_pair<T>(sum(first) + bias[i % 2], sum(first + 1) + bias[i % 2]);
        }
        store_transposed(to + (sixteen + line) * kLine + ((chunk ^ line % 8) << 4), pairs);
      }
      if constexpr (S::kActivates) {
        meet();
        const uint32_t gates = to - group_ * kParkedBytes + threadIdx.x * 16;
        const uint4 gate = load_shared_16(gates), up = load_shared_16(gates + kParkedBytes);
        uint4 result;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          using Two = Vec<T, 2>;
          const Two two = silu_and_mul(reinterpret_cast<const Two&>(reinterpret_cast<const uint32_t (&)[4]>(gate)[i]),
                                       reinterpret_cast<const Two&>(reinterpret_cast<const uint32_t (&)[4]>(up)[i]));
          reinterpret_cast<uint32_t (&)[4]>(result)[i] = reinterpret_cast<const uint32_t&>(two);
        }
        store_shared(gates, result);
      }
      fence_async_proxy();
      meet();
      if (S::kActivates && group_ != 0) continue;
      const int token = at.token + piece * kPiece, left = at.count - piece * kPiece;
      if (!S::kGroups || left >= kPiece) {
        if (leads()) store_box(p_.out, {column * 2, token}, to);
      } else if (writes()) {  // the rows that follow are others'
        if (lane < left) store_box(p_.out_row, {column * 2, token + lane}, to + lane * kLine);
      }
    }
  }

  const Problem& p_;
  const uint32_t shared_;
  const int group_, warp_;
  const uint32_t parked_;
  StraightTurn<kStages> turn_;
  float sum_[2][kSums / 2], total_[kSums - kMostParked];
};

// Calls with.template operator()<Folding, whether factors are bytes>().
template <class S, class With>
__device__ __forceinline__ void dispatch_folding(const Problem& p, bool are_octets, With with) {
  if constexpr (S::kScales) {
    with.template operator()<Scaling<typename S::Element>, true>();
  } else {
    dispatch_fold<S::kKind>(p.weight, p.steps, are_octets, [&]<Fold kFold>() __attribute__((always_inline)) {
      with.template operator()<Folding<typename S::Element, S::kKind, kFold>, is_of_bytes(kFold)>();
    });
  }
}
#endif

template <class S>
__global__ void __launch_bounds__(kThreads, 1) packed_gemm_many_sm90_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t shared = shared_address(memory);
  have_ready(shared);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared + kFullAt + i * 8, S::kGroups ? 8 : 1 + 8);
      mbarrier_init(shared + kEmptyAt + i * 8, 8);
    }
    fence_async_proxy();
    prefetch_map(p.x);
    prefetch_map(p.out);
  }
  begin_dependent();
  if constexpr (S::kGroups) make_tables(p, shared);
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp >= 8) {
    give_registers<S::kOfDecoders>();
    Decoder<S> decoder(p, shared, warp - 8);
    dispatch_folding<S>(p, decoder.are_octets(), [&]<class Folds, bool kBytes>() __attribute__((always_inline)) {
      decoder.template run<Folds, kBytes>();
    });
  } else {
    take_registers<S::kOfMultipliers>();
    float unit = 1.0f;
    if constexpr (!S::kScales) {
      const EntriesOf<typename S::Element, S::kKind> entries(
          reinterpret_cast<const float*>(p.weight.data + PackedWeight::kTableAt));
      dispatch_fold<S::kKind>(p.weight, p.steps, entries.are_octets(),
                              [&]<Fold kFold>() { unit = Folding<typename S::Element, S::kKind, kFold>::kUnit; });
    }
    Multiplier<S>(p, shared, warp).run(unit);
  }
#endif
}

// asks: launches nothing, only says whether it would.
template <class S>
bool launch_shape(const PackedGemmArgs& args, const TokenGroups& groups, int segments, bool asks,
                  const Launch& launch) {
  using T = typename S::Element;
  const PackedWeight& w = args.weight;
  const int64_t x_stride = args.num_rows > 1 ? args.x_stride : (w.k + 7) / 8 * 8;
  Problem p{};
  p.weight = w;
  p.bias = args.bias;
  const int64_t columns = S::kActivates ? w.n / 2 : w.n, of_tile = S::kActivates ? kRows / 2 : kRows;
  p.row_tiles = static_cast<uint32_t>((columns + of_tile - 1) / of_tile);
  p.token_tiles = static_cast<uint32_t>((args.num_rows + kTokens - 1) / kTokens + groups.count);  // at most
  const int64_t each = (args.num_rows + p.token_tiles - 1) / p.token_tiles;
  p.tokens = static_cast<int>((each + kPiece - 1) / kPiece * kPiece);
  p.units = static_cast<int>(w.padded_k / kUnit);
  p.groups = static_cast<int>(w.groups());
  p.blocks = static_cast<int>((w.padded_k + 255) / 256);
  p.segments = segments;
  p.steps = w.steps_of_a_group();
  p.items = 4 / p.steps;
  p.units_by = Divider(p.steps == 4 ? w.group_size / kUnit : 1);
  p.minima_at = p.items * 32 * bytes_of(w.scales_kind);
  p.supers_at = p.minima_at + p.items * 32 * bytes_of(w.minima_kind);
  p.lows_at = p.supers_at + (w.supers ? 64 : 0);
  p.pieces = (p.lows_at + (w.lows ? 64 : 0)) / 16;
  p.tables_at = kFactorsAt + 8 * 2 * p.pieces * 16;  // of eight warps, two units each
  uint32_t bytes = p.tables_at;
  if constexpr (S::kGroups) {
    p.group_begins = groups.begins;
    p.token_groups = static_cast<int>(groups.count);
    p.bands_of_gates = static_cast<int>(w.n / 64);
    p.weight_stride = args.map.weight_stride;
    p.bias_stride = args.map.bias_stride;
    bytes += 2 * (p.token_groups + 1) * 4;
    if (groups.count > INT16_MAX || args.num_rows > INT32_MAX || p.units < 3 || (S::kActivates && w.n % 64 != 0) ||
        !make_tensor_map(p.out_row, args.out, {columns * 2, args.num_rows}, {args.out_stride * 2}, {1}))
      return false;
  }
  if (p.pieces > kMostPieces || bytes > kMostShared || p.groups % p.items != 0 ||
      (p.steps < 4 && w.group_size != p.steps * 16) || int64_t{p.row_tiles} * p.token_tiles > INT32_MAX)
    return false;
  if (!make_tensor_map(p.x, args.x, {w.k * 2, args.num_rows}, {x_stride * 2}, {S::kGroups ? kOfBox : p.tokens}) ||
      !make_tensor_map(p.out, args.out, {columns * 2, args.num_rows}, {args.out_stride * 2}, {kPiece}))
    return false;
  if (asks) return true;
  // In stages of two units.
  for (int i = 0; i <= segments; ++i) {
    const int end = (p.units + 1) / 2 * i / segments * 2;
    p.begins[i] = end < p.units ? end : p.units;
  }
  const int64_t tiles = int64_t{p.row_tiles} * p.token_tiles, sms = num_sms(launch.device);
  launch_dependent_shared(packed_gemm_many_sm90_kernel<S>, dim3(static_cast<unsigned>(tiles < sms ? tiles : sms)),
                          dim3(kThreads), bytes, launch, "packed_gemm", p);
  return true;
}

// The instance for a weight: none where sums of groups of columns are scaled; of groups of tokens, int4 alone, with scales of float16 in
// groups of 64 columns or more.
template <Out kOut>
bool launch_kind(const PackedGemmArgs& args, const TokenGroups& groups, int segments, bool asks, const Launch& launch) {
  const PackedWeight& w = args.weight;
  const auto in_chunks = [](const void* pointer, int64_t stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
  };
  if (w.columns || args.epilogue.any || args.map.factors || args.x_step != 1 || w.k == 0 ||
      !in_chunks(args.x, args.x_stride) || !in_chunks(args.out, args.out_stride) || w.n > INT32_MAX / 4)
    return false;
  bool was_launched = false;
  dispatch<half, bf16>(args.dtype, [&]<class T>() {
    const auto run = [&]<CodeKind kKind, bool kScales = false>() {
      was_launched = launch_shape<Shape<T, kKind, kScales, kOut>>(args, groups, segments, asks, launch);
    };
    [[maybe_unused]] const bool is_table = w.codes_kind == CodeKind::kTable16;
    if constexpr (kOut == Out::kOfOne)
      if (is_table && (w.scales_kind == ScaleKind::kE4M3 || (w.scales_kind == ScaleKind::kE8M0 && !kIsHalf<T>)))
        return run.template operator()<CodeKind::kTable16, true>();
    if constexpr (!kIsHalf<T>) {  // whose sums have units
      if (!is_folded<T>(w, groups.begins != nullptr)) return;
      if (groups.begins && (w.minima || w.scales_kind != ScaleKind::kF16 || w.steps_of_a_group() != 4)) return;
      if (w.codes_kind == CodeKind::kUint4) return run.template operator()<CodeKind::kUint4>();
      if constexpr (kOut == Out::kOfOne) {
        if (is_table) return run.template operator()<CodeKind::kTable16>();
        if (w.codes_kind == CodeKind::kUint8) run.template operator()<CodeKind::kUint8>();
      }
    }
  });
  return was_launched;
}

}  // namespace packed_many_sm90

bool packed_gemm_of_groups_sm90(const PackedGemmArgs& args, const TokenGroups& groups, int segments, bool asks,
                                const Launch& launch) {
  using namespace packed_many_sm90;
  return groups.activates ? launch_kind<Out::kOfGroupsActivated>(args, groups, segments, asks, launch)
                          : launch_kind<Out::kOfGroups>(args, groups, segments, asks, launch);
}

bool packed_gemm_many_sm90(const PackedGemmArgs& args, int segments, const Launch& launch) {
  using namespace packed_many_sm90;
  const PackedWeight& w = args.weight;
  if (args.map.rows) return false;
  // A tile takes as long as 1.7 of 128 tokens in packed_gemm_sm90.cuh, or where codes are E2M1's and scales E4M3's, 1.2.
  const int64_t row_tiles = (w.n + kRows - 1) / kRows, sms = num_sms(launch.device);
  const auto rounds = [&](int64_t tokens) {
    return (row_tiles * ((args.num_rows + tokens - 1) / tokens) + sms - 1) / sms;
  };
  const bool is_worth_it = w.scales_kind == ScaleKind::kE4M3 ? 3 * rounds(kTokens) <= 2 * rounds(128)
                                                             : 9 * rounds(kTokens) <= 5 * rounds(128);
  return is_worth_it && launch_kind<Out::kOfOne>(args, {}, segments, false, launch);
}

}  // namespace pykv
