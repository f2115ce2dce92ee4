"""What a model wants of an array library, for NumPy, CuPy and torch: the part of the work that pykv leaves to it.

That is: data put on the device, matrix products, row lookup.  All else is done by pykv, which takes the arrays
of any of these libraries as they are.  With JAX all is compiled at once, so that little is asked for here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

import pykv

Array = Any  # an array of the chosen library
Host = np.ndarray[Any, Any]


class NumpyArrays:
    """NumPy, and CuPy by the same calls."""

    ops: ModuleType = pykv  # the operations, as this library wants them
    asynchronous = False  # whether calls return before the device has computed

    def __init__(self, namespace: ModuleType, dtype: str):
        self.namespace = namespace  # where PagedKVCache makes its arrays
        self.dtype = dtype
        self._dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        self.asynchronous = namespace is not np
        self._copies: list[tuple[Any, Host]] = []  # that the device has not made yet

    def put(self, host: Host) -> Array:
        """``host`` on the device, its dtype unchanged."""
        return self.namespace.asarray(host)

    def vector(self, host: Host) -> Array:
        """A weight that pykv reads, in the dtype of the model."""
        return self.namespace.asarray(host.astype(self._dtype))

    def matrix(self, *parts: Host) -> Array:
        """A weight for `linear` and `rows`: the rows of all parts."""
        weight = self.vector(parts[0] if len(parts) == 1 else np.concatenate(parts))
        if isinstance(weight, np.ndarray):
            return weight.astype(np.float32, copy=False)  # in which NumPy's products are quick
        return weight

    def empty(self, *shape: int) -> Array:
        return self.namespace.empty(shape, self._dtype)

    def rows(self, table: Array, ids: Array) -> Array:
        """A new array of the rows ``ids`` of ``table``."""
        return table[ids].astype(self._dtype, copy=False)

    def linear(self, x: Array, matrix: Array, bias: Array | None) -> Array:
        """[T, in] times the transpose of [out, in], plus [out]: [T, out], which the caller may write into."""
        product = (x.astype(matrix.dtype, copy=False) @ matrix.T).astype(self._dtype, copy=False)
        if bias is not None:
            product += bias
        return product

    def sample(self, logits: Array, seeds: Host, steps: Host, temperatures: Host) -> Array:
        """A token for each row of logits."""
        steps = self.put(steps)
        tokens = self.namespace.empty_like(steps, dtype=self.namespace.int64)  # as the embedding's rows are asked for
        self.ops.sample(tokens, logits, self.put(seeds), steps, self.put(temperatures))
        return tokens

    def scale(self, x: Array, factor: float) -> Array:
        return (x * factor).astype(self._dtype, copy=False)

    def softcap(self, x: Array, cap: float) -> Array:
        """``cap * tanh(x / cap)``"""
        return (self.namespace.tanh(x / cap) * cap).astype(self._dtype, copy=False)

    def host(self, x: Array) -> Host:
        return np.asarray(x.get() if hasattr(x, "get") else x)

    def reader(self, x: Array) -> Callable[[], Host]:
        """What waits for ``x`` on the host, but not for what the device is asked for after this call."""
        if self.namespace is np:
            return lambda: x  # type: ignore[no-any-return]
        cuda = self.namespace.cuda
        copied = np.frombuffer(cuda.alloc_pinned_memory(x.nbytes), x.dtype, x.size).reshape(x.shape)
        x.get(out=copied, blocking=False)
        event = cuda.Event()
        event.record()
        # CuPy gives memory that is let go to the next who asks, although a copy to it may be under way
        self._copies = [*(one for one in self._copies if not one[0].done), (event, copied)]
        return lambda: _after(event, copied)


class TorchArrays(NumpyArrays):
    """By `pykv.torch`, whose functions `torch.compile` keeps in its graph."""

    def __init__(self, torch: ModuleType, device: str, dtype: str):
        super().__init__(torch, dtype)
        self.ops = importlib.import_module("pykv.torch")
        self.device = device
        self._dtype = getattr(torch, dtype)
        self.asynchronous = device.startswith("cuda")

    def put(self, host: Host) -> Array:
        return self.namespace.from_numpy(host).to(self.device, non_blocking=True)  # waits for nothing on a GPU

    def vector(self, host: Host) -> Array:
        if host.dtype == ml_dtypes.bfloat16:  # which from_numpy does not know
            return self.put(host.view(np.int16)).view(self.namespace.bfloat16).to(self._dtype)
        return self.put(host).to(self._dtype)

    def empty(self, *shape: int) -> Array:
        return self.namespace.empty(shape, dtype=self._dtype, device=self.device)

    def rows(self, table: Array, ids: Array) -> Array:
        return table[ids]

    def linear(self, x: Array, matrix: Array, bias: Array | None) -> Array:
        return self.namespace.nn.functional.linear(x, matrix, bias)

    def scale(self, x: Array, factor: float) -> Array:
        return x * factor

    def softcap(self, x: Array, cap: float) -> Array:
        return self.namespace.tanh(x / cap) * cap

    def host(self, x: Array) -> Host:
        return (x.float() if x.is_floating_point() else x).cpu().numpy()  # type: ignore[no-any-return]

    def reader(self, x: Array) -> Callable[[], Host]:
        if not x.is_cuda:
            return lambda: self.host(x)
        copied = self.namespace.empty(x.shape, dtype=x.dtype, pin_memory=True)
        copied.copy_(x, non_blocking=True)
        event = self.namespace.cuda.Event()
        event.record()
        return lambda: _after(event, copied.numpy())


class JaxArrays(NumpyArrays):
    """Weights alone: what is done with them is compiled (see llama_jax.py), with batches that come from NumPy."""

    def __init__(self, jax: ModuleType, device: Any, dtype: str):
        super().__init__(np, dtype)
        self._jax, self.device = jax, device
        self.asynchronous = device is not None and device.platform != "cpu"

    def put(self, host: Host) -> Array:
        return host

    def vector(self, host: Host) -> Array:
        return self._jax.device_put(host.astype(self._dtype), self.device)

    def sample(self, logits: Array, seeds: Host, steps: Host, temperatures: Host) -> Array:
        return importlib.import_module("pykv.jax").sample(logits, seeds, steps, temperatures)

    def reader(self, x: Array) -> Callable[[], Host]:
        x.copy_to_host_async()
        return lambda: self.host(x)


def _after(event: Any, copied: Host) -> Host:
    event.synchronize()
    return copied


def open_arrays(library: str, device: str | None = None, dtype: str = "auto") -> NumpyArrays:
    """Arrays of ``library`` on ``device`` ("cpu", "cuda", "cuda:1"; None: a GPU if the library has one)."""
    os.environ.setdefault(
        "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
    )  # JAX would take most of the GPU's memory for itself
    module: Any = importlib.import_module(library)
    if device is None:
        device = {
            "numpy": lambda: "cpu",
            "cupy": lambda: "cuda",
            "torch": lambda: "cuda" if module.cuda.is_available() else "cpu",
            "jax": lambda: "cuda" if module.default_backend() == "gpu" else "cpu",
        }[library]()
    kind, _, index = device.partition(":")
    if kind not in ({"numpy": ["cpu"], "cupy": ["cuda"]}.get(library) or ["cpu", "cuda"]):
        raise ValueError(f"{library} has no arrays on {device!r}")
    if dtype == "auto":  # CPUs multiply fp32 fastest; on GPUs bf16 where the library's products are made for it
        dtype = "float32" if kind == "cpu" else "float16" if library == "cupy" else "bfloat16"
    if library == "torch":
        if index:  # events and graphs belong to the current device
            module.cuda.set_device(int(index))
        return TorchArrays(module, device, dtype)
    if library == "jax":
        return JaxArrays(module, module.devices("gpu" if kind == "cuda" else "cpu")[int(index or 0)], dtype)
    if library == "cupy":
        module.cuda.Device(int(index or 0)).use()
    return NumpyArrays(module, dtype)
