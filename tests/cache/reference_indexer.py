"""The ops on the indexer's block-planar cache in their plainest form: NumPy, one token after another."""

from __future__ import annotations

import numpy as np
from cache.reference import quantise
from cache.reference_mla import power_of_two_from


def scales_of(groups: np.ndarray, kind: str) -> np.ndarray:
    """One for each row: max(amax, 1e-4) / 448; for "ue8m0" and "mxfp8" the smallest power of two that is not less."""
    amax = np.fmax.reduce(np.abs(groups.astype(np.float32)), axis=1, initial=0)
    scales = np.fmax(amax, np.float32(1e-4)) / np.float32(448)
    return power_of_two_from(scales) if kind in ("ue8m0", "mxfp8") else scales


def planes(cache: np.ndarray, values: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Values ``[NB, BS, values]`` and scales ``[NB, BS, groups, 4]``, all of them bytes, of a cache as a view."""
    blocks, block_size, entry = cache.shape
    flat = np.lib.stride_tricks.as_strided(cache.view(np.uint8), (blocks, block_size * entry), (cache.strides[0], 1))
    split = block_size * values
    return (
        flat[:, :split].reshape(blocks, block_size, values),
        flat[:, split : split + 4 * block_size * groups].reshape(blocks, block_size, groups, 4),
    )


def indexer_k_quant_and_cache(k: np.ndarray, cache: np.ndarray, slots: np.ndarray, group: int, kind: str) -> None:
    blocks, block_size, _ = cache.shape
    values, scales = planes(cache, k.shape[1], k.shape[1] // group)
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < blocks * block_size:
            block, offset = divmod(slot, block_size)
            groups = k[token].reshape(-1, group)
            own = scales_of(groups, kind)
            values[block, offset] = quantise(groups, own[:, None], "fp8_e4m3").reshape(-1)
            stored = np.repeat(own.view(np.uint32) >> 23, 4).astype(np.uint8) if kind == "mxfp8" else own.astype("<f4")
            scales[block, offset] = stored.view(np.uint8).reshape(-1, 4)


def cp_gather_indexer_k_quant_cache(
    cache: np.ndarray,
    dst_k: np.ndarray,
    dst_scale: np.ndarray,
    block_table: np.ndarray,
    cu_seq_lens: np.ndarray,
    seq_starts: np.ndarray | None = None,
) -> None:
    """A token that is not in the cache leaves its row as it is."""
    blocks, block_size, _ = cache.shape
    groups = dst_scale.shape[1] * dst_scale.itemsize // 4
    values, scales = planes(cache, dst_k.shape[1], groups)
    for request in range(len(cu_seq_lens) - 1):
        start, end = cu_seq_lens[request : request + 2].tolist()
        for row in range(start, min(end, len(dst_k))):
            position = row - start + (0 if seq_starts is None else int(seq_starts[request]))
            column, offset = divmod(position, block_size)
            if 0 <= column < block_table.shape[1] and 0 <= block_table[request, column] < blocks:
                block = block_table[request, column]
                dst_k[row] = values[block, offset].view(dst_k.dtype)
                dst_scale[row] = scales[block, offset].reshape(-1).view(dst_scale.dtype)
