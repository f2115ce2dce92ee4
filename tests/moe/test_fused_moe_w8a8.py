"""A layer of experts with 8-bit weights and activations against one in float64 that has the same codes."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from moe import reference
from moe.inputs import ALONE, GATED, random
from rows import name_of, padded

import pykv
from pykv.moe import fused_moe_workspace_size

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
dtypes = pytest.mark.parametrize("dtype", HALVES, ids=name_of)
E4M3 = ml_dtypes.float8_e4m3fn
CODES = {"fp8": np.dtype(E4M3), "int8": np.dtype(np.int8)}
codes = pytest.mark.parametrize("codes", CODES)
SCALES = ["blocks", "rows", "experts"]


class Weight(NamedTuple):
    codes: np.ndarray
    scale: np.ndarray
    decoded: np.ndarray  # float64


def weight(codes: str, scales: str, experts: int, n: int, k: int, seed: int) -> Weight:
    """Scales differ by up to 4; what is decoded is of the size of ``k ** -0.5``."""
    rng, size = random(seed), max(k, 1) ** -0.5
    if codes == "fp8":
        values = (rng.standard_normal((experts, n, k)) * 16).astype(E4M3)
    else:
        values = rng.integers(-60, 61, (experts, n, k)).astype(np.int8)
    shape = {"blocks": (experts, -(-n // 128), -(-k // 128)), "rows": (experts, n), "experts": (experts,)}[scales]
    scale = (rng.uniform(0.5, 2, shape) * size / (16 if codes == "fp8" else 35)).astype(np.float32)
    wide = scale.astype(np.float64)
    wide = wide.repeat(128, 1).repeat(128, 2)[:, :n, :k] if scales == "blocks" else wide.reshape(experts, -1, 1)
    return Weight(values, scale, values.astype(np.float64) * wide)


def coded(x: np.ndarray, codes: str, group: int = 0, scale: float = 0.0) -> np.ndarray:
    """Rows as codes times scales, float64; by groups, by rows or with one scale."""
    largest = np.float32(448 if codes == "fp8" else 127)
    width = group or max(x.shape[-1], 1)
    rows = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // width, width)
    found = np.abs(rows).max(-1, keepdims=True, initial=0)
    if scale:
        scales = np.float32(scale)
        y = rows * (1 / scales) if codes == "fp8" else rows / scales
    elif group or codes == "int8":
        scales = np.maximum(found, np.float32(1e-10)) / largest
        y = rows * (1 / scales)
    else:
        scales = np.maximum(found / largest, 1 / (largest * 512))
        y = rows / scales
    y = np.clip(y, -largest, largest)
    y = y.astype(E4M3) if codes == "fp8" else np.rint(y)
    return (y.astype(np.float64) * scales).reshape(x.shape)


def routed(tokens: int, k: int, experts: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argsort(random(seed).random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    return random(seed + 1).uniform(0.1, 0.7, (tokens, k)).astype(np.float32), ids


def normal(seed: int, *shape: int, dtype: Any) -> np.ndarray:
    """Columns of quite different sizes, so that groups have quite different scales."""
    rng = random(seed)
    return (
        rng.standard_normal(shape) * np.exp2(rng.integers(-2, 3, shape[-1] // 64 + 1).repeat(64)[: shape[-1]])
    ).astype(dtype)


def expected(
    x: np.ndarray,
    w1: Weight,
    w2: Weight,
    weights: np.ndarray,
    ids: np.ndarray,
    codes: str,
    group: int,
    activation: str = "silu",
    on_input: bool = False,
    expert_map: np.ndarray | None = None,
    a1: float = 0.0,
    a2: float = 0.0,
    b1: np.ndarray | None = None,
    b2: np.ndarray | None = None,
    **numbers: float,
) -> np.ndarray:
    def rounded(v: np.ndarray) -> np.ndarray:
        return v.astype(x.dtype).astype(np.float64)

    rows, out = coded(x, codes, group, a1), np.zeros((len(x), w2.decoded.shape[1]))
    for t, j in np.ndindex(*ids.shape):
        known = 0 <= ids[t, j] < (len(w1.codes) if expert_map is None else len(expert_map))
        e = -1 if not known else ids[t, j] if expert_map is None else expert_map[ids[t, j]]
        if e < 0:
            continue
        h = w1.decoded[e] @ rows[t] + (0 if b1 is None else b1[e])
        h = rounded(h * (weights[t, j] if on_input else 1))
        a = coded(reference.activated(h, activation, **numbers).astype(x.dtype), codes, group, a2)
        y = rounded(w2.decoded[e] @ a + (0 if b2 is None else b2[e]))
        out[t] += y * (1 if on_input else weights[t, j])
    return out


def run(array: Any, x: np.ndarray, w1: Weight, w2: Weight, weights: Any, ids: Any, out: Any = None, **more: Any) -> Any:
    made = array.output(np.full(x.shape, np.nan, x.dtype) if out is None else out)
    given = {"w1_scale": w1.scale, "w2_scale": w2.scale} | more
    arrays = {k: array.input(v) if isinstance(v, np.ndarray) and k != "workspace" else v for k, v in given.items()}
    pykv.fused_moe(made, *map(array.input, (x, w1.codes, w2.codes, weights, ids)), **arrays)
    return array.numpy(made)


def compare(out: np.ndarray, exact: np.ndarray) -> None:
    """A few numbers between the products are rounded to a neighbour, then to another code; after the largest of a row
    all of it.
    """
    assert np.isfinite(out.astype(np.float64)).all()
    error = np.abs(out.astype(np.float64) - exact)
    assert np.linalg.norm(error) <= 0.03 * np.linalg.norm(exact) + 1e-6
    assert (error <= 0.06 * np.abs(exact).max(initial=0) + 1e-6).all()


def layer(codes: str, scales: str, experts: int, hidden: int, inner: int, gated: bool = True) -> tuple[Weight, Weight]:
    first = weight(codes, scales, experts, 2 * inner if gated else inner, hidden, 3)
    return first, weight(codes, scales, experts, hidden, inner, 4)


@dtypes
@codes
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "hidden", "inner"),
    [(0, 2, 4, 128, 128), (1, 2, 4, 256, 128), (5, 1, 3, 128, 384), (33, 4, 8, 640, 128), (200, 2, 3, 256, 256)],
)
def test_sizes(array, dtype, codes, scales, tokens, k, experts, hidden, inner):
    x, (weights, ids) = normal(0, tokens, hidden, dtype=dtype), routed(tokens, k, experts)
    w1, w2 = layer(codes, scales, experts, hidden, inner)
    exact = expected(x, w1, w2, weights, ids, codes, 128 if scales == "blocks" else 0)
    compare(run(array, x, w1, w2, weights, ids), exact)


@codes
@pytest.mark.parametrize("scales", ["rows", "experts"])
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "hidden", "inner"),
    [(9, 2, 3, 37, 21), (70, 3, 5, 72, 264), (3, 1, 512, 24, 16), (4, 2, 3, 40, 0), (3, 0, 4, 24, 8)],
)
def test_sizes_that_are_no_blocks(array, codes, scales, tokens, k, experts, hidden, inner):
    x, (weights, ids) = normal(0, tokens, hidden, dtype=np.float16), routed(tokens, k, experts)
    w1, w2 = layer(codes, scales, experts, hidden, inner)
    compare(run(array, x, w1, w2, weights, ids), expected(x, w1, w2, weights, ids, codes, 0))


@codes
@pytest.mark.parametrize("scales", ["blocks", "rows"])
@pytest.mark.parametrize("activation", [*GATED, *ALONE])
@pytest.mark.parametrize("on_input", [False, True])
def test_activations(array, codes, scales, activation, on_input):
    x, (weights, ids) = normal(0, 7, 256, dtype=ml_dtypes.bfloat16), routed(7, 3, 6)
    w1, w2 = layer(codes, scales, 6, 256, 128, activation in GATED)
    numbers = {"clamp_limit": 1.5, "alpha": 1.7, "beta": 0.5}
    group = 128 if scales == "blocks" else 0
    exact = expected(x, w1, w2, weights, ids, codes, group, activation, on_input, **numbers)
    options = {"activation": activation, "apply_router_weight_on_input": on_input} | numbers
    compare(run(array, x, w1, w2, weights, ids, **options), exact)


@dtypes
@codes
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("tokens", [1, 40, 300])
@pytest.mark.parametrize("with_bias", ["w1_bias", "w2_bias", "both"])
def test_biases(array, dtype, codes, scales, tokens, with_bias):
    """Of the expert that is meant, in rows that lie apart."""
    x, (weights, ids) = normal(0, tokens, 256, dtype=dtype), routed(tokens, 2, 5)
    ids[::7, 1] = -1
    w1, w2 = layer(codes, scales, 5, 256, 128)
    made = {"w1_bias": padded(normal(5, 5, 256, dtype=dtype), 1, 3), "w2_bias": normal(6, 5, 256, dtype=dtype)}
    given = {name: v for name, v in made.items() if with_bias in (name, "both")}
    biases = {name.removesuffix("_bias").replace("w", "b"): v.astype(np.float64) for name, v in given.items()}
    exact = expected(x, w1, w2, weights, ids, codes, 128 if scales == "blocks" else 0, **biases)
    compare(run(array, x, w1, w2, weights, ids, **given), exact)


@codes
def test_biases_of_sizes_that_are_no_blocks(array, codes):
    x, (weights, ids) = normal(0, 9, 72, dtype=np.float16), routed(9, 2, 4)
    w1, w2 = layer(codes, "rows", 4, 72, 37)
    b1, b2 = normal(5, 4, 74, dtype=np.float16), normal(6, 4, 72, dtype=np.float16)
    exact = expected(x, w1, w2, weights, ids, codes, 0, b1=b1.astype(np.float64), b2=b2.astype(np.float64))
    compare(run(array, x, w1, w2, weights, ids, w1_bias=b1, w2_bias=b2), exact)


@codes
@pytest.mark.parametrize("given", ["a1_scale", "a2_scale", "both"])
def test_scales_of_activations_that_are_given(array, codes, given):
    x, (weights, ids) = normal(0, 9, 192, dtype=np.float16), routed(9, 2, 4)
    w1, w2 = layer(codes, "experts", 4, 192, 96)
    sizes = {"a1": 0.02 if codes == "fp8" else 0.07, "a2": 0.011 if codes == "fp8" else 0.05}
    known = {name: v for name, v in sizes.items() if given in (name + "_scale", "both")}
    exact = expected(x, w1, w2, weights, ids, codes, 0, on_input=True, **known)
    arrays = {f"{name}_scale": np.array([v], np.float32) for name, v in known.items()}
    compare(run(array, x, w1, w2, weights, ids, apply_router_weight_on_input=True, **arrays), exact)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_experts_of_other_ranks(array, scales, id_dtype):
    """And ids of none."""
    x, (weights, ids) = normal(0, 20, 128, dtype=np.float16), routed(20, 4, 16)
    ids[::3, 1] = -1
    ids[5] = -7
    expert_map = np.where(np.arange(16) % 4 == 1, np.arange(16) // 4, -1).astype(id_dtype)
    w1, w2 = layer("fp8", scales, 4, 128, 128)
    group = 128 if scales == "blocks" else 0
    exact = expected(x, w1, w2, weights, ids, "fp8", group, expert_map=expert_map)
    compare(run(array, x, w1, w2, weights, ids.astype(id_dtype), expert_map=expert_map), exact)


def test_ids_out_of_range(array):
    x, (weights, ids) = normal(0, 5, 128, dtype=np.float16), routed(5, 2, 4)
    w1, w2 = layer("fp8", "blocks", 4, 128, 128)
    ids[3, 1] = 4
    with array.reports("fused_moe: topk_ids: 4 is out of range"):
        out = array.output(np.zeros_like(x))
        scales = {"w1_scale": array.input(w1.scale), "w2_scale": array.input(w2.scale)}
        pykv.fused_moe(out, *map(array.input, (x, w1.codes, w2.codes, weights, ids)), **scales)
    compare(array.numpy(out), expected(x, w1, w2, weights, ids, "fp8", 128))


@codes
@pytest.mark.parametrize("scales", SCALES)
def test_a_token_has_the_same_bits_among_any_others(array, codes, scales):
    x, (weights, ids) = normal(0, 400, 256, dtype=np.float16), routed(400, 2, 6)
    w1, w2 = layer(codes, scales, 6, 256, 128)
    whole = run(array, x, w1, w2, weights, ids).view(np.uint16)
    for first_token, tokens in ((0, 1), (3, 5), (50, 60), (200, 111)):
        some = slice(first_token, first_token + tokens)
        part = run(array, x[some], w1, w2, weights[some], ids[some])
        np.testing.assert_array_equal(part.view(np.uint16), whole[some])


@dtypes
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize(
    ("hidden", "inner", "k", "experts"), [(256, 128, 2, 24), (2304, 384, 8, 4), (512, 1152, 3, 4), (128, 256, 32, 24)]
)
def test_few_pairs(array, dtype, on_input, hidden, inner, k, experts):
    """Their own kernels on Hopper give a token the bits that it has among many, whatever ids and biases are."""
    known, tokens, many = 200, max(25 // k, 1), 70
    x, (weights, ids) = normal(0, many, hidden, dtype=dtype), routed(many, k, known)
    x[1, 3], ids[::3, 0] = np.nan, -1
    w1, w2 = layer("fp8", "blocks", experts, hidden, inner)
    more: dict[str, Any] = {
        "expert_map": random(5).integers(-1, experts, known).astype(np.int32),
        "apply_router_weight_on_input": on_input,
        "w2_bias": random(6).standard_normal((experts, hidden)).astype(dtype),
    }
    if not on_input:
        more["w1_bias"] = random(7).standard_normal((experts, 2 * inner)).astype(dtype)
    whole = run(array, x, w1, w2, weights, ids, **more)
    for some in (slice(0, 1), slice(1, 1 + tokens)):
        part = run(array, x[some], w1, w2, weights[some], ids[some], **more)
        np.testing.assert_array_equal(part.view(np.uint16), whole[some].view(np.uint16))
    some, biases = slice(2, 3), {"b1": more.get("w1_bias"), "b2": more["w2_bias"]}
    exact = expected(
        x[some], w1, w2, weights[some], ids[some], "fp8", 128, "silu", on_input, more["expert_map"], **biases
    )
    compare(run(array, x[some], w1, w2, weights[some], ids[some], **more), exact)


@codes
@pytest.mark.parametrize("scales", [*SCALES, "given"])
@pytest.mark.parametrize("activation", ["silu", "gelu_no_mul"])
@pytest.mark.parametrize(("tokens", "kept"), [(9, 0), (9, 1), (700, 3)])
def test_what_lies_behind_the_last_pair_is_left_alone(array, codes, scales, activation, tokens, kept):
    """Codes end the workspace: those of pairs that are dropped are not made of what nobody has written."""
    x, (weights, ids) = normal(0, tokens, 256, dtype=np.float16), routed(tokens, 2, 4)
    ids[kept:] = -1
    w1, w2 = layer(codes, "experts" if scales == "given" else scales, 4, 256, 128, activation in GATED)
    size = fused_moe_workspace_size(tokens, 2, 4, w1.codes.shape[1], 128, 256, w8a8=True)
    workspace = array.output(np.full(size, 0xA5, np.uint8))
    given = {"a2_scale": np.array([0.02], np.float32)} if scales == "given" else {}
    out = run(array, x, w1, w2, weights, ids, workspace=workspace, activation=activation, **given)
    behind = array.numpy(workspace)[-128 * 2 * (tokens - kept) :]
    np.testing.assert_array_equal(behind, np.full_like(behind, 0xA5))
    np.testing.assert_array_equal(out[kept:], 0)


def test_strides_and_workspace(array):
    x, (weights, ids) = padded(normal(0, 12, 256, dtype=np.float16), 1, 9), routed(12, 3, 5)
    w1, w2 = layer("fp8", "rows", 5, 256, 40)
    exact = expected(x, w1, w2, weights, ids, "fp8", 0)
    w1, w2 = (Weight(padded(w.codes, 2, 16).view(np.uint8), padded(w.scale, 1, 3), w.decoded) for w in (w1, w2))
    out = padded(np.zeros((12, 256), np.float16), 2, 3)
    size = fused_moe_workspace_size(12, 3, 5, 80, 40, 256, w8a8=True)
    workspace = array.output(np.full(size, 255, np.uint8))
    compare(run(array, x, w1, w2, weights, ids, out, workspace=workspace), exact)
    small = array.output(np.zeros(size - 256, np.uint8))
    with pytest.raises(ValueError, match=rf"fused_moe: workspace: {size} bytes are needed, got {size - 256}"):
        run(array, x, w1, w2, weights, ids, workspace=small)


def test_scales_of_rows_may_have_a_last_dimension(array):
    x, (weights, ids) = normal(0, 3, 128, dtype=np.float16), routed(3, 2, 4)
    w1, w2 = layer("int8", "rows", 4, 128, 64)
    exact = expected(x, w1, w2, weights, ids, "int8", 0)
    w1, w2 = (w._replace(scale=w.scale[..., None]) for w in (w1, w2))
    compare(run(array, x, w1, w2, weights, ids), exact)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"w1_scale": None}, TypeError, "w1_scale: an array is required, got None"),
        ({"w2_scale": None}, TypeError, "w2_scale: an array is required, got None"),
        ({"w1": np.zeros((4, 256, 128), np.float16)}, TypeError, "w1: dtype must be float8_e4m3fn or uint8 or int8"),
        ({"w2": np.zeros((4, 128, 128), np.uint8)}, ValueError, "w2: codes and scales must be of the kind of those"),
        ({"w2": np.zeros((4, 128, 127), np.int8)}, ValueError, "w2: dimension 2 must equal half the rows of w1 = 128"),
        ({"w1_scale": np.zeros((4, 255), np.float32)}, ValueError, "w1_scale: dimension 1 must equal rows of w1 = 256"),
        (
            {"w1_scale": np.zeros((3, 256), np.float32)},
            ValueError,
            "w1_scale: dimension 0 must equal num_experts of w1",
        ),
        (
            {"w1_scale": np.zeros((4, 3, 1), np.float32)},
            ValueError,
            "w1_scale: dimension 1 must equal blocks of 128 rows",
        ),
        ({"w1_scale": np.zeros((4, 2, 1), np.float32)}, ValueError, "w2: codes and scales must be of the kind"),
        ({"w1_scale": np.zeros((4, 256), np.float16)}, TypeError, "w1_scale: dtype must be float32"),
        ({"a1_scale": np.zeros(2, np.float32)}, ValueError, "a1_scale"),
        ({"w1_format": "u4.f16.none.n48.k64.g32.p64"}, ValueError, "w1_scale: must be None with packed weights"),
        (
            {"w1_bias": np.zeros((4, 256), np.float16), "apply_router_weight_on_input": True},
            NotImplementedError,
            "w1_bias: is not supported with 8-bit activations and apply_router_weight_on_input",
        ),
        ({"w1_bias": np.zeros((4, 255), np.float16)}, ValueError, "w1_bias: dimension 1 must equal rows of w1 = 256"),
        ({"w2_bias": np.zeros((4, 128), np.float32)}, TypeError, "w2_bias: dtype must be that of x"),
        (
            {
                "w1": np.zeros((4, 0, 128), np.int8),
                "w1_scale": np.zeros((4, 0), np.float32),
                "w2": np.zeros((4, 128, 0), np.int8),
                "w2_bias": np.zeros((4, 128), np.float16),
            },
            NotImplementedError,
            "w2_bias: is not supported with 8-bit weights that have no columns",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, error, message):
    given: dict[str, Any] = {
        "x": np.zeros((3, 128), np.float16),
        "w1": np.zeros((4, 256, 128), np.int8),
        "w2": np.zeros((4, 128, 128), np.int8),
        "topk_weights": np.zeros((3, 2), np.float32),
        "topk_ids": np.zeros((3, 2), np.int32),
        "w1_scale": np.zeros((4, 256), np.float32),
        "w2_scale": np.zeros((4, 128), np.float32),
    }
    with pytest.raises(error, match=message):
        pykv.fused_moe(np.zeros((3, 128), np.float16), **given | change)


@pytest.mark.parametrize("name", ["a1_scale", "a2_scale"])
def test_blocks_find_their_scales_themselves(name):
    x, (weights, ids) = normal(0, 3, 128, dtype=np.float16), routed(3, 2, 4)
    w1, w2 = layer("fp8", "blocks", 4, 128, 128)
    scales = {"w1_scale": w1.scale, "w2_scale": w2.scale, name: np.ones(1, np.float32)}
    with pytest.raises(ValueError, match=f"{name}: must be None where weights have scales of blocks"):
        pykv.fused_moe(np.zeros_like(x), x, w1.codes, w2.codes, weights, ids, **scales)
