// The same on Hopper's asynchronous matrix units (sm_90a), where rows of weights and of x begin at multiples of 16 bytes: for any
// number of pairs, with rows of the weight as first operand.
//
// Some threads of a block fill a ring with tiles of 64 columns: one has rows of the weight copied, all of them gather rows of x.
// One or two warpgroups multiply; of large tiles another one writes results, with the activation.  Blocks walk over tiles, and
// the ring is filled for the next while results are written.
//
// A sum goes over the columns from the first to the last, 16 at a time, whatever the tile: its bits depend on nothing else.
#include "cuda/cluster.cuh"
#include "cuda/device.h"
#include "cuda/mbarrier.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma_widths.cuh"
#include "moe/expert_gemm.cuh"
#include "moe/expert_tiles.cuh"

namespace pykv {
namespace expert_gemm {

inline constexpr int kUnit = 64, kLine = 2 * kUnit;  // columns of a stage; their bytes
inline constexpr uint32_t kBand = 8;

// kGroups warpgroups multiply kHalves times 64 rows of the weight each with kPairs pairs.
template <class T_, int kPairs_, int kGroups_, int kHalves_, int kStages_, int kPerSm_>
struct WarpgroupShape {
  using T = T_;
  static constexpr int kPairs = kPairs_, kGroups = kGroups_, kHalves = kHalves_, kStages = kStages_;
  static constexpr int kPerSm = kPerSm_;                                         // blocks of a multiprocessor
  static constexpr int kRows = 64 * kGroups * kHalves, kColumns = 64 * kHalves;  // of the weight; of a warpgroup
  static constexpr bool kIsLarge = kPairs > 64;
  static constexpr int kReaders = 128 * kGroups, kFillers = kIsLarge ? 128 : 32, kWriters = kIsLarge ? 128 : 0;
  static constexpr int kThreads = kReaders + kFillers + kWriters;
  // Stages of x that are under way: readers free one when they have the next.
  static constexpr int kLag = kStages > 6 ? 4 : kStages - 2;
  static constexpr int kWeightBytes = kRows * kLine, kStageBytes = kWeightBytes + kPairs * kLine;
  static constexpr int kResultPitch = 2 * kColumns, kResultBytes = kPairs * kResultPitch;  // of a pair; of a warpgroup
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kGroups * kResultBytes;  // aligned by the kernel
  static_assert(kSharedBytes <= 226 << 10 && (kIsLarge || kPairs <= 128));
};

namespace {

using Problem = ExpertGemmProblem;

struct Operands {
  CUtensorMap weight;
  Problem p;
  TileGrid grid;
  int units;           // of 64 columns
  bool whole_results;  // eight can be written at once
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class S>
struct Ring {
  uint32_t data, full_at, empty_at;  // addresses in shared memory

  __device__ uint32_t weight(int stage) const { return data + stage * S::kStageBytes; }
  __device__ uint32_t x(int stage) const { return weight(stage) + S::kWeightBytes; }
  __device__ uint32_t full(int stage) const { return full_at + stage * 8; }
  __device__ uint32_t empty(int stage) const { return empty_at + stage * 8; }
};

template <class S>
struct Tiles : ExpertTiles<S::kPairs> {
  __device__ explicit Tiles(const Operands& o) : ExpertTiles<S::kPairs>(o.p.a.map, o.p.rows, o.grid, o.p.a.num_rows) {}
};

template <class S>
__device__ void copy_weight(const Operands& o, const Ring<S>& ring, int stage, int unit, uint32_t row_tile,
                            int32_t expert) {
  cluster_expect(ring.full(stage), S::kWeightBytes);
  const int column = unit * kLine, first = static_cast<int>(row_tile) * S::kRows;
  if (o.p.fusion.silu_and_mul)
    copy_box(ring.weight(stage), o.weight, {column, 0, 0, first / 16, expert}, ring.full(stage));
  else
    copy_box(ring.weight(stage), o.weight, {column, first, expert}, ring.full(stage));
}

// The threads that fill the ring.
template <class S>
class Filler {
  using T = typename S::T;
  static constexpr int kStep = S::kFillers / 8, kEach = S::kPairs / kStep;  // pairs of a pass; of a thread

  struct Tile {
    uint32_t row_tile;
    int32_t expert;
    int32_t rows[kEach];  // of out
  };

 public:
  __device__ Filler(const Operands& o, const Ring<S>& ring, int thread)
      : o_(o), ring_(ring), chunk_(thread % 8), line_(thread / 8), first_(thread == 0) {}

  // Before the kernel before has ended: the map and the weights are those of an earlier one.
  __device__ void fill_early() {
    const Tiles<S> tiles(o_);
    if (!first_ || tiles.first() >= tiles.count) return;
    uint32_t row_tile, pair_tile;
    tiles.place(tiles.first(), row_tile, pair_tile);
    const int32_t expert = tiles.expert(pair_tile);
    if (expert < 0) return;
    early_ = min(o_.units, S::kStages);
#pragma unroll 1
    for (int unit = 0; unit < early_; ++unit) copy_weight(o_, ring_, unit, unit, row_tile, expert);
  }

  __device__ void run() {
    const Tiles<S> tiles(o_);
    Tile tile{0, -1, {}}, next{0, -1, {}};
    load(tiles, next, tiles.first());
#pragma unroll 1
    for (uint32_t index = tiles.first(); index < tiles.count; index += tiles.step) {
      tile = next;
#pragma unroll
      for (int i = 0; i < kEach; ++i)  // where there is none, another: nobody looks at its results
        x_[i] = tile.rows[i] < 0 ? 0 : o_.p.rows.top_k.quotient(tile.rows[i]);
      load(tiles, next, index + tiles.step);
      if (tile.expert < 0) continue;
#pragma unroll 1
      for (int unit = 0; unit < o_.units; ++unit) {
        mbarrier_wait(ring_.empty(turn_.stage), turn_.parity ^ 1);
        if (first_) {
          if (early_ > 0)
            --early_;
          else
            copy_weight(o_, ring_, turn_.stage, unit, tile.row_tile, tile.expert);
        }
        copy_x(unit);
        turn_.next();
        if (under_way_ == S::kLag) {
          cp_async_wait<S::kLag>();
          publish();
        } else {
          ++under_way_;
        }
      }
    }
    cp_async_wait<0>();
    while (under_way_-- > 0) publish();
  }

 private:
  __device__ void load(const Tiles<S>& tiles, Tile& tile, uint32_t index) const {
    if (index >= tiles.count) return;
    uint32_t pair_tile;
    tiles.place(index, tile.row_tile, pair_tile);
    tile.expert = tiles.expert(pair_tile);
#pragma unroll
    for (int i = 0; i < kEach; ++i) tile.rows[i] = tiles.row(pair_tile, line_ + i * kStep);
  }

  __device__ void copy_x(int unit) const {
    const int column = unit * kUnit + chunk_ * 8;
    const bool inside = column < o_.p.a.k;
    const T* const from = static_cast<const T*>(o_.p.a.x) + (inside ? column : 0);
    const uint32_t to = ring_.x(turn_.stage);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int line = line_ + i * kStep;
      cp_async_16(to + line * kLine + ((chunk_ ^ line % 8) << 4), from + x_[i] * o_.p.a.x_stride, inside);
    }
    cp_async_commit();
  }

  // The oldest stage that is under way has landed.
  __device__ void publish() {
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring_.full(published_));
    if (++published_ == S::kStages) published_ = 0;
  }

  const Operands& o_;
  const Ring<S>& ring_;
  const int chunk_, line_;
  const bool first_;
  int early_ = 0, under_way_ = 0, published_ = 0;
  int32_t x_[kEach];  // rows
  Turn<S::kStages> turn_;
};

// Stores 8 x 8 matrices of 16-bit elements from fragments, transposed.
__device__ inline void store_transposed(uint32_t address, const uint32_t (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1])
               : "memory");
}
__device__ inline void store_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Results of a tile in shared memory, rounded, by warpgroup and pair: rows of the weight in the order of the tile, eight of which
// are a chunk.  `full` and `empty` are barriers, where there are threads that do nothing but write.
template <class S>
struct Results {
  uint32_t data, full, empty;

  __device__ uint32_t chunk(int group, int pair, int chunk) const {
    return data + group * S::kResultBytes + pair * S::kResultPitch + ((chunk ^ pair % 8) << 4);
  }
};

// Writes what a warpgroup has left, by 128 threads.  rows: of out, of each pair; -1: none.
template <class S>
__device__ void write_results(const Operands& o, const Results<S>& results, int group, uint32_t row_tile,
                              const int32_t* rows) {
  using T = typename S::T;
  constexpr int kAtOnce = S::kWriters == 0 ? 4 : 1;  // threads that do nothing else have few registers
  const ExpertGemmArgs& a = o.p.a;
  const bool gated = o.p.fusion.silu_and_mul;
  const int each = gated ? 2 : 1, chunks = S::kColumns / 8 / each;  // chunks that make one; of results of a pair
  const int thread = threadIdx.x % 128, chunk = thread % chunks;
  const int64_t column = (int64_t{row_tile} * S::kGroups + group) * chunks * 8 + chunk * 8, width = o.p.width();
  if (column >= width) return;
  const bool whole = o.whole_results && column + 8 <= width;
#pragma unroll kAtOnce
  for (int pair = thread / chunks; pair < S::kPairs; pair += 128 / chunks) {
    const int32_t row = rows[pair];
    if (row < 0) continue;
    uint4 eight = load_shared_16(results.chunk(group, pair, chunk * each));
    if (gated) {
      const uint4 up = load_shared_16(results.chunk(group, pair, chunk * each + 1));
      const auto activated = [](uint32_t g, uint32_t u) {
        const float2 gates = unpack_pair<T>(g), ups = unpack_pair<T>(u);
        return pack_pair<T>(to_float(silu_times<T>(gates.x, ups.x)), to_float(silu_times<T>(gates.y, ups.y)));
      };
      eight = make_uint4(activated(eight.x, up.x), activated(eight.y, up.y), activated(eight.z, up.z),
                         activated(eight.w, up.w));
    }
    T* const to = static_cast<T*>(a.out) + row * a.out_stride + column;
    if (whole) {
      *reinterpret_cast<uint4*>(to) = eight;
    } else {
      const T* const values = reinterpret_cast<const T*>(&eight);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i < width) to[i] = values[i];
    }
  }
}

// A warpgroup that writes all results.  It looks up where while these are worked out.
template <class S>
__device__ void write_all(const Operands& o, const Results<S>& results, int32_t* rows) {
  constexpr int kBarrier = 1;
  const Tiles<S> tiles(o);
  uint32_t parity = 0;
#pragma unroll 1
  for (uint32_t index = tiles.first(); index < tiles.count; index += tiles.step) {
    uint32_t row_tile, pair_tile;
    tiles.place(index, row_tile, pair_tile);
    if (tiles.expert(pair_tile) < 0) continue;
    named_barrier_sync(kBarrier, S::kWriters);  // nobody needs those of the tile before
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < S::kPairs; i += S::kWriters) rows[i] = tiles.row(pair_tile, i);
    named_barrier_sync(kBarrier, S::kWriters);
    mbarrier_wait(results.full, parity);
    parity ^= 1;
#pragma unroll 1
    for (int group = 0; group < S::kGroups; ++group) write_results(o, results, group, row_tile, rows);
    mbarrier_arrive(results.empty);
  }
}

// A warpgroup that multiplies.
template <class S>
class Multiplier {
  using T = typename S::T;
  static constexpr int kTogether = S::kPairs % 16 == 0 ? 2 : 1;  // tiles of 8 pairs

 public:
  // rows: where it writes itself, room for those of a tile.
  __device__ Multiplier(const Operands& o, const Ring<S>& ring, const Results<S>& results, int group, int32_t* rows)
      : o_(o), ring_(ring), results_(results), group_(group), rows_(rows) {}

  __device__ void run() {
    const Tiles<S> tiles(o_);
    uint32_t row_tile = 0, pair_tile = 0;
    int32_t next = -1;
    if (tiles.first() < tiles.count) {
      tiles.place(tiles.first(), row_tile, pair_tile);
      next = tiles.expert(pair_tile);
    }
#pragma unroll 1
    for (uint32_t index = tiles.first(); index < tiles.count; index += tiles.step) {
      const uint32_t row_tile_here = row_tile, pair_tile_here = pair_tile;
      const int32_t expert = next;
      if (index + tiles.step < tiles.count) {
        tiles.place(index + tiles.step, row_tile, pair_tile);
        next = tiles.expert(pair_tile);
      }
      if (expert < 0) continue;
      int32_t own = -1;  // looked up while the ring is filled
      if (S::kWriters == 0 && thread_ < S::kPairs) own = tiles.row(pair_tile_here, thread_);
      multiply();
      finish(tiles, row_tile_here, pair_tile_here, expert, own);
    }
  }

 private:
  __device__ void multiply() {
#pragma unroll
    for (auto& half : sum_)
#pragma unroll
      for (float& x : half) x = 0.0f;
    wgmma_pin(sum_);
    int before = 0;
#pragma unroll 1
    for (int unit = 0; unit < o_.units; ++unit) {
      mbarrier_wait(ring_.full(turn_.stage), turn_.parity);
      const uint64_t weight = wgmma_matrix(ring_.weight(turn_.stage) + group_ * S::kHalves * 64 * kLine, 8 * kLine);
      const uint64_t x = wgmma_matrix(ring_.x(turn_.stage), 8 * kLine);
      wgmma_begin();
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h)
          Wgmma<T, S::kPairs>::ss(sum_[h], wgmma_further(weight, h * 64 * kLine + 32 * step),
                                  wgmma_further(x, 32 * step), 1);
      wgmma_commit();
      wgmma_wait<1>();
      if (unit > 0) free(before);
      before = turn_.stage;
      turn_.next();
    }
    wgmma_wait<0>();
    wgmma_pin(sum_);
    free(before);
  }

  __device__ void free(int stage) const {
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(ring_.empty(stage));
  }

  __device__ void finish(const Tiles<S>& tiles, uint32_t row_tile, uint32_t pair_tile, int32_t expert, int32_t own) {
    if (o_.p.a.bias) add_bias(row_tile, expert);
    if (o_.p.a.map.factors) multiply_by_factors(tiles, pair_tile);
    // What lay there has been written.
    if constexpr (S::kWriters != 0) {
      mbarrier_wait(results_.empty, written_ ^ 1);
      written_ ^= 1;
    } else {
      named_barrier_sync(1 + group_, 128);
      if (thread_ < S::kPairs) rows_[thread_] = own;
    }
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
      for (int first = 0; first < S::kPairs / 8; first += kTogether) {
        uint32_t pairs[2 * kTogether];
#pragma unroll
        for (int i = 0; i < 2 * kTogether; ++i)
          pairs[i] = pack_pair<T>(sum_[h][4 * first + 2 * i], sum_[h][4 * first + 2 * i + 1]);
        store_transposed(results_.chunk(group_, 8 * (first + lane_ / 16 % kTogether) + lane_ % 8,
                                        h * 8 + thread_ / 32 * 2 + lane_ / 8 % 2),
                         pairs);
      }
    if constexpr (S::kWriters != 0) {
      mbarrier_arrive(results_.full);
    } else {
      named_barrier_sync(1 + group_, 128);
      write_results(o_, results_, group_, row_tile, rows_);
    }
  }

  __device__ void add_bias(uint32_t row_tile, int32_t expert) {
    const ExpertGemmArgs& a = o_.p.a;
    const T* const bias = static_cast<const T*>(a.bias) + expert * a.map.bias_stride;
    const bool gated = o_.p.fusion.silu_and_mul;
    const int64_t width = o_.p.width();
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int band = (group_ * S::kHalves + h) * 4 + thread_ / 32;  // of 16 rows of the weight, in the tile
        const int64_t row = gated ? int64_t{row_tile} * (S::kRows / 2) + band * 8 + lane_ / 4
                                  : int64_t{row_tile} * S::kRows + band * 16 + i * 8 + lane_ / 4;
        const float own = row < width ? to_float(bias[gated ? i * width + row : row]) : 0.0f;
#pragma unroll
        for (int at = 2 * i; at < S::kPairs / 2; at += 4) {
          sum_[h][at] += own;
          sum_[h][at + 1] += own;
        }
      }
  }

  __device__ void multiply_by_factors(const Tiles<S>& tiles, uint32_t pair_tile) {
#pragma unroll
    for (int at = 0; at < S::kPairs / 2; at += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int32_t row = tiles.row(pair_tile, at * 2 + lane_ % 4 * 2 + e);
        const float factor = row >= 0 ? o_.p.a.map.factor_of(row) : 0.0f;
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h) {
          sum_[h][at + e] *= factor;
          sum_[h][at + 2 + e] *= factor;
        }
      }
  }

  const Operands& o_;
  const Ring<S>& ring_;
  const Results<S>& results_;
  const int group_, thread_ = threadIdx.x % 128, lane_ = threadIdx.x % 32;
  int32_t* const rows_;
  uint32_t written_ = 0;
  Turn<S::kStages> turn_;
  float sum_[S::kHalves][S::kPairs / 2];
};
#endif

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kPerSm)
    expert_gemm_warpgroup_kernel(const __grid_constant__ Operands o) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t unaligned[];
  __shared__ uint64_t barriers[2 * S::kStages + 2];
  __shared__ int32_t rows[S::kWriters == 0 ? S::kGroups : 1][S::kPairs];
  const uint32_t data = (shared_address(unaligned) + 1023) / 1024 * 1024;
  const Ring<S> ring{data, shared_address(barriers), shared_address(barriers + S::kStages)};
  const Results<S> results{data + S::kStages * S::kStageBytes, shared_address(barriers + 2 * S::kStages),
                           shared_address(barriers + 2 * S::kStages + 1)};
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(ring.full(i), S::kFillers / 32 + 1);  // each warp, and the copy of the weight
      mbarrier_init(ring.empty(i), S::kReaders / 32);
    }
    mbarrier_init(results.full, S::kReaders);
    mbarrier_init(results.empty, S::kWriters == 0 ? 1 : S::kWriters);
    fence_async_proxy();
    prefetch_map(o.weight);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == S::kGroups) {
    if constexpr (S::kIsLarge) give_registers<72>();
    Filler<S> filler(o, ring, threadIdx.x - S::kReaders);
    if (o.p.fusion.map_is_old) filler.fill_early();
    begin_dependent();
    filler.run();
  } else if (S::kIsLarge && warpgroup > S::kGroups) {
    give_registers<40>();
    begin_dependent();
    write_all(o, results, rows[0]);
  } else {
    if constexpr (S::kIsLarge) take_registers<200>();
    begin_dependent();
    Multiplier<S> multiplier(o, ring, results, warpgroup, rows[S::kWriters == 0 ? warpgroup : 0]);
    multiplier.run();
  }
#endif
}

template <class S>
bool launch_shape(const ExpertGemmArgs& args, const ExpertGemmFusion& fusion, const Launch& launch) {
  constexpr int64_t kItem = sizeof(typename S::T);
  Operands o{{}, Problem(args, fusion, S::kPairs), {0, 0, kBand}, 0, false};
  const int64_t width = o.p.width(), each = fusion.silu_and_mul ? S::kRows / 2 : S::kRows;
  const int64_t row_tiles = (width + each - 1) / each, experts = args.map.num_weights;
  const int64_t pair_tiles = args.map.num_blocks * (args.map.block_size / S::kPairs);
  const int64_t row_bytes = args.weight_row_stride * kItem, weight_bytes = args.weight_stride * kItem;
  if (row_tiles * pair_tiles > INT32_MAX || row_tiles * kBand > INT32_MAX)
    fail(PYKV_NOT_IMPLEMENTED, "x: more than 2^31 tiles are not supported");
  o.grid.row_tiles = static_cast<uint32_t>(row_tiles);
  o.grid.most_pair_tiles = static_cast<uint32_t>(pair_tiles);
  o.units = static_cast<int>((args.k + kUnit - 1) / kUnit);
  o.whole_results = is_aligned(16, args.out, {args.out_stride * kItem});
  const bool known =
      fusion.silu_and_mul
          ? make_tensor_map<5>(o.weight, args.weights, {args.k * kItem, 8, 2, width / 8, experts},
                               {row_bytes, width * row_bytes, 8 * row_bytes, weight_bytes}, {8, 2, S::kRows / 16, 1})
          : make_tensor_map<3>(o.weight, args.weights, {args.k * kItem, args.n, experts}, {row_bytes, weight_bytes},
                               {S::kRows, 1});
  if (!known) return false;
  const int64_t most = int64_t{num_sms(launch.device)} * S::kPerSm, tiles = row_tiles * pair_tiles;
  launch_dependent_shared(expert_gemm_warpgroup_kernel<S>, dim3(static_cast<unsigned>(tiles < most ? tiles : most)),
                          dim3(S::kThreads), S::kSharedBytes, launch, "expert_gemm", o);
  return true;
}

}  // namespace
}  // namespace expert_gemm

template <class T>
bool expert_gemm_warpgroup(const ExpertGemmArgs& args, const ExpertGemmFusion& fusion, const Launch& launch) {
  using namespace expert_gemm;
  constexpr int64_t kItem = sizeof(T);
  if (!has_warpgroups(launch.device) || args.k == 0 || args.k % 8 != 0 || args.n == 0) return false;
  if (!is_aligned(16, args.weights, {args.weight_row_stride * kItem, args.weight_stride * kItem}) ||
      !is_aligned(16, args.x, {args.x_stride * kItem}) || (fusion.silu_and_mul && args.n % 16 != 0))
    return false;
  const int64_t block = args.map.block_size;
  if (block % 144 == 0) return launch_shape<WarpgroupShape<T, 144, 2, 2, 3, 1>>(args, fusion, launch);
  if (block % 128 == 0) return launch_shape<WarpgroupShape<T, 128, 2, 2, 3, 1>>(args, fusion, launch);
  if (block % 96 == 0) return launch_shape<WarpgroupShape<T, 96, 2, 2, 3, 1>>(args, fusion, launch);
  if (block % 64 == 0) return launch_shape<WarpgroupShape<T, 64, 2, 2, 4, 1>>(args, fusion, launch);
  if (block % 48 == 0) return launch_shape<WarpgroupShape<T, 48, 2, 2, 4, 1>>(args, fusion, launch);
  if (block % 32 == 0) return launch_shape<WarpgroupShape<T, 32, 2, 2, 4, 1>>(args, fusion, launch);
  if (block % 16 == 0) return launch_shape<WarpgroupShape<T, 16, 2, 1, 5, 2>>(args, fusion, launch);
  // Of few tiles one block of a multiprocessor reads as fast as three, and leaves room for those of the next kernel.
  if (args.map.num_blocks <= 4) return launch_shape<WarpgroupShape<T, 8, 1, 1, 11, 1>>(args, fusion, launch);
  return launch_shape<WarpgroupShape<T, 8, 1, 1, 7, 3>>(args, fusion, launch);
}

template bool expert_gemm_warpgroup<half>(const ExpertGemmArgs&, const ExpertGemmFusion&, const Launch&);
template bool expert_gemm_warpgroup<bf16>(const ExpertGemmArgs&, const ExpertGemmFusion&, const Launch&);

}  // namespace pykv
