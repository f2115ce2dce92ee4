"""Every activation of numbers near the ends of the dtype, of infinities and of NaN, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from activation import reference
from rows import FLOATS, name_of

import pykv

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
# Between -3 and -200 formulas cancel, or come to subnormal numbers: other tests have those.
LARGE = [0.0, 1e-30, 0.5, 3.0, 200.0, 6e4, 1e9, 1e13, 2e13, 1e19, 1e20, 1e37, 2.4e38, 3.3e38, np.inf]
VALUES = np.array([*LARGE, *(-x for x in LARGE), np.nan])
LIMIT, ALPHA, BETA = 7.0, 1.702, 1.5
RELATIVE = {"float32": 3e-5, "float16": 2e-3, "bfloat16": 2e-2}  # of the large ones this tells little, of others enough


def logistic(x: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    return 1 / (1 + np.exp(-alpha * x))


def xielu(x: np.ndarray) -> np.ndarray:
    positive, negative = np.log1p(np.exp(0.203)), 0.5 + np.log1p(np.exp(-0.85))
    below = negative * np.expm1(np.minimum(x, -1e-6)) + (0.5 - negative) * x
    return np.where(x > 0, positive * x * x + 0.5 * x, below)


ALONE: dict[str, tuple[Callable[..., None], Callable[[np.ndarray], np.ndarray]]] = {
    "gelu_new": (pykv.gelu_new, reference.gelu_tanh),
    "gelu_fast": (pykv.gelu_fast, reference.gelu_tanh),
    "gelu_quick": (pykv.gelu_quick, lambda x: x * logistic(x, 1.702)),
    "relu2": (pykv.relu2, lambda x: np.maximum(x, 0) ** 2),
    "relu_squared": (pykv.relu_squared, lambda x: np.fmax(x, 0) ** 2),
    "xielu": (lambda out, x: pykv.xielu(out, x, 0.203, -0.85), xielu),
}
MASKED_ALONE = {
    "silu_no_mul": reference.silu,
    "gelu_no_mul": reference.gelu,
    "gelu_tanh_no_mul": reference.gelu_tanh,
    "relu2_no_mul": lambda x: np.fmax(x, 0) ** 2,
}


def half(dtype: np.dtype, activation: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    """The activation is rounded before it is multiplied."""
    return lambda gate, up: rounded(activation(gate), dtype) * up


def rounded(x: np.ndarray, dtype: np.dtype | str = "float32") -> np.ndarray:
    return x.astype(np.float32).astype(dtype).astype(np.float64)


def clamped(dtype: np.dtype, gate: np.ndarray, up: np.ndarray, limit: float = LIMIT) -> np.ndarray:
    g = np.fmin(gate, limit)
    return rounded(g * logistic(g, ALPHA), dtype) * (np.fmax(np.fmin(up, limit), -limit) + BETA)


def swigluoai(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    g = np.fmin(gate, LIMIT)
    return (np.fmax(np.fmin(up, LIMIT), -LIMIT) + 1) * rounded(g * logistic(g, ALPHA))


def swiglustep(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.fmin(reference.silu(gate), LIMIT) * np.fmax(np.fmin(up, LIMIT), -LIMIT)


def situ(gate: np.ndarray, up: np.ndarray, linear_beta: float = -1.0) -> np.ndarray:
    u = linear_beta * np.tanh(up / linear_beta) if linear_beta > 0 else up
    return rounded(BETA * np.tanh(gate / BETA) * logistic(gate)) * u


def gated(dtype: np.dtype) -> dict[str, tuple[Callable[..., None], Callable[..., np.ndarray]]]:
    return {
        "silu_and_mul": (pykv.silu_and_mul, half(dtype, reference.silu)),
        "gelu_and_mul": (pykv.gelu_and_mul, half(dtype, reference.gelu)),
        "gelu_tanh_and_mul": (pykv.gelu_tanh_and_mul, half(dtype, reference.gelu_tanh)),
        "silu_and_mul_with_clamp": (
            lambda out, x: pykv.silu_and_mul_with_clamp(out, x, LIMIT, ALPHA, BETA),
            lambda gate, up: clamped(dtype, gate, up),
        ),
        "silu_and_mul_with_clamp, no limit": (
            lambda out, x: pykv.silu_and_mul_with_clamp(out, x, np.inf, ALPHA, BETA),
            lambda gate, up: clamped(dtype, gate, up, np.inf),
        ),
        "fatrelu_and_mul": (
            lambda out, x: pykv.fatrelu_and_mul(out, x, 0.5),
            lambda gate, up: np.where(gate > 0.5, gate, 0) * up,
        ),
        "swiglustep_and_mul": (lambda out, x: pykv.swiglustep_and_mul(out, x, LIMIT), swiglustep),
        "situ_and_mul": (lambda out, x: pykv.situ_and_mul(out, x, BETA), situ),
        "situ_and_mul, bounded": (
            lambda out, x: pykv.situ_and_mul(out, x, BETA, 4.0),
            lambda gate, up: situ(gate, up, 4.0),
        ),
        "swigluoai_and_mul": (lambda out, x: pykv.swigluoai_and_mul(out, x, ALPHA, LIMIT), swigluoai),
    }


GATED = list(gated(FLOATS[0]))
MASKED_GATED = {
    "silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul", "situ": "situ_and_mul",
    "silu_with_clamp": "silu_and_mul_with_clamp", "swigluoai_uninterleave": "silu_and_mul_with_clamp",
    "swigluoai": "swigluoai_and_mul", "swiglustep": "swiglustep_and_mul",
}  # fmt: skip


def masked(name: str) -> Callable[[Any, Any, Any], None]:
    return lambda out, x, counts: pykv.masked_moe_activation(
        out, x, counts, name, clamp_limit=LIMIT, alpha=ALPHA, beta=BETA, situ_beta=BETA, situ_linear_beta=-1.0
    )


def values_of(dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        return VALUES.astype(dtype)


def assert_right(actual: np.ndarray, expected: np.ndarray, said: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        wanted = expected.astype(actual.dtype).astype(np.float64)
    got = actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = np.abs(got - wanted) <= RELATIVE[actual.dtype.name] * np.abs(wanted) + 1e-7 * (np.abs(wanted) < 1e-3)
    wrong = np.argwhere(~((got == wanted) | (np.isnan(got) & np.isnan(wanted)) | near))
    at = tuple(wrong[0]) if len(wrong) else ()
    assert not at, f"{len(wrong)} wrong, the first of {said[at]}: {got[at]}, not {wanted[at]}"


def rows_of(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of values, as many rows as there are."""
    return tuple(x.copy() for x in np.meshgrid(values_of(dtype), values_of(dtype)))


def apply_gated(array: Any, op: Callable[..., None], dtype: np.dtype, interleaved: bool, *more: Any) -> np.ndarray:
    gate, up = rows_of(dtype)
    x = np.stack([gate, up], -1).reshape(len(gate), -1) if interleaved else np.concatenate([gate, up], axis=-1)
    out = array.output(np.zeros_like(gate))
    op(out, array.input(x), *more)
    return array.numpy(out)


def expected_of_pairs(dtype: np.dtype, name: str) -> tuple[np.ndarray, np.ndarray]:
    gate, up = (x.astype(np.float64) for x in rows_of(dtype))
    with np.errstate(all="ignore"):
        return gated(dtype)[name][1](gate, up), np.stack([gate, up], -1)


@dtypes
@pytest.mark.parametrize("name", ALONE)
def test_of_one_number(array: Any, dtype: np.dtype, name: str) -> None:
    op, formula = ALONE[name]
    x = np.tile(values_of(dtype), 3)[None]
    out = array.output(np.zeros_like(x))
    op(out, array.input(x))
    with np.errstate(all="ignore"):
        assert_right(array.numpy(out), formula(x.astype(np.float64)), x)


@dtypes
@pytest.mark.parametrize("name", MASKED_ALONE)
def test_of_one_number_of_an_expert(array: Any, dtype: np.dtype, name: str) -> None:
    x = np.tile(values_of(dtype), 3)[None]
    out = array.output(np.zeros_like(x))
    masked(name)(out, array.input(x), array.input(np.array([1], np.int32)))
    with np.errstate(all="ignore"):
        assert_right(array.numpy(out), MASKED_ALONE[name](x.astype(np.float64)), x)


@dtypes
@pytest.mark.parametrize("name", GATED)
def test_of_two_numbers(array: Any, dtype: np.dtype, name: str) -> None:
    actual = apply_gated(array, gated(dtype)[name][0], dtype, name == "swigluoai_and_mul")
    assert_right(actual, *expected_of_pairs(dtype, name))


@dtypes
@pytest.mark.parametrize("name", MASKED_GATED)
def test_of_two_numbers_of_an_expert(array: Any, dtype: np.dtype, name: str) -> None:
    counts = array.input(np.array([len(VALUES)], np.int32))
    actual = apply_gated(array, masked(name), dtype, name == "swigluoai", counts)
    assert_right(actual, *expected_of_pairs(dtype, MASKED_GATED[name]))
