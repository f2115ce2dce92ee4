"""Weights that others packed, to floats: GGUF, AWQ, GPTQ; codes of 8 and 4 bits with scales of groups.

And activations as such weights want them: columns in another order, rows times a Hadamard matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pykv._schema import Rule, Spec, like, operation
from pykv._types import Array, ScalarOrArray, Stream

# of GGUF's block formats, by id: elements and bytes of a block
GGUF_BLOCKS: Final[Mapping[int, tuple[int, int]]] = {
    2: (32, 18),  # Q4_0
    3: (32, 20),
    6: (32, 22),  # Q5_0
    7: (32, 24),
    8: (32, 34),  # Q8_0
    9: (32, 36),
    10: (256, 84),  # Q2_K
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    29: (256, 56),  # IQ1_M
    34: (256, 54),  # TQ1_0
    35: (256, 66),
    39: (32, 17),  # MXFP4
    40: (64, 36),  # NVFP4
    41: (128, 18),  # Q1_0
}


def _gguf_elements(arguments: Mapping[str, Any]) -> Spec:
    shape, quant_type = arguments["W"].shape, int(arguments["quant_type"])
    elements, size = GGUF_BLOCKS.get(quant_type, (1, 1))  # the call itself refuses other ids
    return Spec((*shape[:-1], shape[-1] // size * elements), "float16")


@operation(out=Rule(_gguf_elements))
def ggml_dequantize(out: Array, W: Array, quant_type: int, *, stream: Stream = None) -> None:
    """Decode the block formats of GGUF.

    In float32 the result is to the bit that of the Python package ``gguf``; other dtypes are rounded once from it.

    Args:
        out: ``[..., n]`` float32, float16 or bfloat16; written.  The elements of a row lie side by side, rows may be
            strided.  The functional forms make float16.
        W: ``[..., bytes]`` uint8: the blocks of a row one after another, whole ones.  Where ``out`` and ``W`` are
            contiguous, only the number of blocks must agree, not the shapes.
        quant_type: the format's id in GGUF (``gguf.GGMLQuantizationType``): 2 Q4_0, 3 Q4_1, 6 Q5_0, 7 Q5_1, 8 Q8_0,
            9 Q8_1 (36 bytes, as ggml has it), 10 Q2_K, 11 Q3_K, 12 Q4_K, 13 Q5_K, 14 Q6_K, 15 Q8_K, 16 IQ2_XXS,
            17 IQ2_XS, 18 IQ3_XXS, 19 IQ1_S, 20 IQ4_NL, 21 IQ3_S, 22 IQ2_S, 23 IQ4_XS, 29 IQ1_M, 34 TQ1_0, 35 TQ2_0,
            39 MXFP4, 40 NVFP4, 41 Q1_0.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or the format do not fit.
        TypeError: dtypes do not fit.
    """


def _rows_by_columns(arguments: Mapping[str, Any]) -> Spec:
    return Spec((arguments["qweight"].shape[0], arguments["scales"].shape[1]), arguments["scales"].dtype)


@operation(out=Rule(_rows_by_columns))
def awq_dequantize(out: Array, qweight: Array, scales: Array, zeros: Array, *, stream: Stream = None) -> None:
    """Decode AWQ's 4-bit weights: ``out = (code - zero) * scale``, rounded once.

    Elements of a row lie side by side in all arrays; rows may be strided.

    Args:
        out: ``[K, N]`` float32, float16 or bfloat16, ``N`` a multiple of 8; written.
        qweight: ``[K, N / 8]`` int32.  Of columns ``8 c`` to ``8 c + 7`` word ``c`` has column ``2 i`` in nibble ``i``
            and column ``2 i + 1`` in nibble ``i + 4``.
        scales: ``[groups, N]``, dtype of ``out``; row ``k`` belongs to group ``k // (K // groups)``.
        zeros: ``[groups, N / 8]`` int32, packed as ``qweight``.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


def _stream_by_columns(arguments: Mapping[str, Any]) -> Spec:
    (words, columns), dtype = arguments["qweight"].shape, arguments["scales"].dtype
    return Spec((words * 32 // max(1, int(arguments["bits"])), columns), dtype)


@operation(out=Rule(_stream_by_columns))
def gptq_dequantize(
    out: Array,
    qweight: Array,
    qzeros: Array,
    scales: Array,
    g_idx: Array | None = None,
    bits: int = 4,
    use_v2_format: bool = False,
    *,
    stream: Stream = None,
) -> None:
    """Decode GPTQ's weights: ``out = (code - zero) * scale``, rounded once.

    Elements of a row lie side by side in all arrays; rows may be strided.

    Args:
        out: ``[K, N]`` float32, float16 or bfloat16; written.
        qweight: ``[K * bits / 32, N]`` int32: the words of a column are its codes as a stream of bits, lowest first.
        qzeros: ``[groups, N * bits / 32]`` int32: such a stream along the columns.
        scales: ``[groups, N]``, dtype of ``out``.
        g_idx: ``[K]`` int32 or int64, the group of each row (act-order); ``None`` or empty: ``k // (K // groups)``.  A
            row whose group is out of range is not written and reported.
        bits: 2, 3, 4 or 8.
        use_v2_format: zeros are what is stored, else one more.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or ``bits`` do not fit.
        TypeError: dtypes do not fit.
    """


def _floats(codes_per_byte: int) -> Rule:
    def make(arguments: Mapping[str, Any]) -> Spec:
        shape = arguments["input"].shape
        return Spec((*shape[:-1], shape[-1] * codes_per_byte), "float16")

    return Rule(make)


@operation(out=_floats(1))
def fp8_dequantize(
    out: Array,
    input: Array,
    scale: ScalarOrArray,
    group_rows: int = 0,
    group_columns: int = 0,
    *,
    stream: Stream = None,
) -> None:
    """Multiply one-byte floats by their scales, one for each group of rows and columns; rounded once.

    Elements of a row lie side by side in ``out`` and ``input``; other strides are free.

    Args:
        out: ``[rows, columns]`` or ``[matrices, rows, columns]`` float32, float16 or bfloat16; written.  The functional
            forms make float16.
        input: the same shape, float8_e4m3fn (or uint8, which holds it) or float8_e5m2.
        scale: one number; or float32 ``[groups of rows, groups of columns]``, with ``matrices`` in front where ``out``
            has them; or ``[rows]`` (``group_rows=1, group_columns=-1``) or ``[columns]`` (``-1, 1``).  Any strides.
        group_rows: rows that share a scale, the last ones may be fewer; -1: all; 0: what divides evenly.
        group_columns: columns that share a scale, the same way.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(out=_floats(1))
def mxfp8_dequantize(
    out: Array, input: Array, scale: Array, is_sf_swizzled_layout: bool = False, *, stream: Stream = None
) -> None:
    """Multiply one-byte floats by powers of two, one for each 32 neighbours of a row; rounded once.

    Args:
        out: ``[rows, columns]`` or ``[matrices, rows, columns]`` float32, float16 or bfloat16, ``columns`` a multiple
            of 32; written.  The functional forms make float16.
        input: the same shape, float8_e4m3fn (or uint8, which holds it) or float8_e5m2.
        scale: uint8 ``[..., columns / 32]`` (e8m0: ``2**(byte - 127)``, 255 is NaN), any strides.
        is_sf_swizzled_layout: ``scale`` is contiguous and in tiles of 128 rows and 4 groups, padded to whole ones.  The
            byte of row ``r`` and group ``g`` is number
            ``(r // 128 * tiles + g // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + g % 4``, ``tiles`` side by side.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(out=_floats(2))
def mxfp4_dequantize(
    out: Array, input: Array, scale: Array, is_sf_swizzled_layout: bool = False, *, stream: Stream = None
) -> None:
    """Multiply four-bit floats by powers of two; all else as :func:`mxfp8_dequantize`.

    Args:
        out: ``[rows, columns]`` or ``[matrices, rows, columns]`` float32, float16 or bfloat16, ``columns`` a multiple
            of 32; written.
        input: uint8 ``[..., columns / 2]``: e2m1, the element of an even column in the low half of its byte.
        scale: as of :func:`mxfp8_dequantize`.
        is_sf_swizzled_layout: the same.
        stream: CUDA stream; ``None``: the current one of the arrays' library.
    """


@operation(out=_floats(2))
def nvfp4_dequantize(
    out: Array,
    input: Array,
    scale: Array,
    global_scale: ScalarOrArray,
    is_sf_swizzled_layout: bool = True,
    *,
    stream: Stream = None,
) -> None:
    """Multiply four-bit floats by ``scale / global_scale``, in fp32 and rounded then.

    Args:
        out: ``[rows, columns]`` or ``[matrices, rows, columns]`` float32, float16 or bfloat16, ``columns`` a multiple
            of 16; written.  The functional forms make float16.
        input: uint8 ``[..., columns / 2]``: e2m1, the element of an even column in the low half of its byte.
        scale: float8_e4m3fn (or uint8, which holds it) ``[..., columns / 16]``, any strides.
        global_scale: one number, by which the scales were multiplied.
        is_sf_swizzled_layout: the layout of ``scale``, as of :func:`mxfp8_dequantize`.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(out=like("A"))
def permute_cols(out: Array, A: Array, perm: Array, *, stream: Stream = None) -> None:
    """Put columns into another order: ``out[..., c] = A[..., perm[c]]``.

    Args:
        out: ``[..., columns]``, dtype of ``A``, any strides; written.  No memory of ``A``.
        A: any dtype, any strides.
        perm: ``[columns]`` int32 or int64.  A column that is out of range is reported, and ``out``'s not written.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(out=like("x"))
def hadacore_transform(out: Array, x: Array, *, stream: Stream = None) -> None:
    """Multiply each row by an orthonormal Hadamard matrix: ``out = H @ x / sqrt(n)``, in fp32, rounded once.

    ``H`` is Sylvester's where ``n = 2**k``: element ``(i, j)`` is ``(-1) ** popcount(i & j)``.  Where ``n = m * 2**k``,
    ``m`` one of 12, 20, 28 and 40, it is the Kronecker product of a matrix of order ``m`` and that of order ``2**k``:
    Paley's of 12 and 40, Williamson's of 20 and 28, as the package ``fast-hadamard-transform`` has them.

    Args:
        out: shape and dtype of ``x``; written.  May be ``x`` itself.
        x: ``[..., n]`` float32, float16 or bfloat16; the elements of a row side by side, rows may be strided.  ``n``
            is at most 49152, and 22528 on GPUs with 99 KB of shared memory (compute capability 8.6, 8.9, 12.0).
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit, or there is no matrix for ``n``.
        TypeError: dtypes do not fit.
        NotImplementedError: ``n`` is too large.
    """
