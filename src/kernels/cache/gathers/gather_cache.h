// Tokens of a paged cache, gathered request after request into plain rows: the idea behind pykv_cp_gather_cache,
// pykv_gather_and_maybe_dequant_cache and pykv_cp_gather_and_upconvert_fp8_kv_cache.
#pragma once

#include "cache/gathers/paged_requests.h"
#include "cache/mla_record.h"
#include "core/nvfp4.h"
#include "cpu/isa.h"

namespace pykv {

enum class GatherKind : uint8_t {
  kCopy,          // elements of `element_bytes` bytes
  kScaled,        // one-byte codes times a scale
  kRecords,       // fp8_ds_mla
  kNvfp4,         // pages of nvfp4, with `pieces` heads of `piece` elements
  kNvfp4Records,  // nvfp4_ds_mla
};

// Records that lie partly in host memory: slot block * block_size + offset of a request's token is a row of the cache, or
// else of the host's.
struct RecordRows {
  const char *in_cache_report, *in_host_report;  // "op: argument"
  Index in_cache, in_host;            // the row of each slot; in_cache negative: in_host counts.  Null: no maps
  int64_t num_in_cache, num_in_host;  // rows
  const char* host;
  int64_t host_row;  // bytes

  // False, and a report, for a row out of range.  Otherwise from says where the record is: in host memory, or if that is
  // null, in the row of the cache that slot becomes.  Inlined by force, as PagedRequests::locate.
  PYKV_HOST_DEVICE __attribute__((always_inline)) inline bool find(int64_t& slot, const char*& from,
                                                                   ErrorWord* errors) const {
    from = nullptr;
    const int64_t row = in_cache[slot], host_slot = slot;
    slot = row;
    if (row >= num_in_cache) return Reporter{errors, in_cache_report}(row, num_in_cache), false;
    if (row >= 0) return true;
    const int64_t of_host = in_host[host_slot];
    if (of_host < 0 || of_host >= num_in_host) return Reporter{errors, in_host_report}(of_host, num_in_host), false;
    from = host + of_host * host_row;
    return true;
  }
};

struct GatherCacheArgs {
  PagedRequests requests;
  GatherKind kind;
  KvFormat format;        // kScaled
  DType dtype;            // of dst; not for kCopy
  int64_t element_bytes;  // kCopy
  const void* src;
  int64_t src_block, src_token;  // distances: elements of src (records, kNvfp4: bytes)
  void* dst;
  int64_t dst_row, num_rows;     // distances in dst: elements of dst
  int64_t pieces, piece;         // an entry: pieces of contiguous elements
  int64_t src_piece, dst_piece;  // from one piece to the next
  MlaRecord record;              // kRecords
  RecordRows record_rows;        // kRecords
  Nvfp4MlaRecord nvfp4_record;   // kNvfp4Records
  Nvfp4Page page;                // kNvfp4
  int64_t dst_dim;               // kNvfp4: from one element to the next
  Scale scale;                   // kScaled, kNvfp4
};

PYKV_CPU_TWIN(gather_cache_cpu, GatherCacheArgs)
void gather_cache_cuda(const GatherCacheArgs& args, const Launch& launch);

}  // namespace pykv
