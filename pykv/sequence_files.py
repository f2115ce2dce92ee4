"""Sequences of a cache as safetensors files.

A file holds the distinct blocks of its sequences in the order of their tokens, whatever the layout of the cache:
``keys.<layer>`` and ``values.<layer>``, [num_blocks, block_size, num_kv_heads, head_size], bfloat16 as its bits, nvfp4
as head_size / 2 bytes of codes and head_size / 16 block scales;
``tables`` [S, W] (-1 behind the last block), ``lengths`` [S] and ``seq_ids`` [S].  Its metadata says what the cache is
like, and has the SHA-256 of everything else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv.block_pool import NO_BLOCK, Residents

FORMAT = "pykv sequences 1"

Tensors = dict[str, npt.NDArray[Any]]


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


def load(path: Any, shape: CacheShape, layout: str) -> tuple[Residents, npt.NDArray[np.uint8]]:
    """Read what ``save`` wrote; raw blocks for a cache of this shape and layout."""
    metadata, tensors = _read(Path(path))
    if metadata.get("format") != FORMAT:
        raise ValueError(f"load: {path}: no file of pykv sequences")
    if metadata.pop("sha256", None) != _checksum(metadata, tensors):
        raise ValueError(f"load: {path}: the checksum is wrong, the file was altered")
    for name, wanted in vars(shape).items():
        if metadata.get(name) != str(wanted):
            raise ValueError(f"load: {path}: its {name} is {metadata.get(name)}, that of the cache {wanted}")
    names = [f"{kind}.{layer}" for kind in ("keys", "values") for layer in range(shape.num_layers)]
    if tensors.keys() != {"tables", "lengths", "seq_ids", *names}:
        raise ValueError(f"load: {path}: tensors are missing or unknown")
    residents = Residents(tensors["seq_ids"].tolist(), tensors["lengths"], tensors["tables"])
    num_blocks = len(tensors[names[0]])
    if not _is_sound(shape.block_size, residents, num_blocks) or any(
        tensors[name].shape != (num_blocks, *shape.block) or tensors[name].dtype != shape.element for name in names
    ):
        raise ValueError(f"load: {path}: its tensors contradict each other")
    caches = np.empty((len(names), num_blocks, int(np.prod(shape.block)) * shape.element.itemsize), np.uint8)
    for i, (blocks, name) in enumerate(zip(caches, names, strict=True)):
        shape.put_by_token(blocks, layout, i < shape.num_layers, tensors[name])
    return residents, caches


def _unused(block_size: int, residents: Residents, num_blocks: int) -> npt.NDArray[np.bool_]:
    """[num_blocks, block_size]: the places behind the last token of every sequence."""
    used = np.zeros(num_blocks, np.int64)
    rows, places = np.nonzero(residents.table != NO_BLOCK)
    np.maximum.at(used, residents.table[rows, places], residents.lengths[rows] - places * block_size)
    return np.asarray(np.arange(block_size) >= used[:, None])


def _is_sound(block_size: int, residents: Residents, num_blocks: int) -> bool:
    table, lengths = residents.table, residents.lengths
    if not (table.ndim == 2 and lengths.shape == (len(table),) and len(residents.ids) == len(set(residents.ids))):
        return False
    if table.dtype != np.int32 or lengths.dtype != np.int64 or len(residents.ids) != len(table):
        return False
    held = np.arange(table.shape[1]) < -(-lengths[:, None] // block_size)
    return bool(
        (lengths >= 0).all()
        and (held.sum(axis=1) * block_size >= lengths).all()
        and (table[~held] == NO_BLOCK).all()
        and np.array_equal(np.unique(table[held]), np.arange(num_blocks))
    )


def _checksum(metadata: Mapping[str, str], tensors: Tensors) -> str:
    sha = hashlib.sha256(repr(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(repr((name, tensor.dtype.str, tensor.shape)).encode())
        sha.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def _write(path: Path, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Under a temporary name first, so that nobody ever sees half a file under this one."""
    save_file = _safetensors("save").numpy.save_file
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, temporary, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, str], Tensors]:
    safetensors = _safetensors("load")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"load: {path}: the file is damaged or no safetensors file: {error}") from None


def _safetensors(op: str) -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ImportError(f"{op}: needs the package safetensors (pip install 'pykv-kernels[files]')") from None
    return safetensors
