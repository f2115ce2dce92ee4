// Tokens into nvfp4_ds_mla records (mla_record.h): a thread takes 16 elements of one, of the latent with their scale, or of
// rope.
#pragma once

#include "cache/mla/concat_rows.cuh"
#include "cache/mla_record.h"
#include "cache/nvfp4_tokens.cuh"

namespace pykv {

struct Nvfp4RecordPlan {
  const char *latent, *rope;
  int64_t latent_row, latent_dim, rope_row, rope_dim;  // bytes
  Divider pieces;                                      // of a token
  Nvfp4MlaRecord record;
  uint32_t num_tokens;
};

// Pieces of a token: blocks of the latent, then 16 elements of rope each, the last ones fewer.
inline int64_t nvfp4_record_pieces(const Nvfp4MlaRecord& record) {
  return record.latent / kNvfp4Block + (record.rope + kNvfp4Block - 1) / kNvfp4Block;
}

// kAligned: elements are loaded and codes stored by vectors.
template <class T, bool kAligned, class Target>
__device__ __forceinline__ void write_nvfp4_record(const Nvfp4RecordPlan& plan, const Target& target,
                                                   uint32_t first_token) {
  uint32_t piece;
  const uint32_t token = first_token + plan.pieces(blockIdx.x * kConcatThreads + threadIdx.x, piece);
  const Nvfp4MlaRecord& record = plan.record;
  const uint32_t blocks = static_cast<uint32_t>(record.latent / kNvfp4Block);
  begin_dependent();
  const auto ids = target.template ids<1>(token, plan.num_tokens);
  if (token >= plan.num_tokens) return;
  char* place = target.place(ids, 0);
  if (!place) return;
  if (piece < blocks) {
    const char* from = plan.latent + int64_t{piece} * kNvfp4Block * plan.latent_dim;
    const Nvfp4Source source{from, from, plan.latent_row, 0, plan.latent_dim, 0, kNvfp4Block};
    uint32_t words[4 * sizeof(T)];
    source.template load<T, kAligned>(token, words);
    const Nvfp4Codes block =
        Nvfp4Quantiser(1.0f, false).template with_scale_of_at_least<T>(words, uint32_t{Nvfp4MlaRecord::kLeastScale});
    place[record.scale_at(piece)] = static_cast<char>(block.scale);
    char* codes = place + piece * (kNvfp4Block / 2);
    if constexpr (kAligned) {
      store_vec(codes, block.codes);
    } else {
#pragma unroll
      for (int b = 0; b < 8; ++b) codes[b] = static_cast<char>((b < 4 ? block.codes.x : block.codes.y) >> (b % 4 * 8));
    }
    return;
  }
  const uint32_t first = (piece - blocks) * kNvfp4Block;
  const char* from = plan.rope + token * plan.rope_row + first * plan.rope_dim;
  const Quotient one(1.0f);
  for (uint32_t i = 0; i < kNvfp4Block && first + i < record.rope; ++i)
    place[record.rope_at() + first + i] =
        static_cast<char>(to_fp8<KvFormat::kE4M3>(*reinterpret_cast<const T*>(from + i * plan.rope_dim), one));
}

}  // namespace pykv
