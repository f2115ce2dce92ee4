// Which calls the kernels of decoding proper can take: the host's side.
#pragma once

#include "attention/paged_attention_decode_pages.cuh"
#include "attention/paged_attention_decode_shape.cuh"

namespace pykv::attention {

// Can DecodeLoader bring this cache?
template <class S>
bool suits_loader(const Problem& p) {
  const PagedAttentionArgs& a = p.a;
  const bool packed_keys = a.key.chunk < a.head_size;
  const auto fits = [](int64_t elements) { return elements >= 0 && elements * S::kBytes < int64_t{1} << 32; };
  const bool strides = fits(a.key.block) && fits(a.key.token) && fits(a.key.head) && fits(a.value.block) &&
                       fits(a.value.token) && fits(a.value.head);
  return strides && S::kByToken == (a.block_size % kGroupTokens != 0) && packed_keys == S::kPackedV &&
         a.num_blocks < (int64_t{1} << 31) && a.max_seq_len < kNoWindow - (1 << 20);
}

// Can it take this call, whatever the lengths?
template <class S>
bool suits_decode(const Problem& p) {
  const PagedAttentionArgs& a = p.a;
  const int64_t most_places = (a.max_seq_len / S::kUnitTokens + S::kLead + 1) * a.num_kv_heads;
  return suits_loader<S>(p) && a.cu_query_lens.data == nullptr && p.group <= S::kColumns &&
         (p.sees_all() || (!S::kInvariant && !p.sparse)) && a.num_seqs * most_places < (int64_t{1} << 31);
}

// The same for several tokens of a sequence.
template <class S>
bool suits_tokens(const Problem& p) {
  const int64_t most_places = (p.a.max_seq_len / S::kUnitTokens + S::kLead + 1) * p.a.num_kv_heads;
  return suits_loader<S>(p) && !p.a.batch_invariant && p.group <= S::kColumns && p.sees_all() && p.min_rows == 0 &&
         (p.a.num_seqs + p.a.num_tokens) * most_places < (int64_t{1} << 31);
}

}  // namespace pykv::attention
