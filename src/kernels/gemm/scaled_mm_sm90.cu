// Which shape of tile a product gets: scaled_mm_sm90.cuh has the kernel.
#include "gemm/scaled_mm_sm90.cuh"

namespace pykv {
namespace scaled_mm {
namespace {

// Columns of a tile where b is read once or twice: all multiprocessors have as many tiles, one if tiles can be so wide.
int columns_each(int64_t columns, int64_t sms) {
  const int64_t rounds = (columns + 128 * sms - 1) / (128 * sms), tiles = rounds * sms;
  return static_cast<int>((columns + 8 * tiles - 1) / (8 * tiles) * 8);
}

// Two blocks of a multiprocessor: the next call's come up while this one's are at their end.  Not where tiles of groups, of which
// there are many, follow one another anyway.
template <class Sum, bool kExact>
bool launch_few(const ScaledMmArgs& args, const Launch& launch) {
  if (args.groups.count > 0) return launch_shape<WarpgroupShape<Sum, kExact, 1, 128, kBatches, 2>>(args, launch);
  const int columns = columns_each(args.n, num_sms(launch.device));
  if (columns <= 32) return launch_shape<WarpgroupShape<Sum, kExact, 1, 32, kRolling, 1, 2>>(args, launch, columns);
  if (columns <= 64) return launch_shape<WarpgroupShape<Sum, kExact, 1, 64, kBatches, 2, 2>>(args, launch, columns);
  return launch_shape<WarpgroupShape<Sum, kExact, 1, 128, kBatches, 1, 2>>(args, launch, columns);
}

// Tiles of 128 rows.  Where sums are added only at the end, wide ones take less time for each column, but the last round of them may
// find little to do.
template <class Sum, bool kExact>
bool launch_many(const ScaledMmArgs& args, const Launch& launch) {
  if constexpr (kExact) {
    const RowGroups& groups = args.groups;
    const int64_t sms = num_sms(launch.device);
    const int64_t row_tiles =
        groups.are_apart() ? groups.count * ((groups.expected_rows + 127) / 128) : (args.m + 127) / 128;
    const auto time = [&](int64_t columns) {
      const int64_t tiles = row_tiles * ((args.n + columns - 1) / columns);
      return (tiles + sms - 1) / sms * (columns + 24);
    };
    if (time(256) <= time(128)) return launch_shape<WarpgroupShape<Sum, true, 2, 256, kBatches>>(args, launch);
  }
  return launch_shape<WarpgroupShape<Sum, kExact, 2, 128, kRolling>>(args, launch);
}

template <class Sum, bool kExact>
bool launch_sum(const ScaledMmArgs& args, const Launch& launch) {
  const bool is_grouped = args.groups.count > 0;
  if ((is_grouped ? args.groups.expected_rows : args.m) <= 64) return launch_few<Sum, kExact>(args, launch);
  if (args.m <= 256 && !is_grouped) {
    const int columns = columns_each(args.n * (args.m > 128 ? 2 : 1), num_sms(launch.device));
    if (columns <= 64) return launch_shape<WarpgroupShape<Sum, kExact, 2, 64, kRolling>>(args, launch, columns);
  }
  return launch_many<Sum, kExact>(args, launch);
}

}  // namespace

bool launch_sm90(const ScaledMmArgs& args, const Launch& launch) {
  const Lines rows(args.a, args.m, args.a_stride, args.a_along_k),
      columns(args.b, args.n, args.b_along_n, args.b_along_k);
  if (!has_warpgroups(launch.device) || !rows.in_chunks || !columns.in_chunks || args.k == 0) return false;
  if (args.m > INT32_MAX - 256 || args.n > INT32_MAX - 256 || args.k > INT32_MAX - 256) return false;
  if ((args.a_group | (args.groups.count > 1 ? args.b_group : 0)) % 16 != 0) return false;
  if (launch_many_sm90(args, launch)) return true;
  if (!args.is_int8) return launch_sum<float, false>(args, launch);
  if (!args.in_blocks) return launch_sum<int32_t, true>(args, launch);
  return launch_shape<WarpgroupShape<int32_t, false, 2, 128, kRolling>>(args, launch);
}

}  // namespace scaled_mm
}  // namespace pykv
