"""The paged KV cache: writing new tokens, copying blocks within it, moving blocks out of it and back.

A cache has NB blocks of BS tokens; slot ``block * BS + offset`` is one token's place.  Layouts (x is 16 bytes):

=======  =====================================================  ========================================
flash    ``[NB, BS, num_kv_heads, head_size]``                  the same; NHD, or HND by strides
packed   ``[NB, num_kv_heads, head_size / x, BS, x]``           ``[NB, num_kv_heads, head_size, BS]``
=======  =====================================================  ========================================

nvfp4 caches are bytes ``[NB, BS, num_kv_heads, head_size * 9 / 16]``, NHD or (by strides) HND: a nominal shape, since
in a block all four-bit floats come first and then the S = head_size / 16 scales of each token and head, NHD or HND as
well.  Scale ``s`` of token ``t`` lies in row ``t``, column ``s`` of keys, but of values (the bytes are vLLM's) in row
``t // 4 * 4 + s // (S / 4)``, column ``s % (S / 4) * 4 + t % 4``.  That needs a ``head_size`` that is a multiple of 64
and a BS that is a multiple of 4, for keys too (others, such as 80 and 96, are refused), and blocks without gaps.

All strides are free, and those of keys and values independent: views of one allocation are as good as two allocations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pykv import _C
from pykv._libraries import torch_stream
from pykv._schema import Rule, Spec, operation
from pykv._types import Array, ScalarOrArray, Stream


@operation()
def reshape_and_cache(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str = "auto",
    k_scale: ScalarOrArray = 1.0,
    v_scale: ScalarOrArray = 1.0,
    interleaved_v: bool = False,
    *,
    stream: Stream = None,
) -> None:
    """Write the keys and values of tokens into their slots of packed caches.

    Args:
        key: ``[num_rows, num_kv_heads, head_size]`` float32, float16 or bfloat16.
        value: ``[num_rows, num_kv_heads, v_head_size]``, dtype of ``key``.
        key_cache: ``[NB, num_kv_heads, head_size / x, BS, x]`` with x = 16 bytes of elements; written.
        value_cache: ``[NB, num_kv_heads, v_head_size, BS]``; written.
        slot_mapping: ``[num_tokens]`` int32 or int64: the slot of each token; negative: padding, the token is skipped.
            Its length decides: ``key`` and ``value`` may have more rows.  Of tokens with one slot, any may win.
        kv_cache_dtype: ``"auto"`` (or the dtype's name): elements are copied, the caches have the dtype of ``key``;
            ``"fp8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``: one-byte elements, ``value / scale`` rounded to nearest even and
            saturated; NaN stays NaN; ``"int8"``: the same with integers, -128 to 127, NaN becomes 0; ``"nvfp4"`` (flash
            caches only): four-bit floats times a scale for each 16 of them, which is the largest magnitude among them
            over 6, as float8_e4m3fn, times ``scale``; NaN becomes 0.  ``scale`` = largest of all / 2688 uses the whole
            range; ``"nvfp4_4over6"``: over 4 instead, for those 16 whose squared errors are less in sum then.
        k_scale, v_scale: for fp8, int8 and nvfp4 caches: a number, or a float32 array of one element or one for each
            head.
        interleaved_v: ``value_cache`` is ``[NB, num_kv_heads, BS / x, v_head_size, x]``, with element ``d`` of token
            ``o`` of a block at ``[o // x, d, o % x]``.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape or an option is wrong; or a slot lies beyond the cache: it was skipped (CPU: at once;
            CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation()
def reshape_and_cache_flash(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str = "auto",
    k_scale: ScalarOrArray = 1.0,
    v_scale: ScalarOrArray = 1.0,
    *,
    stream: Stream = None,
) -> None:
    """Write the keys and values of tokens into their slots of flash caches; else as :func:`reshape_and_cache`.

    The caches are ``[NB, BS, num_kv_heads, head_size]`` and ``[NB, BS, num_kv_heads, v_head_size]``, NHD or, by
    strides, HND.  Slot ``block * BS + offset`` is token ``offset`` of a block; ``PagedKVCache.append`` returns slots.
    """


@operation()
def rotary_and_cache(
    positions: Array,
    query: Array,
    key: Array,
    value: Array,
    cos_sin_cache: Array,
    is_neox: bool,
    key_cache: Array,
    value_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str = "auto",
    k_scale: ScalarOrArray = 1.0,
    v_scale: ScalarOrArray = 1.0,
    rope_dim_offset: int = 0,
    *,
    stream: Stream = None,
) -> None:
    """:func:`rotary_embedding` of ``query`` and ``key``, then :func:`reshape_and_cache_flash` (or the packed form) of
    the rotated ``key`` and of ``value``: in one launch, with the very same results.

    Args:
        positions: ``[num_tokens]`` int32 or int64.
        query: ``[num_tokens, num_heads * head_size]`` or ``[num_tokens, num_heads, head_size]``, float32, float16 or
            bfloat16; rotated in place.
        key: as ``query``, with ``num_kv_heads``; rotated in place.
        value: as ``key``, with a head size of its own.  The three may be parts of one buffer.
        cos_sin_cache: ``[max_position, rotary_dim]`` float32, float16 or bfloat16: in each row all cosines, then all
            sines.
        is_neox: NeoX style pairs, else GPT-J style.
        key_cache, value_cache: flash or packed, as for :func:`reshape_and_cache_flash` and :func:`reshape_and_cache`;
            written.  The head sizes are theirs.
        slot_mapping: at most ``[num_tokens]`` int32 or int64: the slot of each token.  A token without one (beyond its
            end, or negative) is rotated and not cached.
        kv_cache_dtype, k_scale, v_scale: as for :func:`reshape_and_cache`.
        rope_dim_offset: first element of a head that is rotated.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape, a stride or an option is wrong.  Also for a position outside ``cos_sin_cache``, whose token
            was not rotated, but cached as it is, and for a slot beyond the cache, which was skipped (CPU: at once;
            CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


def _heads_of_qkv(count: str) -> Rule:
    def make(arguments: Mapping[str, Any]) -> Spec:
        (tokens, _), dtype = arguments["qkv"]
        return Spec((tokens, arguments[count] * arguments["head_dim"]), dtype)

    return Rule(make)


@operation(q_out=_heads_of_qkv("num_q_heads"), k_out=_heads_of_qkv("num_kv_heads"), v_out=_heads_of_qkv("num_kv_heads"))
def fused_qknorm_rope_cache(
    q_out: Array,
    k_out: Array,
    v_out: Array,
    qkv: Array,
    q_weight: Array,
    k_weight: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    slot_mapping: Array,
    k_cache: Array,
    v_cache: Array,
    head_dim: int,
    num_q_heads: int,
    num_kv_heads: int,
    rotary_pairs: int,
    epsilon: float,
    norm_weight_bias: float = 0.0,
    kv_cache_dtype: str = "auto",
    k_scale: ScalarOrArray | None = None,
    v_scale: ScalarOrArray | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Split ``qkv`` into heads: norm those of queries and keys, rotate them, and cache keys and values.

    A query or key head ``x`` becomes ``x * r * (weight + norm_weight_bias)`` with
    ``r = 1 / sqrt(sum(x**2) / head_dim + epsilon)``, in fp32 and rounded to the dtype; then it is rotated in NeoX style
    and rounded again (:func:`fused_qk_norm_rope` rounds once).  Value heads are copied.  ``k_out`` and ``v_out`` go to
    the cache as by :func:`reshape_and_cache_flash`.  Two launches on a GPU.

    Args:
        q_out: ``[num_tokens, num_q_heads * head_dim]`` or ``[num_tokens, num_q_heads, head_dim]``, dtype of ``qkv``;
            written.
        k_out, v_out: the same with ``num_kv_heads``; written.
        qkv: ``[num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]`` float32, float16 or bfloat16; not changed.
        q_weight, k_weight: ``[head_dim]`` float32, float16 or bfloat16, both of one dtype.
        cos, sin: ``[max_position, >= rotary_pairs]`` float32, float16 or bfloat16, both of one dtype, with one row
            stride: halves of a ``cos_sin_cache``, or arrays of their own.
        positions: ``[num_tokens]`` int32 or int64.
        slot_mapping: at most ``[num_tokens]`` int32 or int64: the slot of each token.  A token without one (beyond its
            end, or negative) is not cached.
        k_cache, v_cache: as for :func:`reshape_and_cache_flash`; written.
        head_dim: elements of a head.
        num_q_heads, num_kv_heads: heads of queries, and of keys or of values.
        rotary_pairs: element ``i`` of a head is rotated with element ``i + rotary_pairs``; 0: none is.
        epsilon: added to the mean square.
        norm_weight_bias: added to the weights (1 for Gemma).
        kv_cache_dtype, k_scale, v_scale: as for :func:`reshape_and_cache`.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape, a stride or an option is wrong.  Also for a position outside ``cos``, whose token was not
            rotated, but normed and cached, and for a slot beyond the cache, which was skipped (CPU: at once; CUDA: by
            ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation()
def copy_blocks(
    key_caches: Sequence[Array], value_caches: Sequence[Array], block_mapping: Array, *, stream: Stream = None
) -> None:
    """``cache[to] = cache[from]`` for each row ``(from, to)`` of the mapping, in the caches of all layers.

    Args:
        key_caches, value_caches: lists or tuples of a cache ``[NB, ...]`` a layer; any dtype and layout; written.
        block_mapping: ``[num_pairs, 2]`` int64 or int32.  On the host (always for CPU caches) it is checked first, and
            its rows take effect in order: a destination may be a source further down.  On the device of the caches its
            rows are copied concurrently: no destination may occur in another row.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape is wrong; or a block lies outside the caches: then nothing was copied if the mapping is on
            the host, and the row was skipped if it is on the device (raised by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation()
def copy_blocks_mla(kv_caches: Sequence[Array], block_mapping: Array, *, stream: Stream = None) -> None:
    """:func:`copy_blocks` for layers of one cache ``[NB, ...]`` each; all else as there."""


@operation()
def swap_blocks(
    src: Array, dst: Array, block_size_in_bytes: int, block_mapping: Array, *, stream: Stream = None
) -> None:
    """Copy bytes of ``src`` to ``dst``: block ``from`` to block ``to`` for each row of the mapping, in order.

    Args:
        src, dst: arrays of any dtype and shape on the CPU or any CUDA device, taken as the bytes from their first
            element on; ``dst`` is written.
        block_size_in_bytes: size of a block, and distance from one to the next.
        block_mapping: ``[num_pairs, 2]`` int64 or int32 on the host; checked before anything is copied.
        stream: CUDA stream of the device of ``dst``, or of ``src`` if ``dst`` lies on the host.  The copies are
            asynchronous where host memory is pinned: synchronise before reading it or letting go of it.

    Raises:
        ValueError: a block lies outside ``src`` or ``dst``, or the mapping not on the host; nothing was copied.
        TypeError: a dtype is wrong.
    """


@operation()
def swap_blocks_layers(
    src_caches: Sequence[Array],
    dst_caches: Sequence[Array],
    block_size_in_bytes: int,
    block_mapping: Array,
    *,
    stream: Stream = None,
) -> None:
    """:func:`swap_blocks` for each pair of arrays of two lists, one after the other: all layers in one call.

    Between a device and pinned host memory many short runs of blocks are copied by a kernel on a few SMs, few long ones
    by the copy engines: either way issuing them takes little time on the host.

    Args:
        src_caches, dst_caches: lists or tuples of equally many arrays, each list on one device; ``dst_caches`` are
            written.  Arrays of both must be writable.
        block_size_in_bytes, block_mapping, stream: as for :func:`swap_blocks`.

    Raises:
        ValueError: a block lies outside the smallest array, an array on another device than the first of its list, or
            the mapping not on the host; nothing was copied.
        TypeError: a dtype is wrong.
    """


@operation(has_body=True)
def swap_blocks_batch(
    src_ptrs: Array | Sequence[int],
    dst_ptrs: Array | Sequence[int],
    sizes: Array | Sequence[int],
    is_src_access_order_any: bool = False,
    *,
    stream: Stream = None,
) -> None:
    """Copy ``sizes[i]`` bytes from the address ``src_ptrs[i]`` to the address ``dst_ptrs[i]``, for each ``i``.

    The copies have no order among them; neighbours that go on where the one before them ends become one.  Between a
    device and pinned memory a kernel on a few SMs makes the short ones, and the copy engines make few long ones.

    Args:
        src_ptrs, dst_ptrs: ``[n]`` int64 on the host, or sequences of ints: addresses of the host, pinned or pageable,
            or of any CUDA device, freely mixed.  Ranges that are written must not overlap others.
        sizes: ``[n]`` int64 on the host, or a sequence of ints.  None of the three is needed after the call.
        is_src_access_order_any: permission to read before earlier work of the stream is done.  It is not made use of.
        stream: CUDA stream; ``None``: torch's current one if an argument is a torch tensor, else the default stream of
            the first device that has one of the addresses.  Where all memory is the host's and the stream is a default
            one, the CPU copies at once.  Otherwise copies are asynchronous where host memory is pinned: synchronise
            before reading it or letting go of it.

    Raises:
        ValueError: the three differ in length; a size is negative; an address is null or negative.  Nothing was copied.
        TypeError: a dtype is wrong.

    Addresses are taken at their word: one that is not valid ends the process, or poisons its CUDA context.
    """
    arrays = (_as_array(src_ptrs), _as_array(dst_ptrs), _as_array(sizes))
    _C.swap_blocks_batch(*arrays, is_src_access_order_any, torch_stream(*arrays) if stream is None else stream)


def _as_array(values: Array | Sequence[int]) -> Any:
    if not isinstance(values, (list, tuple)):
        return values
    return np.array(values) if values else np.empty(0, np.int64)


@Rule
def _fp8(arguments: Mapping[str, Any]) -> Spec:
    shape, dtype = arguments["input"]
    if dtype == "uint8" or dtype.startswith("float8"):
        raise TypeError("convert_fp8: output: must be given where the input is fp8: it decides the dtype")
    return Spec(shape, "float8_e5m2" if arguments["kv_dtype"] == "fp8_e5m2" else "float8_e4m3fn")


@operation(output=_fp8)
def convert_fp8(
    output: Array, input: Array, scale: ScalarOrArray = 1.0, kv_dtype: str = "fp8", *, stream: Stream = None
) -> None:
    """``output = fp8(input / scale)``, or ``output = input * scale`` where the input is fp8.

    Args:
        output: one-byte elements if ``input`` is float32, float16 or bfloat16; else one of these; written.
        input: the same shape; both with any strides.  Or another shape of the same first dimension and as many
            elements, where each index of that is one contiguous block in both: blocks are converted as they lie, such
            as those of packed key caches ``[NB, num_kv_heads, head_size / x, BS, x]``, whose x depends on the dtype.
        scale: a number, or a float32 array of one element.
        kv_dtype: ``"fp8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``: rounded to nearest even, saturated, NaN stays NaN.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape or an option is wrong.
        TypeError: a dtype is wrong, or none of the two arrays has one-byte elements.
    """
