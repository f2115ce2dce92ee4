"""Small right calls of the products with matrices, and calls of a size that means something."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pykv._schema import Spec
from pykv._tools.samples._arrays import Sample, floats, some_codes
from pykv._tools.samples._workload import Tokens, Workload
from pykv._tools.samples.dequantization import WEIGHT, WEIGHT_GROUP, packed_words


def packed_product() -> Sample:
    from pykv.gemm import pack_awq

    w = pack_awq(packed_words(96, 3), packed_words(2, 3), np.abs(floats(2, 24)).astype(np.float16))
    x, bias = floats(3, 96, seed=1).astype(np.float16), floats(24).astype(np.float16)
    return {"out": np.zeros((3, 24), np.float16), "x": x, "weight": w.data, "format": w.format, "bias": bias}


def scaled_product(codes: type[np.generic]) -> Sample:
    """Of codes that are e4m3, or int8."""
    return {
        "out": np.zeros((3, 24), np.float16),
        "a": some_codes(3, 160).view(codes),
        "b": some_codes(24, 160).view(codes).T,
        "a_scales": np.abs(floats(3, 1)) / 256,
        "b_scales": np.abs(floats(1, 24)) / 256,
        "bias": floats(24).astype(np.float16),
    }


SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "packed_gemm": packed_product,
    "cutlass_scaled_mm": lambda: scaled_product(np.uint8),
    "cutlass_scaled_mm_azp": lambda: (
        scaled_product(np.int8)
        | {
            "azp_adj": some_codes(24, 160).sum(axis=1, dtype=np.int32),
            "azp": np.array([[3], [-7], [20]], np.int32),
        }
    ),
}


def _packed_gemm(t: Tokens) -> Workload:
    elements = WEIGHT * WEIGHT
    weight = Spec((256 + elements // 2 + elements // WEIGHT_GROUP * 2,), "uint8")
    form = f"u4.f16.none.n{WEIGHT}.k{WEIGHT}.g{WEIGHT_GROUP}.p{WEIGHT}"
    x = Spec((t.count, WEIGHT), "bfloat16" if t.dtype == "float32" else t.dtype)
    return Workload({"x": x, "weight": weight, "format": form})


def _scaled_mm(t: Tokens, dtype: str, **more: Spec) -> Workload:
    matrices = {"a": Spec((t.count, WEIGHT), dtype), "b": Spec((WEIGHT, WEIGHT), dtype)}
    scales = {"a_scales": Spec((t.count, 1), "float32"), "b_scales": Spec((1, WEIGHT), "float32")}
    return Workload({**matrices, **scales, **more})


WORKLOADS: Mapping[str, Callable[[Tokens], Workload]] = {
    "packed_gemm": _packed_gemm,
    "cutlass_scaled_mm": lambda t: _scaled_mm(t, "uint8"),
    "cutlass_scaled_mm_azp": lambda t: _scaled_mm(t, "int8", azp_adj=Spec((WEIGHT,), "int32")),
}
