// Rows of an embedding table by token ids.  The idea behind pykv_masked_embedding.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "dequantization/gguf_types.h"

namespace pykv {

struct MaskedEmbeddingArgs {
  DType dtype, weight_dtype, position_dtype;
  bool copies;            // rows are copied as bytes
  gguf::BlockSize block;  // of weight; no elements: it has none
  gguf::Type block_type;

  void* out;
  Rows out_rows;
  Index ids, positions;  // positions.data is null: none
  const void* weight;
  int64_t weight_stride;  // elements
  const float* weight_scale;
  int64_t scale_row, scale_group, group_size;  // strides; neighbours that share a scale.  Without scales hidden_size
  const void* position_weight;
  int64_t position_stride, num_positions;
  float scale;

  int64_t org_start, org_end, num_org_pad, added_start, added_end, vocab_size;
  int64_t num_tokens, hidden_size;

  // The row of an id; -1: another shard's, or out of range.  Inlined by force: it must not be a symbol that CPU twins share.
  PYKV_HOST_DEVICE __attribute__((always_inline)) int64_t row_of(int64_t id) const {
    if (id >= org_start && id < org_end) return id - org_start;
    if (id >= added_start && id < added_end) return id - added_start + (org_end - org_start) + num_org_pad;
    return -1;
  }
  PYKV_HOST_DEVICE __attribute__((always_inline)) bool is_token(int64_t id) const { return id >= 0 && id < vocab_size; }
};

PYKV_CPU_TWIN(masked_embedding_cpu, MaskedEmbeddingArgs)
void masked_embedding_cuda(const MaskedEmbeddingArgs& args, const Launch& launch);

}  // namespace pykv
