"""Numbers to codes of 8 and 4 bits.

A code is the nearest one, ties to even, the largest where the number is too large.  NaN is passed over when the
largest magnitude is found; its own code is the largest one (int8: 0).  A row is the last dimension of an array; its
elements lie side by side.  All other strides, and the alignment, are the caller's choice.  Results for a row never
depend on how many others there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pykv._schema import NoneIs, Rule, Spec, half_rows_of, operation
from pykv._types import Array, ScalarOrArray, Stream


def _codes(dtype: str, name: str = "input") -> Rule:
    return Rule(lambda arguments: Spec(arguments[name].shape, dtype))


def _row_numbers(dtype: str) -> Rule:
    return Rule(lambda arguments: Spec((math.prod(arguments["input"].shape[:-1]), 1), dtype))


@Rule
def _group_scales(arguments: Mapping[str, Any]) -> Spec:
    *rows, width = arguments["input"].shape
    return Spec((*rows, width // arguments["group_size"]), "float32")


@Rule
def _packed_scales(arguments: Mapping[str, Any]) -> Spec:
    rows, width = arguments["input"].shape
    return Spec((rows, -(-width // arguments["group_size"] // 4)), "int32")


@operation(result=_codes("int8"))
def static_scaled_int8_quant(
    result: Array, input: Array, scale: ScalarOrArray, azp: Array | None = None, *, stream: Stream = None
) -> None:
    """Quantise to int8: ``round(input / scale)``, or with a zero point ``round(input * (1 / scale)) + azp``, saturated.

    Args:
        result: ``[..., width]`` int8, shape of ``input``; written.
        input: ``[..., width]`` float32, float16 or bfloat16.
        scale: one number.
        azp: int32, one element, on the device of the others.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(result=_codes("int8"), scale=_row_numbers("float32"))
def dynamic_scaled_int8_quant(
    result: Array, input: Array, scale: Array, azp: Array | None = None, *, stream: Stream = None
) -> None:
    """Quantise each row to int8 codes by a scale of its own.

    Without ``azp``: ``scale = m / 127`` with ``m = max(abs(row))``, ``result = round(row * (127 / m))``, of zeros 0.

    With it: ``scale = (max(row) - min(row)) / 255``, ``azp = round(-128 - min(row) / scale)`` and
    ``result = round(row * (1 / scale)) + azp``, saturated.  A row of one number has ``azp = 0`` and codes of 127 or
    -127; of zeros the scale is 1.

    Args:
        result: ``[..., width]`` int8, shape of ``input``; written.
        input: ``[..., width]`` float32, float16 or bfloat16.
        scale: ``[num_rows, 1]`` or ``[num_rows]`` float32, any strides; written.  ``num_rows`` is the product of all
            sizes of ``input`` but the last.
        azp: as ``scale``, int32; written.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(result=_codes("int8"), scale=_row_numbers("float32"))
def per_token_quant_int8(result: Array, input: Array, scale: Array, *, stream: Stream = None) -> None:
    """Compute :func:`dynamic_scaled_int8_quant` as vLLM's Triton kernel does.

    ``m`` is 1e-10 at least, and halves are rounded away from zero.

    Args:
        result: as there.
        input: as there.
        scale: as there.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(result=_codes("float8_e4m3fn"))
def static_scaled_fp8_quant(
    result: Array,
    input: Array,
    scale: ScalarOrArray,
    group_rows: int = 0,
    group_columns: int = 0,
    *,
    stream: Stream = None,
) -> None:
    """Quantise to fp8 codes by given scales: ``result = fp8(input * (1 / scale))``.

    Args:
        result: ``[..., width]`` float8_e4m3fn, uint8 (which holds it) or float8_e5m2, shape of ``input``; written.
        input: ``[..., width]`` float32, float16 or bfloat16.
        scale: one number; or float32 ``[groups of rows, groups of columns]``, rows being all dimensions but the last;
            or ``[num_rows]`` or ``[width]``, with ``group_rows`` 1 and ``group_columns`` -1, or -1 and 1.  Any strides,
            0 too.
        group_rows: how many rows share a scale; the last group may have fewer.  -1: all; 0: what divides evenly.
        group_columns: how many columns do.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or groups do not fit.
        TypeError: dtypes do not fit.
    """


@operation(result=_codes("float8_e4m3fn"), scale=Rule(lambda _: Spec((1,), "float32")))
def dynamic_scaled_fp8_quant(result: Array, input: Array, scale: Array, *, stream: Stream = None) -> None:
    """Quantise by a scale that is computed: ``scale = max(abs(input)) / code``, ``result = fp8(input * (1 / scale))``.

    ``code`` is the largest one, 448 of float8_e4m3fn and 57344 of float8_e5m2.  Zeros have codes of 0, and the scale 0.

    Args:
        result: ``[..., width]`` float8_e4m3fn, uint8 (which holds it) or float8_e5m2, shape of ``input``; written.
        input: ``[..., width]`` float32, float16 or bfloat16.
        scale: float32, one element; written.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(result=_codes("float8_e4m3fn"), scale=_row_numbers("float32"))
def dynamic_per_token_scaled_fp8_quant(
    result: Array, input: Array, scale: Array, scale_ub: ScalarOrArray | None = None, *, stream: Stream = None
) -> None:
    """Quantise each row to fp8 codes by a scale of its own.

    With ``m = max(abs(row))``, ``scale_ub`` at most, ``scale = max(m / code, 1 / (512 * code))`` and
    ``result = fp8(row / scale)``; ``code`` is the largest one, 448 of float8_e4m3fn and 57344 of float8_e5m2.

    Args:
        result: ``[..., width]`` float8_e4m3fn, uint8 (which holds it) or float8_e5m2, shape of ``input``; written.
        input: ``[..., width]`` float32, float16 or bfloat16.
        scale: ``[num_rows, 1]`` or ``[num_rows]`` float32, any strides; written.  ``num_rows`` is the product of all
            sizes of ``input`` but the last.
        scale_ub: bounds ``m``.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


_FP8_RANGE = {"fp8_min": NoneIs(0.0, number=True), "fp8_max": NoneIs(0.0, positive=True)}
_INT8_RANGE = {"int8_min": NoneIs(0.0, number=True), "int8_max": NoneIs(0.0, positive=True)}


@operation(output_q=_codes("float8_e4m3fn"), output_s=_group_scales, converters=_FP8_RANGE)
def per_token_group_fp8_quant(
    input: Array,
    output_q: Array,
    output_s: Array,
    group_size: int,
    eps: float = 1e-10,
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    scale_ue8m0: bool = False,
    *,
    stream: Stream = None,
) -> None:
    """Quantise to fp8 codes with a scale for each group of neighbours in a row.

    ``scale = max(m, eps) / fp8_max`` with ``m = max(abs(group))``, and ``output_q = fp8(group * (1 / scale))``.

    Args:
        input: ``[..., width]`` float32, float16 or bfloat16.
        output_q: ``[..., width]`` float8_e4m3fn, uint8 (which holds it) or float8_e5m2, shape of ``input``; written.
        output_s: ``[..., width / group_size]``, or with all rows in one dimension, float32; written where its strides
            say: row by row, or transposed (strides ``(1, n)``, with ``n`` padded as TMA wants it or not).
        group_size: any that divides ``width``.
        eps: what ``m`` is at least.
        fp8_min: ``-fp8_max``.
        fp8_max: the code that the largest number becomes.  ``None``: the format's largest.
        scale_ue8m0: scales are the least powers of two that are not below these, nor below 1e-10.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or numbers do not fit.
        TypeError: dtypes do not fit.
    """


@operation(output_q=_codes("float8_e4m3fn"), output_s_packed=_packed_scales, converters=_FP8_RANGE)
def per_token_group_fp8_quant_packed(
    input: Array,
    output_q: Array,
    output_s_packed: Array,
    group_size: int = 128,
    eps: float = 1e-10,
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Compute :func:`per_token_group_fp8_quant` with scales of powers of two, four exponents in a word.

    Args:
        input: ``[rows, width]`` float32, float16 or bfloat16.
        output_q: ``[rows, width]`` or with more rows, which become zeros; float8_e4m3fn, uint8 (which holds it) or
            float8_e5m2; written.
        output_s_packed: ``[rows, ceil(width / group_size / 4)]`` int32, any strides; written.  Byte ``i`` of a word,
            the lowest first, is the exponent ``e`` of group ``4 * word + i``, whose scale is ``2**(e - 127)``; 0 behind
            the last group.
        group_size: any that divides ``width``.
        eps: as there.
        fp8_min: as there.
        fp8_max: as there.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or numbers do not fit.
        TypeError: dtypes do not fit.
    """


@operation(output_q=_codes("int8"), output_s=_group_scales, converters=_INT8_RANGE)
def per_token_group_quant_int8(
    input: Array,
    output_q: Array,
    output_s: Array,
    group_size: int,
    eps: float = 1e-10,
    int8_min: float | None = None,
    int8_max: float | None = None,
    truncates: bool = False,
    *,
    stream: Stream = None,
) -> None:
    """Quantise to int8 codes with a scale for each group of neighbours in a row.

    ``scale = max(m, eps) / int8_max`` with ``m = max(abs(group))``, and ``output_q = round(group * (1 / scale))``.

    Args:
        input: ``[..., width]`` float32, float16 or bfloat16.
        output_q: ``[..., width]`` int8, shape of ``input``; written.
        output_s: as of :func:`per_token_group_fp8_quant`.
        group_size: any that divides ``width``.
        eps: what ``m`` is at least.
        int8_min: at most ``-int8_max``; no code is below that.
        int8_max: the code that the largest number becomes.  ``None``: 127.
        truncates: fractions are cut off, as vLLM's kernel does; a code is then wrong by up to 1, not by half of that.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or numbers do not fit.
        TypeError: dtypes do not fit.
    """


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _nibbles(per_number: int = 1, name: str = "input") -> Rule:
    """Of as many numbers; or of half as many, where an activation makes one of two."""

    def make(arguments: Mapping[str, Any]) -> Spec:
        *rows, width = arguments[name].shape
        return Spec((*rows, width // (2 * per_number)), "uint8")

    return Rule(make)


def _block_scales(dtype: str, block: int, *, per_number: int = 1, swizzled: bool = False) -> Rule:
    def make(arguments: Mapping[str, Any]) -> Spec:
        *rows, width = arguments["input"].shape
        blocks = width // (block * per_number)
        if not (swizzled or arguments["is_sf_swizzled_layout"]):
            return Spec((*rows, blocks), dtype)
        tile_rows = max(1, arguments.get("tile_rows", 128))  # the call itself refuses others than 8 and 128
        return Spec((_padded(math.prod(rows), tile_rows), _padded(blocks, 4)), dtype)

    return Rule(make)


@operation(output=_nibbles(), output_scale=_block_scales("float8_e4m3fn", 16))
def scaled_fp4_quant(
    output: Array,
    output_scale: Array,
    input: Array,
    input_scale: ScalarOrArray,
    is_sf_swizzled_layout: bool = True,
    four_over_six: bool = False,
    tile_rows: int = 128,
    *,
    stream: Stream = None,
) -> None:
    """Quantise to nvfp4: four-bit floats (e2m1) in blocks of 16 neighbours, with scales in e4m3.

    With ``m = max(abs(block))``, ``scale = e4m3(input_scale * (m / 6))`` and
    ``output = e2m1(block * (1 / (scale * (1 / input_scale))))``: a number is ``code * scale / input_scale``.  A block
    whose scale is 0 becomes zeros.

    Args:
        output: ``[..., width / 2]`` uint8, or with more bytes in a row, which become 0; written.  Element ``2 j`` is
            the low half of byte ``j``.
        output_scale: float8_e4m3fn or uint8; written.  ``[..., width / 16]``, or as many as ``output`` has blocks, any
            strides; or swizzled: contiguous (int32, too, as four bytes each), in tiles of ``tile_rows`` rows and 4
            scales, padded to whole ones, with zeros.
        input: ``[..., width]`` float32, float16 or bfloat16, ``width`` a multiple of 16.
        input_scale: the global scale, as a rule ``448 * 6 / max(abs(input))``.
        is_sf_swizzled_layout: byte ``((r // 128) * tiles + b // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4``
            is the scale of row ``r`` and block ``b``, with ``tiles`` side by side.
        four_over_six: the scale is ``e4m3(input_scale * (m / 4))`` where that makes the sum of the squared errors of
            the block smaller.
        tile_rows: 128; or 8, as TensorRT-LLM's products of few rows want them: byte
            ``((r // 8) * tiles + b // 4) * 32 + r % 8 * 4 + b % 4``.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(result=_nibbles(2), result_block_scale=_block_scales("float8_e4m3fn", 16, per_number=2, swizzled=True))
def silu_and_mul_nvfp4_quant(
    result: Array,
    result_block_scale: Array,
    input: Array,
    input_global_scale: ScalarOrArray,
    *,
    stream: Stream = None,
) -> None:
    """Compute :func:`silu_and_mul` and :func:`scaled_fp4_quant` of it, with swizzled scales.

    Args:
        result: ``[..., width / 2]`` uint8, or with more bytes in a row, which become 0; written.
        result_block_scale: as ``output_scale`` there; written.
        input: ``[..., 2 * width]`` float32, float16 or bfloat16, ``width`` a multiple of 16.
        input_global_scale: as ``input_scale`` there.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation()
def scaled_fp4_experts_quant(
    output: Array,
    output_scale: Array,
    input: Array,
    input_global_scale: Array,
    input_offset_by_experts: Array,
    output_scale_offset_by_experts: Array,
    *,
    stream: Stream = None,
) -> None:
    """Compute :func:`scaled_fp4_quant` for the rows of experts, with swizzled scales of each expert's own.

    Args:
        output: ``[rows, width / 2]`` uint8; written.
        output_scale: ``[scale_rows, n]`` float8_e4m3fn or uint8, with ``n`` the blocks of a row, rounded up to a
            multiple of 4; or int32 as four bytes each; contiguous; written, with zeros up to the next multiple of 128
            rows behind those of an expert.
        input: ``[rows, width]`` float32, float16 or bfloat16, ``width`` a multiple of 16; the rows of one expert after
            those of another.
        input_global_scale: ``[experts]`` float32: the global scale of each.
        input_offset_by_experts: ``[experts + 1]`` int32 or int64: where an expert's rows begin.  Rows that are no
            expert's are not written.
        output_scale_offset_by_experts: ``[experts + 1]`` int32 or int64: where its rows of ``output_scale`` begin,
            multiples of 128.  Rows for which these lie outside are reported, and not written.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation()
def silu_and_mul_scaled_fp4_experts_quant(
    output: Array,
    output_scale: Array,
    input: Array,
    input_global_scale: Array,
    input_offset_by_experts: Array,
    output_scale_offset_by_experts: Array,
    *,
    stream: Stream = None,
) -> None:
    """Compute :func:`silu_and_mul` and :func:`scaled_fp4_experts_quant` of it.

    ``input`` is ``[rows, 2 * width]``; all else is as there.
    """


@operation(output=_codes("float8_e4m3fn"), output_scale=_block_scales("uint8", 32))
def mxfp8_quantize(
    output: Array,
    output_scale: Array,
    input: Array,
    is_sf_swizzled_layout: bool = False,
    scale_mode: str = "ceil",
    *,
    stream: Stream = None,
) -> None:
    """Quantise to mxfp8: fp8 codes in blocks of 32 neighbours, whose scale is a power of two.

    Args:
        output: ``[..., width]`` float8_e4m3fn, uint8 (which holds it) or float8_e5m2, shape of ``input``; written.
        output_scale: ``[..., width / 32]`` uint8, any strides, or swizzled as of :func:`scaled_fp4_quant`; written.  A
            scale is ``2**(byte - 127)``.
        input: ``[..., width]`` float32, float16 or bfloat16, ``width`` a multiple of 32.
        is_sf_swizzled_layout: as there.
        scale_mode: ``"ceil"``: the least power for which no number is too large; ``"ocp"``:
            ``2**(floor(log2(m)) - e)`` with ``m = max(abs(block))`` and ``e`` the exponent of the largest code, for
            which numbers up to twice too large saturate; ``"vllm"``: ``2**floor(log2(m))``, as vLLM has it.  Blocks of
            zeros have the byte 0, in the last mode 1.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or the mode do not fit.
        TypeError: dtypes do not fit.
    """


@operation(output=_nibbles(), output_scale=_block_scales("uint8", 32))
def mxfp4_quantize(
    output: Array,
    output_scale: Array,
    input: Array,
    is_sf_swizzled_layout: bool = False,
    scale_mode: str = "ocp",
    *,
    stream: Stream = None,
) -> None:
    """Quantise to mxfp4: four-bit floats (e2m1) in blocks of 32 neighbours, whose scale is a power of two.

    Args:
        output: ``[..., width / 2]`` uint8, as of :func:`scaled_fp4_quant`; written.
        output_scale: as of :func:`mxfp8_quantize`; written.
        input: as there.
        is_sf_swizzled_layout: as there.
        scale_mode: as there; ``"vllm"``: ``2**floor(log2(m / 6))``, as vLLM 0.22 has it.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or the mode do not fit.
        TypeError: dtypes do not fit.
    """


@operation()
def mxfp4_experts_quant(
    output: Array,
    output_scale: Array,
    input: Array,
    input_offset_by_experts: Array,
    output_scale_offset_by_experts: Array,
    n_experts: int = 0,
    scale_mode: str = "ocp",
    *,
    stream: Stream = None,
) -> None:
    """Compute :func:`mxfp4_quantize` for the rows of experts, with swizzled scales of each expert's own.

    Args:
        output: ``[rows, width / 2]`` uint8; written.
        output_scale: ``[scale_rows, n]`` uint8, with ``n`` the blocks of a row, rounded up to a multiple of 4; all else
            as of :func:`scaled_fp4_experts_quant`.
        input: ``[rows, width]`` float32, float16 or bfloat16, ``width`` a multiple of 32.
        input_offset_by_experts: as there.
        output_scale_offset_by_experts: as there.
        n_experts: how many there are; 0: one less than offsets.
        scale_mode: as of :func:`mxfp4_quantize`.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or the mode do not fit.
        TypeError: dtypes do not fit.
    """


@operation()
def silu_and_mul_mxfp4_experts_quant(
    output: Array,
    output_scale: Array,
    input: Array,
    input_offset_by_experts: Array,
    output_scale_offset_by_experts: Array,
    n_experts: int = 0,
    scale_mode: str = "ocp",
    *,
    stream: Stream = None,
) -> None:
    """Compute :func:`silu_and_mul` and :func:`mxfp4_experts_quant` of it.

    ``input`` is ``[rows, 2 * width]``; all else is as there.
    """


@operation()
def mxfp8_experts_quant(
    input: Array,
    problem_sizes: Array,
    expert_offsets: Array,
    blockscale_offsets: Array,
    quant_output: Array,
    scale_factor: Array,
    scale_mode: str = "ceil",
    *,
    stream: Stream = None,
) -> None:
    """Compute :func:`mxfp8_quantize` for the rows of experts, with swizzled scales of each expert's own.

    Args:
        input: ``[rows, width]`` float32, float16 or bfloat16, ``width`` a multiple of 32.
        problem_sizes: ``[experts, 3]`` int32: how many rows an expert has, and two numbers that are not read.
        expert_offsets: ``[experts]`` int32 or int64, rising: where its rows begin.  Rows that are no expert's are not
            written.
        blockscale_offsets: ``[experts]`` int32 or int64: where its rows of ``scale_factor`` begin, multiples of 128.
            Rows for which these lie outside are reported, and not written.
        quant_output: ``[rows, width]`` float8_e4m3fn, uint8 (which holds it) or float8_e5m2; written.
        scale_factor: ``[scale_rows, n]`` uint8, with ``n`` the blocks of a row, rounded up to a multiple of 4; or int32
            as four bytes each; contiguous; written, with zeros up to the next multiple of 128 rows behind those of an
            expert.
        scale_mode: as of :func:`mxfp8_quantize`.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or the mode do not fit.
        TypeError: dtypes do not fit.
    """


@operation(out=half_rows_of("input", "float8_e4m3fn"))
def situ_and_mul_quant(
    out: Array,
    scale: Array,
    input: Array,
    beta: float = 1.0,
    linear_beta: float = -1.0,
    group_size: int = 128,
    num_valid_tokens: Array | None = None,
    topk: int = 1,
    *,
    stream: Stream = None,
) -> None:
    """Compute :func:`situ_and_mul` and :func:`per_token_group_fp8_quant` of it, with an ``eps`` of 1e-30.

    Args:
        out: ``[rows, width]`` float8_e4m3fn, uint8 (which holds it) or float8_e5m2; written.
        scale: ``[rows, width / group_size]`` float32, any strides; written.
        input: ``[rows, 2 * width]`` float32, float16 or bfloat16.
        beta: as of :func:`situ_and_mul`.
        linear_beta: as there.
        group_size: any that divides ``width``.
        num_valid_tokens: int32 or int64, one element, on the device.  Rows from that times ``topk`` on are not written,
            and their scales become 1.
        topk: rows of a token.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or numbers do not fit.
        TypeError: dtypes do not fit.
    """


@operation()
def persistent_masked_m_silu_mul_quant(
    input: Array,
    counts: Array,
    y_q: Array,
    y_s: Array,
    use_ue8m0: bool = False,
    group_size: int = 128,
    *,
    stream: Stream = None,
) -> None:
    """Compute :func:`silu_and_mul` and :func:`per_token_group_fp8_quant` of it for the first rows of each expert.

    Args:
        input: ``[experts, rows, 2 * width]`` float32, float16 or bfloat16.
        counts: ``[experts]`` int32 or int64: how many rows of each; others are not written.
        y_q: ``[experts, rows, width]`` float8_e4m3fn, uint8 (which holds it) or float8_e5m2; written.
        y_s: ``[experts, rows, width / group_size]`` float32, any strides; written.  With ``use_ue8m0`` it may be
            ``[experts, rows, ceil(width / group_size / 4)]`` int32, as of :func:`per_token_group_fp8_quant_packed`.
        use_ue8m0: scales are powers of two.
        group_size: any that divides ``width``.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or numbers do not fit.
        TypeError: dtypes do not fit.
    """
