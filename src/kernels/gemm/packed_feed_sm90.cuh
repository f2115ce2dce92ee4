// What fills the ring of packed_gemm_sm90.cuh: codes and x by one thread, factors of groups by some warps.
#pragma once

#include <type_traits>

#include "cuda/cluster.cuh"
#include "cuda/cp_async.cuh"
#include "gemm/packed_ring_sm90.cuh"

namespace pykv {
namespace packed_gemm_sm90 {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// What the lanes of a warp copy of the factors of a stage as they are stored: pieces of 16 bytes, each 32nd of scales and minima
// [band][group][32] and of those of 256 columns [band][32].
class FactorCopies {
 public:
  __device__ FactorCopies(const Problem& p, uint32_t row_tile, int64_t shift)
      : p_(p),
        row_tile_(static_cast<int>(row_tile)),
        shift_(shift),
        of_scales_(8 * bytes_of(p.weight.scales_kind) * p.items),
        of_minima_(8 * bytes_of(p.weight.minima_kind) * p.items),
        count_(of_scales_ + of_minima_ + (p.weight.supers ? 16 : 0) + (p.weight.lows ? 16 : 0)),
        has_stages_(p.steps == 8),
        are_regular_((has_stages_ || (p.weight.group_size == p.steps * 16 && p.groups % p.items == 0)) &&
                     count_ <= 32 * kPrepared) {
    if (!are_regular_) return;
#pragma unroll
    for (int k = 0; k < kPrepared; ++k)
      prepared_[k] = k * 32 + threadIdx.x % 32 < count_ ? piece(k * 32 + threadIdx.x % 32) : Piece{};
  }
  // Of stage i to its place in the ring.
  __device__ void copy(uint32_t stage, int i) const {
    if (!are_regular_) return copy_one_by_one(stage, i);
    const int group = has_stages_ ? p_.groups_by.quotient(i * kColumns) : i;  // or those of a stage
#pragma unroll
    for (int k = 0; k < kPrepared; ++k) {
      if (k * 32 >= count_) break;
      const Piece& own = prepared_[k];
      if (own.from) cp_async_16(stage + own.to, own.from + int64_t{own.halves ? i >> 1 : group} * own.step);
    }
  }

 private:
  static constexpr int kPrepared = 5;  // as many as Q4_1 has
  struct Piece {
    const uint8_t* from;           // of the first stage
    int to, step, halves, column;  // step: bytes of a stage, or of two where halves is 1
  };

  __device__ Piece piece(int n) const {
    const PackedWeight& w = p_.weight;
    const auto band = [&](int of_tile) { return int64_t{min(row_tile_ * 4 + of_tile, p_.bands - 1)}; };
    const bool is_scale = n < of_scales_;
    if (is_scale || n < of_scales_ + of_minima_) {
      const int bytes = is_scale ? bytes_of(w.scales_kind) : bytes_of(w.minima_kind),
                at = is_scale ? n : n - of_scales_;
      // All are powers of two.
      const int of_group = 31 - __clz(2 * bytes), of_band = of_group + 31 - __clz(p_.items);
      const int group = (at & ((1 << of_band) - 1)) >> of_group;
      return {(is_scale ? w.scales : w.minima) + shift_ +
                  (band(at >> of_band) * p_.groups + (are_regular_ ? group : 0)) * 32 * bytes +
                  (at & ((1 << of_group) - 1)) * 16,
              (is_scale ? p_.scales_at : p_.minima_at) + at * 16, p_.items * 32 * bytes, 0, group * p_.steps * 16};
    }
    n -= of_scales_ + of_minima_;
    const bool is_super = w.supers && n < 16;
    return {(is_super ? w.supers : w.lows) + shift_ + band(n / 4 % 4) * p_.blocks * 64 + n % 4 * 16,
            (is_super ? p_.supers_at : p_.lows_at) + n % 16 * 16, 64, 1, -1};
  }

  __device__ void copy_one_by_one(uint32_t stage, int i) const {
#pragma unroll 1
    for (int n = threadIdx.x % 32; n < count_; n += 32) {
      const Piece own = piece(n);
      const int group = min(p_.groups_by.quotient(i * kColumns + max(own.column, 0)), p_.groups - 1);
      const int64_t at = own.column < 0 ? int64_t{i / 2} * own.step : int64_t{group} * (own.step / p_.items);
      cp_async_16(stage + own.to, own.from + at);
    }
  }

  const Problem& p_;
  const int row_tile_;
  const int64_t shift_;
  const int of_scales_, of_minima_, count_;  // pieces
  const bool has_stages_, are_regular_;      // a group has whole stages; those of a stage lie side by side
  Piece prepared_[kPrepared];
};

// The same of Q4_K, which takes so few instructions that the warp that asks for codes can do it, too.
class Q4KCopies {
 public:
  __device__ Q4KCopies(const Problem& p, uint32_t row_tile, int64_t shift) {
    const PackedWeight& w = p.weight;
    const int lane = threadIdx.x % 32;
    const auto band = [&](int i) { return int64_t{min(static_cast<int>(row_tile) * 4 + i, p.bands - 1)}; };
    const int64_t group = band(lane / 8) * p.groups * 32 + lane % 8 * 16;
    scales_ = w.scales + shift + group;
    minima_ = w.minima + shift + group;
    of_256_ = (lane < 16 ? w.supers : w.lows) + shift + band(lane / 4 % 4) * p.blocks * 64 + lane % 4 * 16;
    at_ = p.scales_at + lane * 16;
  }
  __device__ void copy(uint32_t stage, int i) const {
    const uint32_t to = stage + at_;
    cp_async_16(to, scales_ + i * 128);
    cp_async_16(to + 4 * kRows, minima_ + i * 128);
    cp_async_16(to + 8 * kRows, of_256_ + i / 2 * 64);
  }

 private:
  const uint8_t *scales_, *minima_, *of_256_;
  int at_;
};

struct NoCopies {
  __device__ NoCopies(const Problem&, uint32_t, int64_t) {}
};
template <bool kCopies>
using FactorCopiesOf = std::conditional_t<kCopies, FactorCopies, NoCopies>;

// One thread: codes and x.  One warp where preparing warps have enough to do, and factors too.
template <class S>
__device__ void fill(const Problem& p, const Ring& ring, const Tiles<S>& tile, int split, Turn& turn) {
  constexpr int kCodeBytes = kRows / 16 * S::kBlockBytes;
  const int first_block = static_cast<int>(tile.row) * (kRows / 16);
  const int first_token = static_cast<int>(tile.token) * S::kTokens;
  const uint32_t bytes = kCodeBytes + (p.gathers ? 0 : 2 * S::kXBytes);
  [[maybe_unused]] const std::conditional_t<S::kIsQ4K, Q4KCopies, FactorCopiesOf<S::kFillsFactors>> factors(
      p, tile.row, tile.shift());
  for_stages<S>(p, split, turn, [&](int i, const Turn& turn) {
    const uint32_t stage = ring.at(turn), full = ring.full + turn.stage * 8;
    mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
    if constexpr (S::kFillsFactors) {
      factors.copy(stage, i);
      cp_async_arrive(full);
      if (threadIdx.x % 32 != 0) return;
    }
    cluster_expect(full, bytes);
    copy_box(stage + S::kCodesAt, p.codes, {i * 256, first_block, tile.weight}, full);
    if (p.gathers) return;
    copy_box(stage, p.x, {2 * i * 128, first_token}, full);
    copy_box(stage + S::kXBytes, p.x, {(2 * i + 1) * 128, first_token}, full);
  });
}

// Copies what the tensor map cannot describe of x: S::kCopiers threads, for one stage or all.
template <class S>
class Gatherer {
  using T = typename S::Element;
  static constexpr int kStep = S::kCopiers / 8, kEach = S::kTokens / kStep;  // tokens of a pass; of a thread

 public:
  // thread: of S::kCopiers; shift: bytes from p.weight to the one that is meant
  __device__ Gatherer(const Problem& p, int thread, uint32_t token_tile, int64_t shift)
      : p_(p), chunk_(thread % 8), line_(thread / 8), shift_(shift) {
    if (S::kFolds && !p.gathers) return;  // nothing is copied, and finding rows would hold up factors
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t row = p.row(token_tile, line_ + i * kStep);
      x_[i] = row >= 0 ? static_cast<const T*>(p.from) + p.rows.row_of_x(p.map, row) * p.x_stride +
                             (p.whole_chunks ? chunk_ * 8 : 0)
                       : nullptr;
    }
  }

  // From a column on to the stage; the barrier counts one arrival of each thread.
  __device__ void copy(uint32_t stage, int column, uint32_t full) const {
    if (!p_.whole_chunks) {
      copy_one_by_one(stage, column);
      return mbarrier_arrive(full);
    }
#pragma unroll 1
    for (int unit = 0; unit < 2; ++unit) {
      const int first = column + unit * kUnit;
      const bool inside = first + chunk_ * 8 < p_.weight.k;
#pragma unroll
      for (int i = 0; i < kEach; ++i) cp_async_16(place(stage, unit, i), x_[i] + first, inside && x_[i]);
    }
    cp_async_arrive(full);
  }

 private:
  __device__ uint32_t place(uint32_t stage, int unit, int i) const {
    const int token = line_ + i * kStep;
    return stage + unit * S::kXBytes + token * 128 + (chunk_ ^ token % 8) * 16;
  }

  __device__ void copy_one_by_one(uint32_t stage, int column) const {
    const auto* const columns =
        reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(p_.weight.columns) + shift_);
#pragma unroll 1
    for (int at = 0; at < 2 * 4; ++at) {
      const int unit = at / 4, pair = at % 4;
      int from[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        from[e] = column + unit * kUnit + chunk_ * 8 + 2 * pair + e;
        if (p_.weight.columns) from[e] = from[e] < p_.weight.padded_k ? __ldg(columns + from[e]) : -1;
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        uint32_t bits[2];
#pragma unroll
        for (int e = 0; e < 2; ++e)
          bits[e] = x_[i] && from[e] >= 0 && from[e] < p_.weight.k
                        ? __ldg(reinterpret_cast<const unsigned short*>(x_[i]) + from[e] * p_.x_step)
                        : 0;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(place(stage, unit, i) + pair * 4), "r"(bits[0] | bits[1] << 16)
                     : "memory");
      }
    }
  }

  const Problem& p_;
  const int chunk_, line_;
  const int64_t shift_;
  const T* x_[kEach];  // the rows, at this thread's chunk if those are copied whole; null: none
};

// Warps that do nothing else.
template <class S>
__device__ void gather(const Problem& p, const Ring& ring, int thread, const Tiles<S>& tile, int split, Turn& turn) {
  const Gatherer<S> gatherer(p, thread, tile.token, tile.shift());
  for_stages<S>(p, split, turn, [&](int i, const Turn& turn) {
    mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
    gatherer.copy(ring.at(turn), i * kColumns, ring.full + turn.stage * 8);
  });
}

// Factors and, of few tokens, rows of x, for each kPreparers-th place in the ring: as they are stored where codes are multiplied by
// them, otherwise what sums are multiplied by, of which a lane has four rows of the weight.
template <class S>
class Preparer {
 public:
  // warp: which of them this is
  __device__ Preparer(const Problem& p, const Ring& ring, const Tiles<S>& tile, int warp)
      : p_(p),
        ring_(ring),
        warp_(warp),
        shift_(tile.shift()),
        lane_(threadIdx.x % 32),
        gatherer_(p, lane_, tile.token, tile.shift()),
        copies_(p, tile.row, tile.shift()) {
    const PackedWeight& w = p.weight;
    global_ = __ldg(reinterpret_cast<const float*>(w.data + shift_ + PackedWeight::kGlobalScaleAt)) * S::Code::kUnit;
    if constexpr (S::kHasUnits) global_ *= S::entries(w, shift_).unit();
    const int64_t band = min(static_cast<int>(tile.row) * 4 + lane_ / 8, p.bands - 1);
    factors_ = band * p.groups * 32 + lane_ % 8 * 4;
    supers_ = band * p.blocks * 32 + lane_ % 8 * 4;
  }

  __device__ void run(int split, Turn& turn) {
    for_stages<S>(p_, split, turn, [&](int i, const Turn& turn) {
      if (turn.stage % S::kPreparers != warp_) return;
      constexpr int kMost = S::kByWarpgroups ? 2 : 4;  // there are registers for
      if constexpr (S::kFolds) {
        copy_factors(i, turn);
        if (!p_.has_units) return;
      } else if (p_.items == 1) {
        make_factors<1>(i, turn);
      } else if (kMost == 2 || p_.items == 2) {
        make_factors<2>(i, turn);
      } else {
        make_factors<kMost>(i, turn);
      }
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive(ring_.full + turn.stage * 8);
    });
  }

 private:
  // Of the groups of stage i of the weight, so many at once.  What is loaded is under way while it waits and copies.
  template <int kCount>
  __device__ void make_factors(int i, const Turn& turn) const {
    RawFactors raw[kCount];
    load<kCount>(raw, i, 0);
    mbarrier_wait(ring_.empty + turn.stage * 8, turn.parity ^ 1);
    const uint32_t stage = ring_.at(turn);
    if constexpr (S::kFew)
      if (p_.gathers) gatherer_.copy(stage, i * kColumns, ring_.full + turn.stage * 8);
#pragma unroll 1
    for (int first = 0;;) {
      convert<kCount>(raw, stage + first * kRows * 4 + lane_ * 16);
      if ((first += kCount) >= p_.items) return;
      load<kCount>(raw, i, first);
    }
  }

  // ... and what the groups of a stage have in common, if they have.
  __device__ void copy_factors(int i, const Turn& turn) const {
    float units[4];
    if (S::kHasUnits && p_.has_units) find_units(units, i);
    mbarrier_wait(ring_.empty + turn.stage * 8, turn.parity ^ 1);
    const uint32_t stage = ring_.at(turn), full = ring_.full + turn.stage * 8;
    if constexpr (S::kFew)
      if (p_.gathers) gatherer_.copy(stage, i * kColumns, full);
    if constexpr (S::kFillsFactors) {
      if (S::kHasUnits && p_.has_units) store(stage + p_.units_at + lane_ * 16, units);
    } else {
      copies_.copy(stage, i);
      cp_async_arrive(full);
    }
  }
  __device__ void find_units(float (&largest)[4], int i) const {
#pragma unroll
    for (float& x : largest) x = 0.0f;
#pragma unroll 1
    for (int first = 0; first < p_.items; first += 2) {
      RawFactors raw[2];
      load<2>(raw, i, first);
      float scales[2][4], minima[2][4] = {};
      scales_of(scales, raw, p_.weight.scales_kind);
#pragma unroll
      for (int n = 0; n < 8; ++n) scales[n / 4][n % 4] *= global_;
      if (p_.weight.minima) minima_of(minima, raw, p_.weight.minima_kind, p_.weight.offset, scales);
#pragma unroll
      for (int n = 0; n < 8; ++n)
        largest[n % 4] = fmaxf(largest[n % 4], fmaxf(fabsf(scales[n / 4][n % 4]), fabsf(minima[n / 4][n % 4])));
    }
#pragma unroll
    for (float& x : largest) x = power_below(x);
  }

  template <int kCount>
  __device__ void load(RawFactors (&raw)[kCount], int i, int first) const {
    const PackedWeight& w = p_.weight;
    raw[0] = {};
    load_factors_of_block(raw[0], w, supers_ + min(i / 2, p_.blocks - 1) * 32, shift_);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      raw[n] = raw[0];
      const int column = i * kColumns + (first + n) * p_.steps * 16;
      const int64_t group = min(p_.groups_by.quotient(column), p_.groups - 1);
      load_factors_of_group(raw[n], w, factors_ + group * 32, shift_);
    }
  }

  template <int kCount>
  __device__ void convert(const RawFactors (&raw)[kCount], uint32_t to) const {
    const PackedWeight& w = p_.weight;
    float scales[kCount][4];
    scales_of(scales, raw, w.scales_kind);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const uint32_t at = to + S::kScalesAt + n * kRows * 4;
      if constexpr (S::kScalesCodes) {
        const auto pair = [&](int i) { return pack_pair<typename S::Element>(scales[n][i], scales[n][i]); };
        store_shared(at, make_uint4(pair(0), pair(1), pair(2), pair(3)));
      } else {
#pragma unroll
        for (float& s : scales[n]) s *= global_;
        float of_codes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) of_codes[i] = scales[n][i] * unit(i % 2);
        store(at, of_codes);
      }
    }
    if constexpr (S::kSubtracts) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const uint32_t z = raw[n].minimum[0];
        store_shared(to + p_.minima_at + n * kRows * 4,
                     make_uint4(zero_of(0, z), zero_of(1, z >> 8), zero_of(0, z >> 16), zero_of(1, z >> 24)));
      }
    }
  }

  // What decoded numbers of row 0 or 8 of sixteen are to be multiplied by.
  __device__ static constexpr float unit(int row) {
    if constexpr (S::kOfBytes) return CodesOfBytes<typename S::Element>::unit(row);
    return 1.0f;
  }
  // What is added to them, or of codes of eight bits subtracted, for a zero point of what a code is above the base.
  __device__ uint32_t zero_of(int row, uint32_t octet) const {
    if constexpr (S::kKind == CodeKind::kUint8)
      return S::Code::zero_of(128.0f - p_.weight.offset + static_cast<float>(octet & 0xffu));
    const float zero = (p_.weight.offset - 8.0f - static_cast<float>(octet & 0xffu)) / unit(row);
    return pack_pair<typename S::Element>(zero, zero);
  }

  __device__ static void store(uint32_t to, const float (&x)[4]) {
    store_shared(
        to, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])));
  }

  const Problem& p_;
  const Ring& ring_;
  const int warp_;
  const int64_t shift_;
  const int lane_;
  const Gatherer<S> gatherer_;
  const FactorCopiesOf<S::kFolds && !S::kFillsFactors> copies_;
  float global_;
  int64_t factors_, supers_;
};

#endif
}  // namespace packed_gemm_sm90
}  // namespace pykv
