"""Matrix products with packed weights, and of 8-bit matrices with scales.

A weight is packed once, on the host, by the function of its source, such as ``w = pack_awq(qweight, qzeros, scales)``.
Scales of bfloat16 are packed as float16 where that holds all of them exactly.
Then ``pykv.packed_gemm(out, x, w.data, w.format)`` is ``out = x @ W.T``.  Any sizes will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pykv._schema import Rule, Spec, operation
from pykv._types import Array, ScalarOrArray, Stream
from pykv.packed_gguf import E2M1, pack_gguf
from pykv.packed_weight import (
    WORDS,
    Factor,
    Host,
    PackedWeight,
    assemble,
    checked,
    float32,
    in_bfloat16,
    in_order_of_rows,
    integers,
    plain_scales,
    whole,
    zero_points,
)

__all__ = [
    "NF4",
    "PackedWeight",
    "cutlass_scaled_fp4_mm",
    "cutlass_scaled_mm",
    "cutlass_scaled_mm_azp",
    "dsv3_fused_a_gemm",
    "dsv3_router_gemm",
    "fp32_router_gemm",
    "grouped_scaled_mm",
    "interleave_halves",
    "pack_awq",
    "pack_compressed_tensors",
    "pack_fp8",
    "pack_gguf",
    "pack_gptq",
    "pack_integers",
    "pack_mxfp4",
    "pack_nf4",
    "pack_nvfp4",
    "packed_gemm",
    "stack_packed",
]

NF4: Final = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


@Rule
def _product(arguments: Mapping[str, Any]) -> Spec:
    x = arguments["x"]
    n, _ = PackedWeight(None, arguments["format"]).shape
    dtype = x.dtype if arguments["out_scale"] is None else "float8_e4m3fn"
    return Spec((x.shape[0], n // 2 if arguments["activation"] else n), dtype)


@operation(out=_product)
def packed_gemm(
    out: Array,
    x: Array,
    weight: Array,
    format: str,
    bias: Array | None = None,
    token_scales: Array | None = None,
    channel_scales: Array | None = None,
    activation: str = "",
    residual: Array | None = None,
    out_scale: ScalarOrArray | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Multiply the rows of ``x`` by a packed weight: ``out = token_scales * (channel_scales * (x @ W.T)) + bias``.

    Codes are multiplied exactly and summed in fp32; the sum over a group of columns is multiplied by its scale, and the
    result is rounded once.  Weights of NF4, and on Hopper those of GGUF and integers that are like them (with minima,
    with float16 scales in groups of 16 or 32, or in four bits without zero points where ``x`` is bfloat16), are rounded
    to the dtype of ``x`` before.  A row of ``out`` has the same bits however many rows there are.  A weight is packed
    once by the function of its source: :func:`pykv.gemm.pack_awq`, ``pack_gptq``, ``pack_gguf`` and others of that
    module.

    With an ``activation`` neighbours ``a, b`` of a row become ``activation(a) * b``; then ``residual`` is added, all in
    fp32.  Rows of the two projections take turns in such a weight: :func:`pykv.gemm.interleave_halves` puts them so.

    Args:
        out: ``[num_rows, n]``, or with an activation ``[num_rows, n / 2]``, dtype of ``x``, or with ``out_scale``
            float8_e4m3fn, uint8 (which holds it) or int8; written.  The elements of a row lie side by side, rows may be
            strided.  The functional forms make float8_e4m3fn with ``out_scale``.
        x: ``[num_rows, k]`` float16 or bfloat16, any strides.  It is read fastest where the elements of a row lie
            side by side.
        weight: ``[bytes]`` uint8, contiguous: :attr:`PackedWeight.data <pykv.packed_weight.PackedWeight.data>`.
        format: ``PackedWeight.format``, which holds ``n`` and ``k``.
        bias: ``[n]``, dtype of ``x``.  ``None``: none.
        token_scales: float32, one element or ``num_rows``.  ``None``: 1.
        channel_scales: float32, one element or ``n``.  ``None``: 1.
        activation: "silu", "gelu" or "gelu_tanh" of pairs, for an even ``n``; "": none.
        residual: of the shape of ``out``, dtype of ``x``; may be ``out`` itself.  ``None``: none.
        out_scale: one number: ``out`` is the code nearest to the result ``* (1 / out_scale)``, ties to even, the last
            one where it is too large; NaN becomes 448, or 0 of int8.  ``None``: ``out`` holds numbers.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices, the format or the activation do not fit.
        TypeError: dtypes do not fit.
    """


@Rule
def _scaled_product(arguments: Mapping[str, Any]) -> Spec:
    bias = arguments["bias"]
    shape = (arguments["a"].shape[0], arguments["b"].shape[1])
    return Spec(shape, "bfloat16" if bias is None else bias.dtype)


@operation(out=_scaled_product)
def cutlass_scaled_mm(
    out: Array,
    a: Array,
    b: Array,
    a_scales: ScalarOrArray,
    b_scales: ScalarOrArray,
    bias: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Multiply 8-bit matrices with scales: ``out = a_scales * (b_scales * (a @ b)) + bias``, rounded once.

    Sums of int8 are exact, in int32, which holds any up to ``k = 131071``.  Those of float8_e4m3fn are fp32 over
    blocks of 128 of ``k``, added in order: a row of ``out`` has the same bits however many rows there are.

    Scales of blocks: ``out = sum(a_scales[:, i] * b_scales[i, n // 128] * (a @ b over block i)) + bias``.  Scales
    are taken for these unless they have one element, or one for each row or column.  A scale of one element may lie
    on the host, such as a Python number; on CUDA it takes a launch of its own.

    Args:
        out: ``[num_rows, n]`` float32, float16 or bfloat16; written.  The elements of a row lie side by side, rows
            may be strided.  The functional forms make the dtype of ``bias``, or bfloat16.
        a: ``[num_rows, k]`` float8_e4m3fn (or uint8, which holds it) or int8, any strides.
        b: ``[k, n]``, dtype of ``a``, any strides.  Both are read fastest where neighbours of ``k`` lie side by side,
            as in ``w.T`` of a contiguous weight ``[n, k]``, and ``k`` is a multiple of 16.
        a_scales: float32, one element or ``num_rows``; or of blocks, ``[num_rows, ceil(k / 128)]`` float32 or uint8,
            then ``2 ** (byte - 127)``; or ``[num_rows, ceil(ceil(k / 128) / 4)]`` int32, four of these bytes, as
            :func:`per_token_group_fp8_quant_packed` makes them.  Any strides.
        b_scales: float32, one element or ``n``; or of blocks, ``[ceil(k / 128), ceil(n / 128)]`` float32 or uint8.
        bias: ``[n]`` or ``[1, n]``, dtype of ``out``.  ``None``: none.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(out=_scaled_product)
def cutlass_scaled_mm_azp(
    out: Array,
    a: Array,
    b: Array,
    a_scales: ScalarOrArray,
    b_scales: ScalarOrArray,
    azp_adj: Array,
    azp: Array | None = None,
    bias: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Multiply int8 matrices where ``a`` has zero points.

    ``out = a_scales * (b_scales * (a @ b - azp * azp_adj)) + bias``, of which the inner brackets are exact.

    Args:
        out: ``[num_rows, n]`` float32, float16 or bfloat16; written.  The elements of a row lie side by side, rows
            may be strided.  The functional forms make the dtype of ``bias``, or bfloat16.
        a: ``[num_rows, k]`` int8, any strides.
        b: ``[k, n]`` int8, any strides, as in :func:`cutlass_scaled_mm`.
        a_scales: float32, one element or ``num_rows``.
        b_scales: float32, one element or ``n``.
        azp_adj: ``[n]`` or ``[1, n]`` int32: sums of the columns of ``b``; where ``azp`` is ``None``, these times the
            zero point of all.
        azp: ``[num_rows]`` or ``[num_rows, 1]`` int32: the zero point of each row.
        bias: ``[n]`` or ``[1, n]``, dtype of ``out``.  ``None``: none.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(out=Rule(lambda a: Spec((*a["a"].shape[:-1], a["b"].shape[2]), "bfloat16")))
def grouped_scaled_mm(
    out: Array,
    a: Array,
    b: Array,
    a_scales: ScalarOrArray,
    b_scales: Array,
    row_groups: Array | None = None,
    group_begins: Array | None = None,
    group_sizes: Array | None = None,
    expected_rows: int = 0,
    *,
    stream: Stream = None,
) -> None:
    """Multiply rows in groups by the matrix of their group: :func:`cutlass_scaled_mm` with several ``b``.

    Rows of no group are not written.  A row of ``out`` has the same bits whatever the others are.  Which rows a group
    has is told in one of three ways, by int32 or int64 arrays on the device:

    - ``row_groups``: each row has a group, the same for 128 neighbours.
    - ``group_begins``, or with it ``group_sizes``: groups lie one after another.
    - ``group_sizes`` alone: each group has the first rows of a matrix of its own.

    Args:
        out: ``[num_rows, n]`` float32, float16 or bfloat16; written.  ``[groups, num_rows, n]`` with ``group_sizes``
            alone.  The elements of a row lie side by side.  The functional forms make bfloat16.
        a: ``[num_rows, k]`` float8_e4m3fn (or uint8, which holds it) or int8; ``[groups, num_rows, k]`` with
            ``group_sizes`` alone.  Any strides.
        b: ``[groups, k, n]``, dtype of ``a``, any strides; at most 512 groups.  It is read fastest as the last two
            axes of a weight ``[groups, n, k]``, exchanged.
        a_scales: float32, one element or ``[num_rows]`` (``[groups, num_rows]``); or of blocks, ``[num_rows,
            ceil(k / 128)]`` (``[groups, num_rows, ceil(k / 128)]``) float32 or uint8, or four of these in an int32, as
            in :func:`cutlass_scaled_mm`.  Any strides.
        b_scales: float32, ``[groups]``, ``[groups, 1]`` or ``[groups, n]``; or of blocks, ``[groups, ceil(k / 128),
            ceil(n / 128)]`` float32 or uint8.
        row_groups: ``[num_rows]``: the group of each row, which is that of the first of its 128 neighbours.  Rows of
            another are skipped.
        group_begins: where the rows of each group begin, ``[groups]``, or ``[groups + 1]`` without ``group_sizes``.
        group_sizes: ``[groups]``: how many rows there are.  Or ``[groups, 3]``: ``(rows, n, k)`` or ``(n, rows, k)``.
        expected_rows: how many rows a group may have, which chooses the kernel and changes no result.  0: as many as
            there are on average.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit; or (CPU) a group or its rows were out of range.
        TypeError: dtypes do not fit.
    """


def _product_of_rows(a: str, b: str, dtype: str | None = None) -> Rule:
    """Of rows of ``a`` with rows of ``b``."""

    def make(arguments: Mapping[str, Any]) -> Spec:
        return Spec((arguments[a].shape[0], arguments[b].shape[0]), dtype or arguments[a].dtype)

    return Rule(make)


@operation(out=_product_of_rows("a", "b", "bfloat16"))
def cutlass_scaled_fp4_mm(
    out: Array,
    a: Array,
    b: Array,
    block_scale_a: Array,
    block_scale_b: Array,
    alpha: ScalarOrArray,
    *,
    stream: Stream = None,
) -> None:
    """Multiply nvfp4 matrices: ``out = alpha * (a * block_scale_a) @ (b * block_scale_b).T``.

    Products are exact, sums are fp32, and the result is rounded once.  A row of ``out`` has the same bits however many
    rows there are.  Weights stay four bits: they are decoded on the way.

    Args:
        out: ``[num_rows, n]`` float32, float16 or bfloat16; written.  The elements of a row lie side by side, rows may
            be strided.  The functional forms make bfloat16.
        a: ``[num_rows, k / 2]`` uint8, any strides: e2m1 codes, the first of two in the lower half; ``k`` is a
            multiple of 16.
        b: ``[n, k / 2]`` uint8, any strides.
        block_scale_a: float8_e4m3fn (or uint8, which holds it), contiguous, for each 16 neighbours of a row: in tiles
            of 128 rows and four scales, padded to whole ones, as in :func:`nvfp4_dequantize`.  The padding may be any.
        block_scale_b: the same of ``b``.
        alpha: float32, one number.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(output=Rule(lambda a: Spec((a["mat_a"].shape[0], a["mat_b"].shape[1]), a["mat_a"].dtype)))
def dsv3_fused_a_gemm(output: Array, mat_a: Array, mat_b: Array, *, stream: Stream = None) -> None:
    """Multiply few rows by a matrix: ``output = mat_a @ mat_b``, with sums in fp32.

    Any sizes will do; it is made for up to 16 rows.  A row of ``output`` has the same bits however many rows there are.

    Args:
        output: ``[num_rows, n]`` float32, float16 or bfloat16; written.  The elements of a row lie side by side, rows
            may be strided.
        mat_a: ``[num_rows, k]`` float16 or bfloat16, any strides.
        mat_b: ``[k, n]``, dtype of ``mat_a``, any strides.  Both are read fastest where neighbours of ``k`` lie side by
            side, as in ``w.T`` of a weight ``[n, k]``.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(output=_product_of_rows("hidden_states", "router_weight", "float32"))
def dsv3_router_gemm(output: Array, hidden_states: Array, router_weight: Array, *, stream: Stream = None) -> None:
    """Logits of a router: ``output = hidden_states @ router_weight.T``, with sums in fp32.

    Args:
        output: ``[num_rows, num_experts]`` float32, float16 or bfloat16; written.  The elements of a row lie side by
            side, rows may be strided.  The functional forms make float32.
        hidden_states: ``[num_rows, k]`` float16 or bfloat16, any strides.
        router_weight: ``[num_experts, k]``, the same dtype, any strides.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(output=_product_of_rows("a", "b", "float32"))
def fp32_router_gemm(output: Array, a: Array, b: Array, *, stream: Stream = None) -> None:
    """Logits of a router whose weight is float32: ``output = a @ b.T`` in fp32.

    Args:
        output: ``[num_rows, num_experts]`` float32; written.  The elements of a row lie side by side, rows may be
            strided.
        a: ``[num_rows, k]`` float32, float16 or bfloat16, any strides.
        b: ``[num_experts, k]`` float32, any strides.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


_INTEGERS: Final = [f"{sign}{bits}" for sign in ("uint", "int") for bits in (8, 16, 32, 64)]


def pack_integers(
    codes: Array, scales: Array, zeros: Array | None = None, *, group_size: int = -1, bits: int = 4
) -> PackedWeight:
    """Pack ``w = scale * (code - zero)``: unpacked integers of any source.

    Args:
        codes: ``[n, k]`` integers, 0 to ``2 ** bits - 1``.
        scales: ``[n, groups]`` float16, bfloat16 or float32.
        zeros: ``[n, groups]`` integers; ``None``: ``2 ** (bits - 1)``.
        group_size: columns that share a scale; -1: all.
        bits: 2 to 6, or 8.  Up to four they are stored in four, above in eight.

    Raises:
        ValueError: shapes, codes, ``group_size`` or ``bits`` do not fit.
        TypeError: dtypes do not fit.
    """
    bits, group_size = whole("bits", bits), whole("group_size", group_size)
    if bits not in (2, 3, 4, 5, 6, 8):
        raise ValueError(f"bits: must be 2 to 6, or 8, got {bits}")
    if group_size != -1 and group_size < 1:
        raise ValueError(f"group_size: must be positive, or -1, got {group_size}")
    q = checked("codes", codes, _INTEGERS, (None, None))
    if q.size and not 0 <= int(q.min()) <= int(q.max()) < 1 << bits:
        raise ValueError(f"codes: must be 0 to {(1 << bits) - 1}, got {q.min()} to {q.max()}")
    if group_size == -1:
        group_size = max(1, q.shape[1])
    shape = (q.shape[0], -(-q.shape[1] // group_size))
    factor = plain_scales("scales", scales, shape)
    z = None if zeros is None else checked("zeros", zeros, _INTEGERS, shape).astype(np.int64)
    return integers(q, factor, _minima(z, bits, factor), group_size, bits)


def pack_awq(qweight: Array, qzeros: Array, scales: Array) -> PackedWeight:
    """Pack a weight of AWQ.

    Args:
        qweight: ``[k, n / 8]`` int32, the columns of eight in the order 0, 2, 4, 6, 1, 3, 5, 7.
        qzeros: ``[groups, n / 8]`` int32.
        scales: ``[groups, n]`` float16, bfloat16 or float32, where ``groups`` divides ``k``.

    Raises:
        ValueError: shapes do not fit.
        TypeError: dtypes do not fit.
    """
    words = checked("qweight", qweight, WORDS, (None, None))
    k, n = words.shape[0], 8 * words.shape[1]
    factor = _of_columns(scales, n, "qweight", words)
    groups = len(factor.values)
    size = _equal_groups(groups, k)
    z = nibbles_of_awq(checked("qzeros", qzeros, WORDS, (groups, n // 8))).T.astype(np.int64)
    factor = factor._replace(values=factor.values.T)
    return integers(nibbles_of_awq(words).T, factor, zero_points(z, 4, factor), size, 4)


def pack_gptq(
    qweight: Array, qzeros: Array | None, scales: Array, g_idx: Array | None = None, *, bits: int = 4, v2: bool = False
) -> PackedWeight:
    """Pack a weight of GPTQ; with act-order ``packed_gemm`` takes the columns of ``x`` in the order of groups.

    Args:
        qweight: ``[k * bits / 32, n]`` int32, the bits of a column one after another.
        qzeros: ``[groups, n * bits / 32]`` int32; ``None``: ``2 ** (bits - 1)`` everywhere.
        scales: ``[groups, n]`` float16, bfloat16 or float32.  Without ``g_idx``, ``groups`` divides ``k``.
        g_idx: ``[k]`` integers, the group of each row; ``None``, or empty: ``row // (k / groups)``.
        bits: 2, 3, 4 or 8.
        v2: zeros are stored as they are, not less one.

    Raises:
        ValueError: shapes, groups or ``bits`` do not fit.
        TypeError: dtypes do not fit.
    """
    bits = whole("bits", bits)
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"bits: must be 2, 3, 4 or 8, got {bits}")
    words = checked("qweight", qweight, WORDS, (None, None))
    rows, n = words.shape
    if 32 * rows % bits:
        raise ValueError(f"qweight: dimension 0 must be a multiple of bits = {bits}, got shape {[rows, n]}")
    factor = _of_columns(scales, n, "qweight", words)
    groups, z = len(factor.values), None
    owners = None if g_idx is None else checked("g_idx", g_idx, _INTEGERS, (None,))
    if owners is None or not len(owners):
        _equal_groups(groups, 32 * rows // bits)  # before zero points, whose shape follows from it
    if qzeros is not None:
        if n * bits % 32:
            raise ValueError(f"qweight: columns must fill words of qzeros, got {n} of {bits} bits")
        z = bit_stream(checked("qzeros", qzeros, WORDS, (groups, n * bits // 32)).T, bits)
        z = z.astype(np.int64) + (0 if v2 else 1)
    return pack_in_groups(bit_stream(words, bits), z, factor, owners, bits=bits)


def _of_columns(scales: Array, n: int, name: str, words: Host) -> Factor:
    """Scales ``[groups, n]`` beside these words: one of the two may have been transposed."""
    factor = plain_scales("scales", scales, (None, None))
    if factor.values.shape[1] != n:
        given = f"{list(factor.values.shape)} beside {name} {list(words.shape)}"
        raise ValueError(f"scales: must have shape [any, {n}], got {given}")
    return factor


def _minima(zeros: Host | None, bits: int, scales: Factor) -> Factor | None:
    return None if zeros is None else zero_points(zeros, bits, scales)


def _equal_groups(groups: int, k: int) -> int:
    """Rows of each of so many groups."""
    if k and (not groups or k % groups):
        raise ValueError(f"scales: must have as many rows as there are equal groups of the {k} rows, got {groups}")
    return max(1, k // max(1, groups))


def pack_compressed_tensors(
    weight_packed: Array,
    weight_scale: Array,
    weight_zero_point: Array | None = None,
    weight_g_idx: Array | None = None,
    *,
    shape: tuple[int, int],
    bits: int = 4,
) -> PackedWeight:
    """Pack a weight that compressed-tensors stores as ``pack-quantized``.

    Args:
        weight_packed: ``[n, ceil(k * bits / 32)]`` int32, codes of a row in order; ``2 ** (bits - 1)`` is zero.
        weight_scale: ``[n, groups]`` float16, bfloat16 or float32; ``groups`` must divide ``k``.
        weight_zero_point: ``[ceil(n * bits / 32), groups]`` int32, codes of a column one after another; ``None``: 0.
        weight_g_idx: ``[k]``, the group of each column, where they are in no order; all -1 is like ``None``.
        shape: ``(n, k)``, what the file has as ``weight_shape``.
        bits: 4 or 8.

    Raises:
        ValueError: shapes, groups or ``bits`` do not fit.
        TypeError: dtypes do not fit.
    """
    bits = whole("bits", bits)
    if bits not in (4, 8):
        raise ValueError(f"bits: must be 4 or 8, got {bits}")
    n, k = _pair("shape", tuple(shape) if hasattr(shape, "__array__") else shape)  # of the file: an array
    codes = checked("weight_packed", weight_packed, WORDS, (n, -(-k * bits // 32)))
    scales = plain_scales("weight_scale", weight_scale, (n, None))
    groups = scales.values.shape[1]
    zeros = group_of = None
    if weight_zero_point is not None:
        zeros = checked("weight_zero_point", weight_zero_point, WORDS, (-(-n * bits // 32), groups))
    if weight_g_idx is not None:
        group_of = checked("weight_g_idx", weight_g_idx, _INTEGERS, (k,))
    if group_of is not None and (group_of == -1).all():
        group_of = None
    if group_of is None and (groups == 0 or k % groups):
        raise ValueError(f"weight_scale: its {groups} groups must divide {k} columns")
    z = None if zeros is None else bit_stream(zeros, bits)[:n].astype(np.int64)
    factor = scales._replace(values=scales.values.T)
    return pack_in_groups(bit_stream(codes.T, bits)[:k], z, factor, group_of, bits=bits)


def pack_in_groups(
    codes: Host, zeros: Host | None, scales: Factor, group_of: Host | None, *, bits: int
) -> PackedWeight:
    """Pack unpacked integers ``[k, n]`` whose rows may belong to groups in any order.

    Args:
        codes: ``[k, n]``, 0 to ``2 ** bits - 1``.
        zeros: ``[n, groups]``; ``None``: ``2 ** (bits - 1)``.
        scales: ``[groups, n]``.
        group_of: ``[k]``; ``None``, or empty: groups of the same size in order.
        bits: as stored in ``codes``.
    """
    factor = scales._replace(values=scales.values.T)
    n, groups = factor.values.shape
    z = np.full((n, groups), 1 << (bits - 1)) if zeros is None else zeros
    group_size = max(1, -(-codes.shape[0] // max(1, groups)))
    if group_of is None or not len(group_of):
        _equal_groups(groups, codes.shape[0])
    elif len(group_of) != codes.shape[0]:
        raise ValueError(f"g_idx: must have a group for each of the {codes.shape[0]} rows, got {len(group_of)}")
    else:
        owners = group_of.astype(np.int64)
        if (owners != np.arange(len(owners)) // group_size).any():
            return _in_order_of_groups(codes.T, factor, z, owners, bits)
    return integers(codes.T, factor, zero_points(z, bits, factor), group_size, bits)


def pack_fp8(weight: Array, scale: Array | float, *, block: tuple[int, int] | None = None) -> PackedWeight:
    """Pack a weight of float8_e4m3fn for 16-bit activations.

    Args:
        weight: ``[n, k]`` float8_e4m3fn, or uint8 that holds it; without NaN.
        scale: float32, float16 or bfloat16: one for all, ``[n]`` or ``[n, 1]``, or with ``block`` one for each.
        block: rows and columns that share a scale, such as ``(128, 128)``.

    Raises:
        ValueError: shapes or ``block`` do not fit, or there is NaN.
        TypeError: dtypes do not fit.
    """
    codes = checked("weight", weight, ["float8_e4m3fn", "uint8"], (None, None))
    n, k = codes.shape
    s = float32("scale", scale)
    if block is None:
        if s.size not in (1, n):
            raise ValueError(f"scale: must have one element or {n}, got shape {list(s.shape)}")
        scales, group_size = np.broadcast_to(s.reshape(-1, 1), (n, 1)), max(1, k)
    else:
        rows, group_size = _pair("block", block)
        if min(rows, group_size) < 1:
            raise ValueError(f"block: must be positive, got {(rows, group_size)}")
        wanted = (-(-n // rows), -(-k // group_size))
        if s.shape != wanted:
            raise ValueError(f"scale: must have shape {list(wanted)} for blocks of {block}, got {list(s.shape)}")
        scales = np.repeat(s, rows, axis=0)[:n]
    return assemble(codes, "e4m3", Factor("f32", scales), None, group_size)


def pack_nvfp4(weight: Array, scales: Array, global_scale: Array | float = 1.0) -> PackedWeight:
    """Pack a weight of nvfp4: e2m1 codes with a float8_e4m3fn scale for every 16.

    Args:
        weight: ``[n, k / 2]`` uint8, the first of two codes in the lower bits.
        scales: ``[n, k / 16]`` float8_e4m3fn, or uint8 that holds it, in rows: not swizzled; without NaN.
        global_scale: multiplies them; one number.

    Raises:
        ValueError: shapes do not fit, or there is NaN.
        TypeError: dtypes do not fit.
    """
    codes, factor = _codes_of_4(weight, scales, 16, "e4m3", ["float8_e4m3fn", "uint8"])
    number = float32("global_scale", global_scale)
    if number.size != 1:
        raise ValueError(f"global_scale: must have one element, got shape {list(number.shape)}")
    return assemble(codes, "t4", factor, None, 16, table=E2M1, global_scale=float(number.reshape(())))


def pack_mxfp4(weight: Array, scales: Array) -> PackedWeight:
    """Pack a weight of mxfp4: e2m1 codes with a power of two for every 32.

    Args:
        weight: ``[n, k / 2]`` uint8, the first of two codes in the lower bits.
        scales: ``[n, k / 32]`` uint8, or float8_e8m0fnu: 127 more than the exponent; not 255, which is NaN.

    Raises:
        ValueError: shapes do not fit, or there is NaN.
        TypeError: dtypes do not fit.
    """
    codes, factor = _codes_of_4(weight, scales, 32, "e8m0", ["uint8", "float8_e8m0fnu"])
    return assemble(codes, "t4", factor, None, 32, table=E2M1)


def pack_nf4(weight: Array, absmax: Array, shape: tuple[int, int], *, block_size: int = 64) -> PackedWeight:
    """Pack a weight of bitsandbytes' NF4.  Its table is rounded to the dtype of x.

    Args:
        weight: uint8, ``n * k / 2`` of them in any shape, the first of two codes in the upper bits.
        absmax: float32, ``n * k / block_size`` of them in any shape; not quantised itself.
        shape: ``(n, k)``; ``k`` is a multiple of ``block_size``.
        block_size: codes that share a scale.

    Raises:
        ValueError: shapes or ``block_size`` do not fit.
        TypeError: dtypes do not fit.
    """
    (n, k), block_size = _pair("shape", shape), whole("block_size", block_size)
    if min(n, k) < 0:
        raise ValueError(f"shape: must not be negative, got {(n, k)}")
    if block_size < 1:
        raise ValueError(f"block_size: must be positive, got {block_size}")
    if k % block_size:
        raise ValueError(f"shape: columns must be a multiple of block_size = {block_size}, got {k}")
    pairs = _elements("weight", weight, "uint8", n * k // 2)
    scales = _elements("absmax", absmax, "float32", n * k // block_size)
    codes = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(n, k)
    factor = Factor("f32", scales.reshape(n, k // block_size))
    return assemble(codes, "t4", factor, None, block_size, table=NF4)


def _codes_of_4(weight: Array, scales: Array, group_size: int, kind: str, dtypes: list[str]) -> tuple[Host, Factor]:
    """Codes one by one, ``[n, k]``, and their scales."""
    pairs = checked("weight", weight, ["uint8"], (None, None))
    n, half = pairs.shape
    values = checked("scales", scales, dtypes, (n, -(-2 * half // group_size)))
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(n, 2 * half), Factor(kind, values)


def _elements(name: str, array: Array, dtype: str, size: int) -> Host:
    """All of them, whatever the shape."""
    given = checked(name, array, [dtype], None)
    if given.size != size:
        raise ValueError(f"{name}: must have {size} elements, got shape {list(given.shape)}")
    return given.reshape(-1)


def _pair(name: str, pair: Sequence[int]) -> tuple[int, int]:
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise ValueError(f"{name}: must be two integers, got {pair!r}")
    return whole(name, pair[0]), whole(name, pair[1])


def interleave_halves(weight: PackedWeight) -> PackedWeight:
    """Let the rows of both halves of a weight take turns, as ``activation`` of :func:`pykv.packed_gemm` wants them.

    Returns:
        A weight in NumPy.

    Raises:
        ValueError: the number of rows is odd, or it is a stack of weights.
        TypeError: it is no packed weight.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight: must be a PackedWeight, got {type(weight).__name__}")
    checked("weight.data", weight.data, ["uint8"], (None,))
    n, _ = weight.shape
    if n % 2:
        raise ValueError(f"weight: must have an even number of rows, got {n}")
    return in_order_of_rows(weight, np.arange(n).reshape(2, -1).T.ravel())


def stack_packed(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Put weights of one format, those of experts, into one array ``[E, bytes]`` for :func:`pykv.fused_moe`.

    Returns:
        A weight in NumPy.

    Raises:
        ValueError: there are none, or their formats differ, other than by scales of bfloat16 that some of them hold as
            float16.
        TypeError: they are no packed weights.
    """
    if not isinstance(weights, Sequence) or not all(isinstance(w, PackedWeight) for w in weights):
        raise TypeError("weights: must be a sequence of PackedWeight")
    weights = [PackedWeight(checked("weights", w.data, ["uint8"], (None,)), w.format) for w in weights]
    formats = sorted({w.format for w in weights})
    if len(formats) > 1:  # scales of bfloat16: float16 holds those of some weights
        weights = [in_bfloat16(w) for w in weights]
    if len({w.format for w in weights}) != 1:
        raise ValueError(f"weights: must be of one format, got {formats}")
    return PackedWeight(np.stack([w.data for w in weights]), weights[0].format)


def _in_order_of_groups(
    codes: Host, scales: Factor, zeros: Host, group_of: npt.NDArray[np.int64], bits: int
) -> PackedWeight:
    """act-order: columns by group, each padded to a multiple of a size for which all take the fewest bytes."""
    order = np.argsort(group_of, kind="stable")
    groups, counts = np.unique(group_of, return_counts=True)
    if groups[0] < 0 or groups[-1] >= scales.values.shape[1]:
        raise ValueError(f"g_idx: must be 0 to {scales.values.shape[1] - 1}, got {groups[0]} to {groups[-1]}")
    per_step = scales.values.itemsize + 1

    def size_of(step: int) -> float:
        steps = float((-(-counts // step)).sum())
        return steps * (step * (0.5 if bits <= 4 else 1) + per_step)

    step = min((16, 32, 64, 128, max(16, -(-int(counts.max()) // 16) * 16)), key=size_of)
    columns, owner = [], []
    for group, part in zip(groups, np.split(order, np.cumsum(counts)[:-1]), strict=True):
        columns.append(np.concatenate([part, np.full(-len(part) % step, -1)]))
        owner += [group] * (len(columns[-1]) // step)
    factor = scales._replace(values=scales.values[:, owner])
    minima = zero_points(zeros[:, owner], bits, factor)
    return integers(codes, factor, minima, step, bits, columns=np.concatenate(columns))


def check_groups(shape: tuple[int, ...], values: Host, group_size: int, name: str) -> None:
    wanted = (shape[0], -(-shape[1] // group_size))
    if values.shape != wanted:
        raise ValueError(f"{name}: must have shape {list(wanted)}, got {list(values.shape)}")


def nibbles_of_awq(words: Host) -> Host:
    shifts = (4 * np.array([0, 4, 1, 5, 2, 6, 3, 7])).astype(np.uint32)
    return (words.view(np.uint32)[..., None] >> shifts & 15).astype(np.uint8).reshape(len(words), 8 * words.shape[1])


def bit_stream(words: Host, bits: int) -> Host:
    """The fields of each column of words, lowest bits first.

    Raises:
        ValueError: they do not fill the words.
        TypeError: words have no 32 bits.
    """
    if words.dtype.name not in WORDS:
        raise TypeError(f"words of codes: dtype must be int32 or uint32, got {words.dtype}")
    if 32 * words.shape[0] % bits:
        raise ValueError(f"words of codes: {words.shape[0]} of 32 bits hold no whole codes of {bits} bits")
    octets = np.ascontiguousarray(words.T).view(np.uint8)  # [n, bytes]
    stream = np.unpackbits(octets, axis=1, bitorder="little").reshape(len(octets), 8 * octets.shape[1] // bits, bits)
    return np.packbits(stream, axis=2, bitorder="little")[..., 0].T
