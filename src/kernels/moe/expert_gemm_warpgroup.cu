// The same on Hopper's asynchronous matrix units (sm_90a), where rows of weights and of x begin at multiples of 16 bytes: for any
// number of pairs, with rows of the weight as first operand.
//
// Some threads of a block fill a ring with tiles of 64 columns: one has rows of the weight copied, all of them gather rows of x.
// One or two warpgroups multiply.  Blocks walk over tiles, and the ring is filled for the next while results are written.
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

// kGroups warpgroups multiply kHalves times 64 rows of the weight each with kPairs pairs.  The blocks of a cluster have the same
// rows, each of which one copies for all, and pairs one after another.
template <class T_, int kPairs_, int kGroups_, int kHalves_, int kStages_, int kPerSm_, int kCluster_ = 1>
struct WarpgroupShape {
  using T = T_;
  static constexpr int kPairs = kPairs_, kGroups = kGroups_, kHalves = kHalves_, kStages = kStages_;
  static constexpr int kPerSm = kPerSm_;  // blocks of a multiprocessor
  static constexpr int kCluster = kCluster_, kTilePairs = kPairs * kCluster;
  static constexpr int kRows = 64 * kGroups * kHalves,
                       kColumns = 64 * kHalves;  // of the weight; of results of a warpgroup
  static constexpr int kReaders = 128 * kGroups, kFillers = kPairs > 64 ? 128 : 32, kThreads = kReaders + kFillers;
  // Stages of x that are under way: readers free one when they have the next.
  static constexpr int kLag = kStages > 6 ? 4 : kStages - 2;
  static constexpr int kWeightBytes = kRows * kLine, kStageBytes = kWeightBytes + kPairs * kLine;
  static constexpr int kResultPitch = 2 * kColumns, kResultBytes = kPairs * kResultPitch;  // of a pair; of a warpgroup
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kGroups * kResultBytes;  // aligned by the kernel
  static constexpr bool kMovesRegisters = kHalves * kPairs > 128;
  static_assert(kSharedBytes <= 226 << 10);
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
struct Tiles : ExpertTiles<S::kPairs, S::kCluster> {
  __device__ explicit Tiles(const Operands& o)
      : ExpertTiles<S::kPairs, S::kCluster>(o.p.a.map, o.p.rows, o.grid, o.p.a.num_rows) {}
};

template <class S>
__device__ void copy_weight(const Operands& o, const Ring<S>& ring, int stage, int unit, uint32_t row_tile,
                            int32_t expert) {
  constexpr int kOwn = S::kRows / S::kCluster;  // rows that this block copies
  const int rank = blockIdx.x % S::kCluster, column = unit * kLine;
  const int first = static_cast<int>(row_tile) * S::kRows + rank * kOwn;
  const uint32_t to = ring.weight(stage) + rank * kOwn * kLine, full = ring.full(stage);
  cluster_expect(full, S::kWeightBytes);
  const auto copy = [&]<int kRank>(const int (&at)[kRank]) {
    if constexpr (S::kCluster > 1)
      copy_box_to_all(to, o.weight, at, full, (1 << S::kCluster) - 1);
    else
      copy_box(to, o.weight, at, full);
  };
  if (o.p.fusion.silu_and_mul)
    copy({column, 0, 0, first / 16, expert});
  else
    copy({column, first, expert});
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
      for (int i = 0; i < kEach; ++i) x_[i] = row_of_x(tile.rows[i]);
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

  // Where there is none, another: nobody looks at its results.
  __device__ const T* row_of_x(int32_t row) const {
    const ExpertGemmArgs& a = o_.p.a;
    return static_cast<const T*>(a.x) + (row < 0 ? 0 : o_.p.rows.top_k.quotient(row)) * a.x_stride + chunk_ * 8;
  }

  __device__ void copy_x(int unit) const {
    const int column = unit * kUnit;
    const bool inside = column + chunk_ * 8 < o_.p.a.k;
    const uint32_t to = ring_.x(turn_.stage);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int line = line_ + i * kStep;
      cp_async_16(to + line * kLine + ((chunk_ ^ line % 8) << 4), inside ? x_[i] + column : x_[i] - chunk_ * 8, inside);
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
  const T* x_[kEach];
  Turn<S::kStages> turn_;
};

// Stores 8 x 8 matrices of 16-bit elements from fragments, transposed.
__device__ inline void store_transposed(uint32_t address, const uint32_t (&r)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(r[0]) : "memory");
}
__device__ inline void store_transposed(uint32_t address, const uint32_t (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1])
               : "memory");
}
__device__ inline void store_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// A warpgroup that multiplies.

template <class S>
class Multiplier {
  using T = typename S::T;
  static constexpr int kOwnRows = (S::kPairs + 127) / 128;       // of out, that a thread looks up
  static constexpr int kTogether = S::kPairs % 16 == 0 ? 2 : 1;  // tiles of 8 pairs

 public:
  __device__ Multiplier(const Operands& o, const Ring<S>& ring, int group, uint8_t* results, int32_t* rows,
                        float* factors)
      : o_(o), ring_(ring), group_(group), results_(results), rows_(rows), factors_(factors) {}

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
      const uint32_t row_tile_here = row_tile;
      const int32_t expert = next;
      int32_t own[kOwnRows];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i)
        own[i] = thread_ + 128 * i < S::kPairs ? tiles.row(pair_tile, thread_ + 128 * i) : -1;
      if (index + tiles.step < tiles.count) {
        tiles.place(index + tiles.step, row_tile, pair_tile);
        next = tiles.expert(pair_tile);
      }
      if (expert < 0) continue;
      multiply();
      finish(row_tile_here, expert, own);
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
    if constexpr (S::kCluster > 1) {
      // It stands for reads alone: one that shows writes, too, waits for all of them (cluster_arrive).
      if (lane_ < S::kCluster)
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(ring_.empty(stage), lane_))
                     : "memory");

    } else {
      if (lane_ == 0) mbarrier_arrive(ring_.empty(stage));
    }
  }

  __device__ void finish(uint32_t row_tile, int32_t expert, const int32_t (&own)[kOwnRows]) {
    const ExpertGemmArgs& a = o_.p.a;
    const bool gated = o_.p.fusion.silu_and_mul;
    named_barrier_sync(1 + group_, 128);  // what lay there has been written
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int pair = thread_ + 128 * i;
      if (pair >= S::kPairs) break;
      rows_[pair] = own[i];
      if (a.map.factors) factors_[pair] = own[i] >= 0 ? a.map.factor_of(own[i]) : 0.0f;
    }
    if (a.map.factors) named_barrier_sync(1 + group_, 128);
    const T* const bias = a.bias ? static_cast<const T*>(a.bias) + expert * a.map.bias_stride : nullptr;
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h) {
      const int band = (group_ * S::kHalves + h) * 4 + thread_ / 32;  // of 16 rows of the weight, in the tile
      float of_row[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t row = gated ? int64_t{row_tile} * (S::kRows / 2) + band * 8 + lane_ / 4
                                  : int64_t{row_tile} * S::kRows + band * 16 + i * 8 + lane_ / 4;
        if (bias && row < o_.p.width()) of_row[i] = to_float(bias[gated ? i * o_.p.width() + row : row]);
      }
#pragma unroll
      for (int first = 0; first < S::kPairs / 8; first += kTogether) {
        uint32_t low[kTogether], both[2 * kTogether];
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          float v[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            v[e] = sum_[h][4 * (first + t) + e] + of_row[e / 2];
            if (a.map.factors) v[e] *= factors_[8 * (first + t) + lane_ % 4 * 2 + e % 2];
          }
          both[2 * t] = pack_pair<T>(v[0], v[1]);
          both[2 * t + 1] = pack_pair<T>(v[2], v[3]);
          if (gated) {
            const float2 gate = unpack_pair<T>(both[2 * t]), up = unpack_pair<T>(both[2 * t + 1]);
            low[t] = pack_pair<T>(to_float(silu_times<T>(gate.x, up.x)), to_float(silu_times<T>(gate.y, up.y)));
          }
        }
        const int of_warp = thread_ / 32;
        if (gated) {
          const int pair = 8 * first + lane_ % (8 * kTogether);
          store_transposed(place(pair, h * 4 + of_warp), low);
        } else {
          const int pair = 8 * (first + lane_ / 16 % kTogether) + lane_ % 8;
          store_transposed(place(pair, h * 8 + of_warp * 2 + lane_ / 8 % 2), both);
        }
      }
    }
    named_barrier_sync(1 + group_, 128);
    if (gated)
      write<S::kColumns / 2>(row_tile);
    else
      write<S::kColumns>(row_tile);
  }

  // Where eight neighbouring results of a pair lie.
  __device__ uint32_t place(int pair, int chunk) const {
    return shared_address(results_) + pair * S::kResultPitch + ((chunk ^ pair % 8) << 4);
  }

  template <int kWidth>
  __device__ void write(uint32_t row_tile) const {
    constexpr int kChunks = kWidth / 8;  // of a pair
    const ExpertGemmArgs& a = o_.p.a;
    const int chunk = thread_ % kChunks;
    const int64_t column = (int64_t{row_tile} * S::kGroups + group_) * kWidth + chunk * 8, width = o_.p.width();
    if (column >= width) return;
    const bool whole = o_.whole_results && column + 8 <= width;
#pragma unroll 4
    for (int pair = thread_ / kChunks; pair < S::kPairs; pair += 128 / kChunks) {
      const int32_t row = rows_[pair];
      if (row < 0) continue;
      const uint4 eight = load_shared_16(place(pair, chunk));
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

  const Operands& o_;
  const Ring<S>& ring_;
  const int group_, thread_ = threadIdx.x % 128, lane_ = threadIdx.x % 32;
  uint8_t* const results_;
  int32_t* const rows_;
  float* const factors_;
  Turn<S::kStages> turn_;
  float sum_[S::kHalves][S::kPairs / 2];
};
#endif

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kPerSm)
    expert_gemm_warpgroup_kernel(const __grid_constant__ Operands o) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t unaligned[];
  __shared__ uint64_t barriers[2 * S::kStages];
  __shared__ int32_t rows[S::kGroups][S::kPairs];
  __shared__ float factors[S::kGroups][S::kPairs];
  uint8_t* const shared = unaligned + (-shared_address(unaligned) & 1023);
  const Ring<S> ring{shared_address(shared), shared_address(barriers), shared_address(barriers + S::kStages)};
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(ring.full(i), S::kFillers / 32 + 1);  // each warp, and the copy of the weight
      mbarrier_init(ring.empty(i), S::kReaders / 32 * S::kCluster);
    }
    fence_async_proxy();
    if constexpr (S::kCluster > 1) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    prefetch_map(o.weight);
  }
  __syncthreads();
  if constexpr (S::kCluster > 1) {  // all barriers are there
    cluster_announce();
    cluster_wait();
  }
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == S::kGroups) {
    if constexpr (S::kMovesRegisters) give_registers<88>();
    Filler<S> filler(o, ring, threadIdx.x - S::kReaders);
    if (o.p.fusion.map_is_old) filler.fill_early();
    begin_dependent();
    filler.run();
  } else {
    if constexpr (S::kMovesRegisters) take_registers<208>();
    begin_dependent();
    Multiplier<S> multiplier(o, ring, warpgroup, shared + S::kStages * S::kStageBytes + warpgroup * S::kResultBytes,
                             rows[warpgroup], factors[warpgroup]);
    multiplier.run();
  }
  if constexpr (S::kCluster > 1) {  // nobody copies to this block any more, or arrives at its barriers
    __syncwarp();
    cluster_announce();
    cluster_wait();
  }
#endif
}

void launch_clusters(void (*kernel)(Operands), int64_t blocks, int threads, int shared_bytes, int cluster,
                     const Launch& launch, const Operands& o) {
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "expert_gemm");
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream_of(launch);
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  cuda_check(cudaLaunchKernelEx(&config, kernel, o), "expert_gemm");
}

template <class S>
bool launch_shape(const ExpertGemmArgs& args, const ExpertGemmFusion& fusion, const Launch& launch, uint32_t band = 8) {
  constexpr int64_t kItem = sizeof(typename S::T);
  Operands o{{}, Problem(args, fusion, S::kTilePairs), {0, 0, band}, 0, false};
  const int64_t width = o.p.width(), each = fusion.silu_and_mul ? S::kRows / 2 : S::kRows;
  const int64_t row_tiles = (width + each - 1) / each, experts = args.map.num_weights;
  const int64_t pair_tiles = args.map.num_blocks * (args.map.block_size / S::kTilePairs);
  const int64_t row_bytes = args.weight_row_stride * kItem, weight_bytes = args.weight_stride * kItem;
  if (row_tiles * pair_tiles > INT32_MAX || row_tiles * band > INT32_MAX)
    fail(PYKV_NOT_IMPLEMENTED, "x: more than 2^31 tiles are not supported");
  o.grid.row_tiles = static_cast<uint32_t>(row_tiles);
  o.grid.most_pair_tiles = static_cast<uint32_t>(pair_tiles);
  o.units = static_cast<int>((args.k + kUnit - 1) / kUnit);
  o.whole_results = is_aligned(16, args.out, {args.out_stride * kItem});
  const bool known = fusion.silu_and_mul
                         ? make_tensor_map<5>(o.weight, args.weights, {args.k * kItem, 8, 2, width / 8, experts},
                                              {row_bytes, width * row_bytes, 8 * row_bytes, weight_bytes},
                                              {8, 2, S::kRows / S::kCluster / 16, 1})
                         : make_tensor_map<3>(o.weight, args.weights, {args.k * kItem, args.n, experts},
                                              {row_bytes, weight_bytes}, {S::kRows / S::kCluster, 1});
  if (!known) return false;
  const int64_t most = int64_t{num_sms(launch.device)} / S::kCluster * S::kPerSm, tiles = row_tiles * pair_tiles;
  launch_clusters(expert_gemm_warpgroup_kernel<S>, (tiles < most ? tiles : most) * S::kCluster, S::kThreads,
                  S::kSharedBytes, S::kCluster, launch, o);
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
  if (block % 32 == 0) return launch_shape<WarpgroupShape<T, 32, 2, 1, 5, 2>>(args, fusion, launch);
  if (block % 16 == 0) return launch_shape<WarpgroupShape<T, 16, 1, 1, 7, 3>>(args, fusion, launch);
  return launch_shape<WarpgroupShape<T, 8, 1, 1, 7, 3>>(args, fusion, launch);
}

template bool expert_gemm_warpgroup<half>(const ExpertGemmArgs&, const ExpertGemmFusion&, const Launch&);
template bool expert_gemm_warpgroup<bf16>(const ExpertGemmArgs&, const ExpertGemmFusion&, const Launch&);

}  // namespace pykv
