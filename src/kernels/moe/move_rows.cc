#include "moe/move_rows.h"

#include <cinttypes>

#include "moe/pair_inputs.h"
#include "pykv/moe.h"

namespace pykv {
namespace {

// Two arrays of rows of one dtype and width.
MoveRowsArgs rows_args(Tensor& source, Tensor& target) {
  const auto item = static_cast<int64_t>(size_of(source.type()));
  MoveRowsArgs args{};
  args.source = static_cast<const char*>(source.data());
  args.target = static_cast<char*>(target.data());
  args.source_stride = source.stride(0) * item;
  args.target_stride = target.stride(0) * item;
  args.row_bytes = source.size(1) * item;
  args.num_source_rows = source.size(0);
  args.num_target_rows = target.size(0);
  return args;
}

// Pairs are sorted, then rows moved to their places.
struct PermuteArgs {
  SortPairsArgs sort;
  MoveRowsArgs move;
};

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_shuffle_rows(const DLTensor* input_tensor, const DLTensor* dst2src_map, DLTensor* output_tensor,
                              void* stream) {
  return guarded("shuffle_rows", [&](Call& call) {
    Dim sources{"rows of input_tensor"}, targets{"rows of output_tensor"}, width{"width"};
    Tensor source = call.read("input_tensor", input_tensor).shape(sources, width).contiguous_rows();
    Tensor target = call.write("output_tensor", output_tensor)
                        .shape(targets, width)
                        .like(source)
                        .contiguous_rows()
                        .no_overlap_within();
    MoveRowsArgs args = rows_args(source, target);
    args.map = call.read("dst2src_map", dst2src_map).shape(targets).index();
    args.report = "shuffle_rows: dst2src_map";
    if (args.num_target_rows != 0 && args.row_bytes != 0)
      call.run(stream, args, move_rows_cpu, PYKV_CUDA(move_rows_cuda));
  });
}

pykv_status pykv_moe_permute(const DLTensor* input, const DLTensor* topk_ids, const DLTensor* token_expert_indices,
                             const DLTensor* expert_map, int64_t n_expert, int64_t n_local_expert, int64_t topk,
                             DLTensor* permuted_input, DLTensor* expert_first_token_offset, DLTensor* inv_permuted_idx,
                             DLTensor* permuted_idx, void* stream) {
  return guarded("moe_permute", [&](Call& call) {
    if (n_local_expert < 1 || n_local_expert > n_expert || (!expert_map && n_local_expert != n_expert))
      fail(PYKV_VALUE_ERROR,
           "n_local_expert: must be 1 to n_expert = %" PRId64 ", or without expert_map equal it, got %" PRId64,
           n_expert, n_local_expert);
    PermuteArgs args{};
    SortPairsArgs& sort = args.sort = pair_args(call, topk_ids, expert_map, "n_expert", n_expert, n_local_expert,
                                                {"moe_permute: topk_ids", "moe_permute: expert_map"});
    if (topk != sort.top_k)
      fail(PYKV_VALUE_ERROR, "topk: must equal the columns of topk_ids, %" PRId64 ", got %" PRId64, sort.top_k, topk);
    Dim tokens{"num_tokens", sort.num_tokens}, pairs{"num_tokens * topk", sort.num_pairs}, width{"width"};
    Dim ends{"n_local_expert + 1", n_local_expert + 1}, columns{"topk", topk};
    Tensor source = call.read("input", input).shape(tokens, width).contiguous_rows();
    Tensor target = call.write("permuted_input", permuted_input)
                        .shape(pairs, width)
                        .like(source)
                        .contiguous_rows()
                        .no_overlap_within();
    Tensor offsets = call.write("expert_first_token_offset", expert_first_token_offset)
                         .shape(ends)
                         .dtype({DType::kInt64, DType::kInt32})
                         .contiguous();
    Tensor places = int32_output(call, "inv_permuted_idx", inv_permuted_idx).shape(tokens, columns);
    Tensor sorted = int32_output(call, "permuted_idx", permuted_idx).shape(pairs);
    if (token_expert_indices) call.read("token_expert_indices", token_expert_indices);  // it says nothing new

    sort.keeps_all = true;
    sort.num_bins = n_local_expert + (expert_map ? n_expert : 0) + 1;
    sort.places = static_cast<int32_t*>(places.data());
    sort.sorted = static_cast<int32_t*>(sorted.data());
    sort.capacity = sort.num_pairs;
    sort.sentinel = static_cast<int32_t>(sort.num_pairs);
    const bool is_wide = offsets.type() == DType::kInt64;
    if (is_wide)
      sort.wide_offsets = static_cast<int64_t*>(offsets.data());
    else
      sort.offsets = static_cast<int32_t*>(offsets.data());

    args.move = rows_args(source, target);
    args.move.places = {places.data(), topk, 1, false};
    args.move.top_k = topk;
    args.move.num_valid = {static_cast<char*>(offsets.data()) + n_local_expert * (is_wide ? 8 : 4), 0, 0, is_wide};
    call.run(
        stream, args,
        [](const PermuteArgs& a, const Launch& launch) {
          sort_pairs_cpu(a.sort, launch);
          if (a.move.num_target_rows != 0 && a.move.row_bytes != 0) move_rows_cpu(a.move, launch);
        },
        PYKV_CUDA([](const PermuteArgs& a, const Launch& launch) {
          sort_pairs_cuda(a.sort, launch);
          if (a.move.num_target_rows != 0 && a.move.row_bytes != 0) move_rows_cuda(a.move, launch);
        }));
  });
}
