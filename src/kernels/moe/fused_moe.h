// A layer of experts: pairs are sorted by expert, rows of x go through w1, an activation and w2, and each token's are summed.
//
// Rows between these are those of pairs, in the order of the pairs: those of pairs that are dropped are never written, nor
// summed.
#pragma once

#include "activation/named_activation.h"
#include "moe/expert_product.h"
#include "moe/sort_pairs.h"
#include "moe/sum_rows.h"

namespace pykv {

// Pieces of workspace begin at multiples of 256 bytes.
struct WorkspaceLayout {
  int64_t sorted, blocks, taken, places, rows, activated, bytes;

  WorkspaceLayout(int64_t num_pairs, int64_t num_experts, int64_t width, int64_t inner, int64_t hidden) {
    int64_t at = 0;
    const auto place = [&](int64_t size) {
      const int64_t begin = at;
      at += (size + 255) / 256 * 256;
      return begin;
    };
    const int64_t experts = num_pairs < num_experts ? num_pairs : num_experts;  // that have pairs
    sorted = place(4 * (num_pairs + 143 * experts));
    blocks = place(4 * (num_pairs + experts));
    taken = place(4);
    places = place(4 * num_pairs);
    rows = place(2 * num_pairs * (width > hidden ? width : hidden));  // of the first product, then of the second
    activated = place(2 * num_pairs * inner);
    bytes = at;
  }
};

struct FusedMoeArgs {
  SortPairsArgs sort;
  ExpertProduct first, second;
  const NamedActivation* activation;
  GatedActivationArgs gated;
  ElementwiseActivationArgs elementwise;
  SumRowsArgs sum;
  void* workspace;  // null: on CUDA it comes from the stream-ordered pool, on the CPU from the heap
  int64_t workspace_bytes;

  // Says where all lies between the kernels.
  void use(void* memory);
  // Of no expert there are no products: all pairs are dropped.
  bool has_products() const { return sort.num_pairs != 0 && sort.num_listed != 0; }
};

void fused_moe_cuda(const FusedMoeArgs& args, const Launch& launch);

}  // namespace pykv
