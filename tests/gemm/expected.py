"""What the samples of gemm must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from dequantization import reference as packed
from gemm.scaled import E4M3, product

from pykv._tools.samples._arrays import floats
from pykv._tools.samples.dequantization import packed_words

Results = dict[str, Any]


def packed_gemm(a: Any) -> Results:
    codes, zeros = (packed.awq_codes(packed_words(rows, 3)) for rows in (96, 2))
    scales = np.abs(floats(2, 24)).astype(np.float16).astype(np.float64)
    weight = (codes - np.repeat(zeros, 48, 0)) * np.repeat(scales, 48, 0)
    return {"out": a.x.astype(np.float64) @ weight + a.bias.astype(np.float64)}


def scaled_mm(a: Any) -> Results:
    codes = a.a.view(E4M3), np.ascontiguousarray(a.b.T).view(E4M3).T
    return {"out": product(*codes, a.a_scales, a.b_scales, a.bias)}


def scaled_mm_azp(a: Any) -> Results:
    return {"out": product(a.a, a.b, a.a_scales, a.b_scales, a.bias, a.azp_adj, a.azp)}


EXPECTED: dict[str, Callable[[Any], Results]] = {
    "packed_gemm": packed_gemm,
    "cutlass_scaled_mm": scaled_mm,
    "cutlass_scaled_mm_azp": scaled_mm_azp,
}
