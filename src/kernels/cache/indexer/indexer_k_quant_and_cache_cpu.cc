// Twin of indexer_k_quant_and_cache.cu: tokens shared out among threads, each written whole.
#include <cstring>

#include "cache/indexer/indexer_k_quant_and_cache.h"
#include "cache/quantise_cpu.h"
#include "cpu/parallel.h"
#include "cpu/prefetch.h"

namespace pykv::PYKV_ISA {
namespace {

static_assert(IndexerBlock::kLargest == 448.0f);
constexpr int64_t kBytesPerTask = 64 * 1024;  // less is not worth another thread

template <class T>
void write_token(const IndexerKQuantArgs& args, const TileQuantiser<T, 448>& encode, const T* from, int64_t offset,
                 char* block) {
  const bool tile = args.k_dim == 1 && args.group_size % 32 == 0;
  const int64_t size = args.group_size;
  e4m3* values = reinterpret_cast<e4m3*>(block + offset * args.block.values);
  char* scales = block + args.block.scales_at() + offset * args.block.scale_bytes();
  for (int64_t g = 0; g < args.block.groups; ++g, from += size * args.k_dim, values += size) {
    const float most = largest_magnitude(from, args.k_dim, size);
    const float largest = most > IndexerBlock::kLeastMagnitude ? most : IndexerBlock::kLeastMagnitude;
    float scale = largest / IndexerBlock::kLargest;
    if (args.scale != IndexerScale::kFloat) {
      scale = power_of_two_from(scale);
      if (tile) {
        encode.divide_by_power_of_two(values, from, size, scale);
      } else {
        const float reciprocal = 1.0f / scale;  // exact, and so are the products: no division for each element
        convert(values, 1, from, args.k_dim, size, [=](auto x) { return x * reciprocal; });
      }
    } else if (tile && largest == most) {
      encode.divide(values, from, size, largest, scale);
    } else {
      quantise(values, 1, from, args.k_dim, size, scale);
    }
    uint32_t stored = __builtin_bit_cast(uint32_t, scale);
    if (args.scale == IndexerScale::kExponent) stored = (stored >> 23) * 0x01010101u;
    std::memcpy(scales + 4 * g, &stored, 4);
  }
}

template <class T>
void write_tokens(const IndexerKQuantArgs& args, const Launch& launch) {
  const Reporter report = launch.reporter("indexer_k_quant_and_cache: slot_mapping");
  const int64_t block_size = args.block.block_size, num_slots = args.num_blocks * block_size;
  const int64_t token_bytes = args.block.values * static_cast<int64_t>(sizeof(T));
  const int64_t ahead = rows_ahead<T>(args.block.values) * args.k_row;
  const TileQuantiser<T, 448> encode(args.num_tokens * args.block.values);
  parallel_for(args.num_tokens, kBytesPerTask / token_bytes + 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = args.slots[token];
      if (slot < 0) continue;
      if (slot >= num_slots) {
        report(slot, num_slots);
        continue;
      }
      const T* from = static_cast<const T*>(args.k) + token * args.k_row;
      if (args.k_dim == 1) prefetch_bytes(from + ahead, token_bytes);
      write_token(args, encode, from, slot % block_size,
                  static_cast<char*>(args.cache) + slot / block_size * args.block_bytes);
    }
  });
}

}  // namespace

void indexer_k_quant_and_cache_cpu(const IndexerKQuantArgs& args, const Launch& launch) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() { write_tokens<T>(args, launch); });
}

}  // namespace pykv::PYKV_ISA
