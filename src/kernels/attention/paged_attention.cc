// The three C entries of paged attention: one args struct, filled from three signatures.
#include "attention/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "attention/cuda/plan.h"
#include "core/call.h"
#include "pykv/attention.h"

namespace pykv {
namespace {

// What all three have in common, by the names of the C declarations.
struct Inputs {
  DLTensor* out;
  const DLTensor *query, *key_cache, *value_cache, *block_tables, *seq_lens, *cu_query_lens, *alibi_slopes, *sinks;
  const char* kv_cache_dtype;
  const DLTensor *k_scale, *v_scale;
};

int64_t x_of(DType type) { return 16 / static_cast<int64_t>(size_of(type)); }

void take_packed(PagedAttentionArgs& a, Tensor key, Tensor value, Dim& blocks, Dim& kv_heads, Dim& head_size) {
  Dim x{"x = 16 bytes / element size", x_of(key.type())}, chunks{"head_size / x"}, block_size{"block_size"};
  key.shape(blocks, kv_heads, chunks, block_size, x);
  if (chunks * x != head_size)
    key.fail(PYKV_VALUE_ERROR, "dimension 2 must be head_size / x = %lld / %lld, got shape %s",
             static_cast<long long>(head_size), static_cast<long long>(x), key.shape_string().c_str());
  key.contiguous_rows();
  value.shape(blocks, kv_heads, head_size, block_size);
  a.key = {key.data(), key.stride(0), key.stride(3), key.stride(1), key.stride(2), static_cast<int>(x)};
  a.value = {value.data(), value.stride(0), value.stride(3), value.stride(1), value.stride(2)};
  a.block_size = static_cast<int>(block_size);
}

void take_flash(PagedAttentionArgs& a, Tensor key, Tensor value, Dim& blocks, Dim& kv_heads, Dim& head_size) {
  Dim block_size{"block_size"};
  key.shape(blocks, block_size, kv_heads, head_size).contiguous_rows();
  value.shape(blocks, block_size, kv_heads, head_size).contiguous_rows();
  const int chunk = static_cast<int>(head_size);
  a.key = {key.data(), key.stride(0), key.stride(1), key.stride(2), 0, chunk};
  a.value = {value.data(), value.stride(0), value.stride(1), value.stride(2), 1};
  a.block_size = static_cast<int>(block_size);
}

// The pages of one side: rows of a cache that are compact within a page, NHD or HND.
Nvfp4Page nvfp4_page_of(const Tensor& cache, bool swizzled) {
  const int64_t tokens = cache.size(1), heads = cache.size(2), bytes = cache.size(3);
  const bool nhd = cache.stride(1) == heads * bytes && cache.stride(2) == bytes;
  const bool hnd = cache.stride(1) == bytes && cache.stride(2) == tokens * bytes;
  if (!nhd && !hnd && cache.numel() > 0)
    cache.fail(PYKV_VALUE_ERROR, "pages of nvfp4 must be contiguous, in the order NHD or HND");
  return nvfp4_page(tokens, heads, bytes * kNvfp4Block / nvfp4_bytes(kNvfp4Block), !nhd, swizzled);
}

void take_nvfp4(PagedAttentionArgs& a, Tensor key, Tensor value, Dim& blocks, Dim& kv_heads, const Dim& head_size) {
  if (key.ndim() != 4)
    key.fail(PYKV_NOT_IMPLEMENTED, "kv_cache_dtype 'nvfp4' has pages of the flash layouts alone, got shape %s",
             key.shape_string().c_str());
  if (head_size % kNvfp4HeadMultiple != 0)
    fail(PYKV_NOT_IMPLEMENTED, "query: head_size must be a multiple of %d for kv_cache_dtype 'nvfp4', got %lld",
         kNvfp4HeadMultiple, static_cast<long long>(head_size));
  Dim block_size{"block_size"}, bytes{"head_size / 2 + head_size / 16", nvfp4_bytes(head_size)};
  key.shape(blocks, block_size, kv_heads, bytes).contiguous_rows();
  value.shape(blocks, block_size, kv_heads, bytes).contiguous_rows();
  if (block_size % kNvfp4TokenGroup != 0)
    key.fail(PYKV_NOT_IMPLEMENTED, "block_size must be a multiple of %d for kv_cache_dtype 'nvfp4', got %lld",
             kNvfp4TokenGroup, static_cast<long long>(block_size));
  a.key_page = nvfp4_page_of(key, false);
  a.value_page = nvfp4_page_of(value, true);
  const int chunk = static_cast<int>(head_size);
  a.key = {key.data(), key.stride(0), a.key_page.codes_token, a.key_page.codes_head, 0, chunk};
  a.value = {value.data(), value.stride(0), a.value_page.codes_token, a.value_page.codes_head, 1};
  a.block_size = static_cast<int>(block_size);
}

const float* per_head(Call& call, const char* name, const DLTensor* t, Dim& heads) {
  if (!t) return nullptr;
  return static_cast<const float*>(call.read(name, t).shape(heads).dtype({DType::kFloat32}).contiguous().data());
}

PagedAttentionArgs take(Call& call, const Inputs& in) {
  PagedAttentionArgs a{};
  a.op = call.op();
  Dim tokens{"num_tokens"}, heads{"num_heads"}, head_size{"head_size"}, blocks{"num_blocks"}, kv_heads{"num_kv_heads"};
  Dim seqs{"num_seqs"}, width{"max_blocks_per_seq"};
  Tensor query = call.read("query", in.query).shape(tokens, heads, head_size).dtype(kFloats).contiguous_rows();
  Tensor out =
      call.write("out", in.out).shape(tokens, heads, head_size).like(query).contiguous_rows().no_overlap_within();
  Tensor key = call.read("key_cache", in.key_cache).rank_between(4, 5);
  Tensor value = call.read("value_cache", in.value_cache).like(key);
  a.kv_format = kv_format(in.kv_cache_dtype, key, query.type(), {KvFormat::kInt8, KvFormat::kNvfp4});
  if (a.kv_format == KvFormat::kNvfp4) {
    take_nvfp4(a, key, value, blocks, kv_heads, head_size);
  } else if (key.ndim() == 5) {
    take_packed(a, key, value, blocks, kv_heads, head_size);
  } else {
    take_flash(a, key, value, blocks, kv_heads, head_size);
  }
  if (head_size < 1 || head_size > 1024)
    query.fail(PYKV_NOT_IMPLEMENTED, "head_size must lie between 1 and 1024, got %lld",
               static_cast<long long>(head_size));
  if (kv_heads < 1 || heads % kv_heads != 0)
    query.fail(PYKV_VALUE_ERROR, "num_heads must be a multiple of num_kv_heads = %lld, got %lld",
               static_cast<long long>(kv_heads), static_cast<long long>(heads));
  Tensor tables = call.read("block_tables", in.block_tables).shape(seqs, width);
  Tensor lens = call.read("seq_lens", in.seq_lens).shape(seqs);
  a.block_tables = tables.index();
  a.block_table_stride = tables.stride(0);
  a.seq_lens = lens.index();
  if (in.cu_query_lens) {
    Dim seqs_plus_1{"num_seqs + 1", seqs + 1};
    a.cu_query_lens = call.read("cu_query_lens", in.cu_query_lens).shape(seqs_plus_1).index();
  } else if (tokens != seqs) {
    query.fail(PYKV_VALUE_ERROR,
               "without cu_query_lens there must be one query for each of the %lld sequences, got shape %s",
               static_cast<long long>(seqs), query.shape_string().c_str());
  }
  a.dtype = query.type();
  a.out = out.data();
  a.query = query.data();
  a.out_token_stride = out.stride(0);
  a.out_head_stride = out.stride(1);
  a.query_token_stride = query.stride(0);
  a.query_head_stride = query.stride(1);
  a.alibi_slopes = per_head(call, "alibi_slopes", in.alibi_slopes, heads);
  a.sinks = per_head(call, "sinks", in.sinks, heads);
  // otherwise the elements are values themselves
  const bool scaled = a.kv_format != KvFormat::kSame;
  call.scale(a.k_scale, "k_scale", scaled ? in.k_scale : nullptr, kv_heads);
  call.scale(a.v_scale, "v_scale", scaled ? in.v_scale : nullptr, kv_heads);
  a.num_tokens = tokens;
  a.num_seqs = seqs;
  a.num_blocks = blocks;
  a.max_blocks_per_seq = width;
  a.max_seq_len = width * a.block_size;
  a.num_heads = static_cast<int>(heads);
  a.num_kv_heads = static_cast<int>(kv_heads);
  a.head_size = static_cast<int>(head_size);
  a.causal = true;
  return a;
}

void run(Call& call, void* stream, const PagedAttentionArgs& a) {
  attention::Plan& plan = attention::last_plan();
  plan.count = 0;
  plan.workspace = 0;
  if (a.num_tokens == 0 || a.num_seqs == 0 || a.num_heads == 0) return;
  if (const attention::DeviceInfo* device = attention::planned_device()) return make_plan(a, *device, plan);
  if (!call.on_cuda()) {
    plan.count = 1;
    plan.steps[0] = {};  // the CPU
    if (attention::only_plans()) return;
  }
  call.run(stream, a, paged_attention_cpu, PYKV_CUDA(paged_attention_cuda));
}

// The arguments that vLLM's entries have beside those of Inputs.
struct DecodeOptions {
  int64_t num_kv_heads, block_size, max_seq_len;
  double scale;
  BlockSparse sparse;
};

BlockSparse taken(BlockSparse s, const PagedAttentionArgs& a) {
  if (s.vert_stride <= 1) return s;
  if (s.block_size < 1 || s.block_size % a.block_size != 0)
    fail(PYKV_VALUE_ERROR, "blocksparse_block_size: must be a multiple of block_size = %d, got %lld", a.block_size,
         static_cast<long long>(s.block_size));
  // Sums of blocks and heads' offsets are numbers of 64 bits.
  const int64_t most = INT64_MAX / 2, heads = s.sliding_step < 0 ? a.num_kv_heads : a.num_heads;
  const int64_t step = s.sliding_step < -most ? INT64_MAX : std::abs(s.sliding_step);
  const int64_t ranks = most / std::max<int64_t>(heads, 1) / std::max<int64_t>(step, 1);
  if (ranks == 0)
    fail(PYKV_VALUE_ERROR, "blocksparse_head_sliding_step: is too large, got %lld",
         static_cast<long long>(s.sliding_step));
  if (s.tp_rank <= -ranks || s.tp_rank >= ranks)
    fail(PYKV_VALUE_ERROR, "tp_rank: must lie between -%lld and %lld, got %lld", static_cast<long long>(ranks - 1),
         static_cast<long long>(ranks - 1), static_cast<long long>(s.tp_rank));
  s.local_blocks = std::clamp<int64_t>(s.local_blocks, 0, INT32_MAX);
  return s;
}

PagedAttentionArgs take_decode(Call& call, const Inputs& in, const DecodeOptions& options) {
  PagedAttentionArgs a = take(call, in);
  a.scale = number("scale", options.scale);
  if (options.num_kv_heads != a.num_kv_heads)
    fail(PYKV_VALUE_ERROR, "num_kv_heads: must be that of key_cache, %d, got %lld", a.num_kv_heads,
         static_cast<long long>(options.num_kv_heads));
  if (options.block_size != a.block_size)
    fail(PYKV_VALUE_ERROR, "block_size: must be that of key_cache, %d, got %lld", a.block_size,
         static_cast<long long>(options.block_size));
  if (options.max_seq_len < 0)
    fail(PYKV_VALUE_ERROR, "max_seq_len: must not be negative, got %lld", static_cast<long long>(options.max_seq_len));
  a.max_seq_len = std::min(a.max_seq_len, options.max_seq_len);
  a.denominator_epsilon = 1e-6f;
  a.sparse = taken(options.sparse, a);
  return a;
}

// A program that was built for an earlier version has fewer fields: the others are as by default.
pykv_paged_attention_options known(const pykv_paged_attention_options* given) {
  constexpr size_t kFirst = offsetof(pykv_paged_attention_options, workspace) + sizeof(DLTensor*);  // of 0.1.0
  pykv_paged_attention_options options = PYKV_PAGED_ATTENTION_OPTIONS;
  if (!given) return options;
  if (given->struct_size < kFirst || given->struct_size > sizeof options)
    fail(PYKV_VALUE_ERROR, "options: struct_size must lie between %zu and %zu, got %zu", kFirst, sizeof options,
         given->struct_size);
  std::memcpy(&options, given, given->struct_size);
  return options;
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_paged_attention(DLTensor* out, const DLTensor* query, const DLTensor* key_cache,
                                 const DLTensor* value_cache, const DLTensor* block_tables, const DLTensor* seq_lens,
                                 const pykv_paged_attention_options* options, void* stream) {
  return guarded("paged_attention", [&](Call& call) {
    const pykv_paged_attention_options o = known(options);
    PagedAttentionArgs a = take(call, {out, query, key_cache, value_cache, block_tables, seq_lens, o.cu_query_lens,
                                       o.alibi_slopes, o.sinks, o.kv_cache_dtype, o.k_scale, o.v_scale});
    a.scale = std::isnan(o.scale) ? static_cast<float>(1 / std::sqrt(static_cast<double>(a.head_size)))
                                  : number("scale", o.scale);
    if (o.window < 0) fail(PYKV_VALUE_ERROR, "window: must be positive, got %lld", static_cast<long long>(o.window));
    if (!(o.softcap >= 0)) fail(PYKV_VALUE_ERROR, "softcap: must be positive, got %g", o.softcap);
    a.causal = o.causal;
    a.window = o.window;
    // 0 says none, and so does infinity; a cap too small for float must not become 0.
    using Limits = std::numeric_limits<float>;
    a.softcap =
        o.softcap == 0 || o.softcap > Limits::max() ? 0 : std::max(static_cast<float>(o.softcap), Limits::min());
    a.batch_invariant = o.batch_invariant;
    if (o.batch_invariant && a.max_seq_len > kMostInvariantTokens)
      fail(PYKV_NOT_IMPLEMENTED, "block_tables: with batch_invariant a row may hold %lld tokens at most, got %lld",
           static_cast<long long>(kMostInvariantTokens), static_cast<long long>(a.max_seq_len));
    if (o.lse) {
      Dim heads{"num_heads", a.num_heads}, tokens{"num_tokens", a.num_tokens};
      Tensor t = call.write("lse", o.lse).shape(heads, tokens).dtype({DType::kFloat32}).no_overlap_within();
      a.lse = static_cast<float*>(t.data());
      a.lse_head_stride = t.stride(0);
      a.lse_token_stride = t.stride(1);
    }
    if (o.workspace) {
      Tensor t = call.write("workspace", o.workspace).rank(1).contiguous();
      a.workspace = t.data();
      a.workspace_size = t.numel() * static_cast<int64_t>(size_of(t.type()));
      if (reinterpret_cast<uintptr_t>(a.workspace) % 256 != 0)
        t.fail(PYKV_VALUE_ERROR, "must be aligned to 256 bytes, got address %p", a.workspace);
    }
    run(call, stream, a);
  });
}

pykv_status pykv_paged_attention_workspace_size(int64_t num_tokens, int64_t num_seqs, int64_t num_heads,
                                                int64_t num_kv_heads, int64_t head_size, bool batch_invariant,
                                                int32_t device_id, int64_t* size) {
  return guarded("paged_attention_workspace_size", [&](Call&) {
    if (!size) fail(PYKV_TYPE_ERROR, "size: a place for the result is required, got NULL");
    if (num_tokens < 0 || num_seqs < 0 || num_heads < 1 || num_kv_heads < 1 || head_size < 1)
      fail(PYKV_VALUE_ERROR,
           "sizes must be positive, got num_tokens %lld, num_seqs %lld, num_heads %lld, num_kv_heads %lld, "
           "head_size %lld",
           static_cast<long long>(num_tokens), static_cast<long long>(num_seqs), static_cast<long long>(num_heads),
           static_cast<long long>(num_kv_heads), static_cast<long long>(head_size));
#if defined(PYKV_WITH_CUDA)
    *size = paged_attention_workspace_cuda(num_tokens, num_seqs, static_cast<int>(num_heads),
                                           static_cast<int>(num_kv_heads), static_cast<int>(head_size), batch_invariant,
                                           device_id);
#else
    (void)batch_invariant;
    (void)device_id;
    (void)size;
    Call::no_cuda();
#endif
  });
}

pykv_status pykv_paged_attention_v1(DLTensor* out, const DLTensor* query, const DLTensor* key_cache,
                                    const DLTensor* value_cache, int64_t num_kv_heads, double scale,
                                    const DLTensor* block_tables, const DLTensor* seq_lens, int64_t block_size,
                                    int64_t max_seq_len, const DLTensor* alibi_slopes, const char* kv_cache_dtype,
                                    const DLTensor* k_scale, const DLTensor* v_scale, int64_t tp_rank,
                                    int64_t blocksparse_local_blocks, int64_t blocksparse_vert_stride,
                                    int64_t blocksparse_block_size, int64_t blocksparse_head_sliding_step,
                                    void* stream) {
  return guarded("paged_attention_v1", [&](Call& call) {
    const Inputs in = {out,     query,        key_cache, value_cache,    block_tables, seq_lens,
                       nullptr, alibi_slopes, nullptr,   kv_cache_dtype, k_scale,      v_scale};
    const BlockSparse sparse = {tp_rank, blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
                                blocksparse_head_sliding_step};
    run(call, stream, take_decode(call, in, {num_kv_heads, block_size, max_seq_len, scale, sparse}));
  });
}

pykv_status pykv_paged_attention_v2(DLTensor* out, DLTensor* exp_sum, DLTensor* max_logits, DLTensor* tmp_out,
                                    const DLTensor* query, const DLTensor* key_cache, const DLTensor* value_cache,
                                    int64_t num_kv_heads, double scale, const DLTensor* block_tables,
                                    const DLTensor* seq_lens, int64_t block_size, int64_t max_seq_len,
                                    const DLTensor* alibi_slopes, const char* kv_cache_dtype, const DLTensor* k_scale,
                                    const DLTensor* v_scale, int64_t tp_rank, int64_t blocksparse_local_blocks,
                                    int64_t blocksparse_vert_stride, int64_t blocksparse_block_size,
                                    int64_t blocksparse_head_sliding_step, void* stream) {
  return guarded("paged_attention_v2", [&](Call& call) {
    const Inputs in = {out,     query,        key_cache, value_cache,    block_tables, seq_lens,
                       nullptr, alibi_slopes, nullptr,   kv_cache_dtype, k_scale,      v_scale};
    const BlockSparse sparse = {tp_rank, blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
                                blocksparse_head_sliding_step};
    const PagedAttentionArgs a = take_decode(call, in, {num_kv_heads, block_size, max_seq_len, scale, sparse});
    Dim seqs{"num_seqs", a.num_seqs}, heads{"num_heads", a.num_heads}, head_size{"head_size", a.head_size};
    Dim parts{"ceil(max_seq_len / 512)", max_seq_len / 512 + (max_seq_len % 512 != 0)};
    call.write("exp_sum", exp_sum).shape(seqs, heads, parts).dtype({DType::kFloat32});
    call.write("max_logits", max_logits).shape(seqs, heads, parts).dtype({DType::kFloat32});
    call.write("tmp_out", tmp_out).shape(seqs, heads, parts, head_size).dtype({a.dtype});
    run(call, stream, a);
  });
}
