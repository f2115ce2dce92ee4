// Prefill over a paged cache of 16 bits on Hopper's asynchronous matrix units (sm_90a).
//
//   out = softmax(scale * q . k) . v      by the online softmax, one KV tile after another
//
// A block of three warpgroups fills an SM.  One brings data: it walks the block's segments (a query tile of 128 rows, query
// tokens x the heads of a KV head, against its KV tiles of 128 tokens), looks up pages, and copies rows by 16-byte pieces
// into three stages for keys and three for values (heads of 256: two of 64 tokens).  Two compute 64 rows each: S = Q K^T
// and O += P V with Q and the weights P in registers.  A warpgroup asks for the next tile's S and for this tile's P V
// together and makes weights of S while P V is under way; the two take turns at asking, so that one's products run under
// the other's softmax.
//
// Segments come whole, the longest first, with all query tiles of as many KV heads as the L2 holds before the next heads;
// or, where a few tiles are much longer than a block's part of the work, in order of the line of
// schedule/line.cuh, of which every block has an equal share.
//
// Bottleneck: the matrix units, floor = 4 * head size * visible (query, key) pairs * heads / 989 TFLOP/s.  They are busy for
// two thirds of the time at most; docs/log/paged_attention/open.md says what is known of the rest.
#pragma once

#include "attention/cuda/merge/pieces.cuh"
#include "attention/cuda/online_softmax.cuh"
#include "attention/cuda/prefill/feed.cuh"
#include "cuda/dependent.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/mma.cuh"
#include "cuda/wgmma.cuh"

namespace pykv::attention {

// A warpgroup that computes.
template <class S>
struct PrefillRows {
  using T = typename S::Mma;
  using Products = Wgmma<T, S::kTile>;
  using ValueProducts = Wgmma<T, S::kD>;
  static constexpr int kD = S::kD, kTile = S::kTile, kTokens = kTile / 4;

  const Problem& p;
  PrefillScratch& scratch;
  uint32_t queries, keys, values;
  const int lane = threadIdx.x % 32;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;        // known to be uniform
  const int row0 = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // of this lane; the other is 8 further

  float s[kTile / 2];  // scores, then weights
  float o[kD / 2];     // sums
  uint32_t weights[kTile / 16][4];
  uint32_t query[S::kQueriesInRegisters ? kD / 16 : 1][4];
  float maximum[2], sum[2], rescale[2];
  int position[2], first_position, last_position;

  // Each lane for what it has read itself: quicker than one for its warp after __syncwarp, and racecheck follows.
  __device__ void arrive(uint64_t& empty) const { mbarrier_arrive(shared_address(&empty)); }

  __device__ void take_turn() const { named_barrier_sync(kTurnBarrier + group, 256); }
  __device__ void end_turn() const { named_barrier_arrive(kTurnBarrier + 1 - group, 256); }

  __device__ void load_queries() {
    const int r = group * 64 + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      const int chunk = i * 2 + lane / 16;
      ldmatrix_x4(query[i], queries + r * 128 + chunk / 8 * S::kQueryColumnBytes + (chunk % 8 ^ r % 8) * 16);
    }
    arrive(scratch.queries_read);
  }

  __device__ void ask_scores(int stage) {
    const uint64_t q = wgmma_matrix(queries + group * 64 * 128, 1024);
    const uint64_t k = wgmma_matrix(keys + stage * S::kTileBytes, 1024);
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      const uint64_t key = wgmma_further(k, i / 4 * S::kColumnBytes + i % 4 * 32);
      if constexpr (S::kQueriesInRegisters) {
        Products::template rs<kAlong>(s, query[i], key, i > 0);
      } else {
        Products::ss(s, wgmma_further(q, i / 4 * S::kQueryColumnBytes + i % 4 * 32), key, i > 0);
      }
    }
    wgmma_commit();
  }

  // The same scores once more, of this warp alone, which the others do not wait for.
  __device__ void compute_scores(int stage) {
    const int row = lane % 8;
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i) {
      auto& sums = reinterpret_cast<float (&)[4]>(s[4 * i]);
      for (float& x : sums) x = 0;
#pragma unroll
      for (int k = 0; k < kD / 16; k += 2) {
        const int chunk = k * 2 + lane / 8;
        uint32_t key[4];
        ldmatrix_x4(key, keys + stage * S::kTileBytes + chunk / 8 * S::kColumnBytes + (i * 8 + row) * 128 +
                             (chunk % 8 ^ row) * 16);
        mma_16x8x16<T>(sums, query[k], key[0], key[1]);
        mma_16x8x16<T>(sums, query[k + 1], key[2], key[3]);
      }
    }
  }

  __device__ void ask_sums(int stage, bool first) {
    const uint64_t v = wgmma_matrix(values + stage * S::kTileBytes, 1024, S::kColumnBytes);
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i) {
      ValueProducts::template rs<kAcross>(o, weights[i], wgmma_further(v, i * 16 * 128), i > 0 || !first);
    }
    wgmma_commit();
  }

  __device__ void wait_full(uint64_t& full, int parity) const {
    mbarrier_wait(shared_address(&full), parity);
    fence_async_proxy();  // cp.async writes like an ordinary store
  }

  // Is something of the tile not to be seen by all rows of the warpgroup?
  __device__ bool is_masked(int first, const uint4& valid) const {
    return (valid.x & valid.y & valid.z & valid.w) != ~0u ||
           hides_some(p, first, first + kTile - 1, first_position, last_position);
  }

  // What this lane's rows may not see.
  __device__ void mask(int first, const uint4& valid) {
    if (!is_masked(first, valid)) [[likely]]
      return;
    const int column0 = lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int low = first_seen(p, position[h]) - first - column0;
      const int high = last_seen(p, position[h]) - first - column0;
#pragma unroll
      for (int i = 0; i < kTile / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (i * 8 + e < low || i * 8 + e > high) s[4 * i + 2 * h + e] = -INFINITY;
        }
      }
    }
    if ((valid.x & valid.y & valid.z & valid.w) == ~0u) return;
    const uint32_t words[4] = {valid.x >> column0, valid.y >> column0, valid.z >> column0, valid.w >> column0};
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (words[i * 8 / kTokens] >> (i * 8 % kTokens + e) & 1) continue;
        s[4 * i + e] = s[4 * i + 2 + e] = -INFINITY;
      }
    }
  }

  // Scores to weights, relative to `base`; returns their sums in this lane.
  __device__ float2 weigh(const float (&base)[2]) {
    const float scale = p.a.scale * kLog2e;
    float sums[2][2] = {};  // rows, even and odd columns
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * i + 2 * h + e];
          x = power_of_2(fmaf(x, scale, -base[h]));
          sums[h][e] += x;
        }
      }
    }
    return {sums[0][0] + sums[0][1], sums[1][0] + sums[1][1]};
  }

  // Scores to weights relative to the maximum so far: no greater one is looked for.  That is as good unless weights are too large, or
  // there is no maximum yet, which their sums show: then returns false, and scores are lost.
  __device__ bool weigh_at_once() {
    constexpr float kMost = std::is_same_v<T, half> ? 0x1p15f : 0x1p40f;  // T and sums of sums hold it
    const float2 added = weigh(maximum);
    if (!__all_sync(~0u, added.x <= kMost && added.y <= kMost)) [[unlikely]]
      return false;
    sum[0] += added.x;
    sum[1] += added.y;
    return true;
  }

  // Scores to weights.  The sums are kept relative to a maximum that may lag behind, and is a whole number, so that following it is
  // rare and rounds nothing; returns whether a row of the warp does.
  __device__ bool softmax() {
    const float scale = p.a.scale * kLog2e;
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[4] = {s[2 * h], s[2 * h + 1], s[4 + 2 * h], s[5 + 2 * h]};
#pragma unroll
      for (int i = 2; i < kTile / 8; ++i) {
        for (int e = 0; e < 2; ++e) x[i % 2 * 2 + e] = fmaxf(x[i % 2 * 2 + e], s[4 * i + 2 * h + e]);
      }
      top[h] = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) * scale;
    }
    const bool rose = follow_maxima<1, 4>(top, maximum, [&](int h, float factor) {
      rescale[h] = factor;
      sum[h] *= factor;
    });
    const float base[2] = {base_of(maximum[0]), base_of(maximum[1])};
    const float2 added = weigh(base);
    sum[0] += added.x;
    sum[1] += added.y;
    return rose;
  }

  __device__ void round_weights() {
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) weights[i / 4][i % 4] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
  }

  __device__ void rescale_sums() {
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) o[i] *= rescale[i / 2 % 2];
  }

  __device__ uint4 valid_of(int stage) const { return *reinterpret_cast<const uint4*>(scratch.valid[stage]); }

  // Pairs of columns are stored as they lie: to trade them for wider stores takes longer, and the products wait.
  __device__ void end_segment(const Unit& u, const float (&maximum)[2], const float (&sum)[2]) {
    const int column0 = lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row0 + h * 8;
      const Row row = row_of(p, u, r);
      float all = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
      all += __shfl_xor_sync(~0u, all, 2);
      if (u.slot >= 0) {
        const int64_t at = static_cast<int64_t>(u.slot) * p.rows + r;
        if (lane % 4 == 0) p.partial_stats[at] = {maximum[h], all};
        if (!row.valid) continue;
        float* partial = p.partial + at * p.pitch + column0;
#pragma unroll
        for (int i = 0; i < kD / 8; ++i) {
          *reinterpret_cast<float2*>(partial + i * 8) = {o[4 * i + 2 * h], o[4 * i + 2 * h + 1]};
        }
      } else if (row.valid) {
        const float f = finish_row(p, row, u.kv_head, maximum[h], all);
        T* out = output_row<T>(p, row) + column0;
#pragma unroll
        for (int i = 0; i < kD / 8; ++i) {
          if (i * 8 >= p.a.head_size) break;  // it is a multiple of 8
          *reinterpret_cast<uint32_t*>(out + i * 8) = pack_pair<T>(o[4 * i + 2 * h] * f, o[4 * i + 2 * h + 1] * f);
        }
      }
    }
  }

  __device__ const PrefillSegment& segment_of(int n) const { return scratch.segments[n % 8]; }

  __device__ void begin_segment(const Unit& u) {
    position[0] = row_of(p, u, row0).position;
    position[1] = row_of(p, u, row0 + 8).position;
    first_position = row_of(p, u, group * 64).position;
    last_position = row_of(p, u, group * 64 + 63).position;
    for (int h = 0; h < 2; ++h) {
      maximum[h] = -INFINITY;
      sum[h] = 0;
    }
    if constexpr (S::kQueriesInRegisters) load_queries();
  }

  __device__ void release_keys(int stage, bool last) const {
    arrive(scratch.key_empty[stage]);
    if (!S::kQueriesInRegisters && last) arrive(scratch.queries_read);
  }

  // Tile j of segment n: its scores are asked for together with the sums of the tile before, which may end segment n - 1.
  __device__ void run() {
    take_registers<S::kComputeRegisters>();
    if (group == 1) end_turn();  // the first turn is the other's
    wait_full(scratch.key_full[0], 0);
    int n = 0, tiles = segment_of(0).tiles;
    if (tiles == 0) return;
    begin_segment(segment_of(0).unit);
    wgmma_pin(s);
    wgmma_begin();
    ask_scores(0);
    uint4 valid = valid_of(0);
    wgmma_wait<0>();
    wgmma_pin(s);
    release_keys(0, tiles == 1);
    mask(segment_of(0).unit.first_token, valid);
    softmax();
    round_weights();
    bool first = true;  // the tile before is the first of its segment
#pragma unroll 1
    for (int j = 1, used = 1;; ++j, ++used) {
      const int stage = used % S::kStages, parity = used / S::kStages % 2;
      const int before = (used - 1) % S::kStages, parity_before = (used - 1) / S::kStages % 2;
      wait_full(scratch.key_full[stage], parity);
      float ended_maximum[2], ended_sum[2];
      if (j == tiles) {
        tiles = segment_of(++n).tiles;
        if (tiles == 0) {
          wait_full(scratch.value_full[before], parity_before);
          wgmma_pin(o);
          wgmma_begin();
          ask_sums(before, first);
          wgmma_wait<0>();
          wgmma_pin(o);
          end_segment(segment_of(n - 1).unit, maximum, sum);
          return;
        }
        j = 0;
        for (int h = 0; h < 2; ++h) {
          ended_maximum[h] = maximum[h];
          ended_sum[h] = sum[h];
        }
        begin_segment(segment_of(n).unit);
      }
      take_turn();
      wgmma_pin(s);
      wgmma_pin(o);
      wgmma_begin();
      ask_scores(stage);
      wait_full(scratch.value_full[before], parity_before);
      wgmma_begin();
      ask_sums(before, first);
      end_turn();
      first = j == 0;
      valid = valid_of(stage);
      wgmma_wait<1>();
      wgmma_pin(s);
      const int first_token = segment_of(n).unit.first_token + j * kTile;
      bool rose = false;
      if constexpr (S::kQueriesInRegisters) {
        mask(first_token, valid);
        if (first || !weigh_at_once()) {
          if (!first) {
            compute_scores(stage);
            mask(first_token, valid);
          }
          rose = softmax();
        }
        release_keys(stage, j + 1 == tiles);
      } else {
        release_keys(stage, j + 1 == tiles);
        mask(first_token, valid);
        rose = softmax();
      }
      // Never true: the branch keeps the compiler from putting off the weights until after the wait.
      if (fminf(sum[0], sum[1]) < 0) __nanosleep(0);
      wgmma_wait<0>();
      wgmma_pin(o);
      arrive(scratch.value_empty[before]);
      round_weights();
      if (first) {
        end_segment(segment_of(n - 1).unit, ended_maximum, ended_sum);
      } else if (rose) {
        rescale_sums();
      }
    }
  }
};

template <class S>
constexpr int prefill_shared_bytes() {
  return S::kMemoryBytes + static_cast<int>(sizeof(PrefillScratch)) + 1024;  // aligned by the kernel
}

// Of a block, those of both warpgroups that compute.
struct ComputingWarpgroups {
  static __device__ int thread() { return threadIdx.x - kThreads; }
  static __device__ int threads() { return 2 * kThreads; }
  static __device__ void sync() { named_barrier_sync(kComputingBarrier, threads()); }
  static __device__ bool all(bool x) { return !named_barrier_any(kComputingBarrier, threads(), !x); }
};

// Of a block of prefill: warpgroups that run compute(scratch, queries, keys, values), and the one that brings data.  Sum: of pieces.
template <class S, class Sum>
__device__ void run_prefill(const Problem& p, const CacheCopies& copies, const WholeTiles& whole, auto&& compute) {
  extern __shared__ char unaligned[];
  char* memory = unaligned + (-shared_address(unaligned) & 1023);
  const uint32_t queries = shared_address(memory), keys = queries + S::kQueryBytes,
                 values = keys + S::kStages * S::kTileBytes;
  auto& scratch = *reinterpret_cast<PrefillScratch*>(memory + S::kMemoryBytes);
  constexpr int kReaders = S::kThreads - kThreads;
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(&scratch.queries_read), kReaders);
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(shared_address(&scratch.key_full[i]), kThreads + kThreads / 32);
      mbarrier_init(shared_address(&scratch.value_full[i]), kThreads);
      mbarrier_init(shared_address(&scratch.key_empty[i]), kReaders);
      mbarrier_init(shared_address(&scratch.value_empty[i]), kReaders);
    }
    fence_async_proxy();
  }
  wait_for_previous_kernel();
  if (S::kMayBeMixed && p.mixed) let_next_kernel_start();  // which does not wait for this one
  __syncthreads();
  if (threadIdx.x < kThreads) {
    PrefillFeeder<S> feeder{p, copies, whole, scratch, queries, keys, values};
    feeder.run();
  } else {
    compute(scratch, queries, keys, values);
    end_share<Sum>(
        p, scratch.ends,
        [&](const Unit& u, const Row& row, int d, const Sum& sum) {
          store_columns(p, output_row<typename S::Mma>(p, row), d, sum.finish(p, row, u.kv_head));
        },
        ComputingWarpgroups());
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    paged_attention_prefill_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies,
                                   const __grid_constant__ WholeTiles whole) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  run_prefill<S, Quad>(p, copies, whole,
                       [&](PrefillScratch& scratch, uint32_t queries, uint32_t keys, uint32_t values) {
                         PrefillRows<S> rows{p, scratch, queries, keys, values};
                         rows.run();
                       });
#endif
}

void clear_counts(PrefillCounts* counts, const Launch& launch, const char* op);  // cuda/launch.cu

// Launches kKernel over the line or over whole tiles; after: what it keeps in the workspace beside what blocks leave.  `room`: that
// of a larger grid, for the entries that are taken.
template <auto kKernel, class S, class... Args>
void launch_prefill_kernel(const Problem& p, const Step& s, void* room, const Launch& launch, const Args&... args) {
  constexpr int kBytes = prefill_shared_bytes<S>();
  static_assert(kBytes == prefill_sizes(S::kD, sizeof...(Args) > 0).shared_bytes && S::kThreads == 3 * kThreads);
  // Where no tile is long, the longest cannot be what decides.
  const WholeTiles whole{!p.mixed && always_whole(p.a.max_seq_len, S::kTile), static_cast<PrefillCounts*>(room),
                         int64_t{4} * p.a.head_size};
  clear_counts(whole.counts, launch, p.a.op);
  launch_step<kKernel>(p, s, kBytes, launch, cache_copies<S>(p.a), whole, args...);
}

template <class S>
void launch_plain_kernel(const Problem& p, const Step& s, const Launch& launch) {
  launch_prefill_kernel<paged_attention_prefill_kernel<S>, S>(p, s, prefill_counts(p, s.grid), launch);
}

template <class Element>
void launch_prefill(const Problem& p, const Step& s, const Launch& launch) {
  using T = typename Element::Mma;
  const int head_size = s.instance.head_size;
  if (head_size <= 64) return launch_plain_kernel<PrefillShape<T, 64>>(p, s, launch);
  if (head_size <= 128) return launch_plain_kernel<PrefillShape<T, 128>>(p, s, launch);
  launch_plain_kernel<PrefillShape<T, 256>>(p, s, launch);
}

}  // namespace pykv::attention
