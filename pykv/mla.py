"""Caches of multi-head latent attention (MLA): writing them, and gathering their rows.

A token is one row of ``kv_lora_rank`` latent and ``rope_size`` rotated elements, shared by all heads; a cache is
``[NB, BS, kv_lora_rank + rope_size]``.  ``"fp8_ds_mla"`` caches ``[NB, BS, record]`` hold bytes instead: the latent as
float8_e4m3fn, a float32 scale for each 128 of it, and the 16-bit rope as it is: 656 bytes for 512 + 64.
"""

from __future__ import annotations

from pykv import _C
from pykv._types import Array, ScalarOrArray, Stream


def concat_and_cache_mla(
    kv_c: Array,
    k_pe: Array,
    kv_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str = "auto",
    scale: ScalarOrArray = 1.0,
    *,
    stream: Stream = None,
) -> None:
    """Write ``concat(kv_c[t], k_pe[t])`` into the slot of each token.

    Args:
        kv_c: ``[num_rows, kv_lora_rank]`` float32, float16 or bfloat16.
        k_pe: ``[num_rows, rope_size]``, dtype of ``kv_c``.
        kv_cache: ``[NB, BS, kv_lora_rank + rope_size]``, or records; any strides; written.
        slot_mapping: ``[num_tokens]`` int32 or int64: the slot of each token; negative: padding, the token is skipped.
            Its length decides: ``kv_c`` and ``k_pe`` may have more rows.  Of tokens with one slot, any may win.
        kv_cache_dtype: ``"auto"`` (or the dtype's name): copied; ``"fp8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``: one-byte
            elements, ``value / scale`` rounded to nearest even and saturated, NaN stays NaN; ``"fp8_ds_mla"``: records,
            of 16-bit data and a ``kv_lora_rank`` that is a multiple of 128.
        scale: for fp8 caches, but not for ``"fp8_ds_mla"``: a number, or a float32 array of one element.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape or an option is wrong; or a slot lies beyond the cache: it was skipped (CPU: at once;
            CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """
    _C.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale, stream)
