// Prefill on Hopper with batch_invariant: the tiles of prefill/kernel.cuh in the steps of merge/exact.cuh.
//
// A KV tile of 128 tokens is a part of a chunk.  Its scores come in two chains of products and are there at once, so their
// registers, and then those of the part's sums, serve one after the other, beside the chunk's sums.  The running maximum
// follows every 16 keys, as everywhere; but where it does not rise after the first 16 of a part, which is nearly always, all
// products with V go out together.  Else the four warps of a warpgroup, whose products are one, agree on going step by step.
//
// The two warpgroups take turns.  A turn is the products of a part with its values and the scores of the next; the other
// warpgroup makes weights meanwhile.
//
// Sums of chunks are kept in memory as digits side by side in 64 bits, each thread's where it alone reads them, and become
// the records of merge/exact.cuh when there is no more room for digits or the block's part of the segment ends.
// Every other chunk waits in shared memory for the next, so that what is kept comes and goes half as often.
//
// Bottleneck: the matrix units, floor = 4 * head size * visible (query, key) pairs * heads / 989 TFLOP/s.
#pragma once

#include "attention/cuda/merge/exact.cuh"
#include "attention/cuda/prefill/kept.cuh"
#include "attention/cuda/prefill/kernel.cuh"

namespace pykv::attention {

template <class T, int kHeadSize>
struct InvariantPrefillShape : PrefillShape<T, kHeadSize> {
  static constexpr bool kMayBeMixed = false;
  using Base = PrefillShape<T, kHeadSize>;
  static constexpr bool kQueriesInRegisters = false;
  static constexpr int kStages = kHeadSize <= 64 ? 3 : 2;
  static constexpr int kWaitingBytes = 2 * kThreads * (kHeadSize / 8) * 16;
  static constexpr int kMemoryBytes = Base::kQueryBytes + 2 * kStages * Base::kTileBytes + kWaitingBytes;
  static constexpr int kFeederRegisters = 40, kComputeRegisters = 232;
  static_assert(Base::kTile == kPartTokens);
};

template <class S>
struct InvariantPrefillRows : PrefillRows<S> {
  using Base = PrefillRows<S>;
  using T = typename S::Mma;
  using Base::group;
  using Base::kD;
  using Base::keys;
  using Base::kTile;
  using Base::lane;
  using Base::maximum;
  using Base::o;
  using Base::p;
  using Base::queries;
  using Base::row0;
  using Base::s;
  using Base::scratch;
  using Base::values;
  using Base::weights;
  using typename Base::Products;
  using typename Base::ValueProducts;
  static constexpr int kSteps = kTile / 16;  // the running maximum may follow in front of each
  static constexpr int kStages = S::kStages;

  float4* waiting;  // this thread's, in shared memory
  int4* kept;       // and in memory
  float4 waiting_stats;
  ExactSum<1> totals[2];

  float odd[kTile / 2];      // of the scores
  float part_sum[2][2];      // of weights: row, even and odd columns
  float rescale[kSteps][2];  // of the sums in front of a step, if `rescales`
  bool rescales;             // a row of this warp, after the first step
  float chunk[kD / 2], chunk_maximum[2], chunk_sum[2];

  // ---- a part -------------------------------------------------------------------------------------------------------

  // Asks for scores in two chains of products, as in decode/columns.cuh: of every second step.
  __device__ void ask_scores(int stage) {
    const uint64_t q = wgmma_matrix(queries + group * 64 * 128, 1024);
    const uint64_t k = wgmma_matrix(keys + stage * S::kTileBytes, 1024);
    wgmma_pin(s);
    wgmma_pin(odd);
    wgmma_begin();
#pragma unroll
    for (int x = 0; x < kD / 16; ++x) {
      const int i = x * 2 % (kD / 16) + x / (kD / 32);  // one chain, then the other
      Products::ss(i % 2 ? odd : s, wgmma_further(q, i / 4 * S::kQueryColumnBytes + i % 4 * 32),
                   wgmma_further(k, i / 4 * S::kColumnBytes + i % 4 * 32), i > 1);
    }
    wgmma_commit();
  }

  __device__ void wait_scores() {
    wgmma_wait<0>();
    wgmma_pin(s);
    wgmma_pin(odd);
  }

  __device__ void add_chains() {
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) s[i] += odd[i];
  }

  // Of this lane's row h, in steps `from` to `to` - 1.
  __device__ float greatest(int h, int from, int to) const {
    float x[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 2 * from; i < 2 * to; ++i) {
      for (int e = 0; e < 2; ++e) x[e] = fmaxf(x[e], s[4 * i + 2 * h + e]);
    }
    const float y = fmaxf(x[0], x[1]), z = fmaxf(y, __shfl_xor_sync(~0u, y, 1));
    return fmaxf(z, __shfl_xor_sync(~0u, z, 2));
  }

  // Scores of step t to weights, in the order of generic/softmax.cuh.
  __device__ void weigh(int t, float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float base = base_of(maximum[h]);
      float x[2][2];  // of two column tiles
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) x[n][e] = power_of_2(fmaf(s[8 * t + 4 * n + 2 * h + e], scale, -base));
        weights[t][2 * n + h] = pack_pair<T>(x[n][0], x[n][1]);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) part_sum[h][e] += x[0][e] + x[1][e];
    }
  }

  // Does a maximum of the warpgroup rise after the first step of the part, so that sums are to be rescaled?  Weights are made as if
  // none did; if one is too large, which their sums show, they are made once more.
  __device__ bool make_weights() {
    const float scale = p.a.scale * kLog2e;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      part_sum[h][0] = part_sum[h][1] = 0;
      maximum[h] = ceilf(greatest(h, 0, 1) * scale);  // or -inf
    }
#pragma unroll
    for (int t = 0; t < kSteps; ++t) weigh(t, scale);
    rescales = false;
    const float most = fmaxf(fmaxf(part_sum[0][0], part_sum[0][1]), fmaxf(part_sum[1][0], part_sum[1][1]));
    const bool none = maximum[0] == -INFINITY || maximum[1] == -INFINITY;
    if (!__all_sync(~0u, most < 0x1p8f && !none)) [[unlikely]] {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        part_sum[h][0] = part_sum[h][1] = 0;
        maximum[h] = ceilf(greatest(h, 0, 1) * scale);
      }
      follow_maximum(scale);
    }
    return named_barrier_any(kVoteBarrier + group, kThreads, rescales);
  }

  // Weights step by step.
  __device__ void follow_maximum(float scale) {
    weigh(0, scale);
#pragma unroll
    for (int t = 1; t < kSteps; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float top = greatest(h, t, t + 1) * scale, old = maximum[h];
        const float now = top > old + kLag ? ceilf(top) : old;
        rescale[t][h] = power_of_2(old - (now == -INFINITY ? 0.f : now));
        rescales = rescales || (now > old && old != -INFINITY);
        maximum[h] = now;
        for (float& x : part_sum[h]) x *= rescale[t][h];
      }
      weigh(t, scale);
    }
    rescales = __any_sync(~0u, rescales);
  }

  // Products with step t of the part's values.
  __device__ void ask_step(uint64_t v, int t) {
    ValueProducts::template rs<kAcross>(o, weights[t], wgmma_further(v, t * 16 * 128), t > 0);
  }

  __device__ void add_values(int stage, bool by_steps) {
    const uint64_t v = wgmma_matrix(values + stage * S::kTileBytes, 1024, S::kColumnBytes);
    if (by_steps) [[unlikely]] {
#pragma unroll
      for (int t = 0; t < kSteps; ++t) {
        if (rescales && t > 0) {
#pragma unroll
          for (int i = 0; i < kD / 2; ++i) o[i] *= rescale[t][i / 2 % 2];
        }
        wgmma_pin(o);
        wgmma_begin();
        ask_step(v, t);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(o);
      }
      return;
    }
    wgmma_pin(o);
    wgmma_begin();
#pragma unroll
    for (int t = 0; t < kSteps; ++t) ask_step(v, t);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(o);
  }

  // ---- a chunk ------------------------------------------------------------------------------------------------------

  __device__ void clear_chunk() {
#pragma unroll
    for (float& x : chunk) x = 0;
    for (int h = 0; h < 2; ++h) {
      chunk_maximum[h] = -INFINITY;
      chunk_sum[h] = 0;
    }
  }

  // A part's sums join those of the parts before it, relative to the first part's maximum as long as no other is much greater:
  // powers of two round nothing, so that the bits are the same relative to anything.
  __device__ void end_part() {
    float weight[2], old[2];
    bool rises = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = part_sum[h][0] + part_sum[h][1];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (chunk_sum[h] == 0) chunk_maximum[h] = maximum[h];
      const float top = maximum[h] > chunk_maximum[h] + kLag ? maximum[h] : chunk_maximum[h], base = base_of(top);
      rises = rises || top > chunk_maximum[h];
      old[h] = power_of_2(chunk_maximum[h] - base);
      weight[h] = power_of_2(maximum[h] - base);
      chunk_maximum[h] = top;
      chunk_sum[h] = fmaf(sum, weight[h], chunk_sum[h] * old[h]);
    }
    if (__any_sync(~0u, rises)) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) chunk[i] *= old[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) chunk[i] = fmaf(o[i], weight[i / 2 % 2], chunk[i]);
  }

  // Four neighbouring columns of this lane, from its sums in two column tiles, in the row half h.
  __device__ float4 four(const float (&x)[8], int h) const {
    const bool odd = lane & 1;
    const float2 a = {x[2 * h], x[2 * h + 1]}, b = {x[4 + 2 * h], x[5 + 2 * h]};
    const float got0 = __shfl_xor_sync(~0u, odd ? a.x : b.x, 1), got1 = __shfl_xor_sync(~0u, odd ? a.y : b.y, 1);
    return odd ? float4{got0, got1, b.x, b.y} : float4{a.x, a.y, got0, got1};
  }

  // Of the chunk, what lies in the column tiles 2 i and 2 i + 1.  A branch, not a copy in memory, and not a choice for each number.
  template <int kFirst>
  __device__ void get_columns(float (&x)[8]) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) asm volatile("mov.f32 %0, %1;" : "=f"(x[e]) : "f"(chunk[(8 * kFirst + e) % (kD / 2)]));
  }
  __device__ void get_columns(int i, float (&x)[8]) const {
    switch (i) {
      case 0:
        return get_columns<0>(x);
      case 1:
        return get_columns<1>(x);
      case 2:
        return get_columns<2>(x);
      case 3:
        return get_columns<3>(x);
      case 4:
        return get_columns<4>(x);
      case 5:
        return get_columns<5>(x);
      case 6:
        return get_columns<6>(x);
      default:
        return get_columns<7>(x);
    }
  }

  // A chunk waits in shared memory for the next one, so that what is kept comes and goes for every second one.
  __device__ float4& waiting_at(int i) const { return waiting[i * 2 * kThreads]; }

  __device__ void leave_chunk() {
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      const auto& x = reinterpret_cast<const float (&)[8]>(chunk[8 * i]);
      for (int h = 0; h < 2; ++h) waiting_at(2 * i + h) = four(x, h);
    }
    waiting_stats = {chunk_maximum[0], chunk_sum[0], chunk_maximum[1], chunk_sum[1]};
  }

  // ---- the sum of chunks, in memory -----------------------------------------------------------------------------------

  // Of a thread's quads, of which there are two for each two column tiles: of rows row0 and row0 + 8.
  __device__ int4& kept_at(int i) const { return kept[i * 2 * kThreads]; }

  __device__ int2& states_at(int i) const {
    const int thread = threadIdx.x - kThreads;
    return reinterpret_cast<int2*>(kept + kD / 4 * 2 * kThreads - thread)[i * 2 * kThreads + thread];
  }

  // What is kept for two column tiles.
  struct Piece {
    int4 digits[4]{};
    int2 states{KeptQuad::kNone, KeptQuad::kNone};
  };

  __device__ Piece load_piece(int i, bool keeps) const {
    Piece x;
    if (keeps) {
#pragma unroll
      for (int k = 0; k < 4; ++k) x.digits[k] = kept_at(4 * i + k);
      x.states = states_at(i);
    }
    return x;
  }

  // Adds the chunk, and the one that waits if there are `two`, to what is kept, if it `keeps` any.
  __device__ void add_chunks(bool two, bool keeps) {
    Piece next = load_piece(0, keeps);
    int exponents[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 first = !two ? float2{-INFINITY, 0}
                           : h  ? float2{waiting_stats.z, waiting_stats.w}
                                : float2{waiting_stats.x, waiting_stats.y};
      exponents[h][0] = exponent_of(first.x);
      exponents[h][1] = exponent_of(chunk_maximum[h]);
      if (!keeps) totals[h].clear();
      totals[h].add({first.y}, exponents[h][0]);
      totals[h].add({chunk_sum[h]}, exponents[h][1]);
    }
    uint32_t left = 0;  // quads that are not added yet
#pragma unroll 1
    for (int i = 0; i < kD / 16; ++i) {
      const Piece piece = next;
      if (i + 1 < kD / 16) next = load_piece(i + 1, keeps);
      float own[8];
      get_columns(i, own);
      int states[2] = {piece.states.x, piece.states.y};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 a = two ? waiting_at(2 * i + h) : float4{0, 0, 0, 0}, b = four(own, h);
        const float terms[2][4] = {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
        KeptQuad quad;
        quad.set(piece.digits[2 * h], piece.digits[2 * h + 1]);
        quad.state = states[h];
        if (!quad.add_usual(terms, exponents[h])) left |= 1u << (2 * i + h);
        quad.get(kept_at(4 * i + 2 * h), kept_at(4 * i + 2 * h + 1));
        states[h] = quad.state;
      }
      states_at(i) = {states[0], states[1]};
    }
    if (__any_sync(~0u, left != 0)) [[unlikely]]
      add_left(left, two, exponents);
  }

  // Adds the quads in `left`.
  __device__ void add_left(uint32_t left, bool two, const int (&exponents)[2][2]) {
    float own[kD / 2];
#pragma unroll
    for (int i = 0; i < kD / 8; ++i) {
      const auto& x = reinterpret_cast<const float (&)[8]>(chunk[i / 2 * 8]);
      reinterpret_cast<float4&>(own[4 * i]) = four(x, i % 2);
    }
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int at = __ffs(left) - 1, h = at % 2;
      int2& states = states_at(at / 2);
      KeptQuad quad;
      quad.set(kept_at(2 * at), kept_at(2 * at + 1));
      quad.state = h ? states.y : states.x;
#pragma unroll 1
      for (int i = two ? 0 : 1; i < 2; ++i) {
        quad.add_any(i ? own + 4 * at : &waiting_at(at).x, h ? exponents[1][i] : exponents[0][i]);
      }
      quad.get(kept_at(2 * at), kept_at(2 * at + 1));
      (h ? states.y : states.x) = quad.state;
    }
  }

  // What is kept goes to the block's record of the segment, after what is there if `adds`, or, ended, to the output.
  __device__ void settle(const Unit& u, bool adds, bool ends) {
    const int slot = u.slot < 0 ? 2 * blockIdx.x + 1 : u.slot;  // of a segment that is all this block's, too
    const Row rows[2] = {row_of(p, u, row0), row_of(p, u, row0 + 8)};
    const auto column = [&](int i) { return i * 16 + lane % 2 * 8 + lane % 4 / 2 * 4; };
    const auto record = [&](int h, int i) -> ExactQuad& { return ExactQuad::at(p, slot, row0 + h * 8, column(i) / 4); };
    const bool finishes = ends && u.slot < 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (rows[h].valid && adds) totals[h].add(record(h, 0).total);
    }
#pragma unroll 1
    for (int i = 0; i < kD / 16; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (!rows[h].valid) continue;
        KeptQuad x;
        x.set(kept_at(4 * i + 2 * h), kept_at(4 * i + 2 * h + 1));
        x.state = h ? states_at(i).y : states_at(i).x;
        ExactQuad all{x.unpacked(), totals[h]};
        if (adds) all.values.add(record(h, i).values);
        if (finishes) {
          store_columns(p, output_row<T>(p, rows[h]), column(i), all.finish(p, rows[h], u.kv_head));
        } else {
          record(h, i) = all;
        }
      }
    }
  }

  // Both warpgroups have the same turns.
  __device__ void run() {
    take_registers<S::kComputeRegisters>();
    int used = 0;  // tiles
    if (group == 1) this->end_turn();
#pragma unroll 1
    for (int n = 0;; ++n) {
      this->wait_full(scratch.key_full[used % kStages], used / kStages % 2);  // its queries, too
      const PrefillSegment& segment = this->segment_of(n);
      const Unit& u = segment.unit;
      const int tiles = segment.tiles;
      if (tiles == 0) return;
      this->begin_segment(u);
      clear_chunk();
      int chunks = 0;  // since the last settlement
      bool waits = false, settled = false, by_steps = false;
#pragma unroll 1
      for (int j = 0;; ++j, ++used) {
        const int stage = used % kStages, parity = used / kStages % 2;
        if (j > 0 && j < tiles) this->wait_full(scratch.key_full[stage], parity);
        if (j > 0) this->wait_full(scratch.value_full[(used - 1) % kStages], (used - 1) / kStages % 2);
        this->take_turn();
        if (j > 0) {
          add_values((used - 1) % kStages, by_steps);
          this->arrive(scratch.value_empty[(used - 1) % kStages]);
          end_part();
          const bool ends = j == tiles;
          if (ends || (u.first_token + j * kTile) % kChunkTokens == 0) {
            if (!ends && !waits) {
              leave_chunk();
              waits = true;
            } else {
              this->end_turn();
              add_chunks(waits, chunks > 0);
              chunks += 1 + waits;
              waits = false;
              if (ends || chunks + 2 > KeptQuad::kMostTerms) {
                settle(u, settled, ends);
                settled = true;
                chunks = 0;
              }
              if (ends) break;
              this->take_turn();
            }
            clear_chunk();
          }
        }
        ask_scores(stage);
        this->end_turn();
        wait_scores();
        const uint4 valid = this->valid_of(stage);
        this->release_keys(stage, j + 1 == tiles);
        add_chains();
        this->mask(u.first_token + j * kTile, valid);
        by_steps = make_weights();
      }
    }
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    paged_attention_prefill_invariant_kernel(const __grid_constant__ Problem p,
                                             const __grid_constant__ CacheCopies copies,
                                             const __grid_constant__ WholeTiles whole, int4* kept) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  run_prefill<S, ExactQuad>(
      p, copies, whole, [&](PrefillScratch& scratch, uint32_t queries, uint32_t keys, uint32_t values) {
        int4* mine = kept + blockIdx.x * (kept_bytes(S::kD) / 16) + threadIdx.x - kThreads;
        auto* waiting = reinterpret_cast<float4*>(reinterpret_cast<char*>(&scratch) - S::kWaitingBytes);
        InvariantPrefillRows<S> rows{{p, scratch, queries, keys, values}, waiting + threadIdx.x - kThreads, mine};
        rows.run();
      });
#endif
}

template <class S>
void launch_invariant_kernel(const Problem& p, const Step& s, const Launch& launch) {
  const int64_t records = int64_t{2} * s.grid * p.rows * (p.pitch / 4);
  char* after = reinterpret_cast<char*>(p.partial) + records * sizeof(ExactQuad);
  launch_prefill_kernel<paged_attention_prefill_invariant_kernel<S>, S>(p, s, after + s.grid * kept_bytes(S::kD),
                                                                        launch, reinterpret_cast<int4*>(after));
}

template <class Element>
void launch_prefill_invariant(const Problem& p, const Step& s, const Launch& launch) {
  using T = typename Element::Mma;
  if (s.instance.head_size <= 64) return launch_invariant_kernel<InvariantPrefillShape<T, 64>>(p, s, launch);
  launch_invariant_kernel<InvariantPrefillShape<T, 128>>(p, s, launch);
}

}  // namespace pykv::attention
