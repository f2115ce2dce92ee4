// Two partial attentions over disjoint sets of keys as one.
#pragma once

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
  DType dtype;     // of prefix and suffix: float32, float16 or bfloat16
  bool quantised;  // output is E4M3: value * (1 / output_scale)
  PartialOutput output, prefix, suffix;
  Lse output_lse, prefix_lse, suffix_lse;  // output_lse.data may be null
  Scale output_scale;
  int64_t num_tokens;
  int64_t context_tokens;  // tokens from here on are copies of the suffix
  int num_heads, head_size;
};

// With p and s the two lse (infinities of either sign: that side saw nothing) and m = max(p, s):
//   output = (prefix * exp(p - m) + suffix * exp(s - m)) / (exp(p - m) + exp(s - m)),   lse = m + log of that denominator.
// A side of weight zero is not looked at, so it may hold anything.  Where both are empty: the prefix, and -inf.
// output may be prefix or suffix, output_lse either lse.
PYKV_CPU_TWIN(merge_attn_states_cpu, MergeAttnStatesArgs)
void merge_attn_states_cuda(const MergeAttnStatesArgs& args, const Launch& launch);

}  // namespace pykv
