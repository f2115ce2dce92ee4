// A block, or where requests are few a cluster of them, verifies the tree of a request.  All of its nodes are copied to shared
// memory, where links are checked; one warp of each block walks from the root; then all draw one token from the vocabulary.
#include "sampling/verify_tree.h"
#include "sampling/weighed_tokens.cuh"

namespace pykv {
namespace {

// Words of shared memory: five for each node, and a bit.
constexpr int tree_words(int num_nodes) { return 5 * num_nodes + (num_nodes + 31) / 32; }

struct Reporters {
  Reporter of[5];
};

// Its walk is that of one warp, all lanes of which call each function together.
class Tree {
 public:
  __device__ Tree(int32_t* memory, int num_nodes)
      : next_(memory),
        sibling_(memory + num_nodes),
        token_(memory + 2 * num_nodes),
        path_(memory + 3 * num_nodes),
        rejected_(memory + 4 * num_nodes),
        visited_(memory + 5 * num_nodes) {}

  // By all threads of the block.
  template <class Report>
  __device__ void load(const VerifyTreeArgs& args, int64_t request, Report report) {
    for (int i = threadIdx.x; i < args.num_nodes; i += kSelectThreads) {
      next_[i] = known_link(args.next_token, request, i, args.num_nodes,
                            [&](int64_t link, int64_t bound) { report(TreeReport::kNextToken, link, bound); });
      sibling_[i] = known_link(args.next_sibling, request, i, args.num_nodes,
                               [&](int64_t link, int64_t bound) { report(TreeReport::kNextSibling, link, bound); });
      token_[i] = known_token(args, request, i);
      if (i % 32 == 0) visited_[i / 32] = 0;
    }
    __syncthreads();
  }

  __device__ bool first_visit(int node) {
    const int32_t bits = visited_[node / 32], bit = static_cast<int32_t>(1u << (node % 32));
    __syncwarp();
    if (threadIdx.x % 32 == 0) visited_[node / 32] = bits | bit;
    __syncwarp();
    return (bits & bit) == 0;
  }
  __device__ int next(int node) const { return next_[node]; }
  __device__ int sibling(int node) const { return sibling_[node]; }
  __device__ int token(int node) const { return token_[node]; }
  __device__ int path(int i) const { return path_[i]; }
  __device__ void append(int i, int node) {
    if (threadIdx.x % 32 == 0) path_[i] = node;
  }
  __device__ void reject(int token) {
    if (threadIdx.x % 32 == 0) rejected_[num_rejected_] = token;
    ++num_rejected_;
    __syncwarp();
  }
  __device__ void forget_rejected() {
    num_rejected_ = 0;
    __syncwarp();
  }
  __device__ bool is_rejected(int token) const {
    bool found = false;
    for (int i = threadIdx.x % 32; i < num_rejected_; i += 32) found |= rejected_[i] == token;
    return __any_sync(0xffffffffu, found);
  }

  __device__ int num_rejected() const { return num_rejected_; }
  __device__ int rejected(int i) const { return rejected_[i]; }

 private:
  int32_t *next_, *sibling_, *token_, *path_, *rejected_, *visited_;
  int num_rejected_ = 0;
};

__global__ __launch_bounds__(kSelectThreads, 2) void verify_tree_kernel(const __grid_constant__ VerifyTreeArgs args,
                                                                        int blocks,
                                                                        const __grid_constant__ Reporters reporters) {
  extern __shared__ __align__(16) int32_t nodes[];
  __shared__ RowMemory memory;
  __shared__ PathEnd shared_end;
  __shared__ int shared_rejected;
  begin_dependent();
  const int64_t request = static_cast<int64_t>(blockIdx.x) / blocks;
  const int thread = threadIdx.x;
  RowTeam team(memory, static_cast<int>(blockIdx.x) % blocks, blocks);
  const bool is_first = team.rank() == 0;
  Tree tree(nodes, args.num_nodes);
  tree.load(args, request, [&](TreeReport what, long long value, long long bound) {
    if (is_first) reporters.of[static_cast<int>(what)](value, bound);
  });
  const auto report = [&](TreeReport what, long long value, long long bound) {
    if (is_first && thread == 0) reporters.of[static_cast<int>(what)](value, bound);
  };
  const int64_t seed = args.seeds.data ? args.seeds[request] : 0, step = args.steps.data ? args.steps[request] : 0;
  if (thread < 32) {
    const PathEnd end = walk(args, request, tree, TokenNoise::of(seed, step), report);
    if (thread == 0) {
      shared_end = end;
      shared_rejected = tree.num_rejected();
    }
  }
  __syncthreads();
  team.wait_for_blocks();
  const PathEnd end = shared_end;
  const int num_rejected = shared_rejected;

  int64_t last;
  if (args.target) {
    const float* p = args.target + request * args.target_request + end.node * args.target_node;
    const TokenNoise noise = noise_at(seed, step, end.accepted);
    const auto weight = [&](int token) { return p[token]; };
    Entry best = best_token(noise, team, args.vocab_size, weight, [&](int token) {
      for (int i = 0; i < num_rejected; ++i)
        if (tree.rejected(i) == token) return false;
      return true;
    });
    if (best == 0 && num_rejected > 0)
      best = best_token(noise, team, args.vocab_size, weight, [](int) { return true; });
    const bool has_nan = key_of(best) == kKeyOfNan;
    if (best == 0 || has_nan) report(TreeReport::kTargetProbs, request, has_nan ? kRowHasNan : kRowIsEmpty);
    last = best == 0 || has_nan ? -1 : int64_t{index_of(best)};
  } else {
    last = args.target_tokens.at(request, end.node);
  }
  if (is_first) {
    for (int i = thread; i < args.num_out; i += kSelectThreads) {
      args.out.store(request, i, i < end.accepted ? tree.token(tree.path(i + 1)) : i == end.accepted ? last : -1);
      if (!args.accepted_index.data) continue;
      const int node = i <= end.accepted ? tree.path(i) : -1;
      args.accepted_index.store(request, i,
                                node >= 0 && args.retrieve_index.data ? args.retrieve_index.at(request, node) : node);
    }
    if (thread == 0 && args.num_accepted) args.num_accepted[request * args.accepted_stride] = end.accepted;
  }
}

}  // namespace

void verify_tree_cuda(const VerifyTreeArgs& args, const Launch& launch) {
  const int blocks = args.target ? blocks_for_row<verify_tree_kernel>(args.num_requests, args.vocab_size, launch) : 1;
  Reporters reporters{};
  for (int i = 0; i < 5; ++i) reporters.of[i] = launch.reporter(kTreeReports[i]);
  launch_rows<verify_tree_kernel>(args.num_requests, blocks, kSelectThreads,
                                  tree_words(args.num_nodes) * static_cast<int>(sizeof(int32_t)), launch, "verify_tree",
                                  args, blocks, reporters);
}

}  // namespace pykv
