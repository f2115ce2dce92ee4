"""Small right calls of the products with matrices, and calls of a size that means something."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pykv._schema import Spec
from pykv._tools.samples._arrays import Sample, floats
from pykv._tools.samples._workload import Tokens, Workload
from pykv._tools.samples.dequantization import WEIGHT, WEIGHT_GROUP, packed_words


def packed_product() -> Sample:
    from pykv.gemm import pack_awq

    w = pack_awq(packed_words(96, 3), packed_words(2, 3), np.abs(floats(2, 24)).astype(np.float16))
    x, bias = floats(3, 96, seed=1).astype(np.float16), floats(24).astype(np.float16)
    return {"out": np.zeros((3, 24), np.float16), "x": x, "weight": w.data, "format": w.format, "bias": bias}


SAMPLES: Mapping[str, Callable[[], Sample]] = {"packed_gemm": packed_product}


def _packed_gemm(t: Tokens) -> Workload:
    elements = WEIGHT * WEIGHT
    weight = Spec((256 + elements // 2 + elements // WEIGHT_GROUP * 2,), "uint8")
    form = f"u4.f16.none.n{WEIGHT}.k{WEIGHT}.g{WEIGHT_GROUP}.p{WEIGHT}"
    x = Spec((t.count, WEIGHT), "bfloat16" if t.dtype == "float32" else t.dtype)
    return Workload({"x": x, "weight": weight, "format": form})


WORKLOADS: Mapping[str, Callable[[Tokens], Workload]] = {"packed_gemm": _packed_gemm}
