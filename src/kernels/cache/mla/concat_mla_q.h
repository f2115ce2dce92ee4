// Latent and rotated parts of queries side by side: the idea behind pykv_concat_mla_q.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

// Element d of head h of token t lies at data + t * token + h * head + d * dim.
struct QueryPart {
  char* data;
  int64_t token, head, dim, size;  // bytes; size: elements
};

struct ConcatMlaQArgs {
  QueryPart nope, pe;        // read
  QueryPart nope_to, pe_to;  // the two parts of the result
  int64_t num_tokens, num_heads, element_bytes;
};

PYKV_CPU_TWIN(concat_mla_q_cpu, ConcatMlaQArgs)
void concat_mla_q_cuda(const ConcatMlaQArgs& args, const Launch& launch);

}  // namespace pykv
