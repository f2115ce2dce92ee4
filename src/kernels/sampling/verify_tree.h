// Tokens of a tree of drafts that a target model accepts, and one more.  The idea behind pykv_verify_tree.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "sampling/weighed_tokens.h"

namespace pykv {

// Ids of the nodes of each request.
struct NodeIds {
  const void* data;  // [num_requests, num_nodes] int32 or int64
  int64_t stride;
  bool is_int64;

  PYKV_HOST_DEVICE __attribute__((always_inline)) int64_t at(int64_t request, int64_t node) const {
    return is_int64 ? static_cast<const int64_t*>(data)[request * stride + node]
                    : static_cast<const int32_t*>(data)[request * stride + node];
  }
};

struct WritableIds {
  void* data;
  int64_t stride;
  bool is_int64;

  PYKV_HOST_DEVICE __attribute__((always_inline)) void store(int64_t row, int64_t i, int64_t id) const {
    if (is_int64) {
      static_cast<int64_t*>(data)[row * stride + i] = id;
    } else {
      static_cast<int32_t*>(data)[row * stride + i] = static_cast<int32_t>(id);
    }
  }
};

struct VerifyTreeArgs {
  WritableIds out, accepted_index;  // [num_requests, num_out]; accepted_index.data may be null
  int32_t* num_accepted;            // [num_requests]; null: not wanted
  int64_t accepted_stride;

  NodeIds draft_tokens, next_token, next_sibling;
  NodeIds target_tokens;   // data is null: there are probabilities
  NodeIds retrieve_index;  // data is null: the nodes' numbers
  const float* target;     // [num_requests, num_nodes, vocab_size]
  int64_t target_request, target_node;

  Index seeds, steps;

  int64_t num_requests;
  int32_t num_nodes, num_out, vocab_size;
};

constexpr int kMostNodes = 2048;

// What reports name, in this order.
enum class TreeReport { kNextToken, kNextSibling, kDraftTokens, kVisits, kTargetProbs };
inline constexpr const char* kTreeReports[] = {
    "verify_tree: next_token", "verify_tree: next_sibling", "verify_tree: draft_token_ids",
    "verify_tree: times that links lead to a node", "verify_tree: target_probs"};

// What follows is compiled for each instruction set apart.
namespace {

// A link, or the token of a node, as the walk uses it: -1 for what is none or out of range, which links report.
template <class Report>
PYKV_HOST_DEVICE static inline int32_t known_link(const NodeIds& links, int64_t request, int node, int num_nodes,
                                                  Report report) {
  const int64_t link = links.at(request, node);
  if (link >= num_nodes) report(link, num_nodes);
  return link >= 0 && link < num_nodes ? static_cast<int32_t>(link) : -1;
}
PYKV_HOST_DEVICE static inline int32_t known_token(const VerifyTreeArgs& args, int64_t request, int node) {
  const int64_t token = args.draft_tokens.at(request, node);
  const int64_t end = args.target ? int64_t{args.vocab_size} : int64_t{1} << 31;
  return token >= 0 && token < end ? static_cast<int32_t>(token) : -1;
}

// Where a path ends, after so many accepted tokens.
struct PathEnd {
  int node, accepted;
};

// From the root to a node of which no child is accepted.  Links of a tree lead to each node once; a second time ends the walk.
// tree: first_visit(node); next(node), sibling(node), token(node); the path, as append(i, node); and the tokens that are rejected at the
// present node: reject(token), is_rejected(token), forget_rejected().  report(what, value, bound).
template <class Tree, class Report>
PYKV_HOST_DEVICE static inline PathEnd walk(const VerifyTreeArgs& args, int64_t request, Tree& tree,
                                            const TokenNoise& noise, Report report) {
  PathEnd end{0, 0};
  tree.first_visit(0);
  tree.append(0, 0);
  while (end.accepted + 1 < args.num_out) {
    const float* p = args.target ? args.target + request * args.target_request + end.node * args.target_node : nullptr;
    const int64_t wanted = p ? -1 : args.target_tokens.at(request, end.node);
    const float u = p ? acceptance_number(noise, end.accepted) : 0.0f;
    float sum = 0.0f;  // the probability that this child or one before it is accepted
    int child = tree.next(end.node);
    for (; child >= 0; child = tree.sibling(child)) {
      if (!tree.first_visit(child)) {
        report(TreeReport::kVisits, 2, 2);
        child = -1;
        break;
      }
      const int token = tree.token(child);
      if (!p) {
        if (token >= 0 && token == wanted) break;
        continue;
      }
      if (token < 0) report(TreeReport::kDraftTokens, args.draft_tokens.at(request, child), args.vocab_size);
      if (token < 0 || tree.is_rejected(token)) continue;  // twice among siblings it counts once
      sum += p[token];
      if (u < sum) break;
      tree.reject(token);
    }
    if (child < 0) break;
    end = {child, end.accepted + 1};
    tree.append(end.accepted, child);
    tree.forget_rejected();
  }
  return end;
}

}  // namespace

PYKV_CPU_TWIN(verify_tree_cpu, VerifyTreeArgs)
void verify_tree_cuda(const VerifyTreeArgs& args, const Launch& launch);

}  // namespace pykv
