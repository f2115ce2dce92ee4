#include "rotary/rotary_embedding.h"

#include <cinttypes>

#include "core/call.h"
#include "pykv/rotary.h"

namespace pykv {
namespace {

// What all entries have in common; `positions` has the leading dimensions of query and key.
RotaryEmbeddingArgs checked(Call& call, const char* report, const DLTensor* positions, DLTensor* query, DLTensor* key,
                            int64_t head_size, const DLTensor* cos_sin_cache, bool is_neox,
                            int64_t rope_dim_offset = 0) {
  if (head_size <= 0) fail(PYKV_VALUE_ERROR, "head_size: must be positive, got %" PRId64, head_size);
  Dim size("head_size", head_size);
  const Tensor pos = call.read("positions", positions).rank_between(1, 2);
  const Tensor q = call.write("query", query).dtype(kFloats);
  RotaryEmbeddingArgs args{};
  args.axes.count = 1;
  Rotation& r = args.rotation;
  r = rotation_of(report, pos, call.read("cos_sin_cache", cos_sin_cache), head_size, rope_dim_offset);
  r.dtype = q.type();
  r.is_neox = is_neox;
  r.query = rotary_heads(q, pos, size, rope_dim_offset);
  if (key) {
    const Tensor k = call.write("key", key).like(q);
    r.key = rotary_heads(k, pos, size, rope_dim_offset);
    k.apart_from(q);
  }
  return args;
}

void run(Call& call, const RotaryEmbeddingArgs& args, void* stream) {
  const Rotation& r = args.rotation;
  if (r.num_tokens == 0 || r.rotary_dim == 0 || r.query.num_heads + r.key.num_heads == 0) return;
  call.run(stream, args, rotary_embedding_cpu, PYKV_CUDA(rotary_embedding_cuda));
}

// The frequencies of each axis, checked where the host can read them.
RotaryAxes axes_of(Call& call, const DLTensor* mrope_section, bool interleaved, int64_t num_frequencies) {
  Tensor sections = call.anywhere("mrope_section", mrope_section).rank(1);
  const Index index = sections.index();
  const int64_t count = sections.size(0);
  if (count < 1 || count > RotaryAxes::kMost)
    sections.fail(PYKV_VALUE_ERROR, "must have 1 to %d sections, got shape %s", RotaryAxes::kMost,
                  sections.shape_string().c_str());
  RotaryAxes axes{};
  axes.count = static_cast<int>(count);
  axes.interleaved = interleaved;
  if (sections.device().device_type != kDLCPU) {
    axes.on_device = call.read("mrope_section", mrope_section).index();
    return axes;
  }
  int64_t sum = 0;
  for (int k = 0; k < count; ++k) {
    const int64_t size = index[k];
    if (size < 0 || size > num_frequencies - sum)
      sections.fail(PYKV_VALUE_ERROR, "must add up to rotary_dim / 2 = %" PRId64 ", got %" PRId64 " in section %d",
                    num_frequencies, size, k);
    sum += size;
    axes.sizes[k] = static_cast<int>(size);
  }
  if (sum != num_frequencies)
    sections.fail(PYKV_VALUE_ERROR, "must add up to rotary_dim / 2 = %" PRId64 ", got %" PRId64, num_frequencies, sum);
  return axes;
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_rotary_embedding(const DLTensor* positions, DLTensor* query, DLTensor* key, int64_t head_size,
                                  const DLTensor* cos_sin_cache, bool is_neox, int64_t rope_dim_offset, bool inverse,
                                  void* stream) {
  return guarded("rotary_embedding", [&](Call& call) {
    RotaryEmbeddingArgs args = checked(call, "rotary_embedding: positions", positions, query, key, head_size,
                                       cos_sin_cache, is_neox, rope_dim_offset);
    args.rotation.inverse = inverse;
    run(call, args, stream);
  });
}

pykv_status pykv_batched_rotary_embedding(const DLTensor* positions, DLTensor* query, DLTensor* key, int64_t head_size,
                                          const DLTensor* cos_sin_cache, bool is_neox, int64_t rot_dim,
                                          const DLTensor* cos_sin_cache_offsets, void* stream) {
  return guarded("batched_rotary_embedding", [&](Call& call) {
    RotaryEmbeddingArgs args = checked(call, "batched_rotary_embedding: positions + cos_sin_cache_offsets", positions,
                                       query, key, head_size, cos_sin_cache, is_neox);
    if (rot_dim != args.rotation.rotary_dim)
      fail(PYKV_VALUE_ERROR, "rot_dim: must be the width of cos_sin_cache, %" PRId64 ", got %" PRId64,
           args.rotation.rotary_dim, rot_dim);
    Dim tokens("num_tokens", args.rotation.num_tokens);
    args.offsets = call.read("cos_sin_cache_offsets", cos_sin_cache_offsets).shape(tokens).index();
    run(call, args, stream);
  });
}

pykv_status pykv_mrope(const DLTensor* positions, DLTensor* query, DLTensor* key, int64_t head_size,
                       const DLTensor* cos_sin_cache, bool is_neox, const DLTensor* mrope_section,
                       bool mrope_interleaved, void* stream) {
  return guarded("mrope", [&](Call& call) {
    const Tensor all = call.read("positions", positions).rank_between(1, 3);
    if (all.ndim() == 1)  // of text: one position for all axes
      return run(call, checked(call, "mrope: positions", positions, query, key, head_size, cos_sin_cache, is_neox),
                 stream);
    if (all.size(0) == 0)
      all.fail(PYKV_VALUE_ERROR, "must have a row for each section, got shape %s", all.shape_string().c_str());
    DLTensor first = *positions;  // the positions of the first axis
    first.ndim -= 1;
    first.shape += 1;
    if (first.strides) first.strides += 1;
    RotaryEmbeddingArgs args = checked(call, "mrope: positions", &first, query, key, head_size, cos_sin_cache, is_neox);
    args.axes = axes_of(call, mrope_section, mrope_interleaved, args.rotation.rotary_dim / 2);
    if (all.size(0) != args.axes.count)
      all.fail(PYKV_VALUE_ERROR, "dimension 0 must be the number of sections, %d, got shape %s", args.axes.count,
               all.shape_string().c_str());
    args.axes.stride = all.stride(0);
    run(call, args, stream);
  });
}
