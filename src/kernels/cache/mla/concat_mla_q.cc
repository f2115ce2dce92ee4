#include "cache/mla/concat_mla_q.h"

#include <cinttypes>

#include "core/call.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

QueryPart part_of(const Tensor& t, int64_t first, int64_t size) {
  const int64_t item = static_cast<int64_t>(size_of(t.type()));
  return {static_cast<char*>(t.data()) + first * t.stride(2) * item, t.stride(0) * item, t.stride(1) * item,
          t.stride(2) * item, size};
}

}  // namespace
}  // namespace pykv

pykv_status pykv_concat_mla_q(const DLTensor* ql_nope, const DLTensor* q_pe, DLTensor* q_out, void* stream) {
  using namespace pykv;
  return guarded("concat_mla_q", [&](Call& call) {
    Dim tokens{"num_tokens"}, heads{"num_heads"}, latent{"kv_lora_rank"}, rope{"rope_size"};
    Tensor nope = call.read("ql_nope", ql_nope).shape(tokens, heads, latent);
    Tensor pe = call.read("q_pe", q_pe).shape(tokens, heads, rope).like(nope);
    Dim width{"kv_lora_rank + rope_size", latent + rope};
    Dim out_heads{"num_heads of q_out"};
    Tensor out = call.write("q_out", q_out).shape(tokens, out_heads, width).like(nope).no_overlap_within();
    if (out_heads < heads)
      out.fail(PYKV_VALUE_ERROR, "must have at least num_heads = %" PRId64 " heads, got shape %s",
               static_cast<int64_t>(heads), out.shape_string().c_str());

    ConcatMlaQArgs args{part_of(nope, 0, latent),
                        part_of(pe, 0, rope),
                        part_of(out, 0, latent),
                        part_of(out, latent, rope),
                        tokens,
                        heads,
                        static_cast<int64_t>(size_of(nope.type()))};
    // where the latent part is a view of the result already, there is nothing to do for it
    const QueryPart &from = args.nope, &to = args.nope_to;
    if (from.data == to.data && (tokens <= 1 || from.token == to.token) && (heads <= 1 || from.head == to.head) &&
        (latent <= 1 || from.dim == to.dim))
      args.nope.size = args.nope_to.size = 0;
    if (tokens * heads * (args.nope.size + args.pe.size) == 0) return;
    call.run(stream, args, concat_mla_q_cpu, PYKV_CUDA(concat_mla_q_cuda));
  });
}
