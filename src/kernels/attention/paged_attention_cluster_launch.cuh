// Launching the clusters of one query token, with batch_invariant, too, and of several.
#pragma once

#include "attention/paged_attention_cluster.cuh"
#include "attention/paged_attention_exact_cluster.cuh"

namespace pykv::attention {

template <class S>  // paged_attention_tokens.cuh
__global__ void paged_attention_tokens_kernel(const __grid_constant__ Problem p,
                                              const __grid_constant__ CacheCopies copies,
                                              const __grid_constant__ LeftPieces left);

template <class S>
void launch_clusters(const Problem& p, const Step& s, const Launch& launch, const LeftPieces& left = {}) {
  if constexpr (S::kSizes.may_span() && S::kHidesKeys == S::kManyTokens && !S::kSpans) {
    if (s.instance.spans) return launch_clusters<Spanned<S>>(p, s, launch, left);
  }
  const int most_bytes = device_info(launch.device).shared_of_block;
  if constexpr (S::kInvariant) {
    static_assert(sizeof(ExactQuad) == kExactQuadBytes && ExactClusterKernel<S>::kLeafBytes == kLeafBytes);
    static_assert(ExactClusterKernel<S>::kBarrierBytes == 16 && ExactClusterKernel<S>::kTeamWarps == kTeamWarps);
    launch_step<paged_attention_exact_cluster_kernel<S>>(p, s, most_bytes, launch, copies_of<S>(p));
  } else {
    static_assert(cluster_shared_bytes<S>(S::kWarps) == S::kSizes.shared_bytes(S::kWarps));
    if constexpr (S::kManyTokens) {
      launch_step<paged_attention_tokens_kernel<S>>(p, s, most_bytes, launch, copies_of<S>(p), left);
    } else {
      launch_step<paged_attention_cluster_kernel<S>>(p, s, most_bytes, launch, copies_of<S>(p));
    }
  }
}

}  // namespace pykv::attention
