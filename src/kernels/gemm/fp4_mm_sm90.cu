// fp4_mm for many rows on Hopper (sm_90a): out^T = alpha b a^T by wgmma of halves, in the order of fp4_mm.cu and with its bits.
//
// A kernel before decodes a to halves in memory, once for all.  A block computes 128 columns of out for 64 or 128 of its rows.
// One thread fills rings in shared memory by bulk copies: codes and scales of b, 256 of k at a time, and rows of a, 128 at a time.
// Eight warps decode 16 rows of b each into their registers, and multiply.
//
// k is summed in segments.  Where there are few tiles of out, blocks of a cluster share them, and add them up by way of each other's
// shared memory.
#include "cuda/cluster.cuh"
#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"
#include "cuda/divider.cuh"
#include "cuda/load_shared.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/mma.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/turn.cuh"
#include "cuda/vec.cuh"
#include "cuda/wgmma.cuh"
#include "cuda/workspace.cuh"
#include "gemm/fp4_codes.cuh"
#include "gemm/fp4_mm.h"

namespace pykv {
namespace fp4_mm_of_sm90 {  // not an unnamed one, whose members the compiler would report where code for sm_90a lacks

constexpr int kSegments = Fp4MmArgs::kSegments;
constexpr int kColumns = 128, kMultipliers = 256, kThreads = kMultipliers + 128;
constexpr int kUnit = 64, kUnitScales = 512;  // of k; bytes of the scales of 128 rows
constexpr int kCodeBytes = kColumns * 128, kStageBytes = kCodeBytes + 4 * kUnitScales;  // of 256 of k
constexpr int kPitch = kColumns + 4;                                                    // of the sums of a row
constexpr int kMostStages = 5, kSlots = 4, kSharedBytes = 226 << 10;

template <int kRows_>
struct Shape {
  static constexpr int kRows = kRows_;
  static constexpr int kUnitBytes = kRows * 128, kSlotBytes = 2 * kUnitBytes;
  static constexpr int kSumBytes = kRows * kPitch * 4;
};

struct Problem {
  CUtensorMap rows, columns;  // a in halves; codes of b
  Fp4MmArgs args;
  uint32_t row_tiles, column_tiles;
  int splits, each;  // blocks of a cluster; segments that each of them sums
  int stages;
  int units, groups;  // of 64 of k; of 16
  bool wide_out;      // four neighbours of out can be written at once
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

__device__ inline void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// A stage has codes of two pieces, a slot the rows of one.  full, ready: it has come.  freed: the slot has been multiplied, and
// the piece's part of its stage decoded.
struct Ring {
  uint32_t stages, slots, sums;  // addresses in shared memory
  uint32_t full, ready, freed;
};

struct Place {
  int64_t first_row, first_column;
  int begin, end;  // pieces of k
};

template <class S>
__device__ void fill_stage(const Problem& p, const Ring& ring, const Place& place, int index) {
  const int stage = index % p.stages, unit = (place.begin + 2 * index) * 2, units = min(4, p.units - unit);
  const uint32_t at = ring.stages + stage * kStageBytes, full = ring.full + stage * 8;
  cluster_expect(full, kCodeBytes + units * kUnitScales);
  copy_box(at, p.columns, {unit * (kUnit / 2), static_cast<int>(place.first_column)}, full);
  copy_bytes(at + kCodeBytes, p.args.b_scales + p.args.scale_at(place.first_column, unit * 4), units * kUnitScales,
             full);
}

// One thread: a stage is filled again when both of its pieces have been freed.
template <class S>
__device__ void fill(const Problem& p, const Ring& ring, const Place& place) {
  const int pieces = place.end - place.begin, stages = (pieces + 1) / 2;
#pragma unroll 1
  for (int i = 0; i < min(stages, p.stages); ++i) fill_stage<S>(p, ring, place, i);
  Turn slot;
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece, slot.next(kSlots)) {
    mbarrier_wait(ring.freed + slot.stage * 8, slot.parity ^ 1);
    const uint32_t to = ring.slots + slot.stage * S::kSlotBytes, ready = ring.ready + slot.stage * 8;
    cluster_expect(ready, S::kSlotBytes);
#pragma unroll
    for (int u = 0; u < 2; ++u)
      copy_box(to + u * S::kUnitBytes, p.rows,
               {((place.begin + piece) * 2 + u) * 128, static_cast<int>(place.first_row)}, ready);
    const int freed = piece - kSlots;
    if (freed >= 0 && freed % 2 != 0 && freed / 2 + p.stages < stages)
      fill_stage<S>(p, ring, place, freed / 2 + p.stages);
  }
}

// A warp's 16 columns of out: rows of b.
template <class S>
struct Multiplier {
  static constexpr int kSums = S::kRows / 2;  // of a lane

  const Problem& p;
  const Ring& ring;
  const Place& place;
  const int codes_at = codes_of_lane(), scales_at = scales_of_lane();
  float sum[kSums], total[kSums] = {};
  uint32_t a[2][4][4];

  // Where a lane's codes and scales of its first row are in a stage; the other is eight lines further on.
  __device__ static int codes_of_lane() {
    const int lane = threadIdx.x % 32, c = lane % 4, g = lane / 4;
    return (threadIdx.x % kMultipliers / 32 * 16 + g) * 128 + (c / 2 ^ g) * 16 + c % 2 * 8;
  }
  __device__ static int scales_of_lane() {
    const int lane = threadIdx.x % 32, line = threadIdx.x % kMultipliers / 32 * 16 + lane / 4;
    return kCodeBytes + line % 32 * 16 + line / 32 * 4 + lane % 4;
  }

  // unit: of the stage
  __device__ void decode(uint32_t (&fragments)[4][4], uint32_t stage, int unit, bool inside) const {
    const uint32_t codes = stage + (codes_at ^ unit * 32), scales = stage + scales_at + unit * kUnitScales;
#pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
      const uint2 words = load_shared_8(codes + half_row * 8 * 128);
      uint32_t byte;
      asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(scales + half_row * 8 * 16) : "memory");
      const half2 scale = fp4_scale(inside ? byte : 0);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        fragments[i / 2][i % 2 * 2 + half_row] = decode_fp4(i < 4 ? words.x : words.y, i % 4, scale);
    }
  }

  __device__ void multiply(const uint32_t (&fragments)[4][4], uint32_t rows, bool anew) {
    const uint64_t matrix = wgmma_matrix(rows, 1024);
    if (anew) wgmma_pin(sum);
    wgmma_begin();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      Wgmma<half, S::kRows>::template rs<kAlong>(sum, fragments[j], wgmma_further(matrix, j * 32), j > 0 || !anew);
    wgmma_commit();
  }

  __device__ void free(int slot) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.freed + slot * 8);
  }

  // To [row][kPitch].
  __device__ void store(uint32_t to, const float (&x)[kSums]) const {
    const int lane = threadIdx.x % 32, column = threadIdx.x % kMultipliers / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + (row * kPitch + column + i / 2 % 2 * 8) * 4), "f"(x[i])
                   : "memory");
    }
  }

  // first_segment: of this block
  __device__ void run(int first_segment) {
    Turn turn, slot;
    int index = 0;
    const int lane_group = threadIdx.x % 4;
#pragma unroll 1
    for (int segment = 0; segment < p.each; ++segment) {
      const int begin = Fp4MmArgs::segment_begin(p.args.k, first_segment + segment),
                end = Fp4MmArgs::segment_begin(p.args.k, first_segment + segment + 1);
      int owed = -1;  // a slot that has not been given back
#pragma unroll 1
      for (int piece = begin; piece < end; ++piece, ++index) {
        const uint32_t stage = ring.stages + turn.stage * kStageBytes;
        const uint32_t rows = ring.slots + slot.stage * S::kSlotBytes;
        const int half = index % 2;
        if (half == 0) mbarrier_wait(ring.full + turn.stage * 8, turn.parity);
        decode(a[0], stage, half * 2, piece * 8 + lane_group < p.groups);
        mbarrier_wait(ring.ready + slot.stage * 8, slot.parity);
        multiply(a[0], rows, piece == begin);
        wgmma_wait<1>();
        if (owed >= 0) free(owed);
        decode(a[1], stage, half * 2 + 1, piece * 8 + 4 + lane_group < p.groups);
        multiply(a[1], rows + S::kUnitBytes, false);
        wgmma_wait<1>();
        owed = slot.stage;
        slot.next(kSlots);
        if (half != 0) turn.next(p.stages);
      }
      wgmma_wait<0>();
      wgmma_pin(sum);
      if (begin < end) {
        free(owed);
      } else {
#pragma unroll
        for (float& x : sum) x = 0.0f;
      }
      if (p.splits == 1) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) total[i] += sum[i];
      } else if (segment < p.each - 1) {
        store(ring.sums + segment * S::kSumBytes, sum);
      }
    }
  }
};

// Adds the sums [row][kPitch] of all segments, or takes those that there are, and writes each `splits`-th row.
template <class S, class T>
__device__ void write(const Problem& p, const Ring& ring, const Place& place, int rank) {
  const Fp4MmArgs& args = p.args;
  const int lane = threadIdx.x % 32;
  const int64_t column = place.first_column + lane * 4;
  const int rows = static_cast<int>(min(args.m - place.first_row, int64_t{S::kRows}));
  const int columns = static_cast<int>(min(max(args.n - column, int64_t{0}), int64_t{4}));
  const float alpha = args.alpha;
#pragma unroll 1
  for (int row = threadIdx.x % kMultipliers / 32 * p.splits + rank; row < rows; row += kMultipliers / 32 * p.splits) {
    const uint32_t at = (row * kPitch + lane * 4) * 4;
    float x[4] = {};
    const auto add = [&](const float4& part) {
      x[0] += part.x;
      x[1] += part.y;
      x[2] += part.z;
      x[3] += part.w;
    };
    if (p.splits == 1) {
      add(load_shared_float4(ring.stages + at));
    } else {
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
        const int own = s % p.each;  // the last of a block lies where its ring was
        const uint32_t sums = own == p.each - 1 ? ring.stages : ring.sums + own * S::kSumBytes;
        add(load_cluster_float4(cluster_address(sums + at, s / p.each)));
      }
    }
    T* const to = static_cast<T*>(args.out) + (place.first_row + row) * args.out_stride + column;
    Vec<float, 4> result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result[i] = alpha * (x[i] * kFp4Unit);
    if (p.wide_out && columns == 4) {
      *reinterpret_cast<Vec<T, 4>*>(to) = round_to<T>(result);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i < columns) to[i] = from_float<T>(result[i]);
    }
  }
}
#endif

template <class S>
__global__ void __launch_bounds__(kThreads, 1) fp4_mm_sm90_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 unaligned[];
  __shared__ uint64_t barriers[kMostStages + 2 * kSlots];
  const uint32_t data = (shared_address(unaligned) + 1023) / 1024 * 1024, full = shared_address(barriers);
  const uint32_t slots = data + p.stages * kStageBytes;
  const Ring ring{
      data, slots, slots + kSlots * S::kSlotBytes, full, full + kMostStages * 8, full + (kMostStages + kSlots) * 8};
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < p.stages; ++i) mbarrier_init(ring.full + i * 8, 1);
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) {
      mbarrier_init(ring.ready + i * 8, 1);
      mbarrier_init(ring.freed + i * 8, kMultipliers / 32);
    }
    fence_async_proxy();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    prefetch_map(p.rows);
    prefetch_map(p.columns);
  }
  __syncthreads();
  begin_dependent();
  const int rank = static_cast<int>(blockIdx.x % p.splits), first_segment = rank * p.each;
  // Tiles of eight tiles of rows pass over b together: they and it stay in the L2.
  const uint32_t tile = blockIdx.x / p.splits, together = 8 * p.column_tiles, pass = tile / together;
  const uint32_t width = min(p.row_tiles - pass * 8, 8u), in_pass = tile % together;
  const Place place{int64_t{pass * 8 + in_pass % width} * S::kRows, int64_t{in_pass / width} * kColumns,
                    Fp4MmArgs::segment_begin(p.args.k, first_segment),
                    Fp4MmArgs::segment_begin(p.args.k, first_segment + p.each)};
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 2) {
    give_registers<40>();
    if (threadIdx.x == kMultipliers) fill<S>(p, ring, place);
    if (p.splits > 1) {
      __syncwarp();
      cluster_announce_all();
      cluster_wait();
    }
  } else {
    take_registers<232>();
    {
      Multiplier<S> multiplier{p, ring, place};
      multiplier.run(first_segment);
      named_barrier_sync(1, kMultipliers);  // all have done with the ring
      if (p.splits == 1) {
        multiplier.store(data, multiplier.total);
      } else {
        multiplier.store(data, multiplier.sum);
      }
    }
    if (p.splits > 1) {
      cluster_announce_all();
      cluster_wait();
    } else {
      named_barrier_sync(1, kMultipliers);
    }
    if (p.args.out_dtype == DType::kBFloat16)
      write<S, bf16>(p, ring, place, rank);
    else if (p.args.out_dtype == DType::kFloat16)
      write<S, half>(p, ring, place, rank);
    else
      write<S, float>(p, ring, place, rank);
  }
  if (p.splits > 1) {  // nobody reads here any more
    __syncwarp();
    cluster_announce();
    cluster_wait();
  }
#endif
}

// Rows of a in halves: eight chunks of 16 bytes for each 64 of k, of which chunk i is pair i of all four groups.  A chunk a thread.
__global__ void __launch_bounds__(256)
    decode_rows_kernel(const __grid_constant__ Fp4MmArgs args, uint4* halves, const Divider by_units) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  begin_dependent();
  const int64_t index = int64_t{blockIdx.x} * 256 + threadIdx.x;
  uint32_t unit;
  const int64_t row = by_units(static_cast<uint32_t>(index / 8), unit);
  if (row >= args.m) return;
  const int i = threadIdx.x % 8;
  const uint8_t* const codes = args.a + row * args.a_stride + int64_t{unit} * (kUnit / 2) + i / 4 * 4;
  const uint32_t scales =
      __ldg(reinterpret_cast<const uint32_t*>(args.a_scales + args.scale_at(row, int64_t{unit} * 4)));
  uint32_t pairs[4];
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const bool inside = unit * 4 + g < args.k / 16;
    const uint32_t word = inside ? __ldg(reinterpret_cast<const uint32_t*>(codes + g * 8)) : 0;
    pairs[g] = decode_fp4(word, i % 4, fp4_scale(inside ? scales >> 8 * g & 0xffu : 0));
  }
  halves[index] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#endif
}

template <class S>
bool launch_shape(const Fp4MmArgs& args, const Launch& launch, int splits) {
  const int64_t row_tiles = (args.m + S::kRows - 1) / S::kRows, column_tiles = (args.n + kColumns - 1) / kColumns;
  const int64_t units = (args.k + kUnit - 1) / kUnit, line = units * kUnit * 2, bytes = args.k / 2;
  if (row_tiles * column_tiles * splits > INT32_MAX || args.m * units > INT32_MAX - 32) return false;
  const auto size = static_cast<int64_t>(size_of(args.out_dtype));
  Problem p{.rows = {},
            .columns = {},
            .args = args,
            .row_tiles = static_cast<uint32_t>(row_tiles),
            .column_tiles = static_cast<uint32_t>(column_tiles),
            .splits = splits,
            .each = kSegments / splits,
            .stages = 0,
            .units = static_cast<int>(units),
            .groups = static_cast<int>(args.k / 16),
            .wide_out = is_aligned(4 * size, args.out, {args.out_stride * size})};
  const int64_t stride = args.n > 1 ? args.b_stride : (bytes + 15) / 16 * 16;
  if (!make_tensor_map(p.columns, args.b, {bytes, args.n}, {stride}, {kColumns})) return false;
  const int sums = splits > 1 ? (p.each - 1) * S::kSumBytes : 0;
  const int beside = 1024 + kSlots * S::kSlotBytes + sums, room = (kSharedBytes - beside) / kStageBytes;
  p.stages = room < kMostStages ? room : kMostStages;
  const auto kernel = fp4_mm_sm90_kernel<S>;
  const int shared = beside + p.stages * kStageBytes;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "fp4_mm");
  bool can = false;
  with_workspace(nullptr, line * args.m, launch, "fp4_mm: a in halves", [&](void* halves) {
    can = make_tensor_map(p.rows, halves, {line, args.m}, {line}, {S::kRows});
    if (!can) return;
    launch_dependent(decode_rows_kernel, dim3(static_cast<unsigned>((args.m * units + 31) / 32)), dim3(256), launch,
                     "fp4_mm", args, static_cast<uint4*>(halves), Divider(units));
    launch_clusters(kernel, dim3(static_cast<unsigned>(row_tiles * column_tiles * splits)), dim3(kThreads),
                    static_cast<unsigned>(splits), static_cast<size_t>(shared), launch, "fp4_mm", p);
  });
  return can;
}

}  // namespace fp4_mm_of_sm90

bool fp4_mm_sm90(const Fp4MmArgs& args, const Launch& launch) {
  using namespace fp4_mm_of_sm90;
  if (!has_warpgroups(launch.device) || args.a_step != 1 || args.b_step != 1 || args.k == 0) return false;
  if (!is_aligned(16, args.a, {args.m > 1 ? args.a_stride : 0}) ||
      !is_aligned(16, args.b, {args.n > 1 ? args.b_stride : 0}) || !is_aligned(16, args.a_scales) ||
      !is_aligned(16, args.b_scales))
    return false;
  if (args.m > INT32_MAX - 256 || args.n > INT32_MAX - 256 || args.k > INT32_MAX - 1024) return false;
  const int64_t sms = num_sms(launch.device), column_tiles = (args.n + kColumns - 1) / kColumns;
  const auto time = [&](int64_t rows) {  // rounds, and what is beside multiplying in each
    return (column_tiles * ((args.m + rows - 1) / rows) + sms - 1) / sms * (rows + 16);
  };
  if (time(128) < time(64)) return launch_shape<Shape<128>>(args, launch, 1);
  const int64_t tiles = column_tiles * ((args.m + 63) / 64);
  return launch_shape<Shape<64>>(args, launch, tiles * 2 <= sms ? 2 : 1);
}

}  // namespace pykv
