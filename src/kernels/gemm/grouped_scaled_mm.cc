// Products of rows in groups: checks, and what they become for scaled_mm.h.
#include <cinttypes>

#include "core/call.h"
#include "gemm/scaled_mm.h"
#include "pykv/gemm.h"

namespace pykv {
namespace {

class GroupedProduct {
 public:
  ScaledMmArgs args{};

  GroupedProduct(Call& call, DLTensor* out, const DLTensor* a, const DLTensor* b, bool are_apart)
      : call_(call), apart_(are_apart) {
    Tensor weights = call.read("b", b).rank(3), rows = call.read("a", a), to = call.write("out", out);
    rows.dtype({DType::kFloat8E4M3, DType::kInt8, DType::kUInt8});
    args.is_int8 = rows.type() == DType::kInt8;
    if (args.is_int8) {
      weights.like(rows);
    } else {
      weights.dtype({DType::kFloat8E4M3, DType::kUInt8});
    }
    to.dtype(kFloats).contiguous_rows().no_overlap_within();
    if (are_apart) {
      rows.shape(groups_, m_, k_);
      to.shape(groups_, m_, n_);
      args.a_group = rows.stride(0);
      args.out_group = to.stride(0);
    } else {
      rows.shape(m_, k_);
      to.shape(m_, n_);
    }
    weights.shape(groups_, k_, n_);
    if (groups_ > RowGroups::kMost)
      weights.fail(PYKV_VALUE_ERROR, "must be of at most %d groups, got %" PRId64, RowGroups::kMost, int64_t{groups_});
    args.out_dtype = to.type();
    args.a = static_cast<const uint8_t*>(rows.data());
    args.b = static_cast<const uint8_t*>(weights.data());
    args.out = to.data();
    args.m = m_;
    args.n = n_;
    args.k = k_;
    args.a_stride = rows.stride(-2);
    args.a_along_k = rows.stride(-1);
    args.out_stride = to.stride(-2);
    args.b_group = weights.stride(0);
    args.b_along_k = weights.stride(1);
    args.b_along_n = weights.stride(2);
  }

  void scales(const DLTensor* of_a, const DLTensor* of_b) {
    Tensor a = read_scales(call_, "a_scales", of_a, args.a_on_host), b = call_.read("b_scales", of_b);
    if (b.ndim() == 3) {
      Dim k_blocks{"blocks of k", args.blocks()},
          n_blocks{"blocks of n", (args.n + ScaledMmArgs::kBlock - 1) / ScaledMmArgs::kBlock};
      b.dtype({DType::kFloat32, DType::kUInt8}).shape(groups_, k_blocks, n_blocks);
      args.in_blocks = true;
      if (args.a_on_host) call_.read("a_scales", of_a);  // has to be where the call is
      args.a_scales = scales_of_rows(a, apart_ ? &groups_ : nullptr, m_, args.blocks());
      args.b_scales = {b.data(), b.stride(2), b.stride(1), b.type() == DType::kUInt8, b.stride(0)};
    } else {
      a.dtype({DType::kFloat32});
      b.dtype({DType::kFloat32}).rank_between(1, 2).dim(0, groups_);
      if (b.ndim() == 2 && b.size(1) != 1) b.dim(1, n_);
      args.b_scales = {b.data(), b.ndim() == 2 && b.size(1) != 1 ? b.stride(1) : 0, 0, false, b.stride(0)};
      args.a_scales = {a.data(), 0, 0, false, 0};
      if (a.numel() == 1) return;
      a.rank(apart_ ? 2 : 1).dim(-1, m_);
      args.a_scales.along = a.stride(-1);
      if (!apart_) return;
      a.dim(0, groups_);
      args.a_scales.group = a.stride(0);
    }
  }

  void groups(const DLTensor* of_rows, const DLTensor* begins, const DLTensor* sizes, int64_t expected_rows) {
    RowGroups& groups = args.groups;
    groups.count = groups_;
    groups.report_rows = "grouped_scaled_mm: row_groups";
    groups.report_begins = begins ? "grouped_scaled_mm: group_begins" : "grouped_scaled_mm: group_sizes";
    if (of_rows) groups.of_rows = call_.read("row_groups", of_rows).shape(m_).index();
    if (begins) {
      Tensor t = call_.read("group_begins", begins).rank(1);
      if (t.size(0) != groups_ + 1 && !(sizes && t.size(0) == groups_))
        t.fail(PYKV_VALUE_ERROR, "must have groups + 1 = %" PRId64 " elements%s, got shape %s", groups_ + 1,
               sizes ? ", or one for each group" : "", t.shape_string().c_str());
      groups.begins = t.index();
    }
    if (sizes) {
      Tensor t = call_.read("group_sizes", sizes).rank_between(1, 2).dim(0, groups_);
      groups.sizes = {t.data(), t.stride(0), t.dtype({DType::kInt32, DType::kInt64}).type() == DType::kInt64};
      if (t.ndim() == 2) {  // (m, n, k), or (n, m, k)
        Dim three{"3: m, n and k", 3};
        t.dim(1, three);
        groups.more = groups.sizes;
        groups.more.data = static_cast<const char*>(t.data()) + t.stride(1) * (groups.sizes.is_int64 ? 8 : 4);
        groups.less = args.n;
      }
    }
    const int64_t average = apart_ ? args.m : (args.m + groups.count - 1) / (groups.count > 0 ? groups.count : 1);
    groups.expected_rows = expected_rows > 0 ? expected_rows : average;
  }

  void run(void* stream) {
    if (args.m == 0 || args.n == 0 || args.groups.count == 0) return;
    call_.run(stream, args, scaled_mm_cpu, PYKV_CUDA(scaled_mm_cuda));
  }

 private:
  Call& call_;
  const bool apart_;
  Dim groups_{"groups"}, m_{"num_rows"}, n_{"n"}, k_{"k"};
};

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_grouped_scaled_mm(DLTensor* out, const DLTensor* a, const DLTensor* b, const DLTensor* a_scales,
                                   const DLTensor* b_scales, const DLTensor* row_groups, const DLTensor* group_begins,
                                   const DLTensor* group_sizes, int64_t expected_rows, void* stream) {
  return guarded("grouped_scaled_mm", [&](Call& call) {
    if ((row_groups != nullptr) == (group_begins != nullptr || group_sizes != nullptr))
      fail(PYKV_VALUE_ERROR,
           "row_groups: must be given, or group_begins or group_sizes: rows belong to groups in one way");
    GroupedProduct product(call, out, a, b, !row_groups && !group_begins);
    product.scales(a_scales, b_scales);
    product.groups(row_groups, group_begins, group_sizes, expected_rows);
    product.run(stream);
  });
}
