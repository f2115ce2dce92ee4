// Up to 64 query rows on Hopper: from a Step to its instance.
#pragma once

#include "attention/cuda/verify/cluster.cuh"
#include "attention/cuda/verify/codes.cuh"
#include "attention/cuda/verify/columns.cuh"

namespace pykv::attention {

template <class Element>
void launch_verify(const Problem& p, const Step& s, const Launch& launch, const LeftPieces&) {
  if constexpr (Element::kBytes == 1) {
    launch_line_of_codes<Element>(p, s, launch);
  } else {
    launch_line_of_rows<Element>(p, s, launch);
  }
}

template <class Element>
void launch_verify_clusters(const Problem& p, const Step& s, const Launch& launch, const LeftPieces& left) {
  if constexpr (Element::kBytes == 1) {
    launch_clusters_of_codes<Element>(p, s, launch, left);
  } else {
    launch_clusters_of_rows<Element>(p, s, launch, left);
  }
}

}  // namespace pykv::attention
