// The ops of nvfp4, mxfp4 and mxfp8: what they check before group_quant.
#include <cinttypes>
#include <cstring>

#include "pykv/quantization.h"
#include "quantization/code_inputs.h"
#include "quantization/group_quant.h"

namespace pykv {
namespace {

constexpr int kNvfp4 = 16, kMx = 32;  // elements of a block

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Numbers and their codes; the former twice as wide where an activation makes one of two.
struct Blocks {
  Tensor input, codes;
  int64_t rows, width, block, code_groups;
  GroupQuantArgs args{};

  Blocks(Call& call, const char* codes_name, DLTensor* codes_given, const DLTensor* input_given, int block,
         bool nibbles, bool gated)
      : input(call.read("input", input_given)), codes(call.write(codes_name, codes_given)), block(block) {
    input.rank_between(1, Tensor::kMaxRank).dtype(kFloats).contiguous_rows();
    const int64_t multiple = block * (gated ? 2 : 1);
    if (input.size(-1) % multiple != 0)
      input.fail(PYKV_VALUE_ERROR, "the last dimension must be a multiple of %" PRId64 ", got %" PRId64, multiple,
                 input.size(-1));
    width = input.size(-1) / (gated ? 2 : 1);
    if (nibbles) {
      codes.dtype({DType::kUInt8});
    } else {
      codes.dtype(kFp8Codes);
    }
    rows = same_rows(codes, input);
    codes.contiguous_rows().no_overlap_within().apart_from(input);
    const int64_t bytes = nibbles ? block / 2 : block;
    code_groups = codes.size(-1) / bytes;
    if (codes.size(-1) % bytes != 0 || code_groups * block < width)
      codes.fail(PYKV_VALUE_ERROR,
                 "the last dimension must be a multiple of %" PRId64 " and at least %" PRId64 " bytes, got %" PRId64,
                 bytes, width * bytes / block, codes.size(-1));
    args.dtype = input.type();
    args.codes = nibbles ? QuantCode::kE2M1 : kind_of(codes);
    args.source = gated ? RowSource::kSiluAndMul : RowSource::kElements;
    args.input = input.data();
    args.out = codes.data();
    args.input_rows = input.rows();
    args.out_rows = codes.rows();
    args.rows = rows;
    args.width = width;
    args.group_size = block;
    args.code_groups = code_groups;
    args.rule = {QuantScale::kE4M3, ExponentRule::kCeil, largest_code(args.codes), 0.0f, largest_exponent(args.codes)};
  }

  void set_mode(const char* scale_mode) {
    args.rule.kind = QuantScale::kMx;
    required("scale_mode", scale_mode);
    if (std::strcmp(scale_mode, "ceil") == 0) {
      args.rule.exponent = ExponentRule::kCeil;
    } else if (std::strcmp(scale_mode, "ocp") == 0) {
      args.rule.exponent = ExponentRule::kOcp;
    } else if (std::strcmp(scale_mode, "vllm") == 0) {
      args.rule.exponent = ExponentRule::kVllm;
    } else {
      fail(PYKV_VALUE_ERROR, "scale_mode: must be \"ceil\", \"ocp\" or \"vllm\", got \"%s\"", scale_mode);
    }
  }

  // Scales by strides, or in tiles.
  void set_scales(Call& call, const char* name, DLTensor* given, bool swizzled, int64_t tile_rows = 128) {
    Tensor s = scale_bytes(call, name, given);
    args.scales = s.data();
    if (tile_rows != 128 && tile_rows != 8)
      fail(PYKV_VALUE_ERROR, "tile_rows: must be 128 or 8, got %" PRId64, tile_rows);
    if (swizzled) {
      s.contiguous();
      args.tile_bits = tile_rows == 128 ? 7 : 3;
      args.scale_groups = up_to(code_groups, 4);
      args.tiles = args.scale_groups / 4;
      const int64_t wanted = up_to(rows, tile_rows) * args.scale_groups, bytes = s.numel() * item(s);
      if (bytes != wanted)
        s.fail(PYKV_VALUE_ERROR,
               "must have %" PRId64 " bytes (%" PRId64 " rows and %" PRId64
               " blocks, rounded up to multiples of %" PRId64 " and of 4), got shape %s",
               wanted, rows, code_groups, tile_rows, s.shape_string().c_str());
      return;
    }
    if (item(s) != 1) s.fail(PYKV_TYPE_ERROR, "int32 is for swizzled scales");
    same_rows(s, input);
    if (s.size(-1) < width / block)
      s.fail(PYKV_VALUE_ERROR, "the last dimension must be at least %" PRId64 ", got shape %s", width / block,
             s.shape_string().c_str());
    args.scale_groups = s.size(-1);
    args.scale_rows = s.rows();
    args.scale_group = s.stride(-1);
  }

  // Those of experts, in tiles of their own.  offsets_more: experts have one offset more.
  void set_experts(Call& call, const char* scales_name, DLTensor* scales, const char* first_name,
                   const DLTensor* first_given, const char* scales_first_name, const DLTensor* scales_first_given,
                   int64_t offsets_more, const char* report) {
    if (input.ndim() != 2)
      input.fail(PYKV_VALUE_ERROR, "must have 2 dimensions, got shape %s", input.shape_string().c_str());
    Tensor s = scale_bytes(call, scales_name, scales).rank(2).contiguous();
    args.tile_bits = 7;
    args.scales = s.data();
    args.scale_groups = up_to(code_groups, 4);
    args.tiles = args.scale_groups / 4;
    Dim words{"blocks of a row, rounded up to a multiple of 4", args.scale_groups / item(s)};
    s.dim(1, words);
    Dim offsets{"num_experts"};
    Tensor first = call.read(first_name, first_given), scales_first = call.read(scales_first_name, scales_first_given);
    first.shape(offsets);
    scales_first.shape(offsets);
    if (offsets <= offsets_more)
      first.fail(PYKV_VALUE_ERROR, "must have more than %" PRId64 " elements, got shape %s", offsets_more,
                 first.shape_string().c_str());
    if (offsets > INT32_MAX) first.fail(PYKV_NOT_IMPLEMENTED, "2^31 experts and more are not supported");
    args.of_experts = {first.index(),
                       scales_first.index(),
                       nullptr,
                       static_cast<int32_t>(offsets - offsets_more),
                       s.size(0) / 128 * 128,
                       report};
  }

  void run(Call& call, void* stream) const {
    if (rows == 0 || code_groups == 0) return;
    call.run(stream, args, group_quant_cpu, PYKV_CUDA(group_quant_cuda));
  }

 private:
  static int64_t item(const Tensor& s) { return static_cast<int64_t>(size_of(s.type())); }
  Tensor scale_bytes(Call& call, const char* name, DLTensor* given) const {
    Tensor s = call.write(name, given);
    if (args.rule.kind == QuantScale::kE4M3) {
      s.dtype({DType::kFloat8E4M3, DType::kUInt8, DType::kInt32});
    } else {
      s.dtype({DType::kUInt8, DType::kInt32});
    }
    return s.no_overlap_within();
  }
};

constexpr const char* kOffsets = "input_offset_by_experts";
constexpr const char* kScaleOffsets = "output_scale_offset_by_experts";

void nvfp4_of_experts(Call& call, DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                      const DLTensor* global, const DLTensor* offsets, const DLTensor* scale_offsets, bool gated,
                      const char* report, void* stream) {
  Blocks b(call, "output", output, input, kNvfp4, true, gated);
  b.set_experts(call, "output_scale", output_scale, kOffsets, offsets, kScaleOffsets, scale_offsets, 1, report);
  Dim experts{"num_experts", b.args.of_experts.experts};
  b.args.globals = static_cast<const float*>(
      call.read("input_global_scale", global).dtype({DType::kFloat32}).shape(experts).contiguous().data());
  b.run(call, stream);
}

void mxfp4_of_experts(Call& call, DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                      const DLTensor* offsets, const DLTensor* scale_offsets, int64_t n_experts, const char* scale_mode,
                      bool gated, const char* report, void* stream) {
  Blocks b(call, "output", output, input, kMx, true, gated);
  b.set_mode(scale_mode);
  b.set_experts(call, "output_scale", output_scale, kOffsets, offsets, kScaleOffsets, scale_offsets, 1, report);
  if (n_experts != 0 && n_experts != b.args.of_experts.experts)
    fail(PYKV_VALUE_ERROR, "n_experts: must be one less than there are offsets, %d, got %" PRId64,
         b.args.of_experts.experts, n_experts);
  b.run(call, stream);
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_scaled_fp4_quant(DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                                  const DLTensor* input_scale, bool is_sf_swizzled_layout, bool four_over_six,
                                  int64_t tile_rows, void* stream) {
  return guarded("scaled_fp4_quant", [&](Call& call) {
    Blocks b(call, "output", output, input, kNvfp4, true, false);
    b.set_scales(call, "output_scale", output_scale, is_sf_swizzled_layout, tile_rows);
    b.args.given = call.parameter("input_scale", input_scale);
    b.args.four_over_six = four_over_six;
    b.run(call, stream);
  });
}

pykv_status pykv_silu_and_mul_nvfp4_quant(DLTensor* result, DLTensor* result_block_scale, const DLTensor* input,
                                          const DLTensor* input_global_scale, void* stream) {
  return guarded("silu_and_mul_nvfp4_quant", [&](Call& call) {
    Blocks b(call, "result", result, input, kNvfp4, true, true);
    b.set_scales(call, "result_block_scale", result_block_scale, true);
    b.args.given = call.parameter("input_global_scale", input_global_scale);
    b.run(call, stream);
  });
}

pykv_status pykv_scaled_fp4_experts_quant(DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                                          const DLTensor* input_global_scale, const DLTensor* input_offset_by_experts,
                                          const DLTensor* output_scale_offset_by_experts, void* stream) {
  return guarded("scaled_fp4_experts_quant", [&](Call& call) {
    nvfp4_of_experts(call, output, output_scale, input, input_global_scale, input_offset_by_experts,
                     output_scale_offset_by_experts, false, "scaled_fp4_experts_quant: output_scale_offset_by_experts",
                     stream);
  });
}

pykv_status pykv_silu_and_mul_scaled_fp4_experts_quant(DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                                                       const DLTensor* input_global_scale,
                                                       const DLTensor* input_offset_by_experts,
                                                       const DLTensor* output_scale_offset_by_experts, void* stream) {
  return guarded("silu_and_mul_scaled_fp4_experts_quant", [&](Call& call) {
    nvfp4_of_experts(call, output, output_scale, input, input_global_scale, input_offset_by_experts,
                     output_scale_offset_by_experts, true,
                     "silu_and_mul_scaled_fp4_experts_quant: output_scale_offset_by_experts", stream);
  });
}

pykv_status pykv_mxfp8_quantize(DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                                bool is_sf_swizzled_layout, const char* scale_mode, void* stream) {
  return guarded("mxfp8_quantize", [&](Call& call) {
    Blocks b(call, "output", output, input, kMx, false, false);
    b.set_mode(scale_mode);
    b.set_scales(call, "output_scale", output_scale, is_sf_swizzled_layout);
    b.run(call, stream);
  });
}

pykv_status pykv_mxfp4_quantize(DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                                bool is_sf_swizzled_layout, const char* scale_mode, void* stream) {
  return guarded("mxfp4_quantize", [&](Call& call) {
    Blocks b(call, "output", output, input, kMx, true, false);
    b.set_mode(scale_mode);
    b.set_scales(call, "output_scale", output_scale, is_sf_swizzled_layout);
    b.run(call, stream);
  });
}

pykv_status pykv_mxfp4_experts_quant(DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                                     const DLTensor* input_offset_by_experts,
                                     const DLTensor* output_scale_offset_by_experts, int64_t n_experts,
                                     const char* scale_mode, void* stream) {
  return guarded("mxfp4_experts_quant", [&](Call& call) {
    mxfp4_of_experts(call, output, output_scale, input, input_offset_by_experts, output_scale_offset_by_experts,
                     n_experts, scale_mode, false, "mxfp4_experts_quant: output_scale_offset_by_experts", stream);
  });
}

pykv_status pykv_silu_and_mul_mxfp4_experts_quant(DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                                                  const DLTensor* input_offset_by_experts,
                                                  const DLTensor* output_scale_offset_by_experts, int64_t n_experts,
                                                  const char* scale_mode, void* stream) {
  return guarded("silu_and_mul_mxfp4_experts_quant", [&](Call& call) {
    mxfp4_of_experts(call, output, output_scale, input, input_offset_by_experts, output_scale_offset_by_experts,
                     n_experts, scale_mode, true, "silu_and_mul_mxfp4_experts_quant: output_scale_offset_by_experts",
                     stream);
  });
}

pykv_status pykv_mxfp8_experts_quant(const DLTensor* input, const DLTensor* problem_sizes,
                                     const DLTensor* expert_offsets, const DLTensor* blockscale_offsets,
                                     DLTensor* quant_output, DLTensor* scale_factor, const char* scale_mode,
                                     void* stream) {
  return guarded("mxfp8_experts_quant", [&](Call& call) {
    Blocks b(call, "quant_output", quant_output, input, kMx, false, false);
    b.set_mode(scale_mode);
    b.set_experts(call, "scale_factor", scale_factor, "expert_offsets", expert_offsets, "blockscale_offsets",
                  blockscale_offsets, 0, "mxfp8_experts_quant: blockscale_offsets");
    Dim experts{"num_experts", b.args.of_experts.experts}, three{"3", 3};
    b.args.of_experts.sizes = static_cast<const int32_t*>(
        call.read("problem_sizes", problem_sizes).dtype({DType::kInt32}).shape(experts, three).contiguous().data());
    b.run(call, stream);
  });
}
