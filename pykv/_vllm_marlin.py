"""The products with weights in Marlin's order of ``vllm._custom_ops``, for :mod:`pykv.vllm`.

What repacks a weight returns that order of bits, so that arrays which vLLM has repacked will do, too.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

import pykv
from pykv._libraries import array_like, empty_beside, spec_of
from pykv._types import Array
from pykv._vllm_gemm import check_order, given, in_16_bits, multiply, stream_of, type_of, unsorted
from pykv._vllm_packed import packed_once
from pykv.gemm import bit_stream, check_groups, nibbles_of_awq, pack_in_groups, stack_packed
from pykv.packed_gguf import E2M1
from pykv.packed_weight import (
    WORDS,
    Factor,
    Host,
    PackedWeight,
    an_array,
    assemble,
    checked,
    float32,
    host,
    integers,
    plain_scales,
)

# how 64 columns of scales are permuted, where there are several groups; 32 of one group, and of a bias
_GROUPED: Final = np.arange(64).reshape(8, 8).T.ravel()
_ALONE: Final = np.concatenate([2 * i + np.array([0, 1, 8, 9, 16, 17, 24, 25]) for i in range(4)])
_PAIRS: Final = np.array([0, 2, 1, 3])  # besides, of 4 scales of e2m1
_SIGNED: Final = np.concatenate([np.arange(8), -1 - np.arange(8)]).astype(np.float32)
_FLOATS: Final = {"float8_e4m3fn": 8, "float4_e2m1f": 4}  # bits
_INTERLEAVED: Final = {4: np.array([0, 2, 4, 6, 1, 3, 5, 7]), 8: np.array([0, 2, 1, 3])}


def gptq_marlin_repack(
    b_q_weight: Array, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False, *, perm: Array | None = None
) -> Any:
    """A weight of GPTQ, with its rows in the order ``perm`` where that is given, for :func:`marlin_gemm`."""
    codes, order = bit_stream(_words(b_q_weight, num_bits), num_bits), given(perm)
    if order is not None:
        check_order("perm", order, len(codes))
    words = _repacked(codes if order is None else codes[order], size_k, size_n, num_bits, is_a_8bit)
    return array_like(words, "int32", b_q_weight)


def awq_marlin_repack(b_q_weight: Array, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> Any:
    """A weight of AWQ for :func:`marlin_gemm`."""
    codes = _codes_of_awq(_words(b_q_weight, num_bits), size_k, num_bits)
    return array_like(_repacked(codes, size_k, size_n, num_bits, is_a_8bit), "int32", b_q_weight)


def marlin_gemm(
    a: Array,
    c: Array | None,
    b_q_weight: Array,
    b_bias: Array | None,
    b_scales: Array,
    a_scales: Array | None,
    global_scale: Array | None,
    b_zeros: Array | None,
    workspace: Array | None,
    b_q_type: Any,
    size_m: int,
    size_n: int,
    size_k: int,
    use_atomic_add: bool = False,
    use_fp32_reduce: bool = False,
    is_zp_float: bool = False,
    *,
    g_idx: Array | None = None,
    perm: Array | None = None,
) -> Any:
    """:func:`pykv.packed_gemm` of a repacked weight; ``g_idx`` and ``perm`` are for act-order, as until 0.22.

    ``b_q_type``, a scalar type of vLLM or its name, is uint4, uint8, uint4b8, uint8b128, float8_e4m3fn or float4_e2m1f
    (nvfp4 where ``global_scale`` is given, else mxfp4).  Scales, zero points and bias are in the order, and scales of
    floats by the powers of two, that vLLM puts them.  ``workspace`` and the ways to sum are ignored: sums are fp32.

    Activations of int8 or float8_e4m3fn have ``a_scales`` ``[size_m, 1]`` and a weight that was repacked with
    ``is_a_8bit``.  They are brought to 16 bits, which hold them; the result has the dtype of ``c``, else of the scales,
    else bfloat16.  The weight is uint4, uint8, uint4b8 or uint8b128 beside int8, with scales of groups as int16 in
    the dtype of the scales; beside fp8 it is uint4b8 of :func:`marlin_int4_fp8_preprocess` with scales times 512, or
    mxfp4 with exponents 6 too large.

    Returns:
        ``c``, where it is given.

    Raises:
        ValueError: another type of weight.
    """
    (shape, dtype), narrow = spec_of(an_array("a", a)), ""
    if shape != (size_m, size_k):
        raise ValueError(f"a: must have shape [size_m, size_k] = {[size_m, size_k]}, got {list(shape)}")
    if a_scales is not None:
        narrow = "int8" if dtype == "int8" else "fp8"
        dtype = spec_of(b_scales if c is None else c).dtype
        dtype = dtype if dtype in ("float16", "bfloat16") else "bfloat16"
        a = in_16_bits(a, dtype)
    if c is not None and (found := spec_of(c)) != ((size_m, size_n), dtype):
        wanted = f"[size_m, size_n] = {[size_m, size_n]} of {dtype}"
        raise ValueError(f"c: must be {wanted}, got {list(found.shape)} of {found.dtype}")

    def pack() -> PackedWeight:
        words = host(b_q_weight)
        if narrow == "fp8":
            return _beside_fp8(words, b_scales, global_scale, b_zeros, str(b_q_type), size_n, size_k)
        if str(b_q_type) in _FLOATS and not narrow:
            return _floats(words, b_scales, global_scale, str(b_q_type), dtype, size_n, size_k)
        order = given(perm)
        return _integers(
            words, b_scales, b_zeros, b_q_type, size_n, size_k, is_zp_float, given(g_idx), order, bool(narrow)
        )

    bias = None
    if b_bias is not None:
        numbers = float32("b_bias", b_bias).reshape(1, -1)
        if numbers.size != size_n:
            raise ValueError(f"b_bias: must have size_n = {size_n} elements, got {numbers.size}")
        bias = array_like(_reordered(numbers, _ALONE)[0], dtype, a)
    others = (b_scales, global_scale, b_zeros, g_idx, perm)
    key = (dtype, narrow, str(b_q_type), size_n, size_k, is_zp_float)
    out = multiply("a", a, b_q_weight, others, key, pack, bias, a_scales)
    if c is None:
        return out
    target: Any = c
    target[...] = out
    return c


def marlin_int4_fp8_preprocess(qweight: Array, qzeros_or_none: Array | None = None, inplace: bool = False) -> Any:
    """Codes ``c`` of uint4b8 as ``c - 8``, or where that is negative ``15 - c``, for activations of fp8.

    Raises:
        ValueError: zero points, less which codes do not fit into four bits.
    """
    if qzeros_or_none is not None:
        raise ValueError("qzeros_or_none: must be None: codes less their zero points do not fit into four bits")
    words = host(qweight).view(np.uint32)
    below = (~words >> 3 & np.uint32(0x11111111)) * np.uint32(15)  # where the highest bit of a code is not set
    out = array_like((words ^ below ^ (~below & np.uint32(0x88888888))).view(np.int32), "int32", qweight)
    if not inplace:
        return out
    target: Any = qweight
    target[...] = out
    return qweight


def gptq_marlin_moe_repack(b_q_weight: Array, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> Any:
    """:func:`gptq_marlin_repack` of each expert."""
    words = [bit_stream(_words(w, num_bits), num_bits) for w in host(b_q_weight)]
    return _stacked(words, size_k, size_n, num_bits, is_a_8bit, b_q_weight)


def awq_marlin_moe_repack(b_q_weight: Array, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> Any:
    """:func:`awq_marlin_repack` of each expert."""
    codes = [_codes_of_awq(_words(w, num_bits), size_k, num_bits) for w in host(b_q_weight)]
    return _stacked(codes, size_k, size_n, num_bits, is_a_8bit, b_q_weight)


def moe_wna16_marlin_gemm(
    input: Array,
    output: Array | None,
    b_qweight: Array,
    b_bias: Array | None,
    b_scales: Array,
    a_scales: Array | None,
    global_scale: Array | None,
    b_qzeros: Array | None,
    workspace: Array | None,
    sorted_token_ids: Array,
    expert_ids: Array,
    num_tokens_past_padded: Array,
    topk_weights: Array,
    moe_block_size: int,
    top_k: int,
    mul_topk_weights: bool,
    b_q_type: Any,
    size_m: int,
    size_n: int,
    size_k: int,
    use_atomic_add: bool,
    use_fp32_reduce: bool,
    is_zp_float: bool,
    thread_k: int = -1,
    thread_n: int = -1,
    blocks_per_sm: int = -1,
) -> Any:
    """:func:`pykv.fused_moe_gemm` of weights of experts, as :func:`marlin_gemm` has them; returns ``output``.

    Without ``output``, rows of no expert are zeros.
    """
    _refuse(a_scales)
    dtype = spec_of(input).dtype

    def pack() -> PackedWeight:
        experts = range(spec_of(b_qweight).shape[0])
        words = host(b_qweight)
        scales, zeros, numbers = (_each(a, experts) for a in (b_scales, b_qzeros, global_scale))
        name = str(b_q_type)
        if name in _FLOATS:
            return stack_packed(
                [_floats(words[e], scales[e], numbers[e], name, dtype, size_n, size_k) for e in experts]
            )
        return stack_packed(
            [_integers(words[e], scales[e], zeros[e], name, size_n, size_k, is_zp_float) for e in experts]
        )

    key = (dtype, str(b_q_type), size_n, size_k, is_zp_float)
    w = packed_once(b_qweight, (b_scales, global_scale, b_qzeros), key, pack)
    out: Any = output
    if out is None:
        out = empty_beside(input, (size_m * top_k, size_n), dtype)
        out[...] = 0
    bias = None if b_bias is None else array_like(_reordered(float32("b_bias", b_bias), _ALONE), dtype, input)
    pykv.fused_moe_gemm(
        out, input, w.data, topk_weights if mul_topk_weights else None, sorted_token_ids, expert_ids,
        num_tokens_past_padded, top_k, moe_block_size, bias, w.format,
    )  # fmt: skip
    return out


def _each(array: Any, experts: range) -> Any:
    """What each expert has of it: nothing, where it is not given or has no elements."""
    return [None] * len(experts) if array is None or 0 in spec_of(array).shape else array


def _refuse(a_scales: Array | None) -> None:
    if a_scales is not None:
        raise ValueError("a_scales: must be None: activations of experts have 16 bits")


def _integers(
    words: Host,
    b_scales: Any,
    b_zeros: Any,
    b_q_type: Any,
    n: int,
    k: int,
    is_zp_float: bool,
    of_rows: Host | None = None,
    order: Host | None = None,
    beside_int8: bool = False,
) -> PackedWeight:
    bits, centred = type_of("b_q_type", b_q_type, *(() if beside_int8 else _FLOATS))
    codes = _stream_of_marlin(words, k, n, bits, beside_int8)
    factor = _plain(plain_scales("b_scales", b_scales, (None, n)), beside_int8)
    groups = factor.values.shape[0]
    if beside_int8 and groups > 1:
        factor = Factor("f32", np.ascontiguousarray(factor.values).view(np.int16).astype(np.float32))
    zeros = given(b_zeros)
    if centred != (zeros is None):
        raise ValueError(f"b_zeros: must {'not ' if centred else ''}be given with weights of {b_q_type}")
    if order is not None:
        rows = np.arange(k) // -(-k // groups) if of_rows is None else of_rows
        if len(rows) != k:
            raise ValueError(f"g_idx: must have size_k = {k} elements, got {len(rows)}")
        codes, of_rows = unsorted("perm", codes, rows, order)
    if zeros is not None:
        shape = (groups, n if is_zp_float else n * bits // 32)
        checked("b_zeros", b_zeros, ["float16", "bfloat16", "float32"] if is_zp_float else WORDS, shape)
    if is_zp_float and zeros is not None:
        minima = Factor("f32", -(factor.in_float32() * _reordered(float32("b_zeros", b_zeros), _GROUPED)).T)
        return integers(codes.T, factor._replace(values=factor.values.T), minima, -(-k // groups), bits)
    plain = None if zeros is None else _zeros_of_marlin(zeros, n, bits, beside_int8)
    return pack_in_groups(codes, plain, factor, of_rows, bits=bits)


def _floats(words: Host, b_scales: Any, global_scale: Any, b_q_type: str, dtype: str, n: int, k: int) -> PackedWeight:
    """Weights of e4m3 and e2m1.  Their scales hold what the bits want that become a float of ``dtype`` by shifts."""
    bias_of_dtype = {"float16": 15, "bfloat16": 127}[dtype]
    codes = _stream_of_marlin(words, k, n, _FLOATS[b_q_type]).T
    if b_q_type == "float8_e4m3fn":
        factor = _plain(plain_scales("b_scales", b_scales, (None, n)))
        values = np.ldexp(factor.in_float32(), 7 - bias_of_dtype).T
        return assemble(codes, "e4m3", Factor("f32", values), None, -(-k // values.shape[1]))
    stored = host(b_scales).view(np.uint8)
    values = _plain(Factor("e8m0", _reordered(stored, _PAIRS))).values.T
    group_size = 32 if global_scale is None else 16
    check_groups((n, k), values, group_size, "b_scales")
    if global_scale is None:
        return assemble(codes, "t4", Factor("e8m0", values), None, group_size, table=E2M1)
    # a byte is the upper half of a float16 without its sign, 2^7 times the scale
    halves = np.ldexp((values.astype(np.uint16) << 7).view(np.float16).astype(np.float32), -7)
    number = np.ldexp(float32("global_scale", global_scale).reshape(-1)[0], 8 - bias_of_dtype)
    return assemble(codes, "t4", Factor("f32", halves), None, group_size, table=E2M1, global_scale=float(number))


def _beside_fp8(
    words: Host, b_scales: Any, global_scale: Any, b_zeros: Any, b_q_type: str, n: int, k: int
) -> PackedWeight:
    """Weights for activations of fp8: signs and magnitudes, with scales times 512, or e2m1 with exponents plus 6."""
    if b_q_type not in ("uint4b8", "float4_e2m1f") or global_scale is not None or given(b_zeros) is not None:
        raise ValueError("b_q_type: beside fp8 must be uint4b8 or float4_e2m1f (mxfp4), without zero points")
    codes = _stream_of_marlin(words, k, n, 4, True).T
    if b_q_type == "uint4b8":
        factor = _plain(plain_scales("b_scales", b_scales, (None, n)), True)
        values = factor.in_float32().T
        return assemble(codes, "t4", Factor("f32", values / 512), None, -(-k // values.shape[1]), table=_SIGNED)
    values = _plain(Factor("e8m0", host(b_scales).view(np.uint8)), True).values.T
    check_groups((n, k), values, 32, "b_scales")
    return assemble(codes, "t4", Factor("e8m0", values), None, 32, table=E2M1, global_scale=2.0**-6)


def _words(b_q_weight: Array, bits: int) -> Host:
    if bits not in (4, 8):
        raise ValueError(f"num_bits: must be 4 or 8, got {bits}")
    return checked("b_q_weight", b_q_weight, WORDS, (None, None))


def _plain(scales: Factor, beside_8_bits: bool = False) -> Factor:
    """``[groups, n]`` as they were before vLLM permuted them."""
    grouped = len(scales.values) > 1 and not beside_8_bits
    return scales._replace(values=_reordered(scales.values, _GROUPED if grouped else _ALONE))


def _order_of_marlin(bits: int, is_a_8bit: bool) -> Host:
    """Of 1024 codes, [tile of 16 columns][row][column]: which one each place holds."""
    height = 32 if is_a_8bit else 16
    lane, tile, i = np.ogrid[:32, : 64 // height, : height // 2]
    per_column, pair = height // 4, height // 8
    block, r = i // per_column, i % per_column
    row = pair * (lane % 4) + r % pair + height // 2 * (r // pair)
    order = (tile * 16 * height + row * 16 + lane // 4 + 8 * block).ravel()
    if not is_a_8bit:
        return np.asarray(order.reshape(-1, 32 // bits)[:, _INTERLEAVED[bits]].ravel())
    if bits == 4:
        order = order.reshape(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].ravel()
    return np.asarray(order)


def _codes_of_awq(words: Host, k: int, bits: int) -> Host:
    if bits == 4:
        return nibbles_of_awq(words)
    return words.view(np.uint8).reshape(words.shape[0], -1, 4)[..., [0, 2, 1, 3]].reshape(k, -1)


def _stacked(experts: list[Host], k: int, n: int, bits: int, is_a_8bit: bool, like: Array) -> Any:
    words = [_repacked(codes, k, n, bits, is_a_8bit) for codes in experts]
    return array_like(np.stack(words) if words else np.empty((0, k // 16, n * bits // 2), np.int32), "int32", like)


def _repacked(codes: Host, k: int, n: int, bits: int, is_a_8bit: bool) -> Host:
    """Codes ``[k, n]`` as words ``[k / 16, n * bits / 2]`` in the order of Marlin."""
    height = 32 if is_a_8bit else 16
    if codes.shape != (k, n) or k % height or n % 64:
        raise ValueError(
            f"b_q_weight: must hold [size_k, size_n] = {[k, n]} codes, of multiples of {height} and 64, "
            f"got {list(codes.shape)}"
        )
    tiles = codes.reshape(k // height, height, n // 16, 16).swapaxes(1, 2).reshape(-1, 1024)
    whole = tiles[:, _order_of_marlin(bits, is_a_8bit)].reshape(-1, 32 // bits).T
    return stream_of(whole, bits).reshape(k // 16, -1)


def _stream_of_marlin(words: Host, k: int, n: int, bits: int, is_a_8bit: bool = False) -> Host:
    """The inverse of _repacked."""
    if words.shape != (k // 16, n * bits // 2):
        raise ValueError(f"b_q_weight: must have shape {[k // 16, n * bits // 2]}, got {list(words.shape)}")
    stored = bit_stream(words.reshape(1, -1), bits).T.reshape(-1, 1024)
    tiles = np.empty_like(stored)
    tiles[:, _order_of_marlin(bits, is_a_8bit)] = stored
    height = 32 if is_a_8bit else 16
    return tiles.reshape(k // height, n // 16, height, 16).swapaxes(1, 2).reshape(k, n)


def _zeros_of_marlin(words: Host, n: int, bits: int, beside_8_bits: bool = False) -> Host:
    """Zero points ``[n, groups]`` from ``[groups, n * bits / 32]`` as vLLM permutes and packs them."""
    stored = bit_stream(np.ascontiguousarray(words.T), bits).T.reshape(len(words), -1, 32 // bits)
    plain = np.empty_like(stored)
    plain[..., slice(None) if beside_8_bits else _INTERLEAVED[bits]] = stored
    return _reordered(plain.reshape(len(words), n), _GROUPED).T.astype(np.int64)


def _reordered(values: Host, order: Host) -> Host:
    """Columns that were taken in this order, in each ``len(order)`` of them, back at their places."""
    stored = values.reshape(values.shape[0], -1, len(order))
    plain = np.empty_like(stored)
    plain[..., order] = stored
    return plain.reshape(values.shape)
