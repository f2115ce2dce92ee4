"""pykv.functional gives what the operation writes, for every operation that has an output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pykv
from pykv import functional
from pykv._samples import sample
from pykv._schema import all_ops

WITH_OUTPUTS = {name: op for name, op in all_ops().items() if op.rules}


def outputs_of(op: Any, arguments: dict[str, Any]) -> list[str]:
    return [p.name for p in op.parameters if p.name in op.rules and arguments.get(p.name) is not None]


@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_it_returns_what_the_operation_writes(array, name):
    if array.name in ("jax", "interface"):
        pytest.skip("no arrays that can be made and written by this library")
    op, values = WITH_OUTPUTS[name], sample(name)
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
    with pytest.raises(TypeError, match="outputs are made in NumPy, CuPy or torch, got Pointer"):
        functional.rms_norm(pykv.from_pointer(x.ctypes.data, (2, 4), np.float32, "cpu"), None)
