"""The products with packed weights of ``vllm._custom_ops``, for :mod:`pykv.vllm`.

Each weight is packed for :func:`pykv.packed_gemm` once (``_vllm_packed.py``).  What repacks a weight returns vLLM's own
order of bits, so that arrays which vLLM has repacked will do, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

import pykv
from pykv._libraries import array_like, empty_beside, spec_of
from pykv._types import Array
from pykv._vllm_packed import packed_once
from pykv.gemm import bit_stream, nibbles_of_awq, pack_awq, pack_gguf, pack_in_groups
from pykv.packed_weight import Factor, Host, PackedWeight, float32, host, integers, plain_scales

# of 64 columns; of 32; see marlin_gemm
_GROUPED: Final = np.arange(64).reshape(8, 8).T.ravel()
_ALONE: Final = np.concatenate([2 * i + np.array([0, 1, 8, 9, 16, 17, 24, 25]) for i in range(4)])
_INTERLEAVED: Final = {4: np.array([0, 2, 4, 6, 1, 3, 5, 7]), 8: np.array([0, 2, 1, 3])}
_TYPES: Final = {"uint4": (4, False), "uint8": (8, False), "uint4b8": (4, True), "uint8b128": (8, True)}


def _multiply(
    x: Array,
    weight: Array,
    others: tuple[Array | None, ...],
    key: tuple[object, ...],
    pack: Callable[[], PackedWeight],
    bias: Array | None = None,
) -> Any:
    """``x @ W.T + bias`` with what ``pack()`` makes of the weight and ``others``, or made of them before."""
    packed = packed_once(weight, others, key, pack)
    out = empty_beside(x, (spec_of(x).shape[0], packed.shape[0]), spec_of(x).dtype)
    pykv.packed_gemm(out, x, packed.data, packed.format, bias)
    return out


def _given(array: Array | None) -> Host | None:
    """On the host; ``None`` for what has no elements, too."""
    plain = None if array is None else host(array)
    return plain if plain is not None and plain.size else None


def awq_gemm(input: Array, qweight: Array, scales: Array, qzeros: Array, split_k_iters: int) -> Any:
    """:func:`pykv.packed_gemm` of a weight of AWQ; ``split_k_iters`` is ignored: sums are fp32."""
    return _multiply(input, qweight, (scales, qzeros), (), lambda: pack_awq(qweight, qzeros, scales))


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
        words, order = host(b_q_weight), _given(b_g_idx)
        codes = bit_stream(_permute_bits(words, bit, back=True) if use_exllama else words, bit)
        zeros = bit_stream(host(b_gptq_qzeros).T, bit).astype(np.int64) + (0 if use_v2_format else 1)
        if use_exllama and order is not None:
            codes, order = _unsorted(codes, np.arange(len(order)) // -(-len(order) // zeros.shape[1]), order)
        return pack_in_groups(codes, zeros, plain_scales("b_gptq_scales", b_gptq_scales), order, bits=bit)

    others = (b_gptq_qzeros, b_gptq_scales, b_g_idx)
    return _multiply(a, b_q_weight, others, (use_exllama, use_v2_format, bit), pack)


def gptq_shuffle(q_weight: Array, bit: int, *, q_perm: Array | None = None) -> None:
    """Put the bits of a weight in the order of ``gptq_gemm``, and before that its rows in the order ``q_perm``."""
    words, order = host(q_weight), _given(q_perm)
    if order is not None:
        words = _stream_of(bit_stream(words, bit)[order], bit)
    target: Any = q_weight
    target[...] = array_like(_permute_bits(words, bit), "int32", q_weight)


def gptq_marlin_repack(
    b_q_weight: Array, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False, *, perm: Array | None = None
) -> Any:
    """A weight of GPTQ, with its rows in the order ``perm`` where that is given, for :func:`marlin_gemm`."""
    codes, order = bit_stream(host(b_q_weight), num_bits), _given(perm)
    return _repacked(codes if order is None else codes[order], size_k, size_n, num_bits, is_a_8bit, b_q_weight)


def awq_marlin_repack(b_q_weight: Array, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> Any:
    """A weight of AWQ for :func:`marlin_gemm`."""
    if num_bits == 4:
        codes = nibbles_of_awq(host(b_q_weight))
    else:
        octets = host(b_q_weight).view(np.uint8).reshape(size_k, -1, 4)
        codes = octets[..., [0, 2, 1, 3]].reshape(size_k, -1)
    return _repacked(codes, size_k, size_n, num_bits, is_a_8bit, b_q_weight)


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

    ``b_q_type``, a scalar type of vLLM or its name, is uint4, uint8, uint4b8 or uint8b128; scales, zero points and bias
    are in the order that vLLM permutes them to.  ``workspace`` and the ways to sum are ignored: sums are fp32.

    Returns:
        ``c``, where it is given.

    Raises:
        ValueError: another type of weight, or activations of 8 bits.
    """
    bits, centred = _type_of("b_q_type", b_q_type)
    if a_scales is not None or global_scale is not None:
        raise ValueError("a_scales, global_scale: must be None: there are no activations of 8 bits, nor weights of fp4")

    def pack() -> PackedWeight:
        codes = _stream_of_marlin(host(b_q_weight), size_k, size_n, bits)
        scales = plain_scales("b_scales", b_scales)
        groups = scales.values.shape[0]
        values = _reordered(scales.values, _GROUPED if groups > 1 else _ALONE)
        zeros = _given(b_zeros)
        order, of_rows = _given(perm), _given(g_idx)
        if order is not None:
            rows = np.arange(size_k) // -(-size_k // groups) if of_rows is None else of_rows
            codes, of_rows = _unsorted(codes, rows, order)
        factor = scales._replace(values=values)
        if is_zp_float and zeros is not None:
            z = _reordered(float32(b_zeros), _GROUPED)
            minima = Factor("f32", -(factor.in_float32() * z).T)
            return integers(codes.T, factor._replace(values=values.T), minima, -(-size_k // groups), bits)
        return pack_in_groups(
            codes,
            None if centred or zeros is None else _zeros_of_marlin(zeros, size_n, bits),
            factor,
            of_rows,
            bits=bits,
        )

    bias = None
    if b_bias is not None:
        bias = array_like(_reordered(float32(b_bias).reshape(1, -1), _ALONE)[0], spec_of(a).dtype, a)
    key = (bits, centred, size_n, size_k, is_zp_float)
    out = _multiply(a, b_q_weight, (b_scales, b_zeros, g_idx, perm), key, pack, bias)
    if c is None:
        return out
    target: Any = c
    target[...] = out
    return c


def machete_prepack_B(b_q_weight: Array, a_type: Any, b_type: Any, group_scales_type: Any) -> Any:
    """The weight ``[k / per word, n]`` as it is, for :func:`machete_mm`; contiguous."""
    words = np.ascontiguousarray(host(b_q_weight))
    return array_like(words, "int32", b_q_weight)


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

    Raises:
        ValueError: ``a_token_scales``, or another type of the result than that of ``a``.
    """
    bits, centred = _type_of("b_type", b_type)
    dtype = spec_of(a).dtype
    if a_token_scales is not None:
        raise ValueError("a_token_scales: must be None: activations have 16 bits")
    if out_type is not None and str(out_type).removeprefix("torch.") != dtype:
        raise ValueError(f"out_type: must be that of a, {dtype}, got {out_type}")

    def pack() -> PackedWeight:
        codes = bit_stream(host(b_q), bits)
        k, n = codes.shape
        factor = Factor("f32", np.ones((1, n), np.float32))
        if b_group_scales is not None:
            factor = plain_scales("b_group_scales", b_group_scales)
        zeros = None if b_group_zeros is None else float32(b_group_zeros)
        if b_channel_scales is not None:
            of_channel = float32(b_channel_scales).reshape(1, n)
            factor = Factor("f32", factor.in_float32() * of_channel)
            zeros = None if zeros is None else zeros * of_channel
        minima = None
        if not centred:
            minima = Factor("f32", (np.zeros_like(factor.in_float32()) if zeros is None else zeros).T)
        group_size = -(-k // factor.values.shape[0])
        return integers(codes.T, factor._replace(values=factor.values.T), minima, group_size, bits)

    return _multiply(a, b_q, (b_group_scales, b_group_zeros, b_channel_scales), (str(b_type),), pack)


def ggml_mul_mat_vec_a8(W: Array, X: Array, quant_type: int, row: int) -> Any:
    """:func:`pykv.packed_gemm` of a weight of GGUF, as 0.22 had it; activations keep their 16 bits."""
    return _multiply(X, W, (), (quant_type,), lambda: pack_gguf(W, quant_type))


def ggml_mul_mat_a8(W: Array, X: Array, quant_type: int, row: int) -> Any:
    """:func:`pykv.packed_gemm` of a weight of GGUF, as 0.22 had it; activations keep their 16 bits."""
    return ggml_mul_mat_vec_a8(W, X, quant_type, row)


def _type_of(name: str, scalar_type: Any) -> tuple[int, bool]:
    """Bits, and whether codes are centred."""
    if str(scalar_type) not in _TYPES:
        raise ValueError(f"{name}: must be {', '.join(_TYPES)}, got {scalar_type}")
    return _TYPES[str(scalar_type)]


def _unsorted(codes: Host, group_of: Host, order: Host) -> tuple[Host, Host]:
    """Rows that were taken in this order, and their groups, back at their places."""
    plain, groups = np.empty_like(codes), np.empty(len(order), np.int64)
    plain[order], groups[order] = codes, group_of
    return plain, groups


def _stream_of(codes: Host, bits: int) -> Host:
    """The inverse of :func:`pykv.gemm.bit_stream`: ``[k, n]`` to words ``[k * bits / 32, n]``."""
    columns = np.ascontiguousarray(codes.T)[..., None]
    stream = np.unpackbits(columns, axis=2, bitorder="little", count=bits).reshape(columns.shape[0], -1)
    return _words_of(stream)


def _words_of(stream: Host) -> Host:
    """Bits ``[n, k * bits]`` as words ``[k * bits / 32, n]``."""
    words: Host = np.packbits(stream, axis=1, bitorder="little").view(np.int32)
    return np.ascontiguousarray(words.T)


def _shuffled_bits(bits: int) -> Host:
    """Of 32 codes, where each bit of the shuffled words comes from."""
    if bits == 8:
        return np.arange(256)
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
    codes = (per_word * np.arange(bits)[:, None] + order).ravel()
    return np.asarray((bits * codes[:, None] + np.arange(bits)).ravel())


def _permute_bits(words: Host, bits: int, *, back: bool = False) -> Host:
    """Words ``[k * bits / 32, n]`` to those of gptq_shuffle; back: from them."""
    source = _shuffled_bits(bits)
    octets = np.ascontiguousarray(words.T).view(np.uint8)
    runs = np.unpackbits(octets, axis=1, bitorder="little").reshape(len(octets), -1, len(source))
    return _words_of(runs[..., np.argsort(source) if back else source].reshape(len(octets), -1))


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


def _repacked(codes: Host, k: int, n: int, bits: int, is_a_8bit: bool, like: Array) -> Any:
    """Codes ``[k, n]`` as words ``[k / 16, n * bits / 2]`` in the order of Marlin."""
    if bits not in (4, 8):
        raise ValueError(f"num_bits: must be 4 or 8, got {bits}")
    height = 32 if is_a_8bit else 16
    if codes.shape != (k, n) or k % height or n % 64:
        raise ValueError(
            f"b_q_weight: must hold [size_k, size_n] = {[k, n]} codes, of multiples of {height} and 64, "
            f"got {list(codes.shape)}"
        )
    tiles = codes.reshape(k // height, height, n // 16, 16).swapaxes(1, 2).reshape(-1, 1024)
    whole = tiles[:, _order_of_marlin(bits, is_a_8bit)].reshape(-1, 32 // bits).T
    return array_like(_stream_of(whole, bits).reshape(k // 16, -1), "int32", like)


def _stream_of_marlin(words: Host, k: int, n: int, bits: int) -> Host:
    """The inverse of _repacked, for activations of 16 bits."""
    if words.shape != (k // 16, n * bits // 2):
        raise ValueError(f"b_q_weight: must have shape {[k // 16, n * bits // 2]}, got {list(words.shape)}")
    stored = bit_stream(words.reshape(1, -1), bits).T.reshape(-1, 1024)
    tiles = np.empty_like(stored)
    tiles[:, _order_of_marlin(bits, False)] = stored
    return tiles.reshape(k // 16, n // 16, 16, 16).swapaxes(1, 2).reshape(k, n)


def _zeros_of_marlin(words: Host, n: int, bits: int) -> Host:
    """Zero points ``[n, groups]`` from ``[groups, n * bits / 32]`` as vLLM permutes and packs them."""
    stored = bit_stream(np.ascontiguousarray(words.T), bits).T.reshape(len(words), -1, 32 // bits)
    plain = np.empty_like(stored)
    plain[..., _INTERLEAVED[bits]] = stored
    return _reordered(plain.reshape(len(words), n), _GROUPED).T.astype(np.int64)


def _reordered(values: Host, order: Host) -> Host:
    """Columns that were taken in this order, in each ``len(order)`` of them, back at their places."""
    stored = values.reshape(values.shape[0], -1, len(order))
    plain = np.empty_like(stored)
    plain[..., order] = stored
    return plain.reshape(values.shape)
