// The first half of pykv_fused_qknorm_rope_cache: the heads of a fused buffer into arrays of their own, those of queries and keys
// normed.  Its other half is rotary_and_cache.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct HeadsOut {
  void* data;           // [num_tokens, num_heads, head_dim]
  int64_t token, head;  // strides in elements
};

struct NormHeadsArgs {
  DType dtype, weight_dtype;  // of qkv and what is written; of the weights

  const void* qkv;  // [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim], heads without gaps
  int64_t qkv_token;
  HeadsOut q, k, v;
  const void *q_weight, *k_weight;  // [head_dim]

  int64_t num_tokens, num_q_heads, num_kv_heads, head_dim;
  float epsilon, weight_bias;

  PYKV_HOST_DEVICE int64_t num_heads() const { return num_q_heads + 2 * num_kv_heads; }
  // Of head h of qkv.
  PYKV_HOST_DEVICE const void* weight_of(int64_t h) const {  // null: it is copied
    return h < num_q_heads ? q_weight : h < num_q_heads + num_kv_heads ? k_weight : nullptr;
  }
  template <class T>
  PYKV_HOST_DEVICE T* out_of(int64_t token, int64_t h) const {
    const HeadsOut& out = h < num_q_heads ? q : h < num_q_heads + num_kv_heads ? k : v;
    const int64_t first = h < num_q_heads                  ? 0
                          : h < num_q_heads + num_kv_heads ? num_q_heads
                                                           : num_q_heads + num_kv_heads;
    return static_cast<T*>(out.data) + token * out.token + (h - first) * out.head;
  }
};

PYKV_CPU_TWIN(norm_heads_cpu, NormHeadsArgs)
void norm_heads_cuda(const NormHeadsArgs& args, const Launch& launch);

}  // namespace pykv
