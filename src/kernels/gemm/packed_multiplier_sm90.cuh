// What empties the ring of packed_gemm_sm90.cuh: warps that decode codes, multiply and scale.
#pragma once

#include "cuda/load_shared.cuh"
#include "cuda/wgmma.cuh"
#include "gemm/packed_ring_sm90.cuh"

namespace pykv {
namespace packed_gemm_sm90 {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Sums of 16 rows of the weight, of a warp.
template <class S>
class Multiplier {
  using T = typename S::Element;
  using Code = typename S::Code;
  using Words = uint4[S::kOfBytes ? 2 : Code::kPlanes];  // of a unit
  template <int kSteps>
  static constexpr int kTogether =
      S::kScalesCodes ? 8 : kSteps;                     // of 16 columns that are summed before they are scaled
  static constexpr int kSums = S::kTokens / 2;          // of a lane
  static constexpr int kPairs = (S::kTokens + 8) / 16;  // of eight tokens
  // What a sum begins with: -0 + x is x, whatever its sign.
  static constexpr float kNothing = S::kRunsOn ? -0.0f : 0.0f;

 public:
  float total[kSums];  // over a segment; in the end over all, where one block has all

  // shift: bytes from p.weight to the one that is meant
  __device__ Multiplier(const Problem& p, const Ring& ring, const uint32_t* table, int64_t shift)
      : p_(p), ring_(ring), table_(table), entries_(S::entries(p.weight, shift)), warp_(threadIdx.x / 32 % 8) {
#pragma unroll
    for (float& x : total) x = kNothing;
    if constexpr (S::kScalesCodes)
      global_ = __ldg(reinterpret_cast<const float*>(p.weight.data + shift + PackedWeight::kGlobalScaleAt)) *
                (S::kFolds ? entries_.unit() : 1.0f);
    const int lane = threadIdx.x % 32, c = lane % 4;
    constexpr bool kOctets = Code::kPlanes == 2;
    codes_at_ = S::kCodesAt + warp_ * S::kBlockBytes + (8 * (c / 2) + lane / 4) * 16 + (kOctets ? c % 2 * 512 : 0);
    selector_ = S::kOfBytes ? (c % 2 == 0 ? 0x4240 : 0x4341) : c % 2 == 0 ? 0x6240 : 0x7351;
    x_at_ = S::kTokens == 8 ? lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16
                            : (lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16;
    factors_at_ = (warp_ / 2 * 32 + lane / 4 * 4 + warp_ % 2 * 2) * 4;
  }

  // The part'th of all blocks of the cluster.  Inlined by order: otherwise the sums would lie in memory.
  __device__ __forceinline__ void run(int part, Turn& turn) {
    if constexpr (S::kIsQ4K) {
      run_folded<Fold::kBytesMinima>(part, turn);
    } else if constexpr (S::kFolds && S::kWalks) {
      run_steps<8, Fold::kHalf>(part, turn);  // ptxas has too few registers for several loops
    } else if constexpr (S::kFolds) {
      dispatch_fold<S::kKind>(p_.weight, p_.steps, entries_.are_octets(),
                              [&]<Fold kFold>() __attribute__((always_inline)) { run_folded<kFold>(part, turn); });
    } else if constexpr (S::kScalesCodes) {
      run_steps<8>(part, turn);
    } else {
      switch (p_.steps) {
        case 8:
          return run_steps<8>(part, turn);
        case 4:
          return run_steps<4>(part, turn);
        case 2:
          return run_steps<2>(part, turn);
        default:
          return run_steps<1>(part, turn);
      }
    }
  }

  // To [token][kPitch].
  __device__ void store(uint32_t to) const {
    const int lane = threadIdx.x % 32, row = warp_ * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + (token * kPitch + row + i / 2 % 2 * 8) * 4), "f"(total[i])
                   : "memory");
    }
  }

  // Biased, multiplied and rounded, to [token][kRoundedPitch bytes].  factors: of tokens, 0: they are all 1
  __device__ __forceinline__ void store_rounded(uint32_t to, const float (&bias)[2], uint32_t factors) const {
    const int lane = threadIdx.x % 32;
    to += (lane / 16 * 8 + lane % 8) * kRoundedPitch + (warp_ * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int first = 0; first < S::kTokens; first += 16) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const two = total + first / 2 + 2 * i;
        const float2 factor =
            factors ? load_shared_float2(factors + (first + i / 2 * 8 + lane % 4 * 2) * 4) : make_float2(1.0f, 1.0f);
        pairs[i] = pack_pair<T>((two[0] + bias[i % 2]) * factor.x, (two[1] + bias[i % 2]) * factor.y);
      }
      store_transposed(to + first * kRoundedPitch, pairs);
    }
  }

 private:
  // Sizes of groups that are rare, and whose are not known when compiled, have a loop in common.
  template <Fold kFold>
  __device__ __forceinline__ void run_folded(int part, Turn& turn) {
    constexpr bool kIsTable = S::kKind == CodeKind::kTable16;
    if constexpr (kFold == Fold::kHalf) {
      if constexpr (S::kHasStages)
        if (p_.steps == 8) return run_steps<8, kFold>(part, turn);
      if (p_.steps == 2) return run_steps<2, kFold>(part, turn);
      run_steps<4, kFold>(part, turn);
    } else if constexpr (!is_of_bytes(kFold)) {
      run_steps<0, kFold>(part, turn);
    } else {
      constexpr int kSteps = kFold == Fold::kBytesMinima && (S::kIsQ4K || S::kKind == CodeKind::kUint8) ? 2 : 1;
      if (kIsTable && p_.steps == 2) return run_steps<kIsTable ? 2 : kSteps, kFold>(part, turn);
      run_steps<kSteps, kFold>(part, turn);
    }
  }

  // kSteps: of 16 columns, that are scaled together.
  template <int kSteps, Fold kFold = Fold::kHalf>
  __device__ __forceinline__ void run_steps(int part, Turn& turn) {
    const Range range = p_.range(part);
    int segment = part * p_.each, segment_end = p_.begin(segment + 1);
    const auto end_segment = [&] {
      if constexpr (S::kRunsOn) take_sums<kFold>();
      if (p_.keeps()) {
        if (!S::kAllInRing && (!S::kLastInRing || segment + 1 < (part + 1) * p_.each))
          keep(segment % (p_.each * S::kParts));
      } else if constexpr (!S::kRunsOn) {
        join(segment);
      }
      ++segment;
      segment_end = p_.begin(segment + 1);
    };
    while (segment_end == range.begin && segment < (part + 1) * p_.each) end_segment();  // nothing to sum
    if (range.begin == range.end) return;
    if constexpr (S::kRunsOn && S::kByWarpgroups) {
      run_on<kSteps, kFold>(range, turn, segment_end, end_segment);
      return;
    }
    if constexpr (S::kByWarpgroups) {
      wait_full(turn);
      decode<kSteps, kFold>(a_[0], ring_.at(turn), 0);
      if constexpr (kTogether<kSteps> == 8) multiply<0, 4>(a_[0], ring_.at(turn), true);
    }
    const auto end_stage = [&](int i) {
      release(turn);
      turn.advance(S::kParts, p_.stages);
      if (i + 1 == segment_end) end_segment();
    };
    if constexpr (!S::kByWarpgroups) {
#pragma unroll 1
      for (int i = range.begin; i < range.end; ++i) {
        run_stage_at_once<kSteps, kFold>(turn);
        end_stage(i);
      }
    } else {
#pragma unroll 1
      for (int i = range.begin; i < range.end - 1; ++i) {
        run_stage<kSteps, false, kFold>(turn);
        end_stage(i);
      }
      run_stage<kSteps, true, kFold>(turn);
      end_stage(range.end - 1);
    }
  }

  // The same where sums run on to the end of a segment: products of half a stage are under way while the next codes are decoded.
  template <int kSteps, Fold kFold, class End>
  __device__ __forceinline__ void run_on(const Range& range, Turn& turn, const int& segment_end,
                                         const End& end_segment) {
    const auto begin_stage = [&](bool anew) {
      wait_full(turn);
      decode<kSteps, kFold>(a_[0], ring_.at(turn), 0);
      multiply<0, 4>(a_[0], ring_.at(turn), anew);
    };
    const auto end_stage = [&] {
      decode<kSteps, kFold>(a_[1], ring_.at(turn), 1);
      multiply<0, 4>(a_[1], ring_.at(turn) + S::kXBytes, false);
    };
    for (int i = range.begin; i < range.end;) {
      begin_stage(true);
      end_stage();
#pragma unroll 1
      for (++i; i < segment_end; ++i) {
        const Turn before = turn;
        turn.advance(S::kParts, p_.stages);
        wgmma_wait<1>();
        begin_stage(false);
        wgmma_wait<1>();
        release(before);
        end_stage();
      }
      wgmma_wait<0>();
      release(turn);
      turn.advance(S::kParts, p_.stages);
      end_segment();
    }
  }

  __device__ void release(const Turn& turn) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring_.empty + turn.stage * 8);
  }

  template <int kSteps, Fold kFold>
  __device__ __forceinline__ void run_stage_at_once(const Turn& turn) {
    const uint32_t stage = ring_.at(turn);
    constexpr bool kAhead = S::kTokens == 8;  // x of a unit is loaded before any is wanted
    wait_full(turn);
    Words words[2];
    load_codes(words[0], stage, 0);
    load_codes(words[1], stage, 1);
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
      uint32_t steps_of_x[kAhead ? 4 : 1][kPairs][4];
#pragma unroll
      for (int j = 0; j < (kAhead ? 4 : 0); ++j) load_x(steps_of_x[j], stage + unit * S::kXBytes, j);
      decode<kSteps, kFold>(a_[0], words[unit], stage, unit);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t (&x)[kPairs][4] = steps_of_x[kAhead ? j / 2 * 2 : 0];
        constexpr int kMask = kTogether<kSteps> - 1;
        const int step = unit * 4 + j;
        if (!kAhead) load_x(x, stage + unit * S::kXBytes, j);
        multiply_at_once(a_[0][j], x, j, !S::kRunsOn && (step & kMask) == 0);
        if (S::kRunsOn || (step & kMask) != kMask) continue;
        add_scaled(scales<kFold>(stage, step / kTogether<kSteps>));
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
  template <int kSteps, bool kLast, Fold kFold>
  __device__ __forceinline__ void run_stage(const Turn& turn) {
    const uint32_t stage = ring_.at(turn);
    Turn next = turn;
    next.advance(S::kParts, p_.stages);
    const uint32_t next_stage = ring_.at(next);
    if constexpr (kTogether<kSteps> == 8) {
      decode<kSteps, kFold>(a_[1], stage, 1);
      multiply<0, 4>(a_[1], stage + S::kXBytes, false);
      if constexpr (!kLast) {
        wgmma_wait<1>();  // of the first unit
        wait_full(next);
        decode<kSteps, kFold>(a_[0], next_stage, 0);
      }
      const float2 scale = scales<kFold>(stage, 0);
      wgmma_wait<0>();
      add_scaled(scale);
      if constexpr (!kLast) multiply<0, 4>(a_[0], next_stage, true);
    } else {
      constexpr int kItems = 8 / kSteps;
      multiply_item<kSteps>(stage, 0);
      decode<kSteps>(a_[1], stage, 1);
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        if (item == kItems / 2 && !kLast) {
          wait_full(next);
          decode<kSteps>(a_[0], next_stage, 0);
        }
        const float2 scale = scales<kFold>(stage, item);
        wgmma_wait<0>();
        add_scaled(scale);
        if (item + 1 < kItems) multiply_item<kSteps>(stage, item + 1);
      }
    }
  }

  __device__ void wait_full(const Turn& turn) const {
    mbarrier_wait(ring_.full + turn.stage * 8, turn.parity);
    if (S::kByWarpgroups && p_.gathers) fence_async_proxy();  // cp.async writes like an ordinary store
  }

  // Codes of a unit to fragments of its four steps.
  template <int kSteps, Fold kFold = Fold::kHalf>
  __device__ void decode(uint32_t (&a)[4][4], uint32_t stage, int unit) const {
    Words words;
    load_codes(words, stage, unit);
    decode<kSteps, kFold>(a, words, stage, unit);
  }
  template <int kSteps, Fold kFold = Fold::kHalf>
  __device__ void decode(uint32_t (&a)[4][4], const Words& words, uint32_t stage, int unit) const {
    if constexpr (S::kOfBytes) {
      uint2 zeros;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (S::kSubtracts && j % kSteps == 0) zeros = load_zeros<kSteps>(stage, unit * 4 + j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t bytes = __byte_perm(reinterpret_cast<const uint32_t (&)[4]>(words[h])[j], 0, selector_);
          if constexpr (S::kSubtracts) {
            CodesOfBytes<T>::fragment_less(a[j][2 * h], a[j][2 * h + 1], bytes, {zeros.x, zeros.y});
          } else {
            CodesOfBytes<T>::fragment(a[j][2 * h], a[j][2 * h + 1], bytes);
          }
        }
      }
    } else if constexpr (S::kFolds) {
      // Lanes of a row share the work: each has the factors of a group, or of those with minima one of them.
      using Folds = Folding<T, S::kKind, kFold>;
      constexpr bool kOne = kSteps == 2;
      constexpr bool kAlike = kSteps >= 4;  // lanes of a row have the same
      const int groups_log2 = kAlike ? 0 : kSteps == 0 ? 2 - p_.steps / 2 : 2 - kSteps / 2;
      const int groups = 1 << groups_log2;  // of a unit
      const int lane = threadIdx.x % 32, c = lane % 4;
      uint32_t (&own)[2] = own_;
      if (kSteps != 8 || unit == 0)
        fold<kFold, kSteps, kOne>(own, stage, kSteps == 8 ? 0 : unit * groups + c % groups, c >= 2);
      uint32_t s = 0, m = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int group = j >> (2 - groups_log2);
        if (kSteps == 0 || j % (kSteps + !kSteps) == 0) {
          s = kAlike ? own[0] : __shfl_sync(~0u, own[0], group, 4);
          m = Folds::kAdds ? __shfl_sync(~0u, own[!kOne], kOne ? 2 | group : group, 4) : Folds::middle(s);
        }
        Folds::fragment(a[j], words, j, s, m, entries_);
      }
    } else if constexpr (S::kScalesCodes) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int item = (unit * 4 + j) * p_.items / 8;
        const uint2 scales = load_shared_8(stage + S::kScalesAt + item * kRows * 4 + factors_at_);
        Code::fragment_scaled(a[j], words, j, {scales.x, scales.y});
      }
    } else if constexpr (S::kSubtracts) {
      uint2 zeros;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j % kSteps == 0) zeros = load_zeros<kSteps>(stage, unit * 4 + j);
        Code::fragment_less(a[j], words, j, {zeros.x, zeros.y});
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) Code::fragment(a[j], words, j, table_);
    }
  }

  // What is subtracted from codes of a step's group.
  template <int kSteps>
  __device__ uint2 load_zeros(uint32_t stage, int step) const {
    return load_shared_8(stage + p_.minima_at + step / kSteps * kRows * 4 + factors_at_);
  }

  __device__ void load_codes(Words& words, uint32_t stage, int unit) const {
    const uint32_t at = stage + codes_at_ + unit * Code::kPlanes * 512;
    if constexpr (S::kOfBytes || Code::kPlanes == 2) {
      words[0] = load_shared_16(at);
      words[1] = load_shared_16(at + 256);
    } else {
      const uint4 a = load_shared_16(at), b = load_shared_16(at + 256);
      words[0] = make_uint4(__byte_perm(a.x, b.x, selector_), __byte_perm(a.y, b.y, selector_),
                            __byte_perm(a.z, b.z, selector_), __byte_perm(a.w, b.w, selector_));
    }
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
    if (!S::kRunsOn && anew) wgmma_pin(sum_);
    wgmma_begin();
#pragma unroll
    for (int j = kFirst; j < kFirst + kCount; ++j)
      Wgmma<T, S::kTokens>::template rs<kAlong>(sum_, a[j], wgmma_further(matrix, j * 32), j > kFirst || !anew);
    wgmma_commit();
  }

  template <Fold kFold>
  __device__ float2 scales(uint32_t stage, int item) const {
    if constexpr (S::kFolds) {
      constexpr float kUnit = Folding<T, S::kKind, kFold>::kUnit;
      if constexpr (!S::kHasUnits) return make_float2(kUnit, kUnit);
      const float2 units = units_of<kFold>(stage);
      return make_float2(kUnit * units.x, kUnit * units.y);
    }
    if constexpr (S::kScalesCodes) return make_float2(global_, global_);
    return load_shared_float2(stage + S::kScalesAt + item * kRows * 4 + factors_at_);
  }

  __device__ void add_scaled(const float2& scale) {
    if constexpr (S::kByWarpgroups) wgmma_pin(sum_);
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] = fmaf(i / 2 % 2 ? scale.y : scale.x, sum_[i], total[i]);
  }

  // Of the two rows of this lane among the factors of 32.
  __device__ int place() const { return threadIdx.x % 32 / 4 * 4 + warp_ % 2 * 2; }
  // Of a group, as fragment() wants it: scales as a pair, and minima; kOne: either of them.
  template <Fold kFold, int kSteps, bool kOne>
  __device__ __forceinline__ void fold(uint32_t (&own)[2], uint32_t stage, int item, bool is_minimum) const {
    const PackedWeight& w = p_.weight;
    constexpr bool kOfBytes = is_of_bytes(kFold);  // then all places are known here
    constexpr int kItems = 8 / (kSteps + !kSteps), kBytesAt = S::kScalesAt + kItems * kRows;
    const int at = (warp_ / 2 * (kSteps == 0 ? p_.items : kItems) + item) * 32 + place();
    const int of_scale = kOfBytes ? 1 : bytes_of(w.scales_kind), of_minimum = kOfBytes ? 1 : bytes_of(w.minima_kind);
    const int minima_at = kOfBytes ? kBytesAt : p_.minima_at;
    const int supers_at = kOfBytes ? kBytesAt + has_minima(kFold) * kItems * kRows : p_.supers_at;
    const int lows_at = kOfBytes ? supers_at + 2 * kRows : p_.lows_at;
    const uint32_t of_256 = stage + (warp_ / 2 * 32 + place()) * 2;
    const typename Folding<T, S::kKind, kFold>::Factors factors(
        w, global_,
        {stage + S::kScalesAt + at * of_scale, of_256 + supers_at, stage + minima_at + at * of_minimum,
         of_256 + lows_at});
    float2 units = make_float2(1.0f, 1.0f);
    if constexpr (S::kHasUnits) {
      units = units_of<kFold>(stage);
      units = make_float2(inverse_of_power(units.x), inverse_of_power(units.y));
    }
    if constexpr (Folding<T, S::kKind, kFold>::kAdds && kOne) {
      own[0] = factors.one(is_minimum, units);
    } else {
      own[0] = factors.scales(units);
      if (Folding<T, S::kKind, kFold>::kAdds) own[1] = factors.minima(units);
    }
  }
  // What weights of a stage have in common.
  template <Fold kFold>
  __device__ float2 units_of(uint32_t stage) const {
    using Folds = Folding<T, S::kKind, kFold>;
    const uint32_t of_256 = stage + (warp_ / 2 * 32 + place()) * 2;
    if (is_of_bytes(kFold) || (kFold == Fold::kAny && !p_.has_units))
      return Folds::units_of_256(of_256 + p_.supers_at, of_256 + p_.lows_at, global_);
    return load_shared_float2(stage + p_.units_at + (warp_ / 2 * 32 + place()) * 4);
  }

  // Adds the sums of a segment that ran on to total.
  template <Fold kFold>
  __device__ void take_sums() {
    if constexpr (S::kByWarpgroups) wgmma_pin(sum_);
    constexpr float kUnit = S::kFolds ? Folding<T, S::kKind, kFold>::kUnit : 0.0f;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const float sum = kUnit == 1.0f ? sum_[i] : __fmul_rn(S::kFolds ? kUnit : global_, sum_[i]);
      total[i] = S::kParts == 2 ? sum : __fadd_rn(total[i], sum);  // of two parts each keeps its segments
      if constexpr (!S::kByWarpgroups) sum_[i] = 0.0f;
    }
  }

  // Where sums of segments lie.
  __device__ uint32_t kept() const { return ring_.data + p_.stages * p_.stage_bytes; }

  // Those of a segment, for who adds up those of all.
  __device__ void keep(int piece) {
    store(kept() + piece * S::kSumBytes);
#pragma unroll
    for (float& x : total) x = kNothing;
  }

  // Adds those of a segment to those of the segments before.
  __device__ void join(int segment) {
    const bool is_first = segment == 0, is_last = segment == p_.segments - 1;
    const uint32_t whole = kept() + threadIdx.x * 16;
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
  const uint32_t* const table_;
  const EntriesOf<T, S::kKind> entries_;
  const int warp_;
  uint32_t codes_at_, selector_, x_at_, factors_at_;
  float global_;
  float sum_[kSums] = {};
  uint32_t a_[2][4][4];
  mutable uint32_t own_[2];  // factors of a group, or of a stage, whose units have them in common
};

#endif
}  // namespace packed_gemm_sm90
}  // namespace pykv
