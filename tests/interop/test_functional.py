"""pykv.functional gives what the operation writes, for every operation that has an output."""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pykv
from pykv import functional
from pykv._schema import all_ops
from pykv._tools.samples import sample

WITH_OUTPUTS = {name: op for name, op in all_ops().items() if op.rules}


def outputs_of(op: Any, arguments: dict[str, Any]) -> list[str]:
    return [p.name for p in op.parameters if p.name in op.rules and arguments.get(p.name) is not None]


# outputs that the functional form makes of a dtype that NumPy alone, and so the sample, has not
OTHERWISE_MADE = {name: {"out": ml_dtypes.bfloat16} for name in ("cutlass_scaled_fp4_mm", "grouped_scaled_mm")}


@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_it_returns_what_the_operation_writes(array, name):
    if array.name in ("jax", "interface"):
        pytest.skip("no arrays that can be made and written by this library")
    op, values = WITH_OUTPUTS[name], sample(name)
    values |= {k: values[k].astype(dtype) for k, dtype in OTHERWISE_MADE.get(name, {}).items()}
    call = {k: array.output(v) if isinstance(v, np.ndarray) else v for k, v in values.items()}
    getattr(pykv, name)(**call)

    outputs = outputs_of(op, values)
    optional = {p.name for p in op.parameters if p.optional}
    made = {k: array.input(v) if isinstance(v, np.ndarray) else v for k, v in values.items() if k not in outputs}
    made |= {k: True for k in outputs if k in optional}
    result = getattr(functional, name)(**made)
    returned = [k for k in outputs if not op.rules[k].is_scratch]
    results = dict(zip(returned, result if isinstance(result, tuple) else (result,), strict=True))
    for k, got in results.items():
        assert type(got) is type(call[k])
        assert tuple(got.shape) == tuple(call[k].shape)
        assert array.numpy(got).tobytes() == array.numpy(call[k]).tobytes()


def test_positional_arguments_skip_the_outputs():
    x, weight = np.ones((2, 4), np.float32), np.full(4, 2, np.float32)
    np.testing.assert_allclose(functional.rms_norm(x, weight, 0.0), np.full((2, 4), 2))


def test_an_output_that_is_given_is_used():
    x, out = np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32)
    assert functional.rms_norm(x, None, out=out) is out
    np.testing.assert_allclose(out, 1, rtol=1e-6)


def test_changed_arguments_are_no_outputs():
    assert not hasattr(functional, "rotary_embedding")
    with pytest.raises(AttributeError, match="has no 'reshape_and_cache'"):
        _ = functional.reshape_and_cache


def test_errors_name_the_operation():
    x = np.ones((2, 4), np.float32)
    with pytest.raises(TypeError, match="rms_norm: takes at most 3 positional arguments, got 4"):
        functional.rms_norm(x, None, 1e-6, 3)
    with pytest.raises(TypeError, match="rms_norm: input: given twice"):
        functional.rms_norm(x, None, input=x)
    with pytest.raises(TypeError, match="convert_fp8: output: must be given where the input is fp8"):
        functional.convert_fp8(np.zeros(3, np.uint8))
    with pytest.raises(TypeError, match="outputs are made in NumPy, CuPy, torch, Paddle or MLX, got Pointer"):
        functional.rms_norm(pykv.from_pointer(x.ctypes.data, (2, 4), np.float32, "cpu"), None)


X = np.zeros((2, 8), np.float32)
QUERY, CACHE = np.zeros((2, 1, 8), np.float32), np.zeros((1, 4, 1, 8), np.float32)
TABLES, LENGTHS = np.zeros((2, 1), np.int32), np.ones(2, np.int32)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "error", "message"),
    [
        ("rms_norm", (), {}, TypeError, "rms_norm: input: is required"),
        ("rms_norm", (X,), {}, TypeError, "rms_norm: weight: is required"),
        ("rms_norm", ([[1.0]], None), {}, TypeError, "rms_norm: input: must be an array, .*, got list"),
        ("rms_norm", (None, None), {}, TypeError, "rms_norm: input: must be an array, got NoneType"),
        ("rms_norm", (True, None), {}, TypeError, "rms_norm: input: must be an array, got bool"),
        ("rms_norm", (X, None), {"eps": 1}, TypeError, "rms_norm: eps: is no parameter, as these are: epsilon, input"),
        ("rms_norm", (X, None, "1"), {}, TypeError, "rms_norm: epsilon: must be a number, got str"),
        ("rms_norm", (X, None), {"out": 5}, TypeError, "rms_norm: out: must be an array, got int"),
        ("silu_and_mul", (np.float32(3),), {}, ValueError, "silu_and_mul: input: must have 1 to 8 dimensions"),
        ("silu_and_mul_per_block_quant", (X[None], 4), {}, ValueError, "input: must have 2 dimensions, got shape"),
        (
            "silu_and_mul_per_block_quant",
            (X, 4),
            {"is_scale_transposed": np.zeros(3, object)},
            ValueError,
            "silu_and_mul_per_block_quant: is_scale_transposed: ",
        ),
        ("silu_and_mul_per_block_quant", (X, 0), {}, ValueError, "group_size: must be positive and divide width = 4"),
        (
            "rms_norm_per_block_quant",
            (X, X[0]),
            {"group_size": -4},
            ValueError,
            "group_size: must divide hidden_size = 8, got -4",
        ),
        ("paged_attention", (X, CACHE, CACHE, TABLES, LENGTHS), {"lse": True}, ValueError, "query: must have 3 dim"),
        ("paged_attention", (QUERY, CACHE, CACHE, TABLES, LENGTHS), {"window": (-1, -1)}, TypeError, "window: must be"),
        ("paged_attention", (QUERY, CACHE, CACHE, TABLES, LENGTHS), {"softcap": "9"}, TypeError, "softcap: must be a"),
        ("paged_attention", (QUERY, CACHE, CACHE, TABLES, LENGTHS), {"kv_cache_dtype": 8}, TypeError, "be a string"),
    ],
)
def test_wrong_arguments_are_named_before_shapes_are_worked_out(name, args, kwargs, error, message):
    with pytest.raises(error, match=message):
        getattr(functional, name)(*args, **kwargs)


@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_arrays_of_one_dimension_too_many_are_told_by_the_library(name):
    """Whatever a rule of an output makes of them."""
    op = WITH_OUTPUTS[name]
    arrays = [k for k, v in sample(name).items() if isinstance(v, np.ndarray) and k in op.inputs]
    values = {k: v[None] if k == arrays[0] else v for k, v in sample(name).items() if k not in op.rules}
    values[arrays[0]] = values[arrays[0]].reshape((1,) * (9 - values[arrays[0]].ndim) + values[arrays[0]].shape)
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: \w+(, made for .*)?: "):
        getattr(functional, name)(**values)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "awq_dequantize",
            {"scales": np.ones((2, 24), int)},
            "out, made for qweight, scales: dtype must be float32 or",
        ),
        ("hadacore_transform", {"x": np.ones((2, 8))}, "out, made for x: elements of float64 are not supported"),
        ("grouped_topk", {"topk": 1 << 40}, "topk_weights, made for scores, topk: must have at most num_experts = 12"),
        ("grouped_topk", {"topk": np.array(2.0)}, "topk: "),
        ("merge_top_k", {"k": 1 << 63}, "k: "),
        ("scaled_fp4_quant", {"tile_rows": 0}, "tile_rows: must be 128 or 8, got 0"),
        ("convert_fp8", {"input": np.ones((2, 8))}, "input: elements of float64 are not supported"),
    ],
)
def test_an_error_names_what_was_given(name, change, message):
    """An output that was left out is nothing to look for: its error says what it is made for."""
    given = {n: v for n, v in sample(name).items() if n not in all_ops()[name].rules}
    with pytest.raises((TypeError, ValueError), match=f"^{name}: {message}"):
        getattr(functional, name)(**given | change)


def test_an_optional_output_is_asked_for_or_not():
    call = dict(query=QUERY, key_cache=CACHE, value_cache=CACHE, block_tables=TABLES, seq_lens=LENGTHS)
    for no in (False, None):
        assert functional.paged_attention(**call, lse=no).shape == QUERY.shape
    out, lse = functional.paged_attention(**call, lse=True)
    assert lse.shape == (1, 2)
    assert out.shape == QUERY.shape


@pytest.mark.parametrize("name", ["silu_and_mul_per_block_quant", "rms_norm_per_block_quant"])
def test_transposed_scales_have_the_memory_of_the_transpose(array, name):
    if array.name in ("jax", "interface"):
        pytest.skip("no arrays that can be made by this library")
    x = array.input(np.random.default_rng(0).standard_normal((5, 256), np.float32))
    weight = () if name.startswith("silu") else (array.input(np.ones(256, np.float32)),)
    codes, scales = getattr(functional, name)(x, *weight, group_size=64)
    same, transposed = getattr(functional, name)(x, *weight, group_size=64, is_scale_transposed=True)
    assert array.numpy(codes).tobytes() == array.numpy(same).tobytes()
    np.testing.assert_array_equal(array.numpy(scales), array.numpy(transposed))
    step = transposed.stride(0) if array.name.startswith("torch") else transposed.strides[0] // 4
    assert step == 1


def test_rows_of_one_dimension():
    row, weight = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    np.testing.assert_array_equal(functional.rms_norm(row, weight), functional.rms_norm(row[None], weight)[0])
    codes, scale = functional.rms_norm_dynamic_per_token_quant(row, weight)
    assert (codes.shape, scale.shape) == ((8,), (1, 1))


def test_signatures_are_those_of_the_calls():
    assert str(inspect.signature(functional.rms_norm)) == (
        "(input: 'Array', weight: 'Array | None', epsilon: 'float' = 1e-06, *, "
        "out: 'Array | None' = None, stream: 'Stream' = None) -> 'Array'"
    )
    for name, op in WITH_OUTPUTS.items():
        parameters = inspect.signature(getattr(functional, name)).parameters
        assert set(parameters) == {p.name for p in op.parameters} | {"stream"}
        values = {k: v for k, v in sample(name).items() if k not in op.rules}
        bound = inspect.signature(getattr(functional, name)).bind(**values)
        bound.apply_defaults()
        getattr(functional, name)(*bound.args, **bound.kwargs)


def test_tensors_of_transforms_are_told():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"rms_norm: input: must be a plain tensor, got one of torch\.vmap"):
        torch.vmap(lambda y: functional.rms_norm(y, None))(torch.zeros(2, 2, 8))
