"""Types of the public signatures."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable


@runtime_checkable
class SupportsDLPack(Protocol):
    """What NumPy, CuPy, torch, JAX and most other array libraries offer."""

    def __dlpack__(self) -> Any: ...  # the parameters that libraries declare for it differ; JAX declares none


@runtime_checkable
class SupportsCudaArrayInterface(Protocol):
    """What Numba's device arrays offer."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


Array: TypeAlias = SupportsDLPack | SupportsCudaArrayInterface
"""Any array on the CPU or on a CUDA device."""

ScalarOrArray: TypeAlias = float | Array
"""A scale: a number, or a float32 array on the host or on the device of the other arguments."""

Stream: TypeAlias = Any
"""None (the producers' current stream), a cudaStream_t as an int, or a stream of CuPy, torch or cuda.core."""
