#include "norm/fused_qk_norm_rope.h"

#include <cinttypes>
#include <utility>

#include "pykv/norm.h"

using namespace pykv;

pykv_status pykv_fused_qk_norm_rope(DLTensor* qkv, int64_t num_heads_q, int64_t num_heads_k, int64_t num_heads_v,
                                    int64_t head_dim, double eps, const DLTensor* q_weight, const DLTensor* k_weight,
                                    const DLTensor* cos_sin_cache, bool is_neox, const DLTensor* position_ids,
                                    void* stream) {
  return guarded("fused_qk_norm_rope", [&](Call& call) {
    if (head_dim <= 0) fail(PYKV_VALUE_ERROR, "head_dim: must be positive, got %" PRId64, head_dim);
    Dim size("head_dim", head_dim);
    const Tensor x = call.write("qkv", qkv).dtype(kFloats);
    const Tensor positions = call.read("position_ids", position_ids).rank_between(1, 2);
    const RotaryHeads heads = rotary_heads(x, positions, size, 0);
    for (const auto& [name, count] :
         {std::pair{"num_heads_q", num_heads_q}, {"num_heads_k", num_heads_k}, {"num_heads_v", num_heads_v}})
      if (count < 0 || count > heads.num_heads)
        fail(PYKV_VALUE_ERROR, "%s: must lie between 0 and the %" PRId64 " heads of qkv, got %" PRId64, name,
             heads.num_heads, count);
    if (num_heads_q + num_heads_k + num_heads_v != heads.num_heads)
      x.fail(PYKV_VALUE_ERROR, "must have num_heads_q + num_heads_k + num_heads_v = %" PRId64 " heads, got shape %s",
             num_heads_q + num_heads_k + num_heads_v, x.shape_string().c_str());
    QkNormRopeArgs args{};
    Rotation& r = args.rotation;
    r = rotation_of("fused_qk_norm_rope: position_ids", positions, call.read("cos_sin_cache", cos_sin_cache), head_dim,
                    0);
    r.dtype = x.type();
    r.is_neox = is_neox;
    r.query = r.key = heads;
    r.query.num_heads = num_heads_q;
    r.key.num_heads = num_heads_k;
    r.key.data = static_cast<char*>(heads.data) + num_heads_q * heads.head * static_cast<int64_t>(size_of(x.type()));
    args.query_weight = row_weights(call, "q_weight", q_weight, x, size);
    args.key_weight = row_weights(call, "k_weight", k_weight, x, size);
    args.head_size = head_dim;
    args.epsilon = number("eps", eps);
    if (r.num_tokens == 0 || num_heads_q + num_heads_k == 0) return;
    call.run(stream, args, fused_qk_norm_rope_cpu, PYKV_CUDA(fused_qk_norm_rope_cuda));
  });
}
