#include "pykv/attention.h"

#include "op.h"

void bind_attention(Module& m) {
  m.def<pykv_paged_attention>("paged_attention");
  m.def<pykv_paged_attention_v1>("paged_attention_v1");
  m.def<pykv_paged_attention_v2>("paged_attention_v2");
  m.def<pykv_merge_attn_states>("merge_attn_states");
  m.def<pykv_merge_attn_states_n>("merge_attn_states_n");
}
