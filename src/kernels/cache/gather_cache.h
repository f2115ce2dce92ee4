// Tokens of a paged cache, gathered request after request into plain rows: the idea behind pykv_cp_gather_cache,
// pykv_gather_and_maybe_dequant_cache and pykv_cp_gather_and_upconvert_fp8_kv_cache.
#pragma once

#include "cache/mla_record.h"
#include "cache/paged_requests.h"
#include "core/nvfp4.h"
#include "cpu/isa.h"

namespace pykv {

enum class GatherKind : uint8_t {
  kCopy,     // elements of `element_bytes` bytes
  kScaled,   // one-byte codes times a scale
  kRecords,  // fp8_ds_mla
  kNvfp4,    // pages of nvfp4, with `pieces` heads of `piece` elements
};

struct GatherCacheArgs {
  PagedRequests requests;
  GatherKind kind;
  KvFormat format;        // kScaled
  DType dtype;            // of dst; not for kCopy
  int64_t element_bytes;  // kCopy
  const void* src;
  int64_t src_block, src_token;  // distances: elements of src (kRecords, kNvfp4: bytes)
  void* dst;
  int64_t dst_row, num_rows;     // distances in dst: elements of dst
  int64_t pieces, piece;         // an entry: pieces of contiguous elements
  int64_t src_piece, dst_piece;  // from one piece to the next
  MlaRecord record;              // kRecords
  Nvfp4Page page;                // kNvfp4
  int64_t dst_dim;               // kNvfp4: from one element to the next
  Scale scale;                   // kScaled, kNvfp4
};

PYKV_CPU_TWIN(gather_cache_cpu, GatherCacheArgs)
void gather_cache_cuda(const GatherCacheArgs& args, const Launch& launch);

}  // namespace pykv
