// What fills the ring of packed_gemm_sm90.cu: codes and x by one thread; factors of groups, and sums of x, by some warps.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/cp_async.cuh"
#include "cuda/wgmma_tf32.cuh"
#include "gemm/packed_ring_sm90.cuh"

namespace pykv {
namespace packed_gemm_sm90 {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// What a lane copies of the factors of a stage where they come as they are stored: 16 bytes of scales, of minima and of those of 256
// columns.
class FactorCopies {
 public:
  __device__ FactorCopies(const Problem& p, uint32_t row_tile, int64_t shift) {
    const PackedWeight& w = p.weight;
    const int lane = threadIdx.x % 32;
    const auto band = [&](int i) { return int64_t{min(static_cast<int>(row_tile) * 4 + i, p.bands - 1)}; };
    const int64_t group = band(lane / 8) * p.groups * 32 + lane % 8 * 16;
    scales_ = w.scales + shift + group;
    minima_ = w.minima + shift + group;
    of_256_ = (lane < 16 ? w.supers : w.lows) + shift + band(lane / 4 % 4) * p.blocks * 64 + lane % 4 * 16;
  }
  // Of stage i to where its factors lie.
  __device__ void copy(uint32_t to, int i) const {
    to += threadIdx.x % 32 * 16;
    cp_async_16(to, scales_ + i * 128);
    cp_async_16(to + 4 * kRows, minima_ + i * 128);
    cp_async_16(to + 8 * kRows, of_256_ + i / 2 * 64);
  }

 private:
  const uint8_t *scales_, *minima_, *of_256_;
};

// One thread: codes and x.  One warp where factors come as they are stored.
template <class S>
__device__ void fill(const Problem& p, const Ring& ring, const Tiles<S>& tile, int split, Turn& turn) {
  constexpr int kCodeBytes = kRows / 16 * S::kBlockBytes;
  const int first_block = static_cast<int>(tile.row) * (kRows / 16);
  const int first_token = static_cast<int>(tile.token) * S::kTokens;
  const uint32_t bytes = kCodeBytes + (p.gathers ? 0 : 2 * S::kXBytes);
  [[maybe_unused]] const auto factors = [&] {
    if constexpr (S::kFolds)
      return FactorCopies(p, tile.row, tile.shift());
    else
      return 0;
  }();
  for_stages<S>(p, split, turn, [&](int i, const Turn& turn) {
    const uint32_t stage = ring.at(turn), full = ring.full + turn.stage * 8;
    mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
    if constexpr (S::kFolds) {
      factors.copy(stage + S::kScalesAt, i);
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

// Warps of few tokens, each for its places in the ring.
template <class S>
__device__ void gather_by_turns(const Problem& p, const Ring& ring, int warp, const Tiles<S>& tile, int split,
                                Turn& turn) {
  const Gatherer<S> gatherer(p, threadIdx.x % 32, tile.token, tile.shift());
  for_stages<S>(p, split, turn, [&](int i, const Turn& turn) {
    if (turn.stage % S::kPreparers != warp) return;
    mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
    gatherer.copy(ring.at(turn), i * kColumns, ring.full + turn.stage * 8);
  });
}

// Sums of x over each group of a stage, which minima multiply: products with ones.  As the second operand of products of TF32:
// those of four groups for each token, zeros where there are fewer, and then what they lose.
template <class S>
__device__ void sum_x(const Problem& p, uint32_t stage) {
  using T = typename S::Element;
  constexpr int kTiles = (S::kTokens + 15) / 16, kAtOnce = kTiles < 4 ? kTiles : 4;  // of 16 tokens
  constexpr uint32_t kOnes = kIsHalf<T> ? 0x3c003c00u : 0x3f803f80u;
  const int lane = threadIdx.x % 32, c = lane % 4, last_step = p.steps - 1;
  const uint32_t token = lane % (S::kTokens < 16 ? 8 : 16);
  uint32_t from = stage + token * 128 + (lane / 16 ^ lane % 8) * 16;
  uint32_t to = stage + p.sums_at + (lane / 4 + c * 8) * 16;
#pragma unroll 1
  for (int first = 0; first < kTiles; first += kAtOnce, from += kAtOnce * 16 * 128, to += kAtOnce * 16 * 16) {
    float sum[kAtOnce][4] = {};
    uint32_t x[2][kAtOnce][4];
    const auto load = [&](int j) {
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t)
        ldmatrix_x4(x[j % 2][t], (from ^ j % 4 * 32) + j / 4 * S::kXBytes + t * 16 * 128);
    };
    load(0);
    int item = 0;
    const auto store = [&](int t, int at, float x) {
      if (c * 8 >= (S::kTokens < 16 ? 8 : 16)) return;  // all columns are equal
      const uint32_t address = to + t * 256 + at / 4 * S::kSumsBytes + at % 4 * 4;
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(tf32_of(x)) : "memory");
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(address + S::kTokens * 16), "f"(x - tf32_of(x)) : "memory");
    };
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < 7) load(j + 1);
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) mma_16x8x16<T>(sum[t], x[j % 2][t], kOnes, kOnes);
      if ((j & last_step) != last_step) continue;
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
        store(t, item, c == 0 ? sum[t][0] : sum[t][2]);
        sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
      }
      ++item;
    }
#pragma unroll 1
    for (; item < 4; ++item)
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) store(t, item, 0.0f);
  }
}

// What sums are multiplied by, of which a lane has four rows of the weight, and rows of x, for each kPreparers-th place in the ring.
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
        gatherer_(p, lane_, tile.token, tile.shift()) {
    const PackedWeight& w = p.weight;
    global_ = __ldg(reinterpret_cast<const float*>(w.data + shift_ + PackedWeight::kGlobalScaleAt)) * S::Code::kUnit;
    const int64_t band = min(static_cast<int>(tile.row) * 4 + lane_ / 8, p.bands - 1);
    factors_ = band * p.groups * 32 + lane_ % 8 * 4;
    supers_ = band * p.blocks * 32 + lane_ % 8 * 4;
  }

  __device__ void run(int split, Turn& turn) {
    for_stages<S>(p_, split, turn, [&](int i, const Turn& turn) {
      if (turn.stage % S::kPreparers != warp_) return;
      constexpr int kMost = S::kFew ? 4 : 2;  // there are registers for
      if (p_.items == 1) {
        make_factors<1>(i, turn);
      } else if (kMost == 2 || p_.items == 2) {
        make_factors<2>(i, turn);
      } else {
        make_factors<kMost>(i, turn);
      }
      if constexpr (S::kAdds) {
        mbarrier_wait(ring_.full + turn.stage * 8, turn.parity);
        sum_x<S>(p_, ring_.at(turn));
        fence_async_proxy();  // wgmma reads them
      }
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive((S::kJoined ? ring_.full : ring_.ready) + turn.stage * 8);
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
    if constexpr (S::kAdds) {
      float minima[kCount][4];
      minima_of(minima, raw, w.minima_kind, w.offset, scales);
#pragma unroll
      for (int n = 0; n < kCount; ++n) store(to + p_.minima_at + n * kRows * 4, minima[n]);
    }
  }

  // What decoded numbers of row 0 or 8 of sixteen are to be multiplied by.
  __device__ static constexpr float unit(int row) {
    if constexpr (S::kOfBytes) return CodesOfBytes<typename S::Element>::unit(row);
    return 1.0f;
  }
  // What is added to them for a zero point of what a code is above the base.
  __device__ uint32_t zero_of(int row, uint32_t octet) const {
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
  float global_;
  int64_t factors_, supers_;
};

#endif
}  // namespace packed_gemm_sm90
}  // namespace pykv
