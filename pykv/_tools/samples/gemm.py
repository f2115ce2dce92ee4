"""Small right calls of the products with matrices, and calls of a size that means something."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pykv._schema import Spec
from pykv._tools.samples._arrays import Sample, floats, some_codes
from pykv._tools.samples._workload import Tokens, Workload
from pykv._tools.samples.dequantization import WEIGHT, WEIGHT_GROUP, packed_words

EXPERTS = 256  # columns of a router
GROUPS = 8  # weights of a grouped product


def packed_product() -> Sample:
    from pykv.gemm import pack_awq

    w = pack_awq(packed_words(96, 3), packed_words(2, 3), np.abs(floats(2, 24)).astype(np.float16))
    x, bias = floats(3, 96, seed=1).astype(np.float16), floats(24).astype(np.float16)
    return {
        "out": np.zeros((3, 12), np.float16),
        "x": x,
        "weight": w.data,
        "format": w.format,
        "bias": bias,
        "token_scales": np.abs(floats(3, seed=2)),
        "channel_scales": np.abs(floats(24, seed=3)),
        "activation": "silu",
        "residual": floats(3, 12, seed=4).astype(np.float16),
        "out_scale": None,
    }


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


def grouped_product() -> Sample:
    """Three groups, one of which has no rows."""
    return {
        "out": np.zeros((6, 24), np.float16),
        "a": some_codes(6, 160),
        "b": some_codes(3, 24, 160).swapaxes(1, 2),
        "a_scales": np.abs(floats(6)) / 256,
        "b_scales": np.abs(floats(3, 24)) / 256,
        "row_groups": None,
        "group_begins": np.array([0, 2, 2], np.int32),
        "group_sizes": np.array([2, 0, 4], np.int32),
        "expected_rows": 0,
    }


def fp4_product() -> Sample:
    scales = {f"block_scale_{x}": some_codes(128 * 8) for x in "ab"}
    return {
        "out": np.zeros((3, 24), np.float16),
        "a": some_codes(3, 40),
        "b": some_codes(24, 40),
        **scales,
        "alpha": np.float32(1e-4).reshape(1),
    }


def plain_product(output: str, a: str, b: str) -> Sample:
    weight = floats(24, 72, seed=1)
    rows = floats(3, 72).astype(np.float16)
    if b != "b":
        weight = weight.astype(np.float16)
    return {output: floats(3, 24), a: rows, b: weight}


def product_of_few_rows() -> Sample:
    sample = plain_product("output", "mat_a", "mat_b")
    return sample | {"output": sample["output"].astype(np.float16), "mat_b": sample["mat_b"].T}


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
    "grouped_scaled_mm": grouped_product,
    "cutlass_scaled_fp4_mm": fp4_product,
    "dsv3_fused_a_gemm": product_of_few_rows,
    "dsv3_router_gemm": lambda: plain_product("output", "hidden_states", "router_weight"),
    "fp32_router_gemm": lambda: plain_product("output", "a", "b"),
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


def _grouped_mm(t: Tokens) -> Workload:
    matrices = {"a": Spec((t.count, WEIGHT), "uint8"), "b": Spec((GROUPS, WEIGHT, WEIGHT), "uint8")}
    scales = {"a_scales": Spec((t.count,), "float32"), "b_scales": Spec((GROUPS, WEIGHT), "float32")}
    begins = np.linspace(0, t.count, GROUPS + 1).astype(np.int32)
    return Workload({**matrices, **scales, "group_begins": begins})


def _fp4_mm(t: Tokens) -> Workload:
    scales = {
        f"block_scale_{x}": Spec((-(-n // 128) * 8 * WEIGHT,), "uint8") for x, n in (("a", t.count), ("b", WEIGHT))
    }
    matrices = {"a": Spec((t.count, WEIGHT // 2), "uint8"), "b": Spec((WEIGHT, WEIGHT // 2), "uint8")}
    return Workload({**matrices, **scales, "alpha": 1.0})


def _plain(t: Tokens, a: str, b: str, weight: str = "") -> Workload:
    dtype = "bfloat16" if t.dtype == "float32" else t.dtype
    return Workload({a: Spec((t.count, WEIGHT), dtype), b: Spec((EXPERTS, WEIGHT), weight or dtype)})


WORKLOADS: Mapping[str, Callable[[Tokens], Workload]] = {
    "packed_gemm": _packed_gemm,
    "cutlass_scaled_mm": lambda t: _scaled_mm(t, "uint8"),
    "cutlass_scaled_mm_azp": lambda t: _scaled_mm(t, "int8", azp_adj=Spec((WEIGHT,), "int32")),
    "grouped_scaled_mm": _grouped_mm,
    "cutlass_scaled_fp4_mm": _fp4_mm,
    "dsv3_router_gemm": lambda t: _plain(t, "hidden_states", "router_weight"),
    "fp32_router_gemm": lambda t: _plain(t, "a", "b", "float32"),
}
