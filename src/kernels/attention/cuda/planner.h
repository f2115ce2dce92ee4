// The parts of cuda/plan.cc.  Each function of a Planner that gives a bool adds steps to the plan or, if the call had better go another
// way, gives false and adds none.
#pragma once

#include "attention/cuda/plan_request.h"

namespace pykv::attention {

// Whose line takes a call that may go either way, if its lengths do not suit clusters: that of decoding, of four warps together, or of
// single warps.
enum class LineOf { kDecoding, kVerify, kWarps };

// How many blocks take a KV head of a sequence, or a span of its keys, and their warps; no blocks: better leave it to the line.
struct Clusters {
  int blocks, warps;
  int spans = 1;
};

// Of a block of a cluster: with more keys it widens elements for longer than it waits for them.
constexpr int64_t kManyKeys = 2048;

class Planner {
 public:
  Planner(const DeviceInfo& device, Plan& plan) : d_(device), plan_(plan) {}

  void all(const Request& r);

 private:
  const DeviceInfo& d_;
  Plan& plan_;

  // cuda/plan.cc
  bool by_tensor_cores(Request r);
  bool some_rows(const Request& r, RowClass of);
  bool either_way(Request r, RowClass rows);
  bool rows(const Request& r, RowClass rows);
  bool prefill(const Request& r, bool mixed = false);
  bool mixed(const Request& r);
  bool decode(const Request& r);
  static bool may_prefer_verify(const LineSizes& s) { return is_common(s.kind) && !s.invariant && !s.packed; }
  static bool may_fold(const Request& r, const LineSizes& s) {
    return may_prefer_verify(s) && s.head_size == 64 && r.a.head_size > 32 && r.sees_all() && r.can_fold();
  }
  bool prefers_verify(const Request& r, const LineSizes& s) const;
  bool decode_clusters(Request r, const LineSizes& of_line);
  bool decode_either(const Request& r, const ClusterSizes& usual, const LineSizes& of_line);
  bool tokens(const Request& r);
  bool tokens_clusters(const Request& given, int head_size, int columns);
  bool tokens_line(const Request& r, int columns);
  bool may_verify(const Request& r, RowClass rows) const;
  bool fills_verify(const Request& r) const;
  void verify(const Request& r, RowClass rows);
  bool verify_clusters(const Request& r);
  void simple(const Request& r);

  // cuda/plan_steps.cc
  void add(const Step& s);
  static Step step_of(const Request& r, const Instance& instance, int grid, int threads, int cluster, int shared_bytes);
  int grid_of(int blocks_per_sm) const { return std::min(kMaxGrid, d_.sms * blocks_per_sm); }
  int resident_blocks(int threads, int shared_bytes, int by_registers) const;
  int resident_clusters(int blocks, int threads, int shared_bytes, int by_registers) const;
  static Step on_line(Step s, const Tiling& tiling, int unit_tokens);
  bool line(const Request& r, const Instance& instance, int threads, int shared_bytes, int by_registers,
            int unit_tokens, const Tiling& tiling);
  static Tiling line_tiling(const Request& r, const LineSizes& s);
  bool lines(const Request& r, const LineSizes& s, bool by_token = false);
  void combine(const Request& r);
  LineOf line_of(const Request& r) const;
  static Balance balance_for(int kv_heads, float blocks, int grid, float pace, int tokens);
  Balance balance_of(const Request& r, LineOf line, int cluster, int blocks_per_sm) const;
  bool with_line(const Request& r, LineOf line, const Step& clusters);
  Step* clusters_or_line(const Request& r, const ClusterSizes& sizes, const LineSizes& of_line, const Clusters& size,
                         int queries);
  void set_cluster(Step& s, const Request& r, int queries, int quads) const;
  void set_spans(Step& s, int spans, int head_size, int keys_alone) const;
  bool suits_spans(const Request& r) const;
  int invariant_exchange_bytes(const ClusterSizes& s, int group, int blocks, int warps) const;
  int cluster_bytes(const ClusterSizes& s, int group, int blocks, int warps) const;
  int keys_alone(const ClusterSizes& s, int spans, int64_t heads, int round) const;
  int spans_for(const ClusterSizes& s, int64_t most, int blocks, int64_t room, int64_t heads) const;
  Clusters cluster_size(const Request& r, const ClusterSizes& s) const;
  Clusters tokens_size(Request& r, const ClusterSizes& s) const;
  static KernelId cluster_kernel(const ClusterSizes& s, bool spans);
  bool clusters(const Request& r, const ClusterSizes& sizes, const Clusters& size);
  bool verify_cluster(const Request& r, const VerifySizes& sizes, bool alone, bool may_span);
};

}  // namespace pykv::attention
