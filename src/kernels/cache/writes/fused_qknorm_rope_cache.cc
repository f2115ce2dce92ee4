#include "cache/writes/fused_qknorm_rope_cache.h"

#include <cinttypes>

#include "cache/writes/reshape_and_cache_inputs.h"
#include "cache/writes/rotary_and_cache.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

struct Sizes {
  int64_t head_dim, q_heads, kv_heads;
};

Sizes checked_sizes(const Tensor& qkv, int64_t head_dim, int64_t num_q_heads, int64_t num_kv_heads) {
  if (head_dim <= 0) fail(PYKV_VALUE_ERROR, "head_dim: must be positive, got %" PRId64, head_dim);
  const int64_t heads = qkv.size(1) / head_dim;
  if (qkv.size(1) % head_dim != 0)
    qkv.fail(PYKV_VALUE_ERROR, "the last dimension must be a multiple of head_dim = %" PRId64 ", got shape %s",
             head_dim, qkv.shape_string().c_str());
  if (num_q_heads < 0 || num_q_heads > heads)
    fail(PYKV_VALUE_ERROR, "num_q_heads: must lie between 0 and the %" PRId64 " heads of qkv, got %" PRId64, heads,
         num_q_heads);
  if (num_kv_heads < 0 || num_kv_heads > heads)
    fail(PYKV_VALUE_ERROR, "num_kv_heads: must lie between 0 and the %" PRId64 " heads of qkv, got %" PRId64, heads,
         num_kv_heads);
  if (num_q_heads + 2 * num_kv_heads != heads)
    qkv.fail(PYKV_VALUE_ERROR, "must have num_q_heads + 2 * num_kv_heads = %" PRId64 " heads, got shape %s",
             num_q_heads + 2 * num_kv_heads, qkv.shape_string().c_str());
  return {head_dim, num_q_heads, num_kv_heads};
}

// Angles in two arrays: their rows are equally far apart, and the distance between them is one of whole elements.
Rotation rotation_of(const Tensor& positions, Tensor cos, Tensor sin, int64_t pairs, int64_t head_dim) {
  if (pairs < 0 || pairs > head_dim / 2)
    fail(PYKV_VALUE_ERROR, "rotary_pairs: must lie between 0 and head_dim / 2 = %" PRId64 ", got %" PRId64,
         head_dim / 2, pairs);
  Dim rows("max_position");
  cos.rank(2).dim(0, rows).dtype(kFloats).contiguous_rows();
  sin.rank(2).dim(0, rows).like(cos).contiguous_rows();
  for (const Tensor* t : {&cos, &sin})
    if (t->size(1) < pairs)
      t->fail(PYKV_VALUE_ERROR, "must have at least rotary_pairs = %" PRId64 " columns, got shape %s", pairs,
              t->shape_string().c_str());
  if (rows > 1 && cos.stride(0) != sin.stride(0))
    sin.fail(PYKV_VALUE_ERROR, "must have the row stride of cos, %" PRId64 ", got %" PRId64, cos.stride(0),
             sin.stride(0));
  const int64_t bytes = static_cast<char*>(sin.data()) - static_cast<char*>(cos.data()),
                size = static_cast<int64_t>(size_of(cos.type()));
  if (bytes % size != 0) sin.fail(PYKV_VALUE_ERROR, "must be aligned to its elements as cos is");
  Rotation r{};
  r.report = "fused_qknorm_rope_cache: positions";
  r.cache_dtype = cos.type();
  r.positions = {positions.data(), 1, positions.type() == DType::kInt64};
  r.position_token = positions.stride(0);
  r.cos_sin_cache = cos.data();
  r.cache_stride = cos.stride(0);
  r.sines = bytes / size;
  r.max_position = rows;
  r.num_tokens = r.seq = positions.size(0);
  r.rotary_dim = 2 * pairs;
  r.is_neox = true;
  return r;
}

}  // namespace
}  // namespace pykv

pykv_status pykv_fused_qknorm_rope_cache(DLTensor* q_out, DLTensor* k_out, DLTensor* v_out, const DLTensor* qkv,
                                         const DLTensor* q_weight, const DLTensor* k_weight, const DLTensor* cos,
                                         const DLTensor* sin, const DLTensor* positions, const DLTensor* slot_mapping,
                                         DLTensor* k_cache, DLTensor* v_cache, int64_t head_dim, int64_t num_q_heads,
                                         int64_t num_kv_heads, int64_t rotary_pairs, double epsilon,
                                         double norm_weight_bias, const char* kv_cache_dtype, const DLTensor* k_scale,
                                         const DLTensor* v_scale, void* stream) {
  using namespace pykv;
  return guarded("fused_qknorm_rope_cache", [&](Call& call) {
    Dim tokens("num_tokens"), size("head_dim", head_dim);
    const Tensor x = call.read("qkv", qkv).rank(2).dim(0, tokens).dtype(kFloats).contiguous_rows();
    const Sizes sizes = checked_sizes(x, head_dim, num_q_heads, num_kv_heads);
    Tensor pos = call.read("positions", positions).shape(tokens);
    pos.index();
    RotaryAndCacheArgs rest;
    rest.rotation = rotation_of(pos, call.read("cos", cos), call.read("sin", sin), rotary_pairs, head_dim);
    rest.rotation.dtype = x.type();

    const auto heads_of = [&](const Tensor& out, int64_t count) {
      const RotaryHeads heads = rotary_heads(out, pos, size, 0);
      if (heads.num_heads != count)
        out.fail(PYKV_VALUE_ERROR, "must have %" PRId64 " heads of %" PRId64 ", got shape %s", count, head_dim,
                 out.shape_string().c_str());
      return heads;
    };
    const Tensor q = call.write("q_out", q_out).like(x), k = call.write("k_out", k_out).like(x),
                 v = call.write("v_out", v_out).like(x);
    rest.rotation.query = heads_of(q, sizes.q_heads);
    rest.rotation.key = heads_of(k, sizes.kv_heads);
    const RotaryHeads values = heads_of(v, sizes.kv_heads);
    for (const Tensor* out : {&q, &k, &v}) out->apart_from(x);
    k.apart_from(q);
    v.apart_from(q);
    v.apart_from(k);

    const HeadsView keys_view(k, *k_out, head_dim), values_view(v, *v_out, head_dim);
    rest.cache.report = "fused_qknorm_rope_cache: slot_mapping";
    take_inputs(rest.cache, call, false,
                {.key = &keys_view.tensor,
                 .value = &values_view.tensor,
                 .key_cache = k_cache,
                 .value_cache = v_cache,
                 .slot_mapping = slot_mapping,
                 .kv_cache_dtype = kv_cache_dtype,
                 .k_scale = k_scale,
                 .v_scale = v_scale,
                 .names = {"k_out", "v_out", "k_cache", "v_cache"}});

    const Tensor w_q = call.read("q_weight", q_weight).shape(size).dtype(kFloats).contiguous(),
                 w_k = call.read("k_weight", k_weight).shape(size).like(w_q).contiguous();
    const auto out_of = [](const RotaryHeads& heads) { return HeadsOut{heads.data, heads.token, heads.head}; };
    const NormHeadsArgs norm{
        .dtype = x.type(),
        .weight_dtype = w_q.type(),
        .qkv = x.data(),
        .qkv_token = x.stride(0),
        .q = out_of(rest.rotation.query),
        .k = out_of(rest.rotation.key),
        .v = out_of(values),
        .q_weight = w_q.data(),
        .k_weight = w_k.data(),
        .num_tokens = tokens,
        .num_q_heads = sizes.q_heads,
        .num_kv_heads = sizes.kv_heads,
        .head_dim = head_dim,
        .epsilon = number("epsilon", epsilon),
        .weight_bias = number("norm_weight_bias", norm_weight_bias),
    };
    if (tokens == 0 || norm.num_heads() == 0) return;
    call.run(stream, norm, norm_heads_cpu, PYKV_CUDA(norm_heads_cuda));
    call.run(stream, rest, rotary_and_cache_cpu, PYKV_CUDA(rotary_and_cache_cuda));
  });
}
