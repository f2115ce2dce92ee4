"""Caches of multi-head latent attention (MLA): writing them, and gathering their rows.

A token is one row of ``kv_lora_rank`` latent and ``rope_size`` rotated elements, shared by all heads; a cache is
``[NB, BS, kv_lora_rank + rope_size]``.  ``"fp8_ds_mla"`` caches ``[NB, BS, record]`` hold bytes instead: the latent as
float8_e4m3fn, a float32 scale (a power of two) for each 128 of it, and the 16-bit rope as it is: 656 bytes for 512 +
64.  ``"nvfp4_ds_mla"`` records hold it as four-bit floats, the rope as float8_e4m3fn, and a float8_e4m3fn scale for
each 16 of the latent: 352 bytes for 512 + 64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pykv._schema import NoneIs, Rule, Spec, operation
from pykv._types import Array, ScalarOrArray, Stream


@operation()
def concat_and_cache_mla(
    kv_c: Array,
    k_pe: Array,
    kv_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str = "auto",
    scale: ScalarOrArray = 1.0,
    skip_scale: bool = False,
    *,
    stream: Stream = None,
) -> None:
    """Write ``concat(kv_c[t], k_pe[t])`` into the slot of each token.

    Args:
        kv_c: ``[num_rows, kv_lora_rank]`` float32, float16 or bfloat16.
        k_pe: ``[num_rows, rope_size]``, dtype of ``kv_c``.
        kv_cache: ``[NB, BS, kv_lora_rank + rope_size]``, any strides; or records; or nvfp4
            ``[NB, BS, (kv_lora_rank + rope_size) * 9 / 16]`` in blocks without gaps; written.
        slot_mapping: ``[num_tokens]`` int32 or int64: the slot of each token; negative: padding, the token is skipped.
            Its length decides: ``kv_c`` and ``k_pe`` may have more rows.  Of tokens with one slot, any may win.
        kv_cache_dtype: ``"auto"`` (or the dtype's name): copied; ``"fp8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``: one-byte
            elements, ``value / scale`` rounded to nearest even and saturated, NaN stays NaN; ``"int8"``: the same with
            integers, NaN becomes 0; ``"nvfp4"``: as keys of one head (see ``pykv.cache``), whose size must be a
            multiple of 64; ``"fp8_ds_mla"``: records, of 16-bit data and a ``kv_lora_rank`` that is a multiple of 128;
            their scales are the least powers of two that are at least the largest magnitude / 448 and 1e-4; with
            ``rope_size`` 0 what follows the scales is zeros; ``"nvfp4_ds_mla"``: records of four-bit elements, of
            16-bit data, a ``kv_lora_rank`` that is a multiple of 64 and a ``rope_size`` that is a multiple of 8.
        scale: for all but copies and records: a number, or a float32 array of one element.
        skip_scale: take 1 for ``scale`` and do not look at it, for data that was scaled before.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape or an option is wrong; or a slot lies beyond the cache: it was skipped (CPU: at once;
            CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation()
def concat_and_cache_mla_layers(
    kv_c: Array,
    k_pe: Array,
    kv_caches: Sequence[Array],
    slot_mapping: Array,
    kv_cache_dtype: str = "auto",
    kv_scales: ScalarOrArray = 1.0,
    *,
    stream: Stream = None,
) -> None:
    """:func:`concat_and_cache_mla` for several layers at once, each with a cache of its own.

    Args:
        kv_c: ``[num_layers, num_rows, kv_lora_rank]`` float32, float16 or bfloat16.
        k_pe: ``[num_layers, num_rows, rope_size]``, dtype of ``kv_c``.
        kv_caches: a list or tuple of a cache ``[NB, BS, kv_lora_rank + rope_size]`` a layer, all of one dtype and with
            the same strides; written.
        slot_mapping: ``[num_layers, num_tokens]`` int32 or int64; a stride of 0 gives all layers the same slots.
        kv_cache_dtype: ``"auto"`` (or the dtype's name), ``"fp8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
        kv_scales: for fp8: a number, or a float32 array of one element or one for each layer.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape or an option is wrong; or a slot lies beyond the caches: it was skipped (CPU: at once;
            CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation(converters={"num_blocks": NoneIs(-1)})
def concat_and_cache_mla_grouped(
    kv_c: Array,
    k_pe: Array,
    kv_cache_ptrs: Array,
    slot_mapping: Array,
    block_size: int,
    block_stride: int,
    entry_stride: int,
    kv_scales: ScalarOrArray | None = None,
    kv_cache_dtype: str = "auto",
    num_blocks: int | None = None,
    *,
    stream: Stream = None,
) -> None:
    """:func:`concat_and_cache_mla_layers` for caches that are known by their addresses alone, as vLLM calls it.

    Args:
        kv_c, k_pe, slot_mapping, kv_cache_dtype: as there.
        kv_cache_ptrs: ``[num_layers]`` int64 on the device of the other arrays: addresses of the caches, whose elements
            have the dtype of ``kv_c``, or one byte for fp8.  0: nothing is written for this layer.
        block_size: tokens of a block.
        block_stride, entry_stride: elements from block to block and from token to token of each cache.
        kv_scales: as there; ``None``: 1.
        num_blocks: blocks of each cache: slots beyond them are skipped and reported.  ``None``: not known.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape, a size or an option is wrong; or a slot lies beyond ``num_blocks``.
        TypeError: a dtype is wrong.

    Addresses are taken at their word, when the work runs: one that is not valid, or a slot beyond a cache whose
    ``num_blocks`` is not given, overwrites foreign memory, ends the process, or poisons its CUDA context.
    """


@operation()
def concat_and_cache_mla_rope_fused(
    positions: Array,
    q_pe: Array,
    k_pe: Array,
    kv_c: Array,
    cos_sin_cache: Array,
    is_neox: bool,
    slot_mapping: Array,
    kv_cache: Array,
    kv_cache_dtype: str = "auto",
    kv_cache_scale: ScalarOrArray = 1.0,
    rotate_in_fp32: bool = False,
    rotate_padded: bool = False,
    *,
    stream: Stream = None,
) -> None:
    """Rotate ``q_pe`` and ``k_pe`` in place, then write as :func:`concat_and_cache_mla` does.

    Args:
        positions: ``[num_rows]`` int32 or int64.
        q_pe: ``[num_rows, num_heads, rope_size]`` or ``[num_rows, num_heads * rope_size]``, float32, float16 or
            bfloat16; rotated in place.
        k_pe: ``[num_rows, rope_size]``, dtype of ``q_pe``; rotated in place.
        kv_c: ``[num_rows, kv_lora_rank]``, dtype of ``q_pe``.
        cos_sin_cache: ``[max_position, rope_size]`` float32, float16 or bfloat16: in each row all cosines, then all
            sines.
        is_neox: NeoX style pairs, else GPT-J style (see :func:`rotary_embedding`).
        slot_mapping: at most ``[num_rows]`` int32 or int64: the slot of each token.
        kv_cache, kv_cache_dtype, kv_cache_scale: as for :func:`concat_and_cache_mla`; ``kv_cache`` is written.
        rotate_in_fp32: rotate in fp32 and round once, as :func:`rotary_embedding`.  Otherwise as vLLM does, in the
            data's own dtype: cosines, sines, both products and their sum are rounded to it, one after the other.
        rotate_padded: rotate all tokens.  Otherwise those without a place in the cache (beyond the end of
            ``slot_mapping``, or with a slot that is negative or beyond the cache) are left as they are.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape, a stride or an option is wrong.  Also for a position outside ``cos_sin_cache``, whose token
            was not rotated, but cached as it is, and for a slot beyond the cache, which was skipped (CPU: at once;
            CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation()
def cp_gather_cache(
    src_cache: Array,
    dst: Array,
    block_table: Array,
    cu_seq_lens: Array,
    batch_size: int,
    seq_starts: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Gather tokens of requests from a paged cache into the rows of ``dst``, one request after another.

    Request ``r`` has the rows from ``cu_seq_lens[r]`` to ``cu_seq_lens[r + 1]``; row ``i`` is its token
    ``i - cu_seq_lens[r] + seq_starts[r]``.  All other rows of ``dst`` stay as they are.

    Args:
        src_cache: ``[NB, BS, ...]`` of any dtype, MLA or NHD or HND.
        dst: ``[num_rows, ...]``, dtype and entries of ``src_cache``; written.
        block_table: ``[>= batch_size, width]`` int32 or int64, as all ids here.
        cu_seq_lens: ``[>= batch_size + 1]``, ascending.
        batch_size: number of requests.
        seq_starts: ``[>= batch_size]``, any token of a block; ``None``: 0.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape is wrong; or a position lies beyond the block table, or a block beyond the cache: its row
            was not written (CPU: at once; CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation()
def gather_and_maybe_dequant_cache(
    src_cache: Array,
    dst: Array,
    block_table: Array,
    cu_seq_lens: Array,
    token_to_seq: Array | None,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: ScalarOrArray,
    seq_starts: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Gather as :func:`cp_gather_cache`, the elements turned into those of ``dst``.

    Args:
        src_cache: ``[NB, BS, ...]``; for ``"fp8_ds_mla"`` records; for ``"nvfp4"`` with 9 bytes for 16 elements, MLA,
            NHD or HND.
        dst: ``[>= num_tokens, ...]`` float32, float16 or bfloat16; for ``"fp8_ds_mla"`` 16-bit, of the dtype in which
            the rope was written.  Rows from ``num_tokens`` on are not written.
        block_table: ``[>= num_requests, width]``.
        cu_seq_lens: ``[num_requests + 1]``, ascending.
        token_to_seq: ``[>= num_tokens]``: the request of each row; a row at or beyond its request's end is not written.
            ``None``: found from ``cu_seq_lens``.
        num_tokens: number of rows.
        kv_cache_dtype: ``"auto"`` (or the dtype's name): copied; ``"fp8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``,
            ``"int8"``: element times ``scale``; ``"nvfp4"``: times the scale of its block, too, of keys or MLA;
            ``"nvfp4_v"``: of values, whose scales lie in another order (``pykv.cache``); ``"fp8_ds_mla"``.
        scale: a number, or a float32 array of one element.
        seq_starts: ``[>= num_requests]``; ``None``: 0.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: as there; or a request in ``token_to_seq`` is out of range.
        TypeError: a dtype is wrong.
    """


@operation()
def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Array,
    dst: Array,
    block_table: Array,
    workspace_starts: Array,
    batch_size: int,
    seq_starts: Array | None = None,
    host_cache: Array | None = None,
    host_row_ids: Array | None = None,
    device_row_ids: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Gather ``"fp8_ds_mla"`` records as 16-bit rows; request ``r`` begins in row ``workspace_starts[r]``.

    It ends where the next one begins, the last one where ``dst`` ends.  With the last three arguments (all or none)
    records lie partly in host memory, and block ``b`` of ``block_table`` stands for the slots from ``b * BS`` to
    ``(b + 1) * BS``: the record of slot ``s`` is that of slot ``device_row_ids[s]`` of ``src_cache``, or, if that is
    negative, ``host_cache[host_row_ids[s]]``.

    Args:
        src_cache: ``[NB, BS, record]`` of bytes: 656 for rows of 576.
        dst: ``[num_rows, kv_lora_rank + rope_size]`` bfloat16 or float16, as the rope was written; written.
        block_table: ``[>= batch_size, width]``.
        workspace_starts: ``[>= batch_size]``, ascending.
        batch_size: number of requests.
        seq_starts: ``[>= batch_size]``, any token of a block; ``None``: 0.
        host_cache: ``[num_host_rows, record]`` of bytes in host memory: pinned where the other arrays are on CUDA, for
            the kernel reads it, and to be kept until it has.
        host_row_ids, device_row_ids: ``[num_slots]`` int32 or int64, or any shape of as many elements, contiguous.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: as for :func:`cp_gather_cache`; or a row in ``device_row_ids`` or ``host_row_ids`` lies beyond the
            memory that it is one of: it was not read (CPU: at once; CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong, or some of the last three arguments are missing.
    """


@operation()
def cp_gather_and_upconvert_nvfp4_kv_cache(
    src_cache: Array,
    dst: Array,
    block_table: Array,
    workspace_starts: Array,
    batch_size: int,
    *,
    stream: Stream = None,
) -> None:
    """Gather ``"nvfp4_ds_mla"`` records as 16-bit rows; all else as :func:`cp_gather_and_upconvert_fp8_kv_cache`.

    Args:
        src_cache: ``[NB, BS, record]`` of bytes: 352 for rows of 576.
        dst: ``[num_rows, kv_lora_rank + rope_size]`` bfloat16 or float16; written.
        block_table, workspace_starts, batch_size, stream: as there.
    """


@Rule
def _both_parts(arguments: Mapping[str, Any]) -> Spec:
    shape, dtype = arguments["ql_nope"]
    return Spec((*shape[:-1], shape[-1] + arguments["q_pe"].shape[-1]), dtype)


@operation(q_out=_both_parts)
def concat_mla_q(ql_nope: Array, q_pe: Array, q_out: Array, *, stream: Stream = None) -> None:
    """``q_out = concat(ql_nope, q_pe)`` along the last dimension, bit by bit.

    Args:
        ql_nope: ``[num_tokens, num_heads, kv_lora_rank]`` of any dtype; any strides, as for the others.  It may be
            ``q_out[:, :num_heads, :kv_lora_rank]`` itself: then ``q_pe`` alone is copied.
        q_pe: ``[num_tokens, num_heads, rope_size]``, the same dtype.
        q_out: ``[num_tokens, >= num_heads, kv_lora_rank + rope_size]``, the same dtype; written, but for the heads from
            ``num_heads`` on.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape is wrong.
        TypeError: a dtype is wrong.
    """
