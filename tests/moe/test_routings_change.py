"""One layer, made once, with routings that come later: captured in a CUDA graph, compiled by torch, traced by JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gemm.weights import integers, mxfp4
from moe.inputs import random

import pykv
from pykv.gemm import stack_packed

EXPERTS, K, HIDDEN, INNER = 6, 2, 256, 128
KINDS = ["plain", "plain gelu", "int4", "mxfp4", "fp8 in blocks", "int8"]


def arguments(kind: str, dtype: Any = np.float16) -> dict[str, Any]:
    """Weights, and what belongs to them."""
    shapes, r = [(2 * INNER, HIDDEN), (HIDDEN, INNER)], random(3)
    named = {}
    for i, (n, k) in enumerate(shapes, 1):
        if kind in ("int4", "mxfp4"):
            make = partial(integers, group_size=64) if kind == "int4" else mxfp4
            packed = stack_packed([make(n, k, seed=seed)[0] for seed in range(EXPERTS)])
            named |= {f"w{i}": packed.data, f"w{i}_format": packed.format}
        elif kind.startswith("plain"):
            named[f"w{i}"] = (r.standard_normal((EXPERTS, n, k)) * k**-0.5).astype(dtype)
        else:
            blocks = kind == "fp8 in blocks"
            values = r.integers(-60, 61, (EXPERTS, n, k)).astype(np.int8)
            named[f"w{i}"] = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) if blocks else values
            shape = (n // 128, k // 128) if blocks else (n,)
            named[f"w{i}_scale"] = r.uniform(0.5, 2, (EXPERTS, *shape)).astype(np.float32) * k**-0.5 / 35
        named[f"w{i}_bias"] = r.standard_normal((EXPERTS, n)).astype(dtype)
    if kind == "plain gelu":
        named["activation"] = "gelu"
    return named


def routings(tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Weights and ids: spread, all to two experts, some to none, all to none, spread again."""
    for seed in range(5):
        r = random(seed)
        ids = np.argsort(r.random((tokens, EXPERTS)), axis=1)[:, :K].astype(np.int32)
        if seed == 1:
            ids[:] = 5, 2
        if seed in (2, 3):
            ids[r.random(ids.shape) < (0.5 if seed == 2 else 1)] = -1
        yield r.uniform(0.1, 0.7, (tokens, K)).astype(np.float32), ids


def tokens_of(tokens: int, dtype: Any = np.float16) -> np.ndarray:
    return random(9).standard_normal((tokens, HIDDEN)).astype(dtype)


def capture_with_cupy(cupy: Any, body: Callable[[], None]) -> Callable[[], None]:
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        body()
        graph = stream.end_capture()

    def replay() -> None:
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()

    return replay


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 4, 70, 600])
@pytest.mark.parametrize("own_workspace", [False, True])
def test_a_captured_layer_is_replayed_with_other_routings(cupy, kind, tokens, own_workspace):
    on_device = {k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in arguments(kind).items()}
    x, out = cupy.asarray(tokens_of(tokens)), cupy.zeros((tokens, HIDDEN), np.float16)
    given = [cupy.asarray(a) for a in next(routings(tokens))]
    if own_workspace:
        size = pykv.fused_moe_workspace_size(tokens, K, EXPERTS, 2 * INNER, INNER, HIDDEN, w8a8="w1_scale" in on_device)
        on_device["workspace"] = cupy.full(size, 255, np.uint8)
    replay = capture_with_cupy(
        cupy, lambda: pykv.fused_moe(out, x, topk_weights=given[0], topk_ids=given[1], **on_device)
    )
    seen = set()
    for routing in routings(tokens):
        for array, values in zip(given, routing, strict=True):
            array.set(values)
        out.fill(np.nan)
        replay()
        fresh = cupy.full_like(out, np.nan)
        weights, ids = map(cupy.asarray, routing)
        pykv.fused_moe(fresh, x, topk_weights=weights, topk_ids=ids, **on_device | {"workspace": None})
        replayed = cupy.asnumpy(out)
        assert np.isfinite(replayed.astype(np.float32)).all()
        np.testing.assert_array_equal(replayed.view(np.uint16), cupy.asnumpy(fresh).view(np.uint16))
        seen.add(replayed.tobytes())
    assert len(seen) >= 4  # routings have other results


@pytest.mark.parametrize("kind", ["plain", "int4", "int8"])
@pytest.mark.parametrize("tokens", [1, 70, 3000])
def test_router_and_layer_in_one_graph(cupy, kind, tokens):
    """The layer reads what kernels in front of it have just written."""
    on_device = {k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in arguments(kind).items()}
    x, out = cupy.asarray(tokens_of(tokens)), cupy.zeros((tokens, HIDDEN), np.float16)
    logits = cupy.zeros((tokens, EXPERTS), np.float32)
    weights, ids = cupy.zeros((tokens, K), np.float32), cupy.zeros((tokens, K), np.int32)

    def body() -> None:
        pykv.topk_softmax(weights, ids, None, logits, True)
        pykv.fused_moe(out, x, topk_weights=weights, topk_ids=ids, **on_device)

    replay = capture_with_cupy(cupy, body)
    for seed in range(4):
        logits.set(random(seed).standard_normal((tokens, EXPERTS)).astype(np.float32))
        replay()
        replayed = cupy.asnumpy(out)
        found = cupy.asnumpy(ids)
        np.testing.assert_array_equal(found, np.argsort(-cupy.asnumpy(logits), axis=1)[:, :K])
        fresh = cupy.full_like(out, np.nan)
        pykv.fused_moe(fresh, x, topk_weights=weights.copy(), topk_ids=cupy.asarray(found), **on_device)
        np.testing.assert_array_equal(replayed.view(np.uint16), cupy.asnumpy(fresh).view(np.uint16))


def on_numpy(x: np.ndarray, routing: tuple[np.ndarray, np.ndarray], named: dict[str, Any]) -> np.ndarray:
    out = np.zeros_like(x)
    pykv.fused_moe(out, x, topk_weights=routing[0], topk_ids=routing[1], **named)
    return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_takes_other_routings(kind):
    torch = pytest.importorskip("torch")
    named, x = arguments(kind, np.float16), tokens_of(9)
    tensors = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in named.items()}
    compiles = []

    def backend(graph: Any, _: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def layer(x: Any, weights: Any, ids: Any) -> Any:
        out = torch.empty_like(x)
        pykv.fused_moe(out, x, topk_weights=weights, topk_ids=ids, **tensors)
        return out

    torch._dynamo.reset()
    for routing in routings(9):
        got = layer(torch.from_numpy(x), *map(torch.from_numpy, routing)).numpy()
        np.testing.assert_array_equal(got.view(np.uint16), on_numpy(x, routing, named).view(np.uint16))
    assert len(compiles) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_traced_layer_takes_other_routings(kind):
    jax = pytest.importorskip("jax")
    import pykv.jax

    cpu = jax.devices("cpu")[0]
    named, x = arguments(kind, np.float16), tokens_of(9)
    texts = {k: v for k, v in named.items() if isinstance(v, str)}
    arrays = {k: jax.device_put(v, cpu) for k, v in named.items() if k not in texts}
    traces = []

    @jax.jit
    def layer(x: Any, weights: Any, ids: Any, arrays: dict[str, Any]) -> Any:
        traces.append(1)
        return pykv.jax.fused_moe(x, topk_weights=weights, topk_ids=ids, **arrays, **texts)

    for routing in routings(9):
        got = np.asarray(layer(*(jax.device_put(a, cpu) for a in (x, *routing)), arrays))
        np.testing.assert_array_equal(got.view(np.uint16), on_numpy(x, routing, named).view(np.uint16))
    assert len(traces) == 1
