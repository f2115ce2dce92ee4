"""The products with packed weights of ``vllm._custom_ops``, for :mod:`pykv.vllm`.

Each weight is packed for :func:`pykv.packed_gemm` once (``_vllm_packed.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

import pykv
from pykv._libraries import array_like, empty_beside, spec_of
from pykv._types import Array
from pykv._vllm_packed import packed_once
from pykv.gemm import bit_stream, pack_awq, pack_gguf, pack_in_groups
from pykv.packed_weight import (
    WORDS,
    Factor,
    Host,
    PackedWeight,
    an_array,
    checked,
    float32,
    host,
    integers,
    plain_scales,
)

_TYPES: Final = {"uint4": (4, False), "uint8": (8, False), "uint4b8": (4, True), "uint8b128": (8, True)}


def multiply(
    name: str,
    x: Array,
    weight: Array,
    others: tuple[Array | None, ...],
    key: tuple[object, ...],
    pack: Callable[[], PackedWeight],
    bias: Array | None = None,
    token_scales: Array | None = None,
) -> Any:
    """``token_scales * (x @ W.T) + bias`` with what ``pack()`` makes of the weight and ``others``, or has made.

    ``name`` is that of ``x``.
    """
    shape, dtype = spec_of(an_array(name, x))
    if dtype not in ("float16", "bfloat16"):
        raise TypeError(f"{name}: dtype must be float16 or bfloat16, got {dtype}")
    packed = packed_once(weight, others, key, pack)
    n, k = packed.shape
    if len(shape) != 2 or shape[1] != k:
        raise ValueError(f"{name}: must have shape [any, {k}], as the weight has {k} columns, got {list(shape)}")
    out = empty_beside(x, (shape[0], n), dtype)
    pykv.packed_gemm(out, x, packed.data, packed.format, bias, token_scales)
    return out


def in_16_bits(a: Any, dtype: str) -> Any:
    """Activations of float8_e4m3fn or int8 as float16 or bfloat16, which hold them exactly."""
    shape, given_dtype = spec_of(a)
    if given_dtype == dtype:
        return a
    if given_dtype not in ("int8", "uint8", "float8_e4m3fn"):
        raise TypeError(f"a: dtype must be float16, bfloat16, int8 or float8_e4m3fn, got {given_dtype}")
    out = empty_beside(a, shape, dtype)
    if given_dtype == "int8":
        out[...] = a
    else:
        pykv.fp8_dequantize(out, a, 1.0)
    return out


def given(array: Array | None) -> Host | None:
    """On the host; ``None`` for what has no elements, too."""
    plain = None if array is None else host(array)
    return plain if plain is not None and plain.size else None


def awq_gemm(input: Array, qweight: Array, scales: Array, qzeros: Array, split_k_iters: int) -> Any:
    """:func:`pykv.packed_gemm` of a weight of AWQ; ``split_k_iters`` is ignored: sums are fp32."""
    return multiply("input", input, qweight, (scales, qzeros), (), lambda: pack_awq(qweight, qzeros, scales))


def gptq_gemm(
    a: Array,
    b_q_weight: Array,
    b_gptq_qzeros: Array,
    b_gptq_scales: Array,
    use_exllama: bool,
    use_v2_format: bool,
    bit: int,
    *,
    b_g_idx: Array | None = None,
) -> Any:
    """:func:`pykv.packed_gemm` of a weight of GPTQ.

    With ``use_exllama`` the weight is what :func:`gptq_shuffle` made; without, it is that of the checkpoint.
    ``b_g_idx`` is for act-order, which vLLM had until 0.22: with ``use_exllama`` it is the ``q_perm`` of
    :func:`gptq_shuffle`; without, the group of each row.
    """

    def pack() -> PackedWeight:
        words, order = _words_of_gptq("b_q_weight", b_q_weight, bit), given(b_g_idx)
        n = words.shape[1]
        scales = plain_scales("b_gptq_scales", b_gptq_scales, (None, n))
        groups = len(scales.values)
        zeros = bit_stream(checked("b_gptq_qzeros", b_gptq_qzeros, WORDS, (groups, n * bit // 32)).T, bit)
        codes = bit_stream(_permute_bits(words, bit, back=True) if use_exllama else words, bit)
        if use_exllama and order is not None:
            codes, order = unsorted("b_g_idx", codes, np.arange(len(order)) // -(-len(order) // groups), order)
        return pack_in_groups(codes, zeros.astype(np.int64) + (0 if use_v2_format else 1), scales, order, bits=bit)

    others = (b_gptq_qzeros, b_gptq_scales, b_g_idx)
    return multiply("a", a, b_q_weight, others, (use_exllama, use_v2_format, bit), pack)


def gptq_shuffle(q_weight: Array, bit: int, *, q_perm: Array | None = None) -> None:
    """Put the bits of a weight in the order of ``gptq_gemm``, and before that its rows in the order ``q_perm``."""
    words, order = _words_of_gptq("q_weight", q_weight, bit), given(q_perm)
    if order is not None:
        codes = bit_stream(words, bit)
        check_order("q_perm", order, len(codes))
        words = stream_of(codes[order], bit)
    target: Any = q_weight
    target[...] = array_like(_permute_bits(words, bit), "int32", q_weight)


def _words_of_gptq(name: str, array: Array, bit: int) -> Host:
    if bit not in (2, 3, 4, 8):
        raise ValueError(f"bit: must be 2, 3, 4 or 8, got {bit}")
    words = checked(name, array, WORDS, (None, None))
    if bit == 3 and len(words) % 3:
        raise ValueError(f"{name}: dimension 0 must be a multiple of 3 with codes of 3 bits, got {list(words.shape)}")
    return words


def machete_prepack_B(b_q_weight: Array, a_type: Any, b_type: Any, group_scales_type: Any) -> Any:
    """The weight ``[k / per word, n]`` as it is, for :func:`machete_mm`; contiguous."""
    words = np.ascontiguousarray(host(b_q_weight))
    return array_like(words, "int32", b_q_weight)


def machete_supported_schedules(
    a_type: Any,
    b_type: Any,
    group_scales_type: Any,
    group_zeros_type: Any = None,
    channel_scales_type: Any = None,
    token_scales_type: Any = None,
    out_type: Any = None,
) -> list[str]:
    """One name: :func:`machete_mm` ignores the schedule."""
    return ["any"]


def machete_mm(
    a: Array,
    b_q: Array,
    b_type: Any,
    out_type: Any = None,
    b_group_scales: Array | None = None,
    b_group_zeros: Array | None = None,
    b_group_size: int | None = None,
    b_channel_scales: Array | None = None,
    a_token_scales: Array | None = None,
    schedule: str | None = None,
) -> Any:
    """:func:`pykv.packed_gemm` of the weight ``(scale * code + zero) * b_channel_scales``; ``schedule`` is ignored.

    Activations of float8_e4m3fn or int8 are brought to 16 bits, which hold them; the result is then of ``out_type``,
    or float16.

    Raises:
        ValueError: another type of the result than that of ``a`` with 16 bits.
    """
    bits, centred = type_of("b_type", b_type)
    dtype = spec_of(an_array("a", a)).dtype
    name = getattr(out_type, "__name__", None) or str(out_type).removeprefix("torch.")
    if dtype not in ("float16", "bfloat16"):
        a = in_16_bits(a, "float16" if out_type is None else name)
    elif out_type is not None and name != dtype:
        raise ValueError(f"out_type: must be that of a, {dtype}, got {out_type}")

    def pack() -> PackedWeight:
        codes = bit_stream(checked("b_q", b_q, WORDS, (None, None)), bits)
        k, n = codes.shape
        factor, zeros = Factor("f32", np.ones((1, n), np.float32)), None
        if b_group_size not in (None, -1) and (b_group_size < 1 or k % b_group_size):
            raise ValueError(f"b_group_size: must be -1, or divide {k} rows of b_q, got {b_group_size}")
        if b_group_scales is not None:
            groups = None if b_group_size is None else 1 if b_group_size == -1 else k // b_group_size
            factor = plain_scales("b_group_scales", b_group_scales, (groups, n))
            if k and (not len(factor.values) or k % len(factor.values)):
                raise ValueError(f"b_group_scales: its {len(factor.values)} groups must divide {k} rows of b_q")
        if b_group_zeros is not None:
            zeros = float32("b_group_zeros", b_group_zeros)
            if zeros.shape != factor.values.shape:
                shapes = f"{list(factor.values.shape)}, got {list(zeros.shape)}"
                raise ValueError(f"b_group_zeros: must have the shape of b_group_scales, {shapes}")
        if b_channel_scales is not None:
            of_channel = float32("b_channel_scales", b_channel_scales).reshape(1, -1)
            if of_channel.size != n:
                raise ValueError(f"b_channel_scales: must have {n} elements, got {of_channel.size}")
            factor = Factor("f32", factor.in_float32() * of_channel)
            zeros = None if zeros is None else zeros * of_channel
        minima = None
        if not centred:
            minima = Factor("f32", (np.zeros_like(factor.in_float32()) if zeros is None else zeros).T)
        group_size = -(-k // factor.values.shape[0])
        return integers(codes.T, factor._replace(values=factor.values.T), minima, group_size, bits)

    others = (b_group_scales, b_group_zeros, b_channel_scales)
    return multiply("a", a, b_q, others, (str(b_type), b_group_size), pack, None, a_token_scales)


def allspark_repack_weight(
    qweight: Array, scale: Array, zero_point: Array | None = None, has_zp: bool = False
) -> tuple[Any, Any, Any]:
    """The weight ``[k, n]`` uint8, scales and zero points for :func:`allspark_w8a16_gemm`, as 0.22 had it.

    Returns:
        ``[n, k]`` and twice ``[1, n]``, with ``n`` padded to a multiple of 32; ``None`` without zero points.
    """
    zeros = zero_point if has_zp else None
    if has_zp and zeros is None:
        raise ValueError("zero_point: must be given with has_zp")
    plain = host(qweight)
    padding = -plain.shape[1] % 32

    def padded(name: str, of_columns: Array) -> Any:
        values = np.pad(float32(name, of_columns), ((0, 0), (0, padding)))
        return array_like(values, spec_of(of_columns).dtype, of_columns)

    rows = np.ascontiguousarray(np.pad(plain, ((0, 0), (0, padding))).T)
    return (
        array_like(rows, "uint8", qweight),
        padded("scale", scale),
        None if zeros is None else padded("zero_point", zeros),
    )


def allspark_w8a16_gemm(
    a: Array,
    b_qweight: Array,
    b_scales: Array,
    b_qzeros: Array | None,
    n: int,
    group_size: int,
    sm_count: int,
    sm_version: int,
    CUBLAS_M_THRESHOLD: int,
    has_zp: bool,
    n32k16_reorder: bool,
) -> Any:
    """:func:`pykv.packed_gemm` of the weight ``(code - 128 - zero) * scale``, as 0.22 had it; any ``n`` will do.

    ``b_qweight`` is what :func:`allspark_repack_weight` returned, or with ``n32k16_reorder=False`` ``[k, n]`` as it was
    given.  What names a machine is ignored.

    Raises:
        ValueError: ``group_size`` is not -1.
    """
    if group_size != -1:
        raise ValueError(f"group_size: must be -1, one scale for a column, got {group_size}")

    def pack() -> PackedWeight:
        plain = checked("b_qweight", b_qweight, ["uint8"], (None, None))
        rows = plain if n32k16_reorder else plain.T
        factor, minima = plain_scales("b_scales", b_scales), None
        zeros = float32("b_qzeros", b_qzeros) if has_zp else None
        sizes = {"b_qweight": len(rows), "b_scales": factor.values.size, "b_qzeros": n if zeros is None else zeros.size}
        for name, size in sizes.items():
            if size < n:
                raise ValueError(f"{name}: must have n = {n} columns, got {size}")
        codes = rows[:n]
        factor = factor._replace(values=factor.values.reshape(1, -1)[:, :n].T)
        if zeros is not None:
            zeros = zeros.reshape(1, -1)[:, :n].T
            minima = Factor("f32", -factor.in_float32() * (128 + zeros))
        return integers(codes, factor, minima, max(1, codes.shape[1]), 8)

    others = (b_scales, b_qzeros if has_zp else None)
    return multiply("a", a, b_qweight, others, ("allspark", n, has_zp, n32k16_reorder), pack)


def ggml_mul_mat_vec_a8(W: Array, X: Array, quant_type: int, row: int) -> Any:
    """:func:`pykv.packed_gemm` of a weight of GGUF, as 0.22 had it; activations keep their 16 bits.

    Those of float32 are rounded to bfloat16, and the result is float32 again.
    """

    def pack() -> PackedWeight:
        return pack_gguf(checked("W", W, ["uint8"], (row, None)), quant_type)

    return through_bfloat16(lambda x: multiply("X", x, W, (), (quant_type, row), pack), X)


def ggml_mul_mat_a8(W: Array, X: Array, quant_type: int, row: int) -> Any:
    """The same as :func:`ggml_mul_mat_vec_a8`."""
    return ggml_mul_mat_vec_a8(W, X, quant_type, row)


def through_bfloat16(product: Callable[[Any], Any], x: Any) -> Any:
    """``product(x)``; where ``x`` is float32, that of ``x`` rounded to bfloat16, with the result in float32."""
    shape, dtype = spec_of(an_array("X", x))
    if dtype != "float32":
        return product(x)
    narrow = empty_beside(x, shape, "bfloat16")
    narrow[...] = x
    found = product(narrow)
    out = empty_beside(x, spec_of(found).shape, dtype)
    out[...] = found
    return out


def type_of(name: str, scalar_type: Any, *others: str) -> tuple[int, bool]:
    """Bits, and whether codes are centred; ``others``: what would have done, too."""
    if str(scalar_type) not in _TYPES:
        raise ValueError(f"{name}: must be {', '.join((*_TYPES, *others))}, got {scalar_type}")
    return _TYPES[str(scalar_type)]


def check_order(name: str, order: Host, rows: int) -> None:
    if not np.array_equal(np.sort(order), np.arange(rows)):
        raise ValueError(f"{name}: must have each of the {rows} rows once, got {order.size} elements")


def unsorted(name: str, codes: Host, group_of: Host, order: Host) -> tuple[Host, Host]:
    """Rows that were taken in the order ``name``, and their groups, back at their places."""
    check_order(name, order, len(codes))
    plain, groups = np.empty_like(codes), np.empty(len(order), np.int64)
    plain[order], groups[order] = codes, group_of
    return plain, groups


def stream_of(codes: Host, bits: int) -> Host:
    """The inverse of :func:`pykv.gemm.bit_stream`: ``[k, n]`` to words ``[k * bits / 32, n]``."""
    columns = np.ascontiguousarray(codes.T)[..., None]
    stream = np.unpackbits(columns, axis=2, bitorder="little", count=bits).reshape(columns.shape[0], -1)
    return words_of(stream)


def words_of(stream: Host) -> Host:
    """Bits ``[n, k * bits]`` as words ``[k * bits / 32, n]``."""
    words: Host = np.ascontiguousarray(np.packbits(stream, axis=1, bitorder="little")).view(np.int32)
    return np.ascontiguousarray(words.T)


def _shuffled_bits(bits: int) -> Host:
    """Of a word, or of three with codes of 3 bits, where each bit of the shuffled ones comes from."""
    if bits == 8:
        return np.arange(32)
    if bits == 3:
        source = np.empty((3, 32), np.int64)
        for word in range(3):
            for half in range(2):
                codes = 10 * word + 2 * np.arange(5) + half
                source[word, 16 * half : 16 * half + 15] = (3 * codes[:, None] + np.arange(3)).ravel()
                source[word, 16 * half + 15] = 3 * (30 + half) + word
        return np.asarray(source.ravel())
    per_word = 32 // bits
    order = np.concatenate([np.arange(0, per_word, 2), np.arange(1, per_word, 2)])
    return np.asarray((bits * order[:, None] + np.arange(bits)).ravel())


def _permute_bits(words: Host, bits: int, *, back: bool = False) -> Host:
    """Words ``[k * bits / 32, n]`` to those of gptq_shuffle; back: from them."""
    source = _shuffled_bits(bits)
    octets = np.ascontiguousarray(words.T).view(np.uint8)
    runs = np.unpackbits(octets, axis=1, bitorder="little").reshape(len(octets), -1, len(source))
    return words_of(runs[..., np.argsort(source) if back else source].reshape(len(octets), -1))
