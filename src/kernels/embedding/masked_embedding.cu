// A thread has one vector of one row: 16 bytes of it where rows are copied, else eight neighbours.  Of blocks of GGUF, which have odd
// sizes, a thread block has a tile of one row, which it brings to shared memory as it is.
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/fp8.cuh"
#include "cuda/streaming.cuh"
#include "cuda/vec.cuh"
#include "dequantization/gguf_pieces.h"
#include "embedding/masked_embedding.h"

namespace pykv {
namespace {

constexpr int kThreads = 256, kSize = 8;

struct EmbeddingPlan {
  MaskedEmbeddingArgs args;
  Divider vectors_per_row;
  uint32_t num_vectors;
  bool streamed;
  bool weight_aligned, out_aligned, position_aligned, one_scale;  // one_scale: for all of a vector
  Reporter ids, positions;
};

// The row of a token's id; -1: zeros.  What is out of range is reported once, by the thread of the first vector.
__device__ int64_t row_of_token(const EmbeddingPlan& plan, uint32_t token, uint32_t vector) {
  const int64_t id = plan.args.ids[token];
  if (vector == 0 && !plan.args.is_token(id)) plan.ids(id, plan.args.vocab_size);
  return plan.args.row_of(id);
}

template <class V>
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ EmbeddingPlan plan, int64_t item_bytes) {
  begin_dependent();
  const uint32_t n = blockIdx.x * kThreads + threadIdx.x;
  if (n >= plan.num_vectors) return;
  uint32_t vector;
  const uint32_t token = plan.vectors_per_row(n, vector);
  const int64_t row = row_of_token(plan, token, vector);
  V v{};
  if (row >= 0)
    v = load_vec<V>(static_cast<const V*>(static_cast<const void*>(static_cast<const char*>(plan.args.weight) +
                                                                   row * plan.args.weight_stride * item_bytes)) +
                    vector);
  char* to = static_cast<char*>(plan.args.out) + plan.args.out_rows.offset(token) * item_bytes;
  store_vec(static_cast<V*>(static_cast<void*>(to)) + vector, v, plan.streamed);
}

// Eight neighbours, or the first `count`; the others are 0.
template <class T>
__device__ void load_floats(const T* from, int count, bool aligned, float (&x)[kSize]) {
  constexpr int kOnce = kPackSize<T> < kSize ? kPackSize<T> : kSize;
#pragma unroll
  for (int first = 0; first < kSize; first += kOnce) {
    using V = Vec<T, kOnce>;
    const V v = aligned && count == kSize ? load_vec<V>(from + first) : load_some<V>(from + first, count - first);
    const Vec<float, kOnce> floats = to_floats(v);
#pragma unroll
    for (int i = 0; i < kOnce; ++i) x[first + i] = floats[i];
  }
}

__device__ void load_codes(const uint8_t* from, int count, bool aligned, DType dtype, float (&x)[kSize]) {
  using V = Vec<uint8_t, kSize>;
  const V v = aligned && count == kSize ? load_vec<V>(from) : load_some<V>(from, count);
#pragma unroll
  for (int i = 0; i < kSize; i += 2) {
    const auto pair = static_cast<uint16_t>(v.words[i / 4] >> (i % 4 * 8));
    float2 both;
    if (dtype == DType::kInt8) {
      both = {static_cast<float>(static_cast<int8_t>(pair & 0xff)), static_cast<float>(static_cast<int8_t>(pair >> 8))};
    } else if (dtype == DType::kFloat8E5M2) {
      both = fp8x2_to_float2<KvFormat::kE5M2>(pair);
    } else {
      both = fp8x2_to_float2<KvFormat::kE4M3>(pair);
    }
    x[i] = both.x;
    x[i + 1] = both.y;
  }
}

// Elements `at` to at + count - 1 of a table.
__device__ void load_values(const void* table, DType dtype, int64_t at, int count, bool aligned, float (&x)[kSize]) {
  switch (dtype) {
    case DType::kFloat32:
      return load_floats(static_cast<const float*>(table) + at, count, aligned, x);
    case DType::kFloat16:
      return load_floats(static_cast<const half*>(table) + at, count, aligned, x);
    case DType::kBFloat16:
      return load_floats(static_cast<const bf16*>(table) + at, count, aligned, x);
    default:
      return load_codes(static_cast<const uint8_t*>(table) + at, count, aligned, dtype, x);
  }
}

// Adds the position's vector to that of the token, and rounds both to `out`.
template <class T>
__device__ void finish_vector(const EmbeddingPlan& plan, uint32_t token, uint32_t vector, int count,
                              float (&x)[kSize]) {
  const MaskedEmbeddingArgs& a = plan.args;
  const int64_t column = int64_t{vector} * kSize;
  if (a.positions.data) {
    const int64_t position = a.positions[token];
    if (position >= 0 && position < a.num_positions) {
      float more[kSize];
      load_values(a.position_weight, a.position_dtype, position * a.position_stride + column, count,
                  plan.position_aligned, more);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] += more[i];
    } else if (vector == 0) {
      plan.positions(position, a.num_positions);
    }
  }
  T* to = static_cast<T*>(a.out) + a.out_rows.offset(token) + column;
  constexpr int kOnce = kPackSize<T> < kSize ? kPackSize<T> : kSize;
#pragma unroll
  for (int first = 0; first < kSize; first += kOnce) {
    Vec<float, kOnce> part;
#pragma unroll
    for (int i = 0; i < kOnce; ++i) part[i] = x[first + i];
    const Vec<T, kOnce> rounded = round_to<T>(part);
    if (plan.out_aligned && count == kSize) {
      store_vec(to + first, rounded, plan.streamed);
    } else {
      store_some(to + first, rounded, count - first);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) masked_embedding_kernel(const __grid_constant__ EmbeddingPlan plan) {
  const MaskedEmbeddingArgs& a = plan.args;
  begin_dependent();
  const uint32_t n = blockIdx.x * kThreads + threadIdx.x;
  if (n >= plan.num_vectors) return;
  uint32_t vector;
  const uint32_t token = plan.vectors_per_row(n, vector);
  const int64_t column = int64_t{vector} * kSize, left = a.hidden_size - column;
  const int count = left < kSize ? static_cast<int>(left) : kSize;
  const int64_t row = row_of_token(plan, token, vector);
  float x[kSize] = {};
  if (row >= 0) {
    load_values(a.weight, a.weight_dtype, row * a.weight_stride + column, count, plan.weight_aligned, x);
    float own = 1.0f;
    if (a.weight_scale && plan.one_scale)
      own = a.weight_scale[row * a.scale_row + column / a.group_size * a.scale_group];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (a.weight_scale && !plan.one_scale && i < count)
        own = a.weight_scale[row * a.scale_row + (column + i) / a.group_size * a.scale_group];
      x[i] = x[i] * own * a.scale;
    }
  }
  finish_vector<T>(plan, token, vector, count, x);
}

constexpr int kTile = kThreads * kSize;            // elements: whole blocks of every format
constexpr int kMostTileBytes = kTile / 256 * 292;  // Q8_K has most an element

// A kernel for all dtypes of `out`: the decoders are much code.
__global__ void __launch_bounds__(kThreads) blocks_embedding_kernel(const __grid_constant__ EmbeddingPlan plan) {
  __shared__ alignas(16) uint8_t tile[kMostTileBytes];
  const MaskedEmbeddingArgs& a = plan.args;
  begin_dependent();
  uint32_t place;
  const uint32_t token = plan.vectors_per_row(blockIdx.x, place);  // here tiles of a row
  const uint32_t vector = place * kThreads + threadIdx.x;
  const int64_t row = row_of_token(plan, token, vector), first = int64_t{place} * kTile;
  const int elements = static_cast<int>(min(a.hidden_size - first, int64_t{kTile}));
  if (row >= 0) {
    const int bytes = elements / a.block.elements * a.block.bytes;
    const uint8_t* from =
        static_cast<const uint8_t*>(a.weight) + row * a.weight_stride + first / a.block.elements * a.block.bytes;
    const int words = plan.weight_aligned ? bytes / 4 : 0;
    for (int i = threadIdx.x; i < words; i += kThreads)
      reinterpret_cast<uint32_t*>(tile)[i] = reinterpret_cast<const uint32_t*>(from)[i];
    for (int i = 4 * words + static_cast<int>(threadIdx.x); i < bytes; i += kThreads) tile[i] = from[i];
  }
  __syncthreads();
  const int piece = static_cast<int>(threadIdx.x);
  if (piece >= elements / kSize) return;
  float x[kSize] = {};
  if (row >= 0) {
    gguf::Piece y{};
    gguf::dispatch_type(a.block_type, [&]<gguf::Type kType> {
      constexpr gguf::BlockSize kBlock = gguf::block_size(kType);
      constexpr int kPieces = kBlock.elements / kSize;
      y = gguf::decode_piece<kType>(tile + piece / kPieces * kBlock.bytes, piece % kPieces);
    });
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      x[i] = (y.scale * (gguf::byte_value(y.codes[i / 4], i % 4) - y.zero) - y.minimum) * a.scale;
  }
  switch (a.dtype) {
    case DType::kFloat32:
      return finish_vector<float>(plan, token, vector, kSize, x);
    case DType::kFloat16:
      return finish_vector<half>(plan, token, vector, kSize, x);
    default:
      return finish_vector<bf16>(plan, token, vector, kSize, x);
  }
}

EmbeddingPlan plan_of(const MaskedEmbeddingArgs& args, int64_t vectors_per_row, const Launch& launch) {
  if (vectors_per_row > (INT32_MAX - kThreads) / args.num_tokens)
    fail(PYKV_NOT_IMPLEMENTED, "out: 2^31 vectors of 8 elements in one call are not supported");
  const auto item = static_cast<int64_t>(size_of(args.dtype));
  EmbeddingPlan plan{};
  plan.args = args;
  plan.vectors_per_row = Divider(vectors_per_row);
  plan.num_vectors = static_cast<uint32_t>(vectors_per_row * args.num_tokens);
  plan.streamed = is_streamed(args.num_tokens * args.hidden_size * item);
  plan.ids = launch.reporter("masked_embedding: ids");
  plan.positions = launch.reporter("masked_embedding: positions");
  return plan;
}

uint32_t blocks_of(const EmbeddingPlan& plan) { return (plan.num_vectors + kThreads - 1) / kThreads; }

template <class V>
void launch_copy(const MaskedEmbeddingArgs& args, const Launch& launch) {
  const auto item = static_cast<int64_t>(size_of(args.dtype));
  const EmbeddingPlan plan = plan_of(args, args.hidden_size * item / static_cast<int64_t>(sizeof(V)), launch);
  launch_dependent(copy_rows_kernel<V>, blocks_of(plan), kThreads, launch, "masked_embedding", plan, item);
}

// Whether vectors of eight elements are aligned, in accesses of up to 16 bytes.
bool eights_aligned(const void* data, int64_t item, std::initializer_list<int64_t> strides) {
  int64_t bits = 0;
  for (int64_t stride : strides) bits |= stride * item;
  return is_aligned(item == 1 ? kSize : kAccessBytes, data, {bits});
}

}  // namespace

void masked_embedding_cuda(const MaskedEmbeddingArgs& args, const Launch& launch) {
  const auto item = static_cast<int64_t>(size_of(args.dtype));
  const Rows& to = args.out_rows;
  if (args.copies) {
    // The widest vector that all addresses, distances and sizes allow.
    const int64_t bits = (args.weight_stride | to.stride0 | to.stride1 | to.stride2 | args.hidden_size) * item;
    if (is_aligned(16, args.weight, {bits}) && is_aligned(16, args.out)) return launch_copy<uint4>(args, launch);
    if (is_aligned(4, args.weight, {bits}) && is_aligned(4, args.out)) return launch_copy<uint32_t>(args, launch);
    if (is_aligned(2, args.weight, {bits}) && is_aligned(2, args.out)) return launch_copy<uint16_t>(args, launch);
    return launch_copy<uint8_t>(args, launch);
  }
  EmbeddingPlan plan = plan_of(args, (args.hidden_size + kSize - 1) / kSize, launch);
  const auto weight_item = static_cast<int64_t>(size_of(args.weight_dtype));
  plan.weight_aligned = eights_aligned(args.weight, weight_item, {args.weight_stride});
  plan.out_aligned = eights_aligned(args.out, item, {to.stride0, to.stride1, to.stride2});
  plan.position_aligned =
      eights_aligned(args.position_weight, static_cast<int64_t>(size_of(args.position_dtype)), {args.position_stride});
  if (args.block.elements) {
    // A tile begins at a multiple of 4 bytes of its row: it has eight blocks or more.
    plan.weight_aligned = is_aligned(4, args.weight, {args.weight_stride});
    const int64_t tiles = (args.hidden_size + kTile - 1) / kTile;
    plan.vectors_per_row = Divider(tiles);
    launch_dependent(blocks_embedding_kernel, static_cast<uint32_t>(tiles * args.num_tokens), kThreads, launch,
                     "masked_embedding", plan);
    return;
  }
  plan.one_scale = args.group_size % kSize == 0 || args.group_size >= args.hidden_size;
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    launch_dependent(masked_embedding_kernel<T>, blocks_of(plan), kThreads, launch, "masked_embedding", plan);
  });
}

}  // namespace pykv
