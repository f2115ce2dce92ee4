// Decoding for few sequences with batch_invariant, by clusters of blocks as in decode/cluster.cuh.
//
// Four warps, a team, take a chunk (merge/exact.cuh) as they do on the line, in rounds for all teams of the cluster.  The sums of a
// chunk go as they are to the blocks that finish the columns.  Where these have no room for so many, each thread keeps a record.
//
// Chain: length, pages and queries at once -> tiles -> sums -> one exchange -> output.
#pragma once

#include "attention/cuda/decode/invariant_exchange.cuh"
#include "attention/cuda/decode/invariant_team.cuh"
#include "attention/cuda/decode/loader.cuh"

namespace pykv::attention {

template <class S>
struct InvariantClusterKernel {
  using Sums = InvariantExchange<S>;
  using Teams = InvariantTeams<S>;
  using Table = DecodePages<S>;
  using State = typename ColumnQueries<S>::State;
  using PageWords = typename Table::PageWords;
  using FirstLoads = typename Table::FirstLoads;
  using Exchange = typename Sums::Exchange;
  using Kept = typename Teams::Kept;
  static constexpr int kLeafBytes = Sums::kLeafBytes;
  static constexpr int kTeamWarps = Teams::kTeamWarps, kGroups = Table::kGroups;
  static constexpr int kTile = S::kTile, kStages = S::kStages, kPartTiles = kPartTokens / kTile;
  static_assert(kPartTokens == 16 * kGroupTokens);  // half a warp looks up a part

  const Problem& p;
  const CacheCopies& copies;
  char* rings;    // all warps' stages
  float2* stats;  // [warp][column]: maximum and sum
  DecodeLoader<S> loader{p, copies};
  ColumnQueries<S> queries{p};
  Sums sums{p};                  // of the cluster's blocks
  Teams parts{p, rings, stats};  // of the block's warps
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>(), warps = parts.warps;
  const int teams = parts.teams, team = parts.team;
  const int cluster = sums.cluster, rank = sums.block.rank, sequence = sums.sequence, kv_head = sums.kv_head;
  const int items = sums.items, each = sums.each;

  // ---- who takes what -----------------------------------------------------------------------------------------------

  int rounds = 0;           // of chunks for all teams
  int chunks = 0;           // of all blocks of the cluster
  bool by_records = false;  // what the blocks send

  static constexpr int kBarrierBytes = 16;  // aligned

  __device__ void share(int len) {
    chunks = (len + kChunkTokens - 1) / kChunkTokens;
    sums.block.use_spans(len);
    if (sums.block.spans() > 1) chunks = p.by_spans.quotient(chunks + sums.block.spans() - 1 - sums.block.span());
    rounds = p.by_round.quotient(chunks + teams * cluster - 1);
    by_records = sums.leaf_places(chunks, each) * Sums::kLeafBytes > p.exchange_bytes;
  }

  // The team's, of the cluster's; what lies past the end does not exist.
  __device__ int chunk_of(int round) const { return (round * teams + team) * cluster + rank; }

  // Of this warp's i-th tile.
  __device__ int first_token(int i) const {
    const int chunk = chunk_of(i / kPartTiles) * sums.block.spans() + sums.block.span();
    return chunk * kChunkTokens + warp % kTeamWarps * kPartTokens + i % kPartTiles * kTile;
  }

  // Lane: of the tile lane % 16 / kGroups after the i-th, eight tokens.
  __device__ int token_to_look_up(int i) const {
    return first_token(i + lane % 16 / kGroups) + lane % kGroups * kGroupTokens;
  }
  __device__ PageWords look_up_tiles(int i, int end) const {
    const int token = token_to_look_up(i);
    return loader.table.ask_for_page(sequence, token, token < end);
  }

  __device__ FirstLoads find_first_loads() const {
    const int token = token_to_look_up(0);
    return loader.table.find_first_loads(sequence, token, token < p.a.max_seq_len);
  }

  // ---- the loop -----------------------------------------------------------------------------------------------------

  __device__ void run() {
    if (cluster > 1) {
      if (threadIdx.x == 0) cluster_open(shared_address(barrier()));
      cluster_announce();  // others may send
    }
    // What can be found out before the kernel before has ended, is, so that loads come right after it.
    auto places = queries.find_queries(sequence, kv_head);
    queries.have_queries_ready(places);
    FirstLoads first{};
    if constexpr (!S::kSpans) first = find_first_loads();
    if (blockIdx.x < p.early_blocks) {
      const int guess = loader.table.early_length(sequence);
      share(static_cast<int>(clamp(guess, 0, p.a.max_seq_len)));
      loader.table.foresee(sequence, kv_head, guess, first_token(0));
    }
    if constexpr (S::kSpans) first = find_first_loads();
    wait_for_previous_kernel();
    const PageWords pages = loader.table.ask_for_pages(first);
    PageWords later_ids;
    const int len = loader.table.length(first);
    State state;
    queries.fetch_queries(places, state);
    int ids = pages.id();  // of the first tiles; later, of the next part
    if (!S::kSpans && !takes_call(p)) {
      if (cluster > 1) cluster_wait();
      return;
    }
    const int guessed_spans = sums.block.spans();
    share(len);
    if constexpr (S::kSpans) {
      if (sums.block.is_left_out()) return cluster_wait();
      if (sums.block.spans() != guessed_spans) ids = look_up_tiles(0, len).id();
    }
    const int tiles = rounds * kPartTiles;
    Kept kept;
    kept.clear();

    const uint32_t stage0 = shared_address(rings + warp * S::kRingBytes);
    uint32_t valid[kStages];  // of tiles i to i + stages - 1
    int at = 0, free = 0;     // the stages of the first and the last of these
    int token = 0;            // the last one's first
    const auto after = [](int stage) { return stage + 1 == kStages ? 0 : stage + 1; };
#pragma unroll 1
    for (int i = 1 - kStages;; ++i) {
      const int next = i + kStages - 1;
      TilePart part{sequence, len, kv_head, 0, 0, 0, 0, true, false, false, false};
      if (next < tiles) {
        token += kTile;
        if (next % kPartTiles == 0) {
          token = first_token(next);
          if (next > 0) ids = later_ids.id();
          later_ids = look_up_tiles(next + kPartTiles, len);
        }
        part.first_token = token;
        if (part.first_token < len) {
          part.valid = loader.start(stage0 + free * S::kStageBytes, part, Table::pages_of(ids, next % kPartTiles));
        }
      }
      cp_async_commit();
      free = after(free);
#pragma unroll
      for (int k = 0; k + 1 < kStages; ++k) valid[k] = valid[k + 1];
      valid[kStages - 1] = part.valid;
      if (i < 0) continue;
      if (i == 0) {
        queries.settle(kv_head, state);
        if (cluster > 1) {
          sums.await_cluster(barrier(), by_records, chunks);  // the first tile is still on its way
        }
        if (cluster <= 2 || len <= 2048) let_next_kernel_start();
      }
      if (i >= tiles) break;
      if (!state.plain) part.first_token = first_token(i);
      part.valid = valid[0];
      cp_async_wait<kStages - 1>();
      __syncwarp();  // the tile is there
      loader.attend(rings + warp * S::kRingBytes, at * S::kStageBytes, part, state);
      __syncwarp();  // its stage is free
      if ((i + 1) % kPartTiles == 0) {
        if (by_records) {
          parts.end_chunk(state, at, kept);
        } else {
          send_chunk(state, at, chunk_of(i / kPartTiles));
        }
      }
      at = after(at);
    }
    finish(kept, len);
    if (rank == 0 && kv_head == 0 && sums.block.is_first() && threadIdx.x == 0)
      report_sequence(p, load_sequence(p, sequence));
  }

  // ---- the end ------------------------------------------------------------------------------------------------------

  // It counts what others send.
  __device__ uint64_t* barrier() const { return reinterpret_cast<uint64_t*>(stats + warps * S::kColumns); }

  __device__ Exchange exchange() const {
    return sums.exchange_at(reinterpret_cast<char*>(barrier()) + kBarrierBytes, barrier(), chunks);
  }

  // What this team found in a chunk; through a stage that it is done with.
  __device__ void send_chunk(State& state, int stage, int chunk) const {
    const Exchange to = exchange();
    parts.leave_in_team(state, stage);
#pragma unroll 1
    for (int item = threadIdx.x % kThreads; chunk < chunks && item < items; item += kThreads) {
      const PartsOfChunk sum = parts.parts_left(stage, item);
      sums.send_leaf(to, chunk, item, {sum.maximum, sum.sum}, sum.o);
    }
    parts.sync_team();
    ColumnQueries<S>::clear_sums(state);
  }

  __device__ void finish(Kept& kept, int len) const {
    Exchange to = exchange();
    if (!by_records) return sums.add_up_leaves(to, chunks, len);
    if (warps == kTeamWarps && cluster == 1) {  // the team has all
      parts.for_each_kept(kept, [&](const ExactQuad& x, int item) { sums.store(x, item, len); });
      return;
    }
    if (cluster == 1) to.records = reinterpret_cast<ExactQuad*>(rings);  // [team][item]
    send_records(to, kept);
    sums.add_up_records(to, cluster == 1 ? teams : cluster, len);
  }

  __device__ void send_records(const Exchange& to, Kept& kept) const {
    auto* staged = reinterpret_cast<ExactQuad*>(rings);  // [team][item]
    const auto place = [&](int team, int item) { return team * (items + 1) + item; };
    __syncthreads();  // nobody needs the stages
    parts.for_each_kept(kept, [&](const ExactQuad& x, int item) { staged[place(team, item)] = x; });
    if (cluster == 1) return;
    __syncthreads();
#pragma unroll 1
    for (int item = threadIdx.x; item < items; item += blockDim.x) {
      ExactQuad sum = staged[item];
      for (int t = 1; t < teams; ++t) sum.add(staged[place(t, item)]);
      sums.send_record(to, item, sum);
    }
  }
};

template <class S>
struct InvariantClusterBlock {
  static constexpr int kThreadsOfBlock = S::kWarps * 32, kBlocksOfSm = 1;

  static __device__ void run(const Problem& p, const CacheCopies& copies, char* memory) {
    auto* stats = reinterpret_cast<float2*>(memory + blockDim.x / 32 * S::kRingBytes);
    InvariantClusterKernel<S> kernel{p, copies, memory, stats};
    kernel.run();
  }
};

template <class S>
void launch_invariant_clusters(const Problem& p, const Step& s, const Launch& launch) {
  using Kernel = InvariantClusterKernel<S>;
  static_assert(sizeof(ExactQuad) == kExactQuadBytes && Kernel::kLeafBytes == kLeafBytes);
  static_assert(Kernel::kBarrierBytes == 16 && Kernel::kTeamWarps == kTeamWarps);
  if constexpr (S::kSizes.may_span() && !S::kSpans) {
    if (s.spans > 1) return launch_invariant_clusters<Spanned<S>>(p, s, launch);
  }
  const int most_bytes = device_info(launch.device).shared_of_block;
  launch_step<paged_attention_kernel<InvariantClusterBlock<S>>>(p, s, most_bytes, launch, copies_of<S>(p));
}

}  // namespace pykv::attention
