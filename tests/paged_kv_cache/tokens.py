"""Reading and writing single tokens of a cache, in plain NumPy and in every layout."""

import math

import numpy as np

LAYOUTS = ("NHD", "HND", "packed")


def token_view(cache, layout):
    """A writable view [num_blocks, block_size, ...] of a key or value cache (host arrays)."""
    array = np.asarray(cache)
    if layout == "packed":
        return np.moveaxis(array, 3, 1)  # keys [NB, HKV, D/x, BS, x], values [NB, HKV, D, BS]
    return array


def write_tokens(kv, slots, values):
    """Fill each slot of every layer with its value, told apart by layer and by key or value."""
    blocks, offsets = np.divmod(np.asarray(slots), kv.block_size)
    for layer in range(kv.num_layers):
        for sign, cache in ((1, kv.key_caches[layer]), (-1, kv.value_caches[layer])):
            view = token_view(cache, kv.layout)
            filling = sign * (np.asarray(values, np.float32) + layer / 4)
            view[blocks, offsets] = filling.reshape(-1, *[1] * (view.ndim - 2))


def read_tokens(kv, seq_id, most=None):
    """The values that ``write_tokens`` wrote for this sequence, at most so many, found through its block table."""
    table = np.asarray(kv.block_tables([seq_id]))[0]
    positions = np.arange(int(np.asarray(kv.seq_lens([seq_id]))[0]))[:most]
    blocks, offsets = table[positions // kv.block_size], positions % kv.block_size
    seen = []
    for layer in range(kv.num_layers):
        for sign, cache in ((1, kv.key_caches[layer]), (-1, kv.value_caches[layer])):
            tokens = token_view(cache, kv.layout)[blocks, offsets]
            seen.append(sign * tokens.reshape(positions.size, math.prod(tokens.shape[1:])) - layer / 4)
    everything = np.concatenate(seen, axis=1)
    assert (everything == everything[:, :1]).all(), "layers, heads or channels of a token differ"
    return everything[:, 0].tolist()
