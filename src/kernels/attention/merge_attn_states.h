// Partial attentions over disjoint sets of keys as one: two anywhere, or any number of stacked ones.
// The idea behind pykv_merge_attn_states and pykv_merge_attn_states_n.
#pragma once

#include <cmath>

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

// [num_tokens, num_heads, head_size], innermost contiguous; strides in elements.
struct PartialOutput {
  void* data;
  int64_t token, head;

  template <class T>
  PYKV_HOST_DEVICE T* row(int64_t t, int64_t h) const {
    return static_cast<T*>(data) + t * token + h * head;
  }
};

// [num_heads, num_tokens] natural logs.
struct Lse {
  float* data;
  int64_t head, token;

  PYKV_HOST_DEVICE float& at(int64_t t, int64_t h) const { return data[h * head + t * token]; }
};

struct MergeAttnStatesArgs {
  DType dtype;         // of the parts: float32, float16 or bfloat16
  DType output_dtype;  // the same; any of the three if that is float32; or E4M3: value * (1 / output_scale)
  PartialOutput output;
  Lse output_lse;            // data may be null
  PartialOutput outputs[2];  // of the first two parts
  Lse lses[2];
  int64_t output_part, lse_part;  // where there may be more than two: elements from each to the next
  Parameter output_scale;
  int64_t num_tokens;
  int64_t context_tokens;  // tokens from here on are copies of the second part
  int num_parts, num_heads, head_size;
  bool copies_empty;  // where no part saw anything: the first one, else 0

  // Of part p, from that of the first.
  template <class T>
  PYKV_HOST_DEVICE const T* part(int64_t p, int64_t t, int64_t h) const {
    return p == 1 ? outputs[1].row<const T>(t, h) : outputs[0].row<const T>(t, h) + p * output_part;
  }
  PYKV_HOST_DEVICE float lse(int64_t p, int64_t t, int64_t h) const {
    return p == 1 ? lses[1].at(t, h) : (&lses[0].at(t, h))[p * lse_part];
  }
};

// An infinity of either sign says that a part saw nothing.
PYKV_HOST_DEVICE inline float seen(float lse) { return lse == INFINITY ? -INFINITY : lse; }

// With l_i the lse of the parts and m the largest:
//   output = sum_i output_i * exp(l_i - m) / sum_i exp(l_i - m),   lse = m + log of that denominator.
// A part that saw nothing is not looked at, so it may hold anything; where none saw anything, lse is -inf.  NaN is not nothing: in an
// lse it makes output and lse NaN, in an output_i that dimension.
// output may be one of the parts, output_lse one of theirs.
PYKV_CPU_TWIN(merge_attn_states_cpu, MergeAttnStatesArgs)
void merge_attn_states_cuda(const MergeAttnStatesArgs& args, const Launch& launch);

// dispatch_merge<float, half, bf16, e4m3>(args, [&]<class T, class Out> { ... }), the types being the twin's own.
template <class F32, class F16, class BF16, class E4M3, class F>
void dispatch_merge(const MergeAttnStatesArgs& args, F&& body) {
  dispatch<F32, F16, BF16>(args.dtype, [&]<class T> {
    if (args.output_dtype == DType::kFloat8E4M3) return body.template operator()<T, E4M3>();
    if (args.output_dtype == args.dtype) return body.template operator()<T, T>();
    if constexpr (sizeof(T) == 4) {
      dispatch<F16, BF16>(args.output_dtype, [&]<class Out> { body.template operator()<T, Out>(); });
    }
  });
}

}  // namespace pykv
