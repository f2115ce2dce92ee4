// Any number of stacked partial attentions over disjoint sets of keys as one.
#pragma once

#include <cmath>

#include "attention/merge_attn_states.h"

namespace pykv {

struct StackedOutputs {
  PartialOutput first;
  int64_t part;  // elements from one partial output to the next

  template <class T>
  PYKV_HOST_DEVICE T* row(int64_t p, int64_t t, int64_t h) const {
    return first.row<T>(t, h) + p * part;
  }
};

struct StackedLses {
  Lse first;
  int64_t part;

  // An infinity of either sign says that the part saw nothing.
  PYKV_HOST_DEVICE float at(int64_t p, int64_t t, int64_t h) const {
    const float lse = (&first.at(t, h))[p * part];
    return lse == INFINITY ? -INFINITY : lse;
  }
};

struct MergeAttnStatesNArgs {
  DType dtype;         // of the partial outputs: float32, float16 or bfloat16
  DType output_dtype;  // the same; any of the three if that is float32; or E4M3: value * (1 / output_scale)
  PartialOutput output;
  Lse output_lse;  // data may be null
  StackedOutputs outputs;
  StackedLses lses;
  Scale output_scale;
  int64_t num_tokens;
  int num_parts, num_heads, head_size;
};

// With l_i the lse of the parts and m the largest:
//   output = sum_i output_i * exp(l_i - m) / sum_i exp(l_i - m),   lse = m + log of that denominator.
// A part of weight zero is not looked at, so it may hold anything.  Where nothing was seen: 0 and -inf.
// output may be one of the parts, output_lse one of theirs.
PYKV_CPU_TWIN(merge_attn_states_n_cpu, MergeAttnStatesNArgs)
void merge_attn_states_n_cuda(const MergeAttnStatesNArgs& args, const Launch& launch);

// dispatch_merge<float, half, bf16, e4m3>(args, [&]<class T, class Out> { ... }), the types being the twin's own.
template <class F32, class F16, class BF16, class E4M3, class Args, class F>
void dispatch_merge(const Args& args, F&& body) {
  dispatch<F32, F16, BF16>(args.dtype, [&]<class T> {
    if (args.output_dtype == DType::kFloat8E4M3) return body.template operator()<T, E4M3>();
    if (args.output_dtype == args.dtype) return body.template operator()<T, T>();
    if constexpr (sizeof(T) == 4) {
      dispatch<F16, BF16>(args.output_dtype, [&]<class Out> { body.template operator()<T, Out>(); });
    }
  });
}

}  // namespace pykv
