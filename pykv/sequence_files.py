"""Sequences of a cache as safetensors files.

A file holds the distinct blocks of its sequences in the order of their tokens, whatever the layout of the cache:
``keys.<layer>`` and ``values.<layer>``, [num_blocks, block_size, num_kv_heads, head_size], bfloat16 as its bits, nvfp4
as head_size / 2 bytes of codes and head_size / 16 block scales;
``tables`` [S, W] (-1 behind the last block), ``lengths`` [S] and ``seq_ids`` [S].  Its metadata says what the cache is
like, and has the SHA-256 of everything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv.block_moves import check_room
from pykv.block_pool import MAX_LENGTH, NO_BLOCK, BlockPool, OutOfBlocks, Residents
from pykv.safetensors_files import Entry, SafetensorsFile, Tensors
from pykv.safetensors_files import write_file as _write

FORMAT = "pykv sequences 1"


@dataclass(frozen=True)
class CacheShape:
    """What two caches must have in common to exchange sequences."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def element(self) -> np.dtype[Any]:
        """How elements are stored in a file."""
        return np.dtype({"float32": "f4", "float16": "f2", "bfloat16": "u2"}.get(self.dtype, "u1"))

    @property
    def block(self) -> tuple[int, int, int]:
        width = self.head_size * 9 // 16 if self.dtype == "nvfp4" else self.head_size
        return self.block_size, self.num_kv_heads, width

    def by_token(self, blocks: npt.NDArray[np.uint8], layout: str, keys: bool) -> npt.NDArray[Any]:
        """Raw blocks, [n, bytes], as [n, *block]."""
        if self.dtype == "nvfp4":
            return blocks[:, self._nvfp4_places(layout, keys)]
        return np.array(self._view_by_token(blocks, layout, keys)).reshape(-1, *self.block)

    def put_by_token(self, blocks: npt.NDArray[np.uint8], layout: str, keys: bool, by_token: npt.NDArray[Any]) -> None:
        """The other way round."""
        if self.dtype == "nvfp4":
            blocks[:, self._nvfp4_places(layout, keys)] = by_token
            return
        view = self._view_by_token(blocks, layout, keys)
        view[...] = by_token.reshape(view.shape)

    def _nvfp4_places(self, layout: str, keys: bool) -> npt.NDArray[np.int64]:
        """[*block]: where in a raw block the bytes of each token and head are; the scales of values are swizzled."""
        token, head = np.ogrid[: self.block_size, : self.num_kv_heads]
        num_scales = self.head_size // 16

        def row(token: npt.NDArray[np.int64], head: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            return head * self.block_size + token if layout == "HND" else token * self.num_kv_heads + head

        token, head, s = token[..., None], head[..., None], np.arange(num_scales)
        codes = row(token, head) * (8 * num_scales) + np.arange(8 * num_scales)
        if keys:
            scales = row(token, head) * num_scales + s
        else:
            quarter = num_scales // 4
            scales = row(token // 4 * 4 + s // quarter, head) * num_scales + s % quarter * 4 + token % 4
        return np.concatenate([codes, self.block_size * self.num_kv_heads * 8 * num_scales + scales], axis=-1)

    def _view_by_token(self, blocks: npt.NDArray[np.uint8], layout: str, keys: bool) -> npt.NDArray[Any]:
        """A view of raw blocks, [n, bytes], as [n, block_size, num_kv_heads, ...]."""
        size, heads, width = self.block
        elements = blocks.view(self.element)
        if layout == "NHD":
            return elements.reshape(-1, size, heads, width)
        if layout == "HND":
            return elements.reshape(-1, heads, size, width).swapaxes(1, 2)
        x = 16 // self.element.itemsize if keys else 1
        return elements.reshape(-1, heads, width // x, size, x).transpose(0, 3, 1, 2, 4)


def save(path: Any, shape: CacheShape, layout: str, residents: Residents, caches: npt.NDArray[np.uint8]) -> None:
    """Write sequences.  ``caches``: raw blocks [2 * num_layers, n, bytes], keys first, as ``table`` numbers them."""
    tensors: Tensors = {
        "tables": residents.table,
        "lengths": residents.lengths,
        "seq_ids": np.array(residents.ids, np.int64),
    }
    unused = _unused(shape.block_size, residents, caches.shape[1])
    for i, blocks in enumerate(caches):
        keys = i < shape.num_layers
        by_token = shape.by_token(blocks, layout, keys)
        by_token[unused] = 0  # what others have left there is nobody's business
        tensors[f"{'keys' if keys else 'values'}.{i % shape.num_layers}"] = by_token
    metadata = {"format": FORMAT} | {name: str(value) for name, value in vars(shape).items()}
    metadata["sha256"] = _checksum(metadata, tensors)
    _write(Path(path), tensors, metadata)


def load(path: Any, shape: CacheShape, layout: str, pool: BlockPool) -> tuple[Residents, npt.NDArray[np.uint8]]:
    """Read what ``save`` wrote; raw blocks for a cache of this shape and layout with the free blocks of ``pool``."""

    def check(file: SafetensorsFile) -> None:
        """Before memory is spent on the tensors."""
        metadata = dict(file.metadata)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"load: {path}: no file of pykv sequences")
        entries, checksum = file.entries(), metadata.pop("sha256", None)
        try:
            _check_header(path, metadata, entries, shape)
            check_room("load", "more blocks", entries["keys.0"].shape[0], pool)
        except (ValueError, OutOfBlocks):
            if checksum != _digest(metadata, ((name, e, file.pieces(e)) for name, e in sorted(entries.items()))):
                raise ValueError(altered) from None  # which explains the other error
            raise

    altered = f"load: {path}: the checksum is wrong, the file was altered"
    metadata, tensors = _read(Path(path), check)
    if metadata.pop("sha256", None) != _checksum(metadata, tensors):
        raise ValueError(altered)
    residents = Residents(tensors["seq_ids"].tolist(), tensors["lengths"], tensors["tables"])
    num_blocks = len(tensors["keys.0"])
    if not _is_sound(shape.block_size, residents, num_blocks):
        raise ValueError(f"load: {path}: its tensors contradict each other")
    names = _caches(shape)
    caches = np.empty((len(names), num_blocks, int(np.prod(shape.block)) * shape.element.itemsize), np.uint8)
    for i, (blocks, name) in enumerate(zip(caches, names, strict=True)):
        shape.put_by_token(blocks, layout, i < shape.num_layers, tensors.pop(name))
    return residents, caches


def _read(path: Path, check: Callable[[SafetensorsFile], None] | None = None) -> tuple[dict[str, str], Tensors]:
    with SafetensorsFile("load", path) as file:
        if check:
            check(file)
        return file.metadata, {name: file.tensor(entry) for name, entry in file.entries().items()}


def _caches(shape: CacheShape) -> list[str]:
    return [f"{kind}.{layer}" for kind in ("keys", "values") for layer in range(shape.num_layers)]


def _check_header(path: Any, metadata: Mapping[str, str], entries: Mapping[str, Entry], shape: CacheShape) -> None:
    """All that can be told without the data: what the cache is like, and each tensor's dtype and shape."""
    for name, wanted in vars(shape).items():
        if metadata.get(name) != str(wanted):
            raise ValueError(f"load: {path}: its {name} is {metadata.get(name)}, that of the cache {wanted}")
    names = _caches(shape)
    if entries.keys() != {"tables", "lengths", "seq_ids", *names}:
        raise ValueError(f"load: {path}: tensors are missing or unknown")
    num_seqs, num_blocks = ((*entries[name].shape, 0)[0] for name in ("seq_ids", "keys.0"))
    width = min(num_blocks, entries["tables"].shape[-1] if entries["tables"].shape else 0)  # each block once
    forms: dict[str, tuple[Any, tuple[int, ...]]] = {
        "tables": (np.dtype(np.int32), (num_seqs, width)),
        "lengths": (np.dtype(np.int64), (num_seqs,)),
        "seq_ids": (np.dtype(np.int64), (num_seqs,)),
        **dict.fromkeys(names, (shape.element, (num_blocks, *shape.block))),
    }
    for name, (dtype, dims) in forms.items():
        entry = entries[name]
        if entry.dtype != dtype or entry.shape != dims:
            raise ValueError(
                f"load: {path}: {name} is {entry.dtype} {list(entry.shape)} where {dtype} {list(dims)} would fit: "
                "its tensors contradict each other"
            )


def _unused(block_size: int, residents: Residents, num_blocks: int) -> npt.NDArray[np.bool_]:
    """[num_blocks, block_size]: the places behind the last token of every sequence."""
    used = np.zeros(num_blocks, np.int64)
    rows, places = np.nonzero(residents.table != NO_BLOCK)
    np.maximum.at(used, residents.table[rows, places], residents.lengths[rows] - places * block_size)
    return np.asarray(np.arange(block_size) >= used[:, None])


def _is_sound(block_size: int, residents: Residents, num_blocks: int) -> bool:
    """Whether tables and lengths fit together, and each block has one place in the sequences that share it."""
    table, lengths = residents.table, residents.lengths
    if len(residents.ids) != len(set(residents.ids)):
        return False
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) > MAX_LENGTH:
        return False
    spans = -(-lengths // block_size)
    held = np.arange(table.shape[1]) < spans[:, None]
    if table.shape[1] != spans.max(initial=0) or (table[~held] != NO_BLOCK).any():
        return False
    blocks, columns = table[held], np.nonzero(held)[1]
    if not np.array_equal(np.unique(blocks), np.arange(num_blocks)):
        return False
    column_of = np.zeros(num_blocks, np.int64)
    column_of[blocks] = columns
    return bool((column_of[blocks] == columns).all())


def _checksum(metadata: Mapping[str, str], tensors: Tensors) -> str:
    return _digest(
        metadata,
        ((name, t, [np.ascontiguousarray(t).reshape(-1).view(np.uint8).data]) for name, t in sorted(tensors.items())),
    )


def _digest(metadata: Mapping[str, str], tensors: Iterable[tuple[str, Any, Iterable[Any]]]) -> str:
    """The SHA-256 of metadata, and of each tensor's name, what has its dtype and shape, and data in pieces."""
    sha = hashlib.sha256(repr(sorted(metadata.items())).encode())
    for name, form, pieces in tensors:
        sha.update(repr((name, form.dtype.str, form.shape)).encode())
        for piece in pieces:
            sha.update(piece)
    return sha.hexdigest()
