// Up to 64 query rows on Hopper: from a Step to its instance.
#pragma once

#include "attention/cuda/verify/cluster.cuh"
#include "attention/cuda/verify/codes.cuh"
#include "attention/cuda/verify/columns.cuh"
#include "attention/cuda/verify/kernel.cuh"
#include "attention/cuda/verify/rows.cuh"

namespace pykv::attention {

// How tiles of so many rows are multiplied.
template <class Element, int kD, int kRows>
struct VerifyRowsWay {
  using Shape = VerifyShape<Element, kD>;
  template <class S>
  using Softmax = VerifyRows<S>;
};
template <class Element, int kD, int kRows>
struct VerifyColumnsWay {
  using Shape = VerifyColumnsShape<Element, kD, kRows>;
  template <class S>
  using Softmax = VerifyColumns<S>;
};
template <class Element, int kD, int kRows, bool kPairs = false>
struct VerifyCodesWay {
  using Shape = VerifyCodesShape<Element, kD, kRows, kPairs>;
  template <class S>
  using Softmax = VerifyCodes<S>;
};
template <class Element, int kD, int kRows>
using VerifyWay = std::conditional_t<
    Element::kBytes == 1, VerifyCodesWay<Element, kD, kRows>,
    std::conditional_t<kRows == 64, VerifyRowsWay<Element, kD, kRows>, VerifyColumnsWay<Element, kD, kRows>>>;

// launch.operator()<kD, kRows>(): tiles of so many rows, of heads of up to kD.
template <class F>
void dispatch_rows(const Instance& of, F&& launch) {
  dispatch_bool(of.head_size <= 64, [&]<bool kSmall> {
    constexpr int kD = kSmall ? 64 : 128;
    if (of.rows > 32) return launch.template operator()<kD, 64>();
    if (of.rows > 16) return launch.template operator()<kD, 32>();
    launch.template operator()<kD, 16>();
  });
}

template <class Way>
void launch_line(const Problem& p, const Step& s, const Launch& launch) {
  using S = typename Way::Shape;
  launch_verify_kernel<S, typename Way::template Softmax<S>>(p, s, launch);
}

template <class Element>
void launch_verify(const Problem& p, const Step& s, const Launch& launch) {
  if constexpr (Element::kBytes == 1 && kIsCommon<Element>) {
    if (s.instance.folded) {
      return s.instance.rows > 32 ? launch_line<VerifyCodesWay<Element, 128, 64, true>>(p, s, launch)
                                  : launch_line<VerifyCodesWay<Element, 128, 32, true>>(p, s, launch);
    }
  }
  dispatch_rows(s.instance, [&]<int kD, int kRows> {
    if constexpr (kIsCommon<Element> || kD > 64) launch_line<VerifyWay<Element, kD, kRows>>(p, s, launch);
  });
}

template <class Element>
void launch_verify_clusters(const Problem& p, const Step& s, const Launch& launch) {
  dispatch_rows(s.instance, [&]<int kD, int kRows> {
    if constexpr (kRows > 16) {
      using Way = VerifyWay<Element, kD, kRows>;
      using Clusters = VerifyClusterShape<typename Way::Shape, false>;
      using Alone = VerifyClusterShape<typename Way::Shape, true>;
      using Sharing = Spanned<Clusters>;
      if (s.instance.kernel == KernelId::kVerifySpans)
        return launch_verify_cluster<Sharing, typename Way::template Softmax<Sharing>>(p, s, launch);
      if (s.instance.kernel == KernelId::kVerifyBlock)
        return launch_verify_cluster<Alone, typename Way::template Softmax<Alone>>(p, s, launch);
      launch_verify_cluster<Clusters, typename Way::template Softmax<Clusters>>(p, s, launch);
    }
  });
}

}  // namespace pykv::attention
