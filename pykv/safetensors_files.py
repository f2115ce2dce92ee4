"""Safetensors files, read without mapping them and written at once or not at all.

A mapped file that becomes shorter ends the process with SIGBUS, so that reading is by ``pread``.  A file is written
without a name where the file system can do that, so that nothing is left of a save that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Tensors = dict[str, npt.NDArray[Any]]

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes, as the safetensors library has it
_PIECE = 1 << 24


@dataclass(frozen=True)
class Entry:
    """What the header says of a tensor."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int  # in the file
    end: int


class SafetensorsFile:
    """An open file, of which the header has been read; ``op`` begins its error messages."""

    def __init__(self, op: str, path: Any) -> None:
        self._name = f"{op}: {path}"
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its other end
        try:
            self._header = self._read_header()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def metadata(self) -> dict[str, str]:
        metadata: dict[str, str] = self._header.get("__metadata__", {})
        return metadata

    def entries(self) -> dict[str, Entry]:
        """All tensors, which fill the rest of the file without gaps."""
        found = {name: self._entry(name, entry) for name, entry in self._header.items() if name != "__metadata__"}
        place = self._data
        for entry in sorted(found.values(), key=lambda e: (e.begin, e.end)):
            if entry.begin != place:
                raise self._damaged("its tensors have gaps or overlap")
            place = entry.end
        if place != self._size:
            raise self._damaged(f"it should have {place} bytes, and has {self._size}")
        return found

    def tensor(self, entry: Entry) -> npt.NDArray[Any]:
        array = np.empty(entry.shape, entry.dtype)
        self._read(array.reshape(-1).view(np.uint8).data, entry.begin)
        return array

    def pieces(self, entry: Entry) -> Iterator[memoryview]:
        """The bytes of a tensor, some at a time; each is good until the next."""
        buffer = memoryview(bytearray(min(_PIECE, entry.end - entry.begin)))
        for place in range(entry.begin, entry.end, _PIECE):
            piece = buffer[: entry.end - place]
            self._read(piece, place)
            yield piece

    def _read_header(self) -> dict[str, Any]:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._damaged("it is no regular file")
        self._size = status.st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        self._data = 8 + length
        if length > _MAX_HEADER or self._data > self._size:
            raise self._damaged(f"a header of {length} bytes does not fit")
        text = bytearray(length)
        self._read(memoryview(text), 8)
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            raise self._damaged("the header is no JSON") from None
        if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
            raise self._damaged("the header is none of safetensors")
        return header

    def _entry(self, name: str, entry: Any) -> Entry:
        try:
            dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
            begin, end = entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise self._damaged(f"the header of {name!r} is none of safetensors") from None
        if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
            raise self._damaged(f"the header of {name!r} has something else than sizes")
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise self._damaged(f"{name!r} of {dtype} {list(shape)} cannot have {end - begin} bytes")
        return Entry(dtype, shape, self._data + begin, self._data + end)

    def _read(self, target: memoryview, place: int) -> None:
        while target:
            count = os.preadv(self._fd, [target], place)
            if count == 0:
                raise self._damaged("it became shorter while it was read")
            target, place = target[count:], place + count

    def _damaged(self, why: str) -> ValueError:
        return ValueError(f"{self._name}: the file is damaged or no safetensors file: {why}")


def write_file(path: Any, tensors: Tensors, metadata: dict[str, str]) -> None:
    """The file has its name when it is complete and on the disk, in place of what had that name."""
    folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    temporary = os.path.join(folder, f".{name}.saving")
    with _open_folder(folder) as directory, _new_file(folder, temporary) as file:
        try:
            for piece in _pieces(tensors, metadata):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            while os.fstat(file.fileno()).st_nlink == 0:
                try:
                    # a folder's descriptor is given because only then Python follows the link to the file
                    os.link(f"/proc/self/fd/{file.fileno()}", temporary, src_dir_fd=directory, follow_symlinks=True)
                except FileExistsError:
                    _remove_left_over(temporary)
            os.replace(temporary, os.path.join(folder, name))
        except BaseException:
            if _has_name(file.fileno(), temporary):
                os.unlink(temporary)
            raise
        os.fsync(directory)


def _pieces(tensors: Tensors, metadata: dict[str, str]) -> Iterator[Any]:
    header: dict[str, Any] = {"__metadata__": metadata}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # so that each is aligned
    place = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [place, place + tensor.nbytes]
        }  # fmt: skip
        place += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in ordered:
        yield np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


@contextlib.contextmanager
def _open_folder(folder: str) -> Iterator[int]:
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield directory
    finally:
        os.close(directory)


def _new_file(folder: str, temporary: str) -> BinaryIO:
    """A new file, locked as long as it is open: without a name, or with the temporary one where that cannot be."""
    try:
        if not os.path.isdir("/proc/self/fd"):
            raise OSError(errno.EOPNOTSUPP, "no way from a descriptor to a name")
        file = _create(folder, os.O_TMPFILE)
        _lock(file.fileno())
        return file
    except (AttributeError, OSError):
        return _new_temporary(temporary)


def _new_temporary(temporary: str) -> BinaryIO:
    while True:
        try:
            file = _create(temporary, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            _remove_left_over(temporary)
            continue
        _lock(file.fileno())
        if _has_name(file.fileno(), temporary):
            return file
        file.close()  # somebody took it for a left-over before it was locked


def _create(path: str, flags: int) -> BinaryIO:
    return open(path, "wb", opener=lambda path, _: os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666))


def _remove_left_over(temporary: str) -> None:
    """Wait for whoever is saving under this name, and remove what a save that was killed has left."""
    try:
        file = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _lock(file)
        if _has_name(file, temporary):
            os.unlink(temporary)
    finally:
        os.close(file)


def _lock(file: int) -> None:
    with contextlib.suppress(OSError):  # file systems without locks: concurrent saves of one name disturb each other
        fcntl.flock(file, fcntl.LOCK_EX)


def _has_name(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False
