// Attention over a paged cache without tensor cores: fp32 data, and whatever the tensor-core kernels do not take (odd or
// large head sizes, strides that are no multiple of 16 bytes).
//
// Work: see schedule/line.cuh.  A tile of 16 rows against 32 tokens at a time; queries, one tile of K or V and the
// running output lie in shared memory as floats.  A thread computes four scores, then four rows by four columns of the
// output.  Bound by shared-memory reads and by latency (one tile in flight), far from the memory floor of
// KV bytes / bandwidth.
#include <algorithm>
#include <type_traits>

#include "attention/cuda/launch.cuh"
#include "attention/cuda/merge/exact.cuh"
#include "attention/cuda/merge/pieces.cuh"
#include "attention/cuda/rows.cuh"
#include "attention/cuda/schedule/line.cuh"
#include "cuda/dependent.cuh"
#include "cuda/fp8.cuh"
#include "cuda/launch.h"
#include "cuda/nvfp4.cuh"

namespace pykv::attention {
namespace {

constexpr int kRows = 16;
constexpr int kTile = 32;  // tokens of a tile; half of them if the head is very large (Problem::kv_tile)

template <KvFormat kFormat>
struct Fp8 {
  uint8_t code;
};

struct Nvfp4 {};

template <class T>
__device__ float to_float(T x) {
  return static_cast<float>(x);
}
template <KvFormat kFormat>
__device__ float to_float(Fp8<kFormat> x) {
  return fp8_to_float<kFormat>(x.code);
}

__device__ float load_query(const Problem& p, const Row& row, int d) {
  const int64_t at = row.token * p.a.query_token_stride + row.head * p.a.query_head_stride + d;
  if (p.a.dtype == DType::kFloat16) return to_float(static_cast<const half*>(p.a.query)[at]);
  if (p.a.dtype == DType::kBFloat16) return to_float(static_cast<const bf16*>(p.a.query)[at]);
  return static_cast<const float*>(p.a.query)[at];
}

__device__ void store_output(const Problem& p, const Row& row, int d, float x) {
  if (p.a.dtype == DType::kFloat16) {
    output_row<half>(p, row)[d] = half(x);
  } else if (p.a.dtype == DType::kBFloat16) {
    output_row<bf16>(p, row)[d] = bf16(x);
  } else {
    output_row<float>(p, row)[d] = x;
  }
}

// Four columns from d on.
__device__ void store_quad(const Problem& p, const Row& row, int d, float4 x) {
  const float columns[4] = {x.x, x.y, x.z, x.w};
  for (int e = 0; e < 4 && d + e < p.a.head_size; ++e) store_output(p, row, d + e, columns[e]);
}

struct Pages {
  int64_t id[kTile];  // -1: not visible to any row, or out of range
  int token[kTile];
};

// The weight of a key that a row does not see.
constexpr uint32_t kHidden = 0x80000000;  // -0.f
__device__ bool is_hidden(float weight) { return __float_as_uint(weight) == kHidden; }

// One tile of K or V as floats, zeros where there is nothing: a warp takes every fourth token, its lanes the dimensions.  Returns
// whether all that this thread has loaded is finite.
template <class Cache>
__device__ bool load_tile(const Problem& p, const Pages& pages, const void* data, int64_t block_stride,
                          int64_t token_stride, int64_t head_offset, float* tile, auto&& offset_of) {
  const int pitch = p.pitch + 4;
  float zero = 0;
#pragma unroll 4
  for (int t = threadIdx.x / 32; t < p.kv_tile; t += kThreads / 32) {
    const bool exists = pages.id[t] >= 0;
    const Cache* row = static_cast<const Cache*>(data) +
                       (exists ? pages.id[t] * block_stride + pages.token[t] * token_stride + head_offset : 0);
#pragma unroll 4
    for (int d = threadIdx.x % 32; d < p.pitch; d += 32) {
      const float x = exists && d < p.a.head_size ? to_float(row[offset_of(d)]) : 0.f;
      tile[t * pitch + d] = x;
      zero = fmaf(x, 0.f, zero);
    }
  }
  return zero == 0;
}

// The same for pages of nvfp4: a thread takes eight neighbours of a token.
__device__ bool load_nvfp4_tile(const Problem& p, const Pages& pages, const void* data, int64_t block_stride,
                                const Nvfp4Page& page, int kv_head, float* tile) {
  const int eighths = p.a.head_size / 8;
  float zero = 0;
  for (int x = threadIdx.x; x < p.kv_tile * eighths; x += kThreads) {
    const int t = x / eighths, d = x % eighths * 8, token = pages.token[t];
    half2 values[4] = {};
    if (pages.id[t] >= 0) {
      const uint8_t* at = static_cast<const uint8_t*>(data) + pages.id[t] * block_stride;
      const uint8_t* bytes = at + page.codes_at(token, kv_head, 0) + d / 2;
      uint32_t codes = 0;
      for (int i = 0; i < 4; ++i) codes |= static_cast<uint32_t>(bytes[i]) << 8 * i;  // whatever the alignment
      nvfp4x8_to_half2x4(codes, at[page.scale_at(token, kv_head, d / kNvfp4Block)], values);
    }
    float4* to = reinterpret_cast<float4*>(tile + t * (p.pitch + 4) + d);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 low = __half22float2(values[2 * i]), high = __half22float2(values[2 * i + 1]);
      to[i] = {low.x, low.y, high.x, high.y};
    }
    zero = fmaf(__low2float(values[0]), 0.f, zero);  // a scale that is NaN makes all of them NaN
  }
  return zero == 0;
}

template <class Cache>
__global__ void __launch_bounds__(kThreads, 4)
    paged_attention_simple_kernel(const __grid_constant__ Problem p, const __grid_constant__ Divider by_chunk) {
  extern __shared__ __align__(16) float memory[];
  __shared__ PlanScratch plan;
  __shared__ Walker walker;
  __shared__ LineEnds ends;
  __shared__ Unit u;
  __shared__ Pages pages;
  __shared__ float probs[kRows][kTile];
  __shared__ float rescale[kRows];

  const int head_size = p.a.head_size;
  const int pitch = p.pitch + 4;             // 4: eight rows of float4 in different banks
  float* queries = memory;                   // [kRows][pitch], scaled
  float* outputs = queries + kRows * pitch;  // [kRows][pitch]
  float* tile = outputs + kRows * pitch;     // [kTile][pitch], K then V
  const int my_row = threadIdx.x / 8, my_column = threadIdx.x % 8;

  let_next_kernel_start();
  const SharePosition share = find_share(p, plan);
  if (threadIdx.x == 0) {
    walker.start(p, share, &ends);
  }

  float maximum = -INFINITY, sum = 0, slope = 0;
  int offset = 0;
  Row row{};
  while (true) {
    __syncthreads();
    if (threadIdx.x == 0) {
      u = walker.unit;
      if (u.exists) walker.next(p);
    }
    __syncthreads();
    if (!u.exists) break;
    if (u.begins) {
      const float scale = p.a.scale * (p.a.kv_format == KvFormat::kSame ? 1.f : p.a.k_scale[u.kv_head]);
      for (int x = threadIdx.x; x < kRows * pitch; x += kThreads) {
        const Row r = row_of(p, u, x / pitch);
        const int d = x % pitch;
        queries[x] = r.valid && d < head_size ? load_query(p, r, d) * scale : 0.f;
        outputs[x] = 0;
      }
      row = row_of(p, u, my_row);
      slope = p.a.alibi_slopes && row.valid ? p.a.alibi_slopes[row.head] : 0.f;
      if (p.sparse) offset = sparse_offset(p, row.head, u.kv_head);
      maximum = -INFINITY;
      sum = 0;
    }

    // Pages of the tile's tokens.
    if (threadIdx.x < kTile) {
      const int token = u.first_token + threadIdx.x;
      int64_t id = -1;
      if (threadIdx.x < p.kv_tile && is_wanted(p, u, token)) {
        id = load_page(p, u.sequence, token).id(p);
        if (id < 0 || id >= p.a.num_blocks) {
          p.bad_block(id, p.a.num_blocks);
          id = -1;
        }
      }
      pages.id[threadIdx.x] = id;
      pages.token[threadIdx.x] = p.block_size.remainder(token);
    }
    __syncthreads();

    const KeyCacheView& k = p.a.key;
    if constexpr (std::is_same_v<Cache, Nvfp4>) {
      load_nvfp4_tile(p, pages, k.data, k.block, p.a.key_page, u.kv_head, tile);
    } else {
      load_tile<Cache>(p, pages, k.data, k.block, k.token, u.kv_head * k.head, tile, [&](int d) {
        const int64_t chunk = by_chunk.quotient(d);
        return chunk * (k.chunk_stride - k.chunk) + d;
      });
    }
    __syncthreads();

    float s[kTile / 8] = {};
    for (int d = 0; d < head_size; d += 4) {
      const float4 q = *reinterpret_cast<const float4*>(queries + my_row * pitch + d);
#pragma unroll
      for (int i = 0; i < kTile / 8; ++i) {
        if (8 * i >= p.kv_tile) break;
        const float4 y = *reinterpret_cast<const float4*>(tile + (my_column + 8 * i) * pitch + d);
        s[i] += q.x * y.x + q.y * y.y + q.z * y.z + q.w * y.w;
      }
    }
    float top = maximum;
    unsigned is_seen = 0;
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i) {
      const int t = my_column + 8 * i, distance = u.first_token + t - row.position;
      bool seen = pages.id[t] >= 0 && (!p.a.causal || distance <= 0) && abs(distance) < p.window;
      if (p.sparse) {
        seen = seen && sparse_attends(p, offset, u.sequence_len, u.first_token + t);
      }
      s[i] = seen ? logit(p, s[i], 1.f, slope, distance) : -INFINITY;
      is_seen |= static_cast<unsigned>(seen) << i;
      top = fmaxf(top, s[i]);
    }
    for (int m = 1; m < 8; m *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    top = ceilf(top);  // its powers are exact
    const float base = top == -INFINITY ? 0.f : top;
    const float factor = exp2f(maximum - base);
    sum *= factor;
    maximum = top;
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i) {
      const float x = exp2f(s[i] - base);
      probs[my_row][my_column + 8 * i] = is_seen >> i & 1 ? x : __uint_as_float(kHidden);
      sum += x;
    }
    if (my_column == 0) rescale[my_row] = factor;
    __syncthreads();

    const ValueCacheView& v = p.a.value;
    bool finite;
    if constexpr (std::is_same_v<Cache, Nvfp4>) {
      finite = load_nvfp4_tile(p, pages, v.data, v.block, p.a.value_page, u.kv_head, tile);
    } else {
      finite = load_tile<Cache>(p, pages, v.data, v.block, v.token, u.kv_head * v.head, tile,
                                [&](int d) { return d * v.dim; });
    }
    const bool plain = __syncthreads_and(finite) != 0;  // else a row must not have zero times what it does not see
    const int quads = p.pitch / 4;
    for (int x = threadIdx.x; x < kRows / 4 * quads; x += kThreads) {
      const int r0 = x / quads * 4, d = x % quads * 4;
      float4 o[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float4 old = *reinterpret_cast<const float4*>(outputs + (r0 + r) * pitch + d);
        const float f = rescale[r0 + r];
        o[r] = {old.x * f, old.y * f, old.z * f, old.w * f};
      }
#pragma unroll 4
      for (int t = 0; t < p.kv_tile; ++t) {
        const float4 y = *reinterpret_cast<const float4*>(tile + t * pitch + d);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float w = probs[r0 + r][t];
          if (!plain && is_hidden(w)) continue;
          o[r] = {o[r].x + w * y.x, o[r].y + w * y.y, o[r].z + w * y.z, o[r].w + w * y.w};
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) *reinterpret_cast<float4*>(outputs + (r0 + r) * pitch + d) = o[r];
    }
    if (!u.ends_chunk) continue;

    __syncthreads();
    float total = sum;
    for (int m = 1; m < 8; m *= 2) total += __shfl_xor_sync(~0u, total, m);
    if (!row.valid) continue;
    if (p.a.batch_invariant) {
      for (int d = my_column * 4; d < p.pitch; d += 32) {
        float4& o = *reinterpret_cast<float4*>(outputs + my_row * pitch + d);
        // kept in memory; for a segment that is all this block's, the place of a last one is still free
        ExactQuad& kept = ExactQuad::at(p, u.slot < 0 ? 2 * blockIdx.x + 1 : u.slot, my_row, d / 4);
        const FinishedQuad done = add_chunks(p, u, row, my_row, d / 4, {{maximum, total}, o}, {}, !u.first_chunk, kept);
        if (done.is_finished) store_quad(p, row, d, done.x);
        o = {0, 0, 0, 0};
      }
      maximum = -INFINITY;
      sum = 0;
    } else if (u.slot >= 0) {
      if (my_column == 0) p.partial_stats[u.slot * kRows + my_row] = {maximum, total};
      float* partial = p.partial + (int64_t{u.slot} * kRows + my_row) * p.pitch;
      for (int d = my_column; d < p.pitch; d += 8) partial[d] = outputs[my_row * pitch + d];
    } else {
      const float last = finish_row(p, row, u.kv_head, maximum, total);
      for (int d = my_column; d < head_size; d += 8) store_output(p, row, d, outputs[my_row * pitch + d] * last);
    }
  }
  const auto store = [&](const Unit& of, const Row& row, int d, const auto& sum) {
    store_quad(p, row, d, sum.finish(p, row, of.kv_head));
  };
  if (p.a.batch_invariant) {
    end_share<ExactQuad>(p, ends, store);
  } else {
    end_share<Quad>(p, ends, store);
  }
}

template <class Cache>
void launch_kernel(const Problem& p, const Step& s, const Launch& launch) {
  const auto kernel = paged_attention_simple_kernel<Cache>;
  static DoneOnce allowed;
  allowed.on(launch.device, [&] {
    const int most_bytes = device_info(launch.device).shared_of_block - kSimpleOwnBytes;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes), p.a.op);
  });
  const Divider by_chunk(std::min(p.a.key.chunk, p.a.head_size));
  kernel<<<s.grid, s.threads, s.shared_bytes, stream_of(launch)>>>(p, by_chunk);
  check_launch(p.a.op);
}

}  // namespace

void launch_simple(const Problem& p, const Step& s, const Launch& launch) {
  switch (p.a.kv_format) {
    case KvFormat::kE4M3:
      return launch_kernel<Fp8<KvFormat::kE4M3>>(p, s, launch);
    case KvFormat::kE5M2:
      return launch_kernel<Fp8<KvFormat::kE5M2>>(p, s, launch);
    case KvFormat::kInt8:
      return launch_kernel<int8_t>(p, s, launch);
    case KvFormat::kNvfp4:
      return launch_kernel<Nvfp4>(p, s, launch);
    case KvFormat::kSame:
      return dispatch<float, half, bf16>(p.a.dtype, [&]<class Cache> { launch_kernel<Cache>(p, s, launch); });
  }
}

}  // namespace pykv::attention
