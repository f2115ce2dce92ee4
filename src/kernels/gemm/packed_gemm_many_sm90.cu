// packed_gemm of many tokens on Hopper (sm_90a), of weights that are multiplied by the scales of their groups as they are decoded, so that
// one sum runs on through a segment of the columns.  The same bits as from packed_gemm_sm90.cuh.
//
// A block computes 128 rows of the weight times kTokens of x: y^T = w x^T.  Four warps decode codes once for all of these tokens, to
// shared memory, where both operands of the matrix units lie, and one of their lanes asks for x.  Two warpgroups multiply, and do nothing
// else: what they hold are the sums of a segment and those of all segments so far.  Blocks go from tile to tile, and results are written
// by the copy engine while the next tile is decoded.
#include "cuda/cluster.cuh"
#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"
#include "cuda/divider.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma.cuh"
#include "gemm/packed_codes.cuh"
#include "gemm/packed_gemm_many_sm90.h"

#ifndef XS
#define XS 3
#define WS 3
#define PARKED 64
#define REGS 208
#define ONE 0
#define EARLY 1
#define CHOOSE 1
#endif

namespace pykv {
namespace packed_many_sm90 {

// Of a tile; columns of a stage; bytes of a line of both operands.
inline constexpr int kRows = 128, kTokens = 256, kUnit = PackedWeight::kUnit, kLine = 128;
inline constexpr int kMostSegments = 4;
// Sums of a lane; of those of all segments so far, in shared memory.
inline constexpr int kSums = kTokens / 2, kParked = PARKED;
inline constexpr int kThreads = 3 * 128, kOfMultipliers = REGS, kOfDecoders = 504 - 2 * REGS;  // registers
inline constexpr int kPiece = 32;  // tokens that a warpgroup writes at once, to one of two places
inline constexpr int kXStages = XS, kWStages = WS;
inline constexpr uint32_t kXBytes = kTokens * kLine, kWBytes = kRows * kLine, kPieceBytes = kPiece * kLine;
inline constexpr uint32_t kParkedBytes = 128 * kParked * 4;  // of a warpgroup; results are written from there
// In shared memory.
inline constexpr uint32_t kWAt = kXStages * kXBytes, kParkedAt = kWAt + kWStages * kWBytes,
                          kBarriersAt = kParkedAt + 2 * kParkedBytes, kXFullAt = kBarriersAt,
                          kXEmptyAt = kXFullAt + kXStages * 8, kWFullAt = kXEmptyAt + kXStages * 8,
                          kWEmptyAt = kWFullAt + kWStages * 8, kFactorsAt = (kWEmptyAt + kWStages * 8 + 15) / 16 * 16;
inline constexpr int kMostPieces = 32;  // of 16 bytes, of the factors of a unit's 32 rows
inline constexpr uint32_t kMostShared = 227 << 10;
static_assert(2 * kPieceBytes <= kParkedBytes);

template <class T, CodeKind kKind_>
struct Shape {
  using Element = T;
  using Code = Codes<T, kKind_>;
  static constexpr CodeKind kKind = kKind_;
};

struct Problem {
  CUtensorMap x, out;
  PackedWeight weight;
  const void* bias;
  Divider units_by;  // of 64 columns, of a group
  uint32_t row_tiles, token_tiles;
  int units, groups, blocks;      // of 64 columns; of columns; of 256 columns
  int segments;                   // of the columns, whose sums are added in order
  int begins[kMostSegments + 1];  // in units
  int steps, items;               // of 16 columns of a group in a unit; groups of a unit
  int pieces;                     // of the factors of a unit
  int minima_at, supers_at, lows_at;

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

// The compiler does not see that this is a loop: after one it would ask the warp to meet again.
[[maybe_unused]] __device__ inline void wait_for(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done:}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
}

template <int kStages>
struct Place {
  uint32_t stage = 0, parity = 0;
  __device__ void next() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

// The units of a block's tiles, one after another.
class Cursor {
 public:
  int unit = 0, row_tile = 0, token_tile = 0;

  __device__ explicit Cursor(const Problem& p) : p_(p), tile_(blockIdx.x) { begin(); }
  __device__ bool inside() const { return tile_ < p_.tiles(); }
  // Whether it came to another tile.
  __device__ bool next() {
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
    if (inside()) p_.place(tile_, row_tile, token_tile);
  }

  const Problem& p_;
  uint32_t tile_;
};

// A warp decodes 32 rows: lanes 16 b + 8 c + g those codes of rows g and 8 + g of sixteen b that lanes 2 c and 2 c + 1 of a fragment have
// (packed_weight.h).  Codes are loaded to registers two units before, factors, a piece by each lane, to shared memory.
template <class S>
class Decoder {
  using T = typename S::Element;
  static constexpr int kPlanes = S::Code::kPlanes;

 public:
  // warp: of four
  __device__ Decoder(const Problem& p, uint32_t shared, int warp)
      : p_(p),
        shared_(shared),
        factors_(shared + kFactorsAt + warp * 2 * p.pieces * 16),
        warp_(warp),
        b_(threadIdx.x % 32 / 16),
        c_(threadIdx.x % 16 / 8),
        g_(threadIdx.x % 8),
        entries_(reinterpret_cast<const float*>(p.weight.data + PackedWeight::kTableAt)),
        ahead_(p) {
    global_ = __ldg(reinterpret_cast<const float*>(p.weight.data + PackedWeight::kGlobalScaleAt)) * entries_.unit();
  }

  __device__ bool are_octets() const { return entries_.are_octets(); }

  // kSteps: 0: p.steps, which is not known when compiled
  template <Fold kFold, int kSteps>
  __device__ __forceinline__ void run() {
    find();
    load(words_[0], 0);
    load(words_[1], 1);
    int slot = 0;
#pragma unroll 1
    for (Cursor at(p_); at.inside(); at.next(), slot ^= 1) {
      if (slot == 0) {
        run_unit<kFold, kSteps>(words_[0], 0, at);
      } else {
        run_unit<kFold, kSteps>(words_[1], 1, at);
      }
    }
  }

 private:
  using Words = uint4[2][kPlanes];  // of two lanes of a fragment

  __device__ void find() {
    if (!ahead_.inside()) return;
    const PackedWeight& w = p_.weight;
    const int64_t band = min(ahead_.row_tile * (kRows / 32) + warp_, static_cast<int>(w.padded_n() / 32) - 1);
    codes_ = w.codes + (band * 2 + b_) * p_.units * (kPlanes * 512) + (c_ * 16 + g_) * 16;
    // What this lane copies of factors: of groups [band][group][32], or of 256 columns [band][block][32]
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
  }
  // The next unit.
  __device__ __forceinline__ void load(Words& to, int slot) {
    if (ahead_.inside()) {
      const int unit = ahead_.unit;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
          to[n][plane] = __ldg(reinterpret_cast<const uint4*>(codes_ + plane * 512 + n * 128));
      codes_ += kPlanes * 512;
      const int at = is_of_256_ ? unit / 4 : p_.steps < 4 ? unit : p_.units_by.quotient(unit);
      if (from_) cp_async_16(slot_at(slot) + threadIdx.x % 32 * 16, from_ + int64_t{at} * step_);
      if (ahead_.next()) find();
    }
    cp_async_commit();
  }
  __device__ uint32_t slot_at(int slot) const { return factors_ + slot * p_.pieces * 16; }

  // Of a group of a unit, for rows g and 8 + g, as Folding::fragment() wants them.
  template <Fold kFold>
  __device__ __forceinline__ void fold(uint32_t (&own)[2], int slot, int item) const {
    const PackedWeight& w = p_.weight;
    constexpr bool kBytes = is_of_bytes(kFold);
    const int row = 4 * g_ + 2 * b_, at = item * 32 + row;
    const uint32_t factors = slot_at(slot);
    const typename Folding<T, S::kKind, kFold>::Factors found(
        w, global_,
        {factors + at * (kBytes ? 1 : bytes_of(w.scales_kind)), factors + p_.supers_at + row * 2,
         factors + p_.minima_at + at * (kBytes ? 1 : bytes_of(w.minima_kind)), factors + p_.lows_at + row * 2});
    const float2 one = make_float2(1.0f, 1.0f);
    own[0] = found.scales(one);
    own[1] = found.minima(one);
  }

  template <Fold kFold, int kSteps>
  __device__ __forceinline__ void run_unit(Words& words, int slot, const Cursor& at) {
    using Folds = Folding<T, S::kKind, kFold>;
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
    const int steps = kSteps == 0 ? p_.steps : kSteps;
    uint32_t own[2][2] = {};
    fold<kFold>(own[0], slot, steps < 4 ? c_ : 0);
    if (kSteps == 0 ? steps == 1 : kSteps == 1) fold<kFold>(own[1], slot, 2 + c_);
    if (warp_ == 0 && threadIdx.x % 32 == 0) ask(at);
    __syncwarp();
    wait_for(shared_ + kWEmptyAt + w_.stage * 8, w_.parity ^ 1);
    const uint32_t to = shared_ + kWAt + w_.stage * kWBytes + (warp_ * 32 + b_ * 16 + g_) * kLine + (c_ ^ g_) * 16;
    uint32_t scale = own[0][0], minimum = own[0][1];
    if (!Folds::kAdds) minimum = Folds::middle(scale);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t a[2][4];
      if (kSteps < 4 && (kSteps == 0 || j % (kSteps + !kSteps) == 0)) {
        const int item = steps == 4 ? 0 : j / steps, from = steps == 4 ? threadIdx.x : b_ * 16 + item % 2 * 8 + g_;
        const bool is_second = item >= 2;
        scale = __shfl_sync(~0u, is_second ? own[1][0] : own[0][0], from);
        minimum = Folds::kAdds ? __shfl_sync(~0u, is_second ? own[1][1] : own[0][1], from) : Folds::middle(scale);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) Folds::fragment(a[n], words[n], j, scale, minimum, entries_);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_shared((to ^ j * 32) + half * 8 * kLine,
                     make_uint4(a[0][half], a[0][2 + half], a[1][half], a[1][2 + half]));
    }
    if (EARLY == 0) fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_ + kWFullAt + w_.stage * 8);
    w_.next();
    load(words, slot);
  }

  __device__ void ask(const Cursor& at) {
    const uint32_t full = shared_ + kXFullAt + x_.stage * 8;
    wait_for(shared_ + kXEmptyAt + x_.stage * 8, x_.parity ^ 1);
    cluster_expect(full, kXBytes);
    copy_box(shared_ + x_.stage * kXBytes, p_.x, {at.unit * kLine, at.token_tile * kTokens}, full);
    x_.next();
  }

  const Problem& p_;
  const uint32_t shared_, factors_;
  const int warp_, b_, c_, g_;
  const EntriesOf<T, S::kKind> entries_;
  Place<kXStages> x_;
  Place<kWStages> w_;
  Cursor ahead_;  // what is loaded next
  const uint8_t *codes_, *from_;
  int step_;
  bool is_of_256_;
  float global_;
  Words words_[2];
};

template <class T>
class Multiplier {
 public:
  // warp: of eight
  __device__ Multiplier(const Problem& p, uint32_t shared, int warp)
      : p_(p), shared_(shared), group_(warp / 4), warp_(warp), parked_(shared + kParkedAt + warp / 4 * kParkedBytes) {}

  // unit: what sums are multiplied by
  __device__ __forceinline__ void run(float unit) {
#pragma unroll 1
    for (Cursor at(p_); at.inside(); at.next_tile()) {
      bool has_total = false;
#if ONE
      multiply(p_.units);
#pragma unroll
      for (float& x : sum_) x = __fmul_rn(unit, x);
      (void)has_total;
#else
#pragma unroll 1
      for (int segment = 0; segment < p_.segments; ++segment) {
        const int count = p_.begins[segment + 1] - p_.begins[segment];
        if (count == 0) continue;
        multiply(count);
#pragma unroll
        for (float& x : sum_) x = __fmul_rn(unit, x);
        if (has_total) take_total();
        if (segment + 1 < p_.segments) keep_total();
        has_total = true;
      }
#endif
      store(at.row_tile * kRows, at.token_tile * kTokens);
    }
    if (leads()) wait_until_written();  // shared memory has to stay until it has been read
  }

 private:
  __device__ bool leads() const { return threadIdx.x % 128 == 0; }
  __device__ static void wait_until_written() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

  // Sums of the segments so far: what registers do not hold lies where results are written from.
  __device__ void keep_total() {
    if (leads()) wait_until_written();
    named_barrier_sync(1 + group_, 128);
#pragma unroll
    for (int i = 0; i < kParked; i += 4)
      store_shared(own_place(i), make_uint4(__float_as_uint(sum_[i]), __float_as_uint(sum_[i + 1]),
                                            __float_as_uint(sum_[i + 2]), __float_as_uint(sum_[i + 3])));
#pragma unroll
    for (int i = kParked; i < kSums; ++i) total_[i - kParked] = sum_[i];
  }
  __device__ void take_total() {
#pragma unroll
    for (int i = 0; i < kParked; i += 4) {
      const float4 v = load_shared_float4(own_place(i));
      sum_[i] = __fadd_rn(v.x, sum_[i]);
      sum_[i + 1] = __fadd_rn(v.y, sum_[i + 1]);
      sum_[i + 2] = __fadd_rn(v.z, sum_[i + 2]);
      sum_[i + 3] = __fadd_rn(v.w, sum_[i + 3]);
    }
#pragma unroll
    for (int i = kParked; i < kSums; ++i) sum_[i] = __fadd_rn(total_[i - kParked], sum_[i]);
  }
  __device__ uint32_t own_place(int i) const { return parked_ + i / 4 * (128 * 16) + threadIdx.x % 128 * 16; }

  __device__ void release(uint32_t x, uint32_t w) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive(shared_ + kXEmptyAt + x * 8);
      mbarrier_arrive(shared_ + kWEmptyAt + w * 8);
    }
  }

  __device__ __forceinline__ void begin(bool add) {
    wait_for(shared_ + kXFullAt + x_.stage * 8, x_.parity);
    wait_for(shared_ + kWFullAt + w_.stage * 8, w_.parity);
    // What decoders have stored.  A fence of theirs would wait for the codes that they load.
    if (EARLY) fence_async_proxy();
    const uint64_t w = wgmma_matrix(shared_ + kWAt + w_.stage * kWBytes + group_ * 64 * kLine, 8 * kLine);
    const uint64_t x = wgmma_matrix(shared_ + x_.stage * kXBytes, 8 * kLine);
    wgmma_begin();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      Wgmma<T, kTokens>::ss(sum_, wgmma_further(w, 32 * j), wgmma_further(x, 32 * j), j > 0 || add);
    wgmma_commit();
  }

  // So many units.
  __device__ __forceinline__ void multiply(int count) {
    wgmma_pin(sum_);
    begin(false);
#pragma unroll 1
    for (int unit = 1; unit < count; ++unit) {
      const uint32_t x = x_.stage, w = w_.stage;
      x_.next();
      w_.next();
      begin(true);
      wgmma_wait<1>();
      release(x, w);
    }
    wgmma_wait<0>();
    wgmma_pin(sum_);
    release(x_.stage, w_.stage);
    x_.next();
    w_.next();
  }

  // By the copy engine, which leaves out what is outside: 64 rows of the weight and some tokens at once.
  __device__ __forceinline__ void store(int row, int token) const {
    const int lane = threadIdx.x % 32, first_row = row + group_ * 64;
    const int line = lane / 16 * 8 + lane % 8, chunk = warp_ % 4 * 2 + lane / 8 % 2;
    float bias[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = first_row + warp_ % 4 * 16 + i * 8 + lane / 4;
      if (p_.bias && own < p_.weight.n) bias[i] = to_float(static_cast<const T*>(p_.bias)[own]);
    }
#pragma unroll
    for (int piece = 0; piece < kTokens / kPiece; ++piece) {
      const uint32_t to = parked_ + piece % 2 * kPieceBytes;
      if (leads()) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      named_barrier_sync(1 + group_, 128);
#pragma unroll
      for (int sixteen = 0; sixteen < kPiece; sixteen += 16) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const two = sum_ + (piece * kPiece + sixteen) / 2 + 2 * i;
          pairs[i] = pack_pair<T>(two[0] + bias[i % 2], two[1] + bias[i % 2]);
        }
        store_transposed(to + (sixteen + line) * kLine + ((chunk ^ line % 8) << 4), pairs);
      }
      fence_async_proxy();
      named_barrier_sync(1 + group_, 128);
      if (leads()) store_box(p_.out, {first_row * 2, token + piece * kPiece}, to);
    }
  }

  const Problem& p_;
  const uint32_t shared_;
  const int group_, warp_;
  const uint32_t parked_;
  Place<kXStages> x_;
  Place<kWStages> w_;
  float sum_[kSums], total_[kSums - kParked];
};

// Calls with.template operator()<fold, steps>(): steps of 16 columns of a group, 0: not known when compiled.
template <class S, class With>
__device__ __forceinline__ void dispatch_steps(const Problem& p, bool are_octets, With with) {
  dispatch_fold<S::kKind>(p.weight, p.steps, are_octets, [&]<Fold kFold>() __attribute__((always_inline)) {
    if constexpr (is_of_bytes(kFold) && S::kKind == CodeKind::kUint8) {
      with.template operator()<kFold, kFold == Fold::kBytes ? 1 : 2>();
    } else if constexpr (is_of_bytes(kFold)) {
      if (p.steps == 2) return with.template operator()<kFold, 2>();
      with.template operator()<kFold, 1>();
    } else if constexpr (kFold == Fold::kHalf || (kFold == Fold::kAny && S::kKind == CodeKind::kUint4)) {
      if (p.steps == 4) return with.template operator()<kFold, 4>();
      with.template operator()<kFold, 0>();
    } else {
      with.template operator()<kFold, 0>();
    }
  });
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
    for (int i = 0; i < kXStages; ++i) {
      mbarrier_init(shared + kXFullAt + i * 8, 1);
      mbarrier_init(shared + kXEmptyAt + i * 8, 8);
    }
#pragma unroll
    for (int i = 0; i < kWStages; ++i) {
      mbarrier_init(shared + kWFullAt + i * 8, 4);
      mbarrier_init(shared + kWEmptyAt + i * 8, 8);
    }
    fence_async_proxy();
    prefetch_map(p.x);
    prefetch_map(p.out);
  }
  __syncthreads();
  begin_dependent();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp >= 8) {
    give_registers<kOfDecoders>();
    Decoder<S> decoder(p, shared, warp - 8);
    dispatch_steps<S>(p, decoder.are_octets(), [&]<Fold kFold, int kSteps>() __attribute__((always_inline)) {
      decoder.template run<kFold, kSteps>();
    });
  } else {
    take_registers<kOfMultipliers>();
    float unit = 1.0f;
    const EntriesOf<typename S::Element, S::kKind> entries(
        reinterpret_cast<const float*>(p.weight.data + PackedWeight::kTableAt));
    dispatch_fold<S::kKind>(p.weight, p.steps, entries.are_octets(),
                            [&]<Fold kFold>() { unit = Folding<typename S::Element, S::kKind, kFold>::kUnit; });
    Multiplier<typename S::Element>(p, shared, warp).run(unit);
  }
#endif
}

template <class S>
bool launch_shape(const PackedGemmArgs& args, int segments, const Launch& launch) {
  using T = typename S::Element;
  const PackedWeight& w = args.weight;
  const int64_t x_stride = args.num_rows > 1 ? args.x_stride : (w.k + 7) / 8 * 8;
  Problem p{};
  p.weight = w;
  p.bias = args.bias;
  p.row_tiles = static_cast<uint32_t>((w.n + kRows - 1) / kRows);
  p.token_tiles = static_cast<uint32_t>((args.num_rows + kTokens - 1) / kTokens);
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
  const uint32_t bytes = kFactorsAt + 8 * p.pieces * 16;
  if (p.pieces > kMostPieces || bytes > kMostShared || p.groups % p.items != 0 ||
      (p.steps < 4 && w.group_size != p.steps * 16) || int64_t{p.row_tiles} * p.token_tiles > INT32_MAX)
    return false;
  if (!make_tensor_map(p.x, args.x, {w.k * 2, args.num_rows}, {x_stride * 2}, {kTokens}) ||
      !make_tensor_map(p.out, args.out, {w.n * 2, args.num_rows}, {args.out_stride * 2}, {kPiece}))
    return false;
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

}  // namespace packed_many_sm90

bool packed_gemm_many_sm90(const PackedGemmArgs& args, int segments, const Launch& launch) {
  using namespace packed_many_sm90;
  const PackedWeight& w = args.weight;
  const auto in_chunks = [](const void* pointer, int64_t stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
  };
  if (args.map.rows || w.columns || args.epilogue.any || args.x_step != 1 || w.k == 0 ||
      !in_chunks(args.x, args.x_stride) || !in_chunks(args.out, args.out_stride) || w.n > INT32_MAX / 4)
    return false;
  // Rounds of tiles: one of 256 tokens takes as long as 1.7 of 128 in packed_gemm_sm90.cuh.
  const int64_t row_tiles = (w.n + kRows - 1) / kRows, sms = num_sms(launch.device);
  const auto rounds = [&](int64_t tokens) {
    return (row_tiles * ((args.num_rows + tokens - 1) / tokens) + sms - 1) / sms;
  };
  if (CHOOSE && 9 * rounds(kTokens) > 5 * rounds(128)) return false;
  bool was_launched = false;
  dispatch<half, bf16>(args.dtype, [&]<class T>() {
    if constexpr (!kIsHalf<T>) {  // whose sums have units
      if (CHOOSE && !is_folded(w, false)) return;
      if (w.codes_kind == CodeKind::kUint4) was_launched = launch_shape<Shape<T, CodeKind::kUint4>>(args, segments, launch);
      if (w.codes_kind == CodeKind::kUint8) was_launched = launch_shape<Shape<T, CodeKind::kUint8>>(args, segments, launch);
#ifndef SMALL
      if (w.codes_kind == CodeKind::kTable16) was_launched = launch_shape<Shape<T, CodeKind::kTable16>>(args, segments, launch);
#endif
    }
  });
  return was_launched;
}

}  // namespace pykv
