// The same on Hopper's asynchronous matrix units (sm_90a), where rows of weights and of x begin at multiples of 16 bytes: for any
// number of pairs, with rows of the weight as first operand.
//
// Some threads of a block fill a ring with tiles of 64 columns: one has rows of the weight copied, all of them gather rows of x.
// One or two warpgroups multiply; of large tiles another one writes results, with the activation.  Blocks walk over tiles, and
// the ring is filled for the next while results are written.
//
// A sum goes over the columns from the first to the last, 16 at a time, whatever the tile: its bits depend on nothing else.
#include "cuda/device.h"
#include "moe/warpgroup_filler.cuh"
#include "moe/warpgroup_multiplier.cuh"

namespace pykv {
namespace expert_gemm {  // not an unnamed one, whose members the compiler would report where code for sm_90a lacks

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
      mbarrier_init(ring.full(i), S::kFillers + 1);  // copies of x, and that of the weight
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
  Operands o{{}, Problem(args, fusion, S::kPairs), {0, 0, kBand}, 0, 0, false};
  const int64_t width = o.p.width(), each = fusion.silu_and_mul ? S::kRows / 2 : S::kRows;
  const int64_t row_tiles = (width + each - 1) / each, experts = args.map.num_weights;
  const int64_t pair_tiles = args.map.num_blocks * (args.map.block_size / S::kPairs);
  const int64_t row_bytes = args.weight_row_stride * kItem, weight_bytes = args.weight_stride * kItem;
  if (row_tiles * pair_tiles > INT32_MAX || row_tiles * kBand > INT32_MAX)
    fail(PYKV_NOT_IMPLEMENTED, "x: more than 2^31 tiles are not supported");
  o.grid.row_tiles = static_cast<uint32_t>(row_tiles);
  o.grid.most_pair_tiles = static_cast<uint32_t>(pair_tiles);
  o.units = static_cast<int>((args.k + kUnit - 1) / kUnit);
  o.x_chunks = static_cast<uint32_t>(args.x_stride / 8);
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

}  // namespace expert_gemm

template <class T>
bool expert_gemm_warpgroup(const ExpertGemmArgs& args, const ExpertGemmFusion& fusion, const Launch& launch) {
  using namespace expert_gemm;
  constexpr int64_t kItem = sizeof(T);
  if (!has_warpgroups(launch.device) || args.k == 0 || args.k % 8 != 0 || args.n == 0) return false;
  if (!is_aligned(16, args.weights, {args.weight_row_stride * kItem, args.weight_stride * kItem}) ||
      !is_aligned(16, args.x, {args.x_stride * kItem}) || args.x_stride < 0 ||
      args.num_rows * (args.x_stride / 8) > UINT32_MAX || (fusion.silu_and_mul && args.n % 16 != 0))
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
