"""pykv.jax: every operation, eager and under jit, returns what a direct call writes; caches are updated in place."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest
from fresh import fresh
from interop.test_functional import OTHERWISE_MADE

import pykv
from pykv._schema import all_ops
from pykv._tools.samples import sample

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import pykv.jax  # noqa: E402

OPS = all_ops()


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.config.getoption("--device") not in (None, request.param):
        pytest.skip(f"--device {request.config.getoption('--device')}")
    if request.param == "cuda" and not pykv.has_cuda():
        pytest.skip("this pykv was built without CUDA")
    try:
        chosen = jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip("JAX sees no CUDA device")
    with jax.default_device(chosen):
        yield request.param


def narrow(value: Any) -> Any:
    """What JAX has without its x64 mode."""
    if isinstance(value, list):
        return [narrow(v) for v in value]
    return value.astype(np.int32) if isinstance(value, np.ndarray) and value.dtype == np.int64 else value


def written(name: str, values: dict[str, Any]) -> list[Any]:
    """What the operation writes, as the function of pykv.jax returns it."""
    op = OPS[name]
    getattr(pykv, name)(**values)
    return [
        values[p.name]
        for p in op.parameters
        if p.kind.startswith("written")
        and values.get(p.name) is not None
        and not (p.name in op.rules and op.rules[p.name].is_scratch)
    ]


def arguments(name: str) -> dict[str, Any]:
    """For the function of pykv.jax: without outputs; optional ones are asked for."""
    op, values = OPS[name], {k: narrow(v) for k, v in sample(name).items()}
    optional = {p.name for p in op.parameters if p.optional}
    return {k: True if k in op.rules else v for k, v in values.items() if k not in op.rules or k in optional}


def assert_equal(got: Any, expected: list[Any]) -> None:
    got = list(got) if isinstance(got, tuple) else [got]
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("name", pykv.jax.__all__)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_it_returns_what_the_operation_writes(name, jit, device):
    given = arguments(name)
    function = partial(getattr(pykv.jax, name), **{k: v for k, v in given.items() if not is_array(v)})
    arrays = {k: v for k, v in given.items() if is_array(v)}
    got = (jax.jit(function) if jit else function)(**jax.tree.map(jnp.asarray, arrays))
    made = {k: sample(name)[k].astype(dtype) for k, dtype in OTHERWISE_MADE.get(name, {}).items()}
    expected = written(name, {k: narrow(v) for k, v in (sample(name) | made).items()})
    if device == "cpu":
        assert_equal(got, expected)
    else:
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            x, y = (np.asarray(a).view(np.uint8) if np.dtype(a.dtype).itemsize == 1 else a for a in (x, y))
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


def is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, list))


def test_a_donated_cache_is_updated_in_place(device):
    values = sample("reshape_and_cache_flash")
    key, value, slots = (jnp.asarray(narrow(values[k])) for k in ("key", "value", "slot_mapping"))
    # a sum: what is made of an array of NumPy may still have its memory, which is not JAX's to give away
    caches = [(jnp.asarray(values[k]) + 0).block_until_ready() for k in ("key_cache", "value_cache")]
    step = jax.jit(pykv.jax.reshape_and_cache_flash, donate_argnums=(2, 3))
    before = [cache.unsafe_buffer_pointer() for cache in caches]
    for _ in range(3):
        caches = step(key, value, *caches, slots)
    assert [cache.unsafe_buffer_pointer() for cache in caches] == before


def test_without_donation_the_argument_stays(device):
    values = sample("fused_add_rms_norm")
    x, residual, weight = (jnp.asarray(v) for v in values.values())
    out, total = jax.jit(pykv.jax.fused_add_rms_norm)(x, residual, weight)
    np.testing.assert_array_equal(np.asarray(x), values["input"])
    np.testing.assert_array_equal(np.asarray(residual), values["residual"])
    np.testing.assert_allclose(np.asarray(total), values["input"] + values["residual"], rtol=1e-6)
    assert out.shape == x.shape


def test_scan_carries_the_caches(device):
    values = sample("reshape_and_cache_flash")
    key, value = jnp.asarray(values["key"]), jnp.asarray(values["value"])
    caches = (jnp.zeros(values["key_cache"].shape), jnp.zeros(values["value_cache"].shape))
    slots = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)

    def step(carried, slots):
        return tuple(pykv.jax.reshape_and_cache_flash(key, value, *carried, slots)), ()

    (keys, _), _ = jax.jit(lambda caches, slots: jax.lax.scan(step, caches, slots))(caches, slots)
    flat = np.asarray(keys).reshape(-1, *keys.shape[2:])
    np.testing.assert_array_equal(flat[:6], np.concatenate([values["key"]] * 2))
    assert not flat[6:].any()


def test_vmap(device):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 8), np.float32))
    weight = jnp.linspace(0, 1, 8)
    got = jax.vmap(pykv.jax.rms_norm, in_axes=(0, None))(x, weight)
    np.testing.assert_array_equal(np.asarray(got), np.stack([pykv.jax.rms_norm(row, weight) for row in x]))


def test_vmap_of_rows_of_one_dimension(device):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8), np.float32))
    weight = jnp.linspace(0, 1, 8)
    got = jax.vmap(pykv.jax.rms_norm, in_axes=(0, None))(x, weight)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(pykv.jax.rms_norm(x, weight)))


def test_scales_have_no_strides_that_could_be_transposed(device):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 256), np.float32))
    plain = pykv.jax.silu_and_mul_per_block_quant(x, 64)
    transposed = jax.jit(partial(pykv.jax.silu_and_mul_per_block_quant, group_size=64, is_scale_transposed=True))(x)
    assert_equal(transposed, list(plain))


def test_an_optional_output_is_asked_for_or_not(device):
    given = arguments("paged_attention") | {"lse": False}
    given.pop("workspace", None)
    out = pykv.jax.paged_attention(**given)
    assert out.shape == given["query"].shape
    assert len(pykv.jax.paged_attention(**given | {"lse": True})) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pykv.jax.rms_norm(), "rms_norm: input: is required"),
        (lambda: pykv.jax.rms_norm("x", None), "rms_norm: input: must be an array, got str"),
        (lambda: pykv.jax.rms_norm(object(), None), "rms_norm: input: must be an array, got object"),
        (lambda: pykv.jax.rms_norm(jnp.ones((2, 8)), None, stream=None), "rms_norm: stream: is no parameter"),
        (lambda: pykv.jax.silu_and_mul_per_block_quant(jnp.ones((1, 2, 8)), 4), "input: must have 2 dimensions"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_signatures_are_those_of_the_calls():
    assert str(inspect.signature(pykv.jax.fused_add_rms_norm)) == (
        "(input: 'Array', residual: 'Array', weight: 'Array | None', epsilon: 'float' = 1e-06) -> 'tuple[Array, ...]'"
    )
    for name in pykv.jax.__all__:
        parameters = inspect.signature(getattr(pykv.jax, name)).parameters
        assert set(parameters) == {p.name for p in OPS[name].parameters}


def test_shard_map(device):
    from jax.sharding import Mesh, PartitionSpec

    mesh = Mesh(np.array(jax.devices(device)[:1]), ("tokens",))
    x = jnp.ones((4, 8))
    rows = PartitionSpec("tokens")
    if hasattr(jax, "shard_map"):
        function = jax.shard_map(pykv.jax.relu2, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    else:  # before JAX 0.7
        from jax.experimental.shard_map import shard_map

        function = shard_map(pykv.jax.relu2, mesh=mesh, in_specs=rows, out_specs=rows, check_rep=False)
    np.testing.assert_array_equal(np.asarray(jax.jit(function)(x)), np.ones((4, 8)))


def test_denormal_numbers_stay():
    """XLA's threads flush them, and so would those that pykv starts from one of these."""
    program = """
        import jax, numpy as np
        import pykv, pykv.jax
        x = np.full((2048, 1024), 1e-20, np.float32)
        direct = np.zeros((2048, 512), np.float32)
        with jax.default_device(jax.devices("cpu")[0]):
            through_jax = np.asarray(pykv.jax.fatrelu_and_mul(x, 0.0))
        pykv.fatrelu_and_mul(direct, x, 0.0)
        smallest = np.float32(1e-20) * np.float32(1e-20)
        print(smallest > 0, (direct == smallest).all(), (through_jax == smallest).all())
    """
    assert fresh(program, PYKV_NUM_THREADS="4").split() == ["True"] * 3


def test_what_does_not_fit_is_an_error_when_the_call_is_traced():
    def function(x, weight):
        return pykv.jax.rms_norm(x, weight[:4])

    with pytest.raises(ValueError, match="rms_norm: weight: dimension 0 must equal hidden_size = 8"):
        jax.jit(function).lower(jnp.ones((3, 8)), jnp.ones(8))
    with pytest.raises(TypeError, match="rms_norm: weight: dtype must be"):
        pykv.jax.rms_norm(jnp.ones((3, 8)), jnp.ones(8, jnp.int32))
    with pytest.raises(TypeError, match="rms_norm: takes at most 3 positional arguments, got 4"):
        pykv.jax.rms_norm(jnp.ones((3, 8)), None, 1e-6, 1)


def test_ids_out_of_range_are_reported(device):
    values = {k: jnp.asarray(narrow(v)) for k, v in sample("reshape_and_cache_flash").items()}
    values["slot_mapping"] = jnp.asarray([0, 1, 999], jnp.int32)
    if device == "cpu":
        with pytest.raises(Exception, match="slot_mapping: 999 is out of range"):
            jax.block_until_ready(pykv.jax.reshape_and_cache_flash(**values))
    else:
        jax.block_until_ready(pykv.jax.reshape_and_cache_flash(**values))
        with pytest.raises(ValueError, match="slot_mapping: 999 is out of range"):
            pykv.check_errors()
