// Twin of concat_and_cache_mla.cu: tokens shared out among threads, each written whole.
#include <vector>

#include "cache/mla/concat_and_cache_mla.h"
#include "cache/mla_record.h"
#include "cache/quantise_cpu.h"
#include "cpu/encode.h"
#include "cpu/nvfp4_encode.h"
#include "cpu/parallel.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kBytesPerTask = 64 * 1024;  // less is not worth another thread

template <class T>
const T* row_of(const MlaPart& part, int64_t token) {
  return static_cast<const T*>(part.data) + token * part.row;
}

// write(token, block, offset, out) for every token with a slot inside the cache, of elements of so many bytes.
template <class Write>
void for_each_slot(const ConcatAndCacheMlaArgs& args, int64_t stored_bytes, const Launch& launch, Write&& write) {
  const Reporter report = launch.reporter(args.report);
  const int64_t num_slots = args.num_blocks * args.block_size;
  const int64_t size = args.latent.size + args.rope.size;
  const int64_t token_bytes = size * static_cast<int64_t>(size_of(args.dtype));
  const bool streamed = args.num_tokens * size * stored_bytes > kWorthStreaming;
  parallel_for(args.num_tokens, kBytesPerTask / token_bytes + 1, [&](int64_t begin, int64_t end) {
    LineWriter out(streamed);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = args.slots[token];
      if (slot < 0) continue;
      if (slot >= num_slots) {
        report(slot, num_slots);
        continue;
      }
      write(token, slot / args.block_size, slot % args.block_size, out);
    }
  });
}

// write(token, place, out); place: its first element in the cache.
template <class Stored, class Write>
void for_each_token(const ConcatAndCacheMlaArgs& args, const Launch& launch, Write&& write) {
  for_each_slot(args, sizeof(Stored), launch, [&](int64_t token, int64_t block, int64_t offset, LineWriter& out) {
    write(token, static_cast<Stored*>(args.cache) + block * args.block + offset * args.token, out);
  });
}

template <class T>
void copy_part(T* to, int64_t to_dim, const T* from, const MlaPart& part, LineWriter& out) {
  if (part.dim != 1 || to_dim != 1) {
    for (int64_t i = 0; i < part.size; ++i) to[i * to_dim] = from[i * part.dim];
  } else {
    out.put(to, from, part.size * static_cast<int64_t>(sizeof(T)));
  }
}

template <class T>
void copy_all(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  for_each_token<T>(args, launch, [&](int64_t token, T* place, LineWriter& out) {
    copy_part(place, args.dim, row_of<T>(args.latent, token), args.latent, out);
    copy_part(place + args.latent.size * args.dim, args.dim, row_of<T>(args.rope, token), args.rope, out);
  });
}

template <class T, class Code>
void quantise_all(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  const MlaPart &latent = args.latent, &rope = args.rope;
  const float scale = args.scale[0];
  const Encoder<T, Code> encode(scale, args.num_tokens * (latent.size + rope.size));
  const auto write = [&](Code* to, const T* from, const MlaPart& part, LineWriter& out) {
    if (args.dim != 1 || part.dim != 1) return quantise(to, args.dim, from, part.dim, part.size, scale);
    out.fill(to, part.size, [&](Code* codes, int64_t first, int64_t n) { encode(codes, from + first, n); });
  };
  for_each_token<Code>(args, launch, [&](int64_t token, Code* place, LineWriter& out) {
    write(place, row_of<T>(latent, token), latent, out);
    write(place + latent.size * args.dim, row_of<T>(rope, token), rope, out);
  });
}

// nvfp4: parts that are no neighbours, or end within four blocks, are brought together first.
template <class T>
void quantise_blocks(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  const MlaPart &latent = args.latent, &rope = args.rope;
  const int64_t size = latent.size + rope.size, room = nvfp4_whole(size / kNvfp4Four) + kNvfp4Fours;
  const Nvfp4Encoder<T> encode(args.scale[0], args.num_tokens * size, args.four_over_six);
  const bool in_place = latent.dim == 1 && rope.dim == 1 && latent.size % kNvfp4Four == 0;
  for_each_slot(args, 1, launch, [&](int64_t token, int64_t block, int64_t offset, LineWriter& out) {
    if (size == 0) return;
    uint8_t* page = static_cast<uint8_t*>(args.cache) + block * args.block;
    const T *c = row_of<T>(latent, token), *pe = row_of<T>(rope, token);
    std::vector<uint8_t> codes(room * kNvfp4FourCodes), scales(room * 4);
    const int64_t fours = size / kNvfp4Four, latents = latent.size / kNvfp4Four;
    if (in_place) {
      encode(codes.data(), scales.data(), {c, 1, 0, latents}, 0);
      encode(codes.data() + latents * kNvfp4FourCodes, scales.data() + 4 * latents, {pe, 1, 0, fours - latents}, 0);
    } else {
      std::vector<T> together(size);
      for (int64_t i = 0; i < latent.size; ++i) together[i] = c[i * latent.dim];
      for (int64_t i = 0; i < rope.size; ++i) together[latent.size + i] = pe[i * rope.dim];
      encode(codes.data(), scales.data(), {together.data(), 1, 0, fours}, 0);
    }
    out.put(page + args.page.codes_at(offset, 0, 0), codes.data(), fours * kNvfp4FourCodes);
    Nvfp4Scales at(args.page, offset, 0, 0);
    for (int64_t i = 0; i < 4 * fours; ++i) page[at.next()] = scales[i];
  });
}

template <class T>
void write_records(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  const MlaPart &latent = args.latent, &rope = args.rope;
  const MlaRecord record{latent.size, rope.size};
  const TileQuantiser<T, 448> encode(args.num_tokens * latent.size);
  for_each_token<uint8_t>(args, launch, [&](int64_t token, uint8_t* place, LineWriter&) {
    for (int64_t first = 0; first < latent.size; first += MlaRecord::kTile) {
      const T* tile = row_of<T>(latent, token) + first * latent.dim;
      const float largest = largest_magnitude(tile, latent.dim, MlaRecord::kTile);
      const float least = largest / MlaRecord::kLargest;
      const float scale = power_of_two_from(least > MlaRecord::kLeastScale ? least : MlaRecord::kLeastScale);
      e4m3* codes = reinterpret_cast<e4m3*>(place + first);
      if (latent.dim == 1) {
        encode.divide_by_power_of_two(codes, tile, MlaRecord::kTile, scale);
      } else {
        quantise(codes, 1, tile, latent.dim, MlaRecord::kTile, scale);
      }
      std::memcpy(place + record.scales_at() + first / (MlaRecord::kTile / 4), &scale, 4);
    }
    const T* from = row_of<T>(rope, token);
    if (!rope.data) {
      std::memset(place + record.rope_at(), 0, 2 * rope.size);
    } else if (rope.dim == 1) {
      std::memcpy(place + record.rope_at(), from, 2 * rope.size);
    } else {
      for (int64_t i = 0; i < rope.size; ++i) std::memcpy(place + record.rope_at() + 2 * i, from + i * rope.dim, 2);
    }
  });
}

template <class T>
void write_nvfp4_records(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  const MlaPart &latent = args.latent, &rope = args.rope;
  const Nvfp4MlaRecord record{latent.size, rope.size};
  for_each_token<uint8_t>(args, launch, [&](int64_t token, uint8_t* place, LineWriter&) {
    const T* from = row_of<T>(latent, token);
    for (int64_t block = 0; block < latent.size / kNvfp4Block; ++block) {
      T elements[kNvfp4Block];
      for (int i = 0; i < kNvfp4Block; ++i) elements[i] = from[(block * kNvfp4Block + i) * latent.dim];
      const float largest = largest_magnitude(elements, 1, kNvfp4Block) / kNvfp4Largest;
      uint8_t scale = from_float<e4m3>(largest).bits;
      scale = scale > Nvfp4MlaRecord::kLeastScale ? scale : Nvfp4MlaRecord::kLeastScale;
      place[record.scale_at(block)] = scale;
      store_e2m1(place + block * (kNvfp4Block / 2), elements, 1.0f / to_float(e4m3{scale}));
    }
    quantise(reinterpret_cast<e4m3*>(place + record.rope_at()), 1, row_of<T>(rope, token), rope.dim, rope.size, 1.0f);
  });
}

}  // namespace

void concat_and_cache_mla_cpu(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  if (args.entry == MlaEntry::kRecord)
    return dispatch<f16, bf16>(args.dtype, [&]<class T>() { write_records<T>(args, launch); });
  if (args.entry == MlaEntry::kNvfp4Record)
    return dispatch<f16, bf16>(args.dtype, [&]<class T>() { write_nvfp4_records<T>(args, launch); });
  switch (args.format) {
    case KvFormat::kSame:
      return size_of(args.dtype) == 2 ? copy_all<uint16_t>(args, launch) : copy_all<uint32_t>(args, launch);
    case KvFormat::kE4M3:
      return dispatch<float, f16, bf16>(args.dtype, [&]<class T>() { quantise_all<T, e4m3>(args, launch); });
    case KvFormat::kE5M2:
      return dispatch<float, f16, bf16>(args.dtype, [&]<class T>() { quantise_all<T, e5m2>(args, launch); });
    case KvFormat::kInt8:
      return dispatch<float, f16, bf16>(args.dtype, [&]<class T>() { quantise_all<T, i8>(args, launch); });
    case KvFormat::kNvfp4:
      return dispatch<float, f16, bf16>(args.dtype, [&]<class T>() { quantise_blocks<T>(args, launch); });
  }
}

}  // namespace pykv::PYKV_ISA
