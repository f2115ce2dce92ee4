"""What the samples of gemm must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from dequantization import reference as packed
from gemm import fp4
from gemm.scaled import E4M3, product

from pykv._tools.samples._arrays import floats
from pykv._tools.samples.dequantization import packed_words

Results = dict[str, Any]


def packed_gemm(a: Any) -> Results:
    codes, zeros = (packed.awq_codes(packed_words(rows, 3)) for rows in (96, 2))
    scales = np.abs(floats(2, 24)).astype(np.float16).astype(np.float64)
    weight = (codes - np.repeat(zeros, 48, 0)) * np.repeat(scales, 48, 0)
    scales = a.token_scales.astype(np.float64)[:, None] * a.channel_scales.astype(np.float64)
    y = scales * (a.x.astype(np.float64) @ weight) + a.bias.astype(np.float64)
    gate, up = y[:, ::2], y[:, 1::2]
    return {"out": gate / (1 + np.exp(-gate)) * up + a.residual.astype(np.float64)}


def scaled_mm(a: Any) -> Results:
    codes = a.a.view(E4M3), np.ascontiguousarray(a.b.T).view(E4M3).T
    return {"out": product(*codes, a.a_scales, a.b_scales, a.bias)}


def scaled_mm_azp(a: Any) -> Results:
    return {"out": product(a.a, a.b, a.a_scales, a.b_scales, a.bias, a.azp_adj, a.azp)}


def grouped_mm(a: Any) -> Results:
    out = np.zeros(a.out.shape)
    for group, (begin, size) in enumerate(zip(a.group_begins, a.group_sizes, strict=True)):
        rows = slice(begin, begin + size)
        w = np.ascontiguousarray(a.b[group].T).view(E4M3).T
        out[rows] = product(a.a[rows].view(E4M3), w, a.a_scales[rows], a.b_scales[group])
    return {"out": out}


def fp4_mm(a: Any) -> Results:
    rows, columns = (fp4.decoded(x, s) for x, s in ((a.a, a.block_scale_a), (a.b, a.block_scale_b)))
    return {"out": float(a.alpha[0]) * rows @ columns.T}


EXPECTED: dict[str, Callable[[Any], Results]] = {
    "packed_gemm": packed_gemm,
    "cutlass_scaled_mm": scaled_mm,
    "cutlass_scaled_mm_azp": scaled_mm_azp,
    "grouped_scaled_mm": grouped_mm,
    "cutlass_scaled_fp4_mm": fp4_mm,
    "dsv3_fused_a_gemm": lambda a: {"output": a.mat_a.astype(np.float64) @ a.mat_b.astype(np.float64)},
    "dsv3_router_gemm": lambda a: {"output": a.hidden_states.astype(np.float64) @ a.router_weight.astype(np.float64).T},
    "fp32_router_gemm": lambda a: {"output": a.a.astype(np.float64) @ a.b.astype(np.float64).T},
}
