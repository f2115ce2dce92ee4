// Decoding with batch_invariant: a team of four warps takes the parts of a chunk (merge/exact.cuh), each in sums of its own, and
// adds them up.  On the line a block is a team, in clusters it may have several.
#pragma once

#include "attention/cuda/decode/queries.cuh"
#include "attention/cuda/merge/exact.cuh"

namespace pykv::attention {

// kInRegisters: what a thread keeps of chunks, if that is twice four columns.
template <class S, bool kInRegisters = false>
struct InvariantTeams {
  using Queries = ColumnQueries<S>;
  using State = typename Queries::State;
  static constexpr int kD = S::kD, kQuads = kD / 4, kTeamWarps = 4, kParts = kChunkTokens / kPartTokens;
  static constexpr int kLeaf = S::kColumns * kD * 4;  // bytes of a warp's sums
  static constexpr int kRing = S::kRingBytes / 4;
  static_assert(kParts == kTeamWarps && kLeaf <= S::kStageBytes && !S::kRaw);

  // Four columns of a query each, a team's threads in turn: the first in registers.
  static constexpr int kKept = (S::kColumns * kQuads + kThreads - 1) / kThreads;
  struct Kept {
    ExactQuad near, far[kKept > 1 ? kKept - 1 : 1];

    __device__ void clear() {
      near.clear();
      for (ExactQuad& x : far) x.clear();
    }
  };

  const Problem& p;
  char* rings;    // all warps' stages
  float2* stats;  // [warp][column]: maximum and sum
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>(), warps = blockDim.x / 32;
  const int items = p.group * kQuads;  // four columns of a query each
  const int teams = warps / kTeamWarps, team = warp / kTeamWarps;

  __device__ void sync_team() const {
    const auto sync = [](auto barrier) {  // a number that the compiler knows: else it would take all of them
      asm volatile("bar.sync %0, %1;" ::"n"(decltype(barrier)::value), "n"(kThreads) : "memory");
    };
    if (team == 0) {
      sync(std::integral_constant<int, 1>());
    } else if (S::kWarps > 4 && team == 1) {
      sync(std::integral_constant<int, 2>());
    } else if (S::kWarps > 8) {
      sync(std::integral_constant<int, 3>());
    }
  }

  __device__ float2 (&stats_of(int w) const)[S::kColumns] {
    return *reinterpret_cast<float2(*)[S::kColumns]>(stats + w * S::kColumns);
  }

  // body(kept, item): what this thread keeps of four columns of a query each.
  __device__ void for_each_kept(Kept& kept, auto&& body) const {
    const auto visit = [&](int j, ExactQuad& x) {
      const int item = threadIdx.x % kThreads + j * kThreads;
      if (item < items) body(x, item);
    };
    visit(0, kept.near);
    if constexpr (kInRegisters && kKept == 2) {
      visit(1, kept.far[0]);
    } else {
#pragma unroll 1
      for (int j = 1; j < kKept && j * kThreads < items; ++j) visit(j, kept.far[hidden(j - 1)]);
    }
  }

  // A warp's sums, each lane's in four neighbouring places.
  __device__ void leave(const State& state, float* to, float2 (&stats)[S::kColumns]) const {
#pragma unroll
    for (int i = 0; i < Queries::kQueryTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = i * 8 + lane % 4 * 2 + e;
        float sum = state.sum[i][e];
        for (int m = 4; m < 32; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
        if (lane / 4 == 0 && column < p.group) stats[column] = {state.maximum[i][e], sum};
      }
#pragma unroll
      for (int n = 0; n < kD / 16; ++n) {
        const float (&x)[4] = state.o[i][n];
        reinterpret_cast<float4*>(to)[(i * (kD / 16) + n) * 32 + (lane ^ n % 8)] = {x[0], x[1], x[2], x[3]};
      }
    }
  }

  // From there, four columns of a query.
  static __device__ float4 left_at(const float* from, int item) {
    const int column = item / kQuads, d = item % kQuads * 4, n = d / 16;
    float x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int h = S::kPermutedOutput ? k % 2 : d / 8 % 2, row = S::kPermutedOutput ? (d % 16 + k) / 2 : d % 8 + k;
      const int of = row * 4 + column / 2 % 4;  // the lane
      x[k] = from[((column / 8 * (kD / 16) + n) * 32 + (of ^ n % 8)) * 4 + 2 * h + column % 2];
    }
    return {x[0], x[1], x[2], x[3]};
  }

  // What the team's warps found, where all of them find it: in a stage that they are done with.
  __device__ const float* left_by(int w, int stage) const {
    return reinterpret_cast<const float*>(rings + stage * S::kStageBytes) + (team * kTeamWarps + w) * kRing;
  }

  __device__ void leave_in_team(const State& state, int stage) const {
    leave(state, const_cast<float*>(left_by(warp % kTeamWarps, stage)), stats_of(warp));
    sync_team();
  }

  // Parts of a chunk that they left, added up.
  __device__ PartsOfChunk parts_left(int stage, int item) const {
    PartsOfChunk sum;
#pragma unroll
    for (int w = 0; w < kTeamWarps; ++w) {
      sum.add(stats_of(team * kTeamWarps + w)[item / kQuads], left_at(left_by(w, stage), item));
    }
    return sum;
  }

  // A team adds up what its warps found of a chunk.
  __device__ void end_chunk(State& state, int stage, Kept& kept) const {
    leave_in_team(state, stage);
    for_each_kept(kept, [&](ExactQuad& x, int item) {
      const PartsOfChunk sum = parts_left(stage, item);
      x.add(sum.o, sum.sum, sum.maximum);
    });
    sync_team();  // the stage is free
    Queries::clear_sums(state);
  }
};

}  // namespace pykv::attention
