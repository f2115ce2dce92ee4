"""Products for few rows with sums in fp32: the first projection of an MLA layer, and routers.

torch's own product is timed beside, where torch has CUDA and is what makes arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, has_torch, main, on_cupys_stream

ROWS = [1, 4, 8, 16, 17, 32, 64]
# name -> columns, k, whether the weight is float32
SHAPES = {
    "dsv3_fused_a_gemm": [(2112, 7168, False)],
    "dsv3_router_gemm": [(256, 7168, False)],
    "fp32_router_gemm": [(256, 3072, True), (256, 6144, True)],
}


def product(name: str, n: int, k: int, wide: bool, rows: int, dtype: str, device: Device) -> Call:
    a, w = device.random((rows, k), dtype), device.random((n, k), "float32" if wide else dtype)
    out = device.random((rows, n), "float32" if wide else dtype)
    function, b = getattr(pykv, name), w.T if name == "dsv3_fused_a_gemm" else w
    return lambda: function(out, a, b)


def of_torch(n: int, k: int, wide: bool, rows: int, dtype: str, device: Device) -> Call:
    import torch.utils.dlpack

    made = "float32" if wide else dtype

    def tensor(*shape: int) -> Any:  # CuPy's bfloat16 is not torch's
        x = device.random(shape, made)
        return torch.utils.dlpack.from_dlpack(x.view(f"i{x.itemsize}")).view(getattr(torch, made))

    a, w, out = tensor(rows, k), tensor(n, k), tensor(rows, n)
    return on_cupys_stream(lambda: torch.mm(a, w.T, out=out))


def cases(dtypes: list[str]) -> Iterator[Case]:
    for dtype in dtypes:
        for name, shapes in SHAPES.items():
            for n, k, wide in shapes:
                for rows in ROWS:
                    if dtype == "float32" and not wide:
                        continue
                    size = {"n": n, "k": k, "tokens": rows}
                    each = 4 if dtype == "float32" else 2
                    written = rows * n * (4 if wide else each)
                    moved = n * k * (4 if wide else each) + rows * k * each + written
                    yield Case(name, size, dtype, moved, partial(product, name, n, k, wide, rows, dtype), written)
                    if dtype == "bfloat16" and has_torch():
                        make = partial(of_torch, n, k, wide, rows, dtype)
                        yield Case(f"torch.mm of {name}", size, dtype, moved, make, written)


if __name__ == "__main__":
    main(cases)
