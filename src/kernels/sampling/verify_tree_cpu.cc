// A request is one thread's.
#include <utility>

#include "cpu/parallel.h"
#include "sampling/verify_tree.h"
#include "sampling/weighed_tokens_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

class Tree {
 public:
  template <class Report>
  void load(const VerifyTreeArgs& args, int64_t request, Report report) {
    num_rejected_ = 0;
    for (int i = 0; i < args.num_nodes; ++i) {
      is_visited_[i] = false;
      next_[i] = known_link(args.next_token, request, i, args.num_nodes,
                            [&](int64_t link, int64_t bound) { report(TreeReport::kNextToken, link, bound); });
      sibling_[i] = known_link(args.next_sibling, request, i, args.num_nodes,
                               [&](int64_t link, int64_t bound) { report(TreeReport::kNextSibling, link, bound); });
      token_[i] = known_token(args, request, i);
    }
  }
  bool first_visit(int node) { return !std::exchange(is_visited_[node], true); }
  int next(int node) const { return next_[node]; }
  int sibling(int node) const { return sibling_[node]; }
  int token(int node) const { return token_[node]; }
  void append(int i, int node) { path_[i] = node; }
  int path(int i) const { return path_[i]; }
  void reject(int token) { rejected_[num_rejected_++] = token; }
  void forget_rejected() { num_rejected_ = 0; }
  bool has_rejected() const { return num_rejected_ > 0; }
  bool is_rejected(int token) const {
    for (int i = 0; i < num_rejected_; ++i)
      if (rejected_[i] == token) return true;
    return false;
  }

 private:
  int32_t next_[kMostNodes], sibling_[kMostNodes], token_[kMostNodes], path_[kMostNodes], rejected_[kMostNodes];
  int num_rejected_;
  bool is_visited_[kMostNodes];
};

void verify(const VerifyTreeArgs& args, int64_t request, Tree& tree, const Launch& launch) {
  const auto report = [&](TreeReport what, int64_t value, int64_t bound) {
    launch.reporter(kTreeReports[static_cast<int>(what)])(value, bound);
  };
  tree.load(args, request, report);
  const int64_t seed = args.seeds.data ? args.seeds[request] : 0, step = args.steps.data ? args.steps[request] : 0;
  const PathEnd end = walk(args, request, tree, TokenNoise::of(seed, step), report);
  int64_t last;
  if (args.target) {
    const float* p = args.target + request * args.target_request + end.node * args.target_node;
    const TokenNoise noise = noise_at(seed, step, end.accepted);
    const auto weight = [&](int token) { return p[token]; };
    Entry best = best_token(noise, args.vocab_size, weight, [&](int token) { return !tree.is_rejected(token); });
    if (best == 0 && tree.has_rejected()) best = best_token(noise, args.vocab_size, weight, [](int) { return true; });
    const bool has_nan = key_of(best) == kKeyOfNan;
    if (best == 0 || has_nan) report(TreeReport::kTargetProbs, request, has_nan ? kRowHasNan : kRowIsEmpty);
    last = best == 0 || has_nan ? -1 : int64_t{index_of(best)};
  } else {
    last = args.target_tokens.at(request, end.node);
  }
  for (int i = 0; i < args.num_out; ++i) {
    args.out.store(request, i, i < end.accepted ? tree.token(tree.path(i + 1)) : i == end.accepted ? last : -1);
    if (!args.accepted_index.data) continue;
    const int node = i <= end.accepted ? tree.path(i) : -1;
    args.accepted_index.store(request, i,
                              node >= 0 && args.retrieve_index.data ? args.retrieve_index.at(request, node) : node);
  }
  if (args.num_accepted) args.num_accepted[request * args.accepted_stride] = end.accepted;
}

}  // namespace

void verify_tree_cpu(const VerifyTreeArgs& args, const Launch& launch) {
  parallel_for(args.num_requests, 1, [&](int64_t begin, int64_t end) {
    Tree tree;
    for (int64_t request = begin; request < end; ++request) verify(args, request, tree, launch);
  });
}

}  // namespace pykv::PYKV_ISA
