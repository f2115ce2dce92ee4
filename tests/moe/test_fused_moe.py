"""A layer of experts against one in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gemm.weights import Weight, awq, fp8, gguf, gptq, integers, mxfp4, nf4, nvfp4
from moe import reference
from moe.inputs import ALONE, GATED, random
from rows import name_of, padded

import pykv
from pykv.gemm import pack_integers, stack_packed
from pykv.moe import fused_moe_workspace_size
from pykv.packed_weight import PackedWeight

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
dtypes = pytest.mark.parametrize("dtype", HALVES, ids=name_of)
NUMBERS = {"clamp_limit": 1.5, "alpha": 1.7, "beta": 0.5}


def normal(seed: int, *shape: int, dtype: Any, size: float = 1.0) -> np.ndarray:
    return (random(seed).standard_normal(shape) * size).astype(dtype)


def routed(tokens: int, k: int, experts: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argsort(random(seed).random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    return random(seed + 1).uniform(0.1, 0.7, (tokens, k)).astype(np.float32), ids


def layer(dtype: Any, experts: int, hidden: int, inner: int, gated: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """``h`` and ``y`` are about 1."""
    rows = 2 * inner if gated else inner
    w1 = normal(3, experts, rows, hidden, dtype=dtype, size=max(hidden, 1) ** -0.5)
    return w1, normal(4, experts, hidden, inner, dtype=dtype, size=max(inner, 1) ** -0.5)


def run(array: Any, x: np.ndarray, w1: Any, w2: Any, weights: Any, ids: Any, out: Any = None, **options: Any) -> Any:
    made = array.output(np.full(x.shape, np.nan, x.dtype) if out is None else out)
    arrays = {k: array.input(v) if isinstance(v, np.ndarray) and k != "workspace" else v for k, v in options.items()}
    pykv.fused_moe(made, *map(array.input, (x, w1, w2, weights, ids)), **arrays)
    return array.numpy(made)


def compare(out: np.ndarray, exact: np.ndarray, size: np.ndarray, times: int = 1) -> None:
    """What lies between the products may be rounded to a neighbour of what the reference has there."""
    eps = times * float(ml_dtypes.finfo(out.dtype).eps)
    error = np.abs(out.astype(np.float64) - exact)
    assert (error <= 2 * eps * size + 1e-6).all(), (error / (size * eps + 1e-30)).max()
    assert np.linalg.norm(error) <= eps * np.linalg.norm(exact) + 1e-6


def check(array: Any, x: np.ndarray, w1: Any, w2: Any, weights: Any, ids: Any, **options: Any) -> None:
    known = {k.replace("apply_router_weight_on_input", "on_input"): v for k, v in options.items()}
    compare(run(array, x, w1, w2, weights, ids, **options), *reference.experts(x, w1, w2, weights, ids, **known))


@dtypes
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "hidden", "inner"),
    [
        (0, 2, 4, 64, 32),
        (1, 2, 4, 64, 32),
        (1, 8, 64, 256, 96),
        (5, 1, 3, 136, 72),
        (9, 2, 3, 37, 21),
        (33, 4, 8, 520, 40),
        (70, 3, 5, 72, 264),
        (100, 2, 4, 136, 72),
        (300, 2, 4, 136, 264),
        (150, 2, 3, 37, 21),
        (40, 1, 2, 250, 132),
        (16, 2, 4, 136, 72),
        (64, 2, 4, 200, 48),
        (70, 2, 2, 136, 40),
        (512, 2, 4, 136, 72),
        (6, 2, 700, 16, 8),
        (2, 3, 4, 0, 8),
        (3, 2, 4, 24, 0),
        (3, 0, 4, 24, 8),
    ],
)
def test_sizes(array, dtype, tokens, k, experts, hidden, inner):
    x, (weights, ids) = normal(0, tokens, hidden, dtype=dtype), routed(tokens, k, experts)
    check(array, x, *layer(dtype, experts, hidden, inner), weights, ids)


@dtypes
@pytest.mark.parametrize("activation", [*GATED, *ALONE])
@pytest.mark.parametrize("on_input", [False, True])
def test_activations_and_biases(array, dtype, activation, on_input):
    x, (weights, ids) = normal(0, 7, 96, dtype=dtype), routed(7, 3, 6)
    w1, w2 = layer(dtype, 6, 96, 40, activation in GATED)
    options = {"w1_bias": normal(5, 6, len(w1[0]), dtype=dtype), "w2_bias": normal(6, 6, 96, dtype=dtype)}
    options |= NUMBERS | {"activation": activation, "apply_router_weight_on_input": on_input}
    check(array, x, w1, w2, weights, ids, **options)


@dtypes
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_experts_of_other_ranks(array, dtype, id_dtype):
    """And ids of none."""
    x, (weights, ids) = normal(0, 20, 64, dtype=dtype), routed(20, 4, 16)
    ids[::3, 1] = -1
    ids[5] = -7
    expert_map = np.where(np.arange(16) % 4 == 1, np.arange(16) // 4, -1).astype(id_dtype)
    check(array, x, *layer(dtype, 4, 64, 24), weights, ids.astype(id_dtype), expert_map=expert_map)


def test_ids_out_of_range(array):
    x, (weights, ids) = normal(0, 5, 64, dtype=np.float16), routed(5, 2, 4)
    w1, w2 = layer(np.float16, 4, 64, 24)
    ids[3, 1] = 4
    with array.reports("fused_moe: topk_ids: 4 is out of range"):
        out = array.output(np.zeros_like(x))
        pykv.fused_moe(out, *map(array.input, (x, w1, w2, weights, ids)))
    compare(array.numpy(out), *reference.experts(x, w1, w2, weights, ids))
    ids[3, 1] = 0
    expert_map = np.array([0, 1, 2, 4], np.int32)
    with array.reports("fused_moe: expert_map: 4 is out of range"):
        pykv.fused_moe(out, *map(array.input, (x, w1, w2, weights, ids)), expert_map=array.input(expert_map))
    known = np.array([0, 1, 2, -1])
    compare(array.numpy(out), *reference.experts(x, w1, w2, weights, ids, expert_map=known))


def stacked(make: Any, experts: int) -> tuple[PackedWeight, np.ndarray]:
    made: list[Weight] = [make(seed=seed) for seed in range(experts)]
    return stack_packed([w for w, _ in made]), np.stack([decoded for _, decoded in made])


PACKED = {
    "int4": partial(integers, group_size=32, zeros=False),
    "int4 with zeros": partial(integers, group_size=32),
    "int8": partial(integers, group_size=64, bits=8, dtype=np.float32),
    "awq": partial(awq, group_size=32),
    "fp8": fp8,
    "fp8 in blocks": partial(fp8, block=(128, 128)),
    "nvfp4": nvfp4,
    "mxfp4": mxfp4,
}


@dtypes
@pytest.mark.parametrize("name", ["plain", "int4 with zeros", "nvfp4"])
def test_a_token_has_the_same_bits_among_any_others(array, dtype, name):
    x, (weights, ids) = normal(0, 400, 272, dtype=dtype, size=0.1), routed(400, 2, 6)
    w1, w2 = layer(dtype, 6, 272, 208)
    formats = {}
    if name != "plain":
        first, second = (stacked(partial(PACKED[name], *shape), 6)[0] for shape in ((416, 272), (272, 208)))
        w1, w2, formats = first.data, second.data, {"w1_format": first.format, "w2_format": second.format}
    bits = f"u{x.itemsize}"
    whole = run(array, x, w1, w2, weights, ids, **formats).view(bits)
    for first_token, tokens in ((0, 1), (3, 5), (17, 20), (50, 60), (200, 111)):
        some = slice(first_token, first_token + tokens)
        part = run(array, x[some], w1, w2, weights[some], ids[some], **formats)
        np.testing.assert_array_equal(part.view(bits), whole[some])
    crowded = np.concatenate([ids[:3], np.full((200, 2), ids[0, 0])])  # most go to one expert
    part = run(array, x[:203], w1, w2, weights[:203], crowded, **formats)
    np.testing.assert_array_equal(part[:3].view(bits), whole[:3])


@dtypes
@pytest.mark.parametrize("name", ["plain", "int4 with zeros", "fp8 in blocks", "mxfp4"])
@pytest.mark.parametrize("tokens", [2, 9, 150])
def test_a_nan_stays_with_its_token(array, dtype, name, tokens):
    x, (weights, ids) = normal(0, tokens, 256, dtype=dtype, size=0.1), routed(tokens, 2, 5)
    w1, w2 = layer(dtype, 5, 256, 128)
    formats = {}
    if name != "plain":
        first, second = (stacked(partial(PACKED[name], *shape), 5)[0] for shape in ((256, 256), (256, 128)))
        w1, w2, formats = first.data, second.data, {"w1_format": first.format, "w2_format": second.format}
    whole = run(array, x, w1, w2, weights, ids, **formats).view("u2")
    x[1, 3] = np.nan
    out = run(array, x, w1, w2, weights, ids, **formats)
    assert np.isnan(out[1].astype(np.float32)).all()
    np.testing.assert_array_equal(np.delete(out, 1, 0).view("u2"), np.delete(whole, 1, 0))


@dtypes
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("tokens", [1, 6, 30, 100, 300])
def test_packed(array, dtype, name, tokens):
    (first, w1), (second, w2) = (stacked(partial(PACKED[name], *shape), 5) for shape in ((128, 192), (192, 64)))
    # of the size of those of other tests
    scale = 1 / (np.std(w1) * 192**0.5)
    x, (weights, ids) = normal(0, tokens, 192, dtype=dtype, size=scale), routed(tokens, 2, 5)
    bias = normal(5, 5, 128, dtype=dtype)
    formats = {"w1_format": first.format, "w2_format": second.format}
    out = run(array, x, first.data, second.data, weights, ids, w1_bias=bias, **formats)
    weights_are_rounded = name == "int4" and dtype != np.float16 and array.device == "cuda"
    compare(out, *reference.experts(x, w1, w2, weights, ids, w1_bias=bias), times=1 + weights_are_rounded)


@dtypes
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("hidden", "inner", "group", "k", "experts"),
    [
        (512, 256, 128, 2, 24),
        (504, 400, 32, 3, 24),
        (272, 272, 64, 8, 24),
        (512, 512, 256, 5, 24),
        (256, 256, 128, 32, 24),
        (256, 4352, 128, 2, 3),
    ],
)
def test_few_pairs(array, dtype, zeros, hidden, inner, group, k, experts):
    """Their own kernels on Hopper give a token the bits that it has among many, whatever ids and biases are."""
    if inner > 4096 and array.device == "cpu":
        inner = 256
    known, tokens, many = 200, max(25 // k, 1), 70
    made = [
        [integers(*shape, group_size=group, zeros=zeros, seed=seed) for seed in range(2)]
        for shape in ((2 * inner, hidden), (hidden, inner))
    ]
    (first, w1), (second, w2) = (
        (stack_packed([of[e % 2][0] for e in range(experts)]), np.stack([of[e % 2][1] for e in range(experts)]))
        for of in made
    )
    x = normal(0, many, hidden, dtype=dtype, size=1 / (np.std(w1) * hidden**0.5))
    weights, ids = routed(many, k, known)
    ids[::3, 0] = -1
    options: dict[str, Any] = {
        "expert_map": random(5).integers(-1, experts, known).astype(np.int32),
        "w1_bias": normal(5, experts, 2 * inner, dtype=dtype),
        "w2_bias": normal(6, experts, hidden, dtype=dtype),
        "apply_router_weight_on_input": zeros,
    }
    formats = {"w1_format": first.format, "w2_format": second.format}
    whole = run(array, x, first.data, second.data, weights, ids, **formats, **options)
    for some in (slice(0, 1), slice(1, 1 + tokens)):
        part = run(array, x[some], first.data, second.data, weights[some], ids[some], **formats, **options)
        np.testing.assert_array_equal(part.view("u2"), whole[some].view("u2"))
    options["on_input"] = options.pop("apply_router_weight_on_input")
    weights_are_rounded = not zeros and dtype != np.float16 and array.device == "cuda"
    compare(
        part, *reference.experts(x[some], w1, w2, weights[some], ids[some], **options), times=1 + weights_are_rounded
    )


def test_few_pairs_report_ids(array):
    (first, w1), (second, w2) = (stacked(partial(integers, *s, zeros=False), 4) for s in ((512, 256), (256, 256)))
    x, (weights, ids) = normal(0, 1, 256, dtype=np.float16, size=0.1), routed(1, 2, 4)
    formats = {"w1_format": first.format, "w2_format": second.format}
    ids[0, 1] = 4
    out = array.output(np.zeros_like(x))
    given = [array.input(a) for a in (x, first.data, second.data, weights, ids)]
    with array.reports("fused_moe: topk_ids: 4 is out of range"):
        pykv.fused_moe(out, *given, **formats)
    compare(array.numpy(out), *reference.experts(x, w1, w2, weights, ids))
    expert_map = np.array([0, 4, 4, 4, -1], np.int32)
    ids[0, 1] = 1
    with array.reports("fused_moe: expert_map: 4 is out of range"):
        pykv.fused_moe(out, *given[:4], array.input(ids), expert_map=array.input(expert_map), **formats)


def act_order(seed: int) -> Weight:
    return gptq(40, 256, 4, group_of=random(seed).permutation(256) // 64, seed=seed)


OTHERS = {"act-order": act_order, "nf4": partial(nf4, 50, 192), **{f"gguf {t}": partial(gguf, t) for t in (12, 14, 23)}}


@pytest.mark.parametrize("name", OTHERS)
def test_packed_beside_plain(array, name):
    """Columns in another order, two levels of scales, and tables: of the experts that are meant."""
    first, w1 = stacked(OTHERS[name], 3)
    _, n, k = w1.shape
    w2 = normal(4, 3, k, n, dtype=np.float16, size=n**-0.5)
    x, (weights, ids) = normal(0, 9, k, dtype=np.float16, size=0.1), routed(9, 2, 3)
    out = run(array, x, first.data, w2, weights, ids, w1_format=first.format, activation="silu_no_mul")
    if name == "nf4":
        w1 = w1.astype(np.float16).astype(np.float64)  # more than its table is
    weights_are_rounded = name.startswith("gguf") and array.device == "cuda"
    compare(out, *reference.experts(x, w1, w2, weights, ids, "silu_no_mul"), times=1 + weights_are_rounded)


@pytest.mark.parametrize("name", [*PACKED, "nf4", "gguf 12", "gguf 14"])
@pytest.mark.parametrize("tokens", [350, 1300])
def test_more_tiles_than_blocks(array, name, tokens):
    """More than a GPU has room for at once: a token has the bits that it has among few."""
    if array.device == "cpu":
        tokens //= 10
    make = {"nf4": nf4, "gguf 12": partial(gguf, 12), "gguf 14": partial(gguf, 14)}.get(name) or PACKED[name]
    rows = 2048 if array.device == "cuda" else 512
    (first, w1), (second, w2) = (stacked(partial(make, *shape), 5) for shape in ((rows, 256), (256, rows // 2)))
    scale = 1 / (np.std(w1) * 256**0.5)
    x, (weights, ids) = normal(0, tokens, 256, dtype=np.float16, size=scale), routed(tokens, 2, 5)
    ids[20:, 0] = np.where(ids[20:, 1] == 4, 0, 4)  # one expert has most
    formats = {"w1_format": first.format, "w2_format": second.format}
    whole = run(array, x, first.data, second.data, weights, ids, **formats)
    for some in (slice(0, 20), slice(max(tokens - 60, 0), tokens)):
        part = run(array, x[some], first.data, second.data, weights[some], ids[some], **formats)
        np.testing.assert_array_equal(part.view("u2"), whole[some].view("u2"))
    if name in PACKED:
        compare(part, *reference.experts(x[some], w1, w2, weights[some], ids[some]))


@pytest.mark.parametrize("name", ["int4", "int4 in groups of 32", "gguf 12"])
@pytest.mark.parametrize(("hidden", "inner", "tokens"), [(320, 416, 1500), (512, 384, 1500), (320, 416, 350)])
def test_many_pairs(array, name, hidden, inner, tokens):
    """Experts with any number of pairs, none among them: a token has the bits that it has among few."""
    experts = 9
    if array.device == "cpu":
        tokens //= 10
    make = {
        "int4": partial(integers, group_size=128, zeros=False),
        "int4 in groups of 32": partial(integers, group_size=32, zeros=False),
        "gguf 12": partial(gguf, 12),
    }[name]
    if name == "gguf 12":
        hidden, inner = 512, 256 * (inner // 160)
    (first, w1), (second, w2) = (
        stacked(partial(make, *shape), experts) for shape in ((2 * inner, hidden), (hidden, inner))
    )
    x = normal(0, tokens, hidden, dtype=HALVES[1], size=1 / (np.std(w1) * hidden**0.5))
    weights, ids = routed(tokens, 3, experts - 1)  # the last one has no pairs
    ids[tokens // 6 :, 0] = np.where((ids[tokens // 6 :, 1:] == 4).any(axis=1), 0, 4)  # one has most
    ids[tokens // 3 :, 1] = np.where(ids[tokens // 3 :, 1] == 5, -1, ids[tokens // 3 :, 1])  # one few
    options: dict[str, Any] = {
        "w1_bias": normal(5, experts, 2 * inner, dtype=HALVES[1]),
        "w2_bias": normal(6, experts, hidden, dtype=HALVES[1]),
        "w1_format": first.format,
        "w2_format": second.format,
    }
    whole = run(array, x, first.data, second.data, weights, ids, **options)
    for some in (slice(0, 1), slice(7, 20), slice(40, 100), slice(tokens - 60, tokens)):
        part = run(array, x[some], first.data, second.data, weights[some], ids[some], **options)
        np.testing.assert_array_equal(part.view("u2"), whole[some].view("u2"))
    biases = {name: options[name] for name in ("w1_bias", "w2_bias")}
    some = slice(tokens - 60, tokens)
    weights_are_rounded = array.device == "cuda"
    compare(
        whole[some],
        *reference.experts(x[some], w1, w2, weights[some], ids[some], **biases),
        times=1 + weights_are_rounded,
    )


@pytest.mark.parametrize("kind", ["plain", "int4"])
@pytest.mark.parametrize(("experts", "tokens", "k"), [(1024, 3, 8), (1024, 200, 8), (1000, 40, 33), (1, 5, 1)])
def test_any_number_of_experts(array, kind, experts, tokens, k):
    """A layer behind its router, which writes where the layer reads."""
    hidden, inner = 64, 32
    w1, w2 = layer(np.float16, experts, hidden, inner)
    formats: dict[str, Any] = {}
    given = [w1, w2]
    if kind == "int4":
        packed = [stacked(partial(integers, *w.shape[1:], group_size=32), experts) for w in (w1, w2)]
        given, (w1, w2) = [p.data for p, _ in packed], [decoded for _, decoded in packed]
        formats = {f"w{i}_format": p.format for i, (p, _) in enumerate(packed, 1)}
    x = normal(0, tokens, hidden, dtype=np.float16, size=0.3 if kind == "int4" else 1)
    weights, ids = array.output(np.zeros((tokens, k), np.float32)), array.output(np.zeros((tokens, k), np.int32))
    logits = random(7).permuted(np.tile(np.arange(experts, dtype=np.float32) / 128 - 4, (tokens, 1)), axis=1)
    pykv.topk_sigmoid(weights, ids, None, array.input(logits), True)
    np.testing.assert_array_equal(array.numpy(ids), np.argsort(-logits, axis=1)[:, :k])
    out = array.output(np.zeros_like(x))
    pykv.fused_moe(out, *map(array.input, (x, *given)), weights, ids, **formats)
    compare(array.numpy(out), *reference.experts(x, w1, w2, array.numpy(weights), array.numpy(ids)))


@pytest.mark.parametrize("kind", ["plain", "int4", "int8"])
def test_more_tokens_than_16_bits_count(array, kind):
    """As many as the reference is asked for; the others are the same few again."""
    tokens, few, hidden, inner, experts = 70_001, 257, 64, 32, 5
    x, (weights, ids) = normal(0, few, hidden, dtype=np.float16, size=0.3), routed(few, 2, experts)
    w1, w2 = layer(np.float16, experts, hidden, inner)
    options: dict[str, Any] = {}
    given = [w1, w2]
    if kind == "int4":
        packed = [stacked(partial(integers, *w.shape[1:], group_size=32), experts) for w in (w1, w2)]
        given = [p.data for p, _ in packed]
        options = {f"w{i}_format": p.format for i, (p, _) in enumerate(packed, 1)}
    elif kind == "int8":
        given = [np.rint(w * 100).astype(np.int8) for w in given]
        options = {f"w{i}_scale": np.full(w.shape[:2], 0.01, np.float32) for i, w in enumerate(given, 1)}
    first = run(array, x, *given, weights, ids, **options)
    if kind == "plain":
        compare(first, *reference.experts(x, w1, w2, weights, ids))
    many = [np.resize(a, (tokens, a.shape[1])) for a in (x, weights, ids)]
    out = run(array, many[0], *given, *many[1:], **options)
    np.testing.assert_array_equal(out.view(np.uint16), np.resize(first, out.shape).view(np.uint16))


@dtypes
@pytest.mark.parametrize("name", ["plain", "int4", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 9, 200])
@pytest.mark.parametrize("parts", [1, 2])
def test_shared_experts_are_experts_that_every_token_has(array, dtype, name, tokens, parts):
    """The last columns of the routing are theirs, written once; the router writes the others.  One that is ``parts``
    times as wide as the others is as many of them.
    """
    if array.name == "interface":
        pytest.skip("its arrays have no views")
    experts, k, hidden, inner = 6, 2, 128, 64
    if name == "plain":
        w1, w2 = layer(dtype, experts + parts, hidden, inner)
        given, formats = [w1, w2], {}
    else:
        packed = [stacked(partial(PACKED[name], *s), experts + parts) for s in ((2 * inner, hidden), (hidden, inner))]
        given, (w1, w2) = [p.data for p, _ in packed], [decoded for _, decoded in packed]
        formats = {f"w{i}_format": p.format for i, (p, _) in enumerate(packed, 1)}
    x = normal(0, tokens, hidden, dtype=dtype, size=1 if name == "plain" else 1 / (np.std(w1) * hidden**0.5))
    shared = np.arange(experts, experts + parts, dtype=np.int32)
    wide_weights = np.concatenate([np.zeros((tokens, k), np.float32), np.ones((tokens, parts), np.float32)], axis=1)
    wide_ids = np.concatenate([np.zeros((tokens, k), np.int32), np.tile(shared, (tokens, 1))], axis=1)
    weights, ids = array.output(wide_weights), array.output(wide_ids)
    logits = random(7).permuted(np.tile(np.arange(experts, dtype=np.float32) / 4, (tokens, 1)), axis=1)
    pykv.topk_softmax(weights[:, :k], ids[:, :k], None, array.input(logits), True)
    out = array.output(np.zeros_like(x))
    pykv.fused_moe(out, *map(array.input, (x, *given)), weights, ids, **formats)

    routed_ids = np.argsort(-logits, axis=1)[:, :k]
    chosen = np.take_along_axis(reference.scores_of(logits, "softmax"), routed_ids, -1)
    exact, size = reference.experts(x, w1, w2, chosen / chosen.sum(-1, keepdims=True), routed_ids)
    # what they add, computed as the one wide layer that they are
    h = (
        x.astype(np.float64)
        @ np.concatenate([w[half] for half in np.split(np.arange(2 * inner), 2) for w in w1[experts:]]).T
    )
    a = reference.activated(h.astype(dtype).astype(np.float64), "silu").astype(dtype).astype(np.float64)
    wide = np.concatenate(list(w2[experts:].astype(np.float64)), axis=1)
    compare(array.numpy(out), exact + a @ wide.T, size + np.abs(a) @ np.abs(wide.T) + parts * np.abs(a @ wide.T))


@dtypes
def test_strides_and_workspace(array, dtype):
    x, (weights, ids) = padded(normal(0, 12, 72, dtype=dtype), 1, 9), routed(12, 3, 5)
    w1, w2 = (padded(w, 2, 8) for w in layer(dtype, 5, 72, 40))
    out = padded(np.zeros((12, 72), dtype), 2, 3)
    size = fused_moe_workspace_size(12, 3, 5, 80, 40, 72)
    workspace = array.output(np.full(size, 255, np.uint8))
    wide = np.full((12, 5), 9, np.int64)
    wide[:, 1:4] = ids
    options = {"workspace": workspace, "apply_router_weight_on_input": True}
    result = run(array, x, w1, w2, padded(weights, 1, 2), wide[:, 1:4], out, **options)
    compare(result, *reference.experts(x, w1, w2, weights, ids, on_input=True))
    small = array.output(np.zeros(size - 256, np.uint8))
    with pytest.raises(ValueError, match=rf"fused_moe: workspace: {size} bytes are needed, got {size - 256}"):
        run(array, x, w1, w2, weights, ids, workspace=small)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": np.zeros((3, 65), np.float16)}, ValueError, "out: dimension 1 must equal hidden_size = 65"),
        ({"x": np.zeros((3, 64), np.float32)}, TypeError, "x: dtype must be float16 or bfloat16, got float32"),
        ({"w1": np.zeros((4, 47, 64), np.float16)}, ValueError, "w1: has two rows for each column of w2"),
        ({"w1": np.zeros((4, 48, 63), np.float16)}, ValueError, "w1: dimension 2 must equal hidden_size = 64"),
        ({"w2": np.zeros((3, 64, 24), np.float16)}, ValueError, "w2: dimension 0 must equal num_experts of w1 = 4"),
        ({"w2": np.zeros((4, 64, 25), np.float16)}, ValueError, "w2: dimension 2 must equal half the rows of w1 = 24"),
        ({"topk_ids": np.zeros((4, 2), np.int32)}, ValueError, "topk_ids: dimension 0 must equal num_tokens = 3"),
        ({"topk_weights": np.zeros((3, 1), np.float32)}, ValueError, "topk_weights: dimension 1 must equal topk = 2"),
        ({"topk_weights": np.zeros((3, 2), np.float16)}, TypeError, "topk_weights: dtype must be float32"),
        ({"activation": "swish"}, ValueError, "activation: must be one of silu, silu_with_clamp, .*, got 'swish'"),
        ({"w1_bias": np.zeros((4, 47), np.float16)}, ValueError, "w1_bias: dimension 1 must equal rows of w1 = 48"),
        ({"w1_format": "u4.f16.none.n48.k64.g32.p64"}, TypeError, "w1: dtype must be uint8"),
        (
            {"w1_format": "u4.f16.none.n48.k65.g32.p128", "w1": np.zeros((4, 3584), np.uint8)},
            ValueError,
            "w1",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, error, message):
    given = {
        "x": np.zeros((3, 64), np.float16),
        "w1": np.zeros((4, 48, 64), np.float16),
        "w2": np.zeros((4, 64, 24), np.float16),
        "topk_weights": np.zeros((3, 2), np.float32),
        "topk_ids": np.zeros((3, 2), np.int32),
    }
    with pytest.raises(error, match=message):
        pykv.fused_moe(np.zeros((3, 64), np.float16), **given | change)


def test_intermediate_results_beyond_int64_are_refused():
    """Addresses that nobody looks at: 2^30 pairs of 2^33 elements each."""
    far, inner = 1 << 40, 1 << 33
    x, w1, w2 = (pykv.from_pointer(far, s, "float16", "cpu") for s in ((1, 1), (1, inner, 1), (1, 1, inner)))
    weights = pykv.from_pointer(far, (1, 1 << 30), "float32", "cpu", strides=(0, 0))
    ids = pykv.from_pointer(far, (1, 1 << 30), "int32", "cpu", strides=(0, 0))
    with pytest.raises(
        NotImplementedError, match="fused_moe: topk_ids: rows of 8589934592 elements for each of 1073741"
    ):
        pykv.fused_moe(x, x, w1, w2, weights, ids, "silu_no_mul")


def test_stacked_weights_are_of_one_format():
    with pytest.raises(ValueError, match=r"weights: must be of one format, got \['"):
        stack_packed([integers(32, 64)[0], integers(32, 128)[0]])


@pytest.mark.parametrize("kind", ["float16", "packed", "int8"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_rank_without_experts(array, kind, tokens):
    """All its pairs lie elsewhere."""
    hidden, inner, options = 64, 32, {}
    shapes = [(2 * inner, hidden), (hidden, inner)]
    weights = [np.zeros((0, *s), np.int8 if kind == "int8" else np.float16) for s in shapes]
    if kind == "int8":
        options = {f"w{i + 1}_scale": np.ones((0, n), np.float32) for i, (n, _) in enumerate(shapes)}
    if kind == "packed":
        packed = [pack_integers(np.zeros(s, np.uint8), np.ones((s[0], 1), np.float16)) for s in shapes]
        weights = [np.zeros((0, *w.data.shape), np.uint8) for w in packed]
        options = {f"w{i + 1}_format": w.format for i, w in enumerate(packed)}
    x = normal(0, tokens, hidden, dtype=np.float16)
    out = run(array, x, *weights, *routed(tokens, 2, 4), expert_map=np.full(4, -1, np.int32), **options)
    assert (out == 0).all()
