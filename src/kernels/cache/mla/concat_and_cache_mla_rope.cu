// q_pe and k_pe rotated in place; cache[slot[t] / BS, slot[t] % BS] = concat(kv_c[t], rotated k_pe[t]).
//
// Memory-bound, mostly by q_pe, whose many heads are moved in and out once; the floor is that traffic at copy bandwidth
// (records of 4096 tokens on an H200: 38.5 us, 98 % of a copy; 42.6 us by two launches).
// One launch rotates and writes: plain entries as rotary_and_cache does; records by blocks that write latents
// (write_mla_records.cuh), while those that rotate put the keys behind them.  nvfp4, whose blocks lie across the vectors that
// are rotated, and records that are not aligned take a second launch, which comes up under the tail of the first.
#include "cache/mla/concat_and_cache_mla_rope.h"
#include "cache/mla/entry_places.cuh"
#include "cache/mla/write_mla_records.cuh"
#include "cache/writes/rotate_to_cache.cuh"

namespace pykv {
namespace {

template <class T, int kRows>
__global__ void __launch_bounds__(kConcatThreads, 8)
    rope_records_kernel(const __grid_constant__ RecordPlan latents, const __grid_constant__ SlotTarget target,
                        const __grid_constant__ RotationPlan rotation, const __grid_constant__ SidePlan key,
                        uint32_t latent_blocks) {
  if (blockIdx.x < latent_blocks) return write_mla_records<T, true, kRows>(latents, target, 0);
  rotate_to_cache<Mover<T, KvFormat::kSame, kPackSize<T>>, T>(rotation, target.map, key, nullptr,
                                                              blockIdx.x - latent_blocks);
}

template <class T>
void launch_kernel(const ConcatAndCacheMlaRopeArgs& args, const Launch& launch) {
  const ConcatAndCacheMlaArgs& entry = args.concat;
  const MlaRecord record{entry.latent.size, entry.rope.size};
  RotaryAndCacheArgs rotary = args.rotary;
  rotary.rotate_only = false;
  const RecordPlan latents = record_plan(entry, 0);
  const SlotTarget target = target_of(entry, 1, launch);
  SidePlan key{};
  key.cache = static_cast<char*>(entry.cache) + record.rope_at();
  key.block = entry.block;
  key.token = entry.token;
  key.vectors_per_chunk = Divider(entry.rope.size / kPackSize<T>);

  RotationPlan rotation = plan_rotation(rotary, kPackSize<T>, kRotatedHeads, kConcatThreads, 0, launch);
  if (rotation.num_blocks < 2 * static_cast<uint32_t>(num_sms(launch.device)))
    rotation = plan_rotation(rotary, kPackSize<T>, 1, kConcatThreads, 0, launch);
  dispatch_rows_per_thread<2>(entry.num_tokens, latents.lanes.d, launch, [&]<int kRows> {
    const int64_t groups = (entry.num_tokens + kRows - 1) / kRows;
    const uint32_t blocks = static_cast<uint32_t>((groups * latents.lanes.d + kConcatThreads - 1) / kConcatThreads);
    launch_dependent(rope_records_kernel<T, kRows>, blocks + rotation.num_blocks, kConcatThreads, launch,
                     "concat_and_cache_mla_rope_fused", latents, target, rotation, key, blocks);
  });
}

// Whether one launch can write these records.
bool fits(const ConcatAndCacheMlaRopeArgs& args) {
  const ConcatAndCacheMlaArgs& entry = args.concat;
  return entry.entry == MlaEntry::kRecord && entry.num_tokens > 0 && entry.latent.size > 0 &&
         args.rotary.rotation.rotary_dim > 0 && entry.num_tokens * entry.latent.size < int64_t{1} << 33 &&
         records_aligned(entry) && rotation_width(args.rotary, kPackSize<half>) == kPackSize<half>;
}

}  // namespace

void concat_and_cache_mla_rope_cuda(const ConcatAndCacheMlaRopeArgs& args, const Launch& launch) {
  if (fits(args)) return dispatch<half, bf16>(args.concat.dtype, [&]<class T> { launch_kernel<T>(args, launch); });
  rotary_and_cache_cuda(args.rotary, launch);
  if (args.rotary.rotate_only && args.concat.num_tokens > 0) concat_and_cache_mla_cuda(args.concat, launch);
}

}  // namespace pykv
