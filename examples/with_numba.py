"""Numba's kernels and pykv's in turn on the same arrays: pykv takes them by ``__cuda_array_interface__``.

python examples/with_numba.py

Seen with numba 0.68 and numba-cuda 0.30, whose CUDA part wants a NumPy before 2.5.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

import pykv


@cuda.jit
def double(x):  # type: ignore[no-untyped-def]
    row, column = cuda.grid(2)
    if row < x.shape[0] and column < x.shape[1]:
        x[row, column] *= 2


def main() -> None:
    host = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    x, weight = cuda.to_device(host), cuda.to_device(np.ones(256, np.float32))
    out = cuda.device_array_like(x)
    pykv.rms_norm(out, x, weight)
    double[(8, 32), (8, 8)](out)
    squares = cuda.device_array_like(x)
    pykv.relu2(squares, out)
    normed = 2 * host / np.sqrt((host**2).mean(-1, keepdims=True) + 1e-6)
    error = np.abs(squares.copy_to_host() - np.maximum(normed, 0) ** 2).max()
    print(f"relu(2 * rms_norm(x)) squared: {error:.1e} off at most")


if __name__ == "__main__":
    main()
