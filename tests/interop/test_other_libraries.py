"""Arrays of libraries that pykv has never heard of, by what they export; each is skipped where it is not installed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pykv
from pykv import functional

# how to make an array out of one of NumPy
LIBRARIES = {
    "array_api_strict": lambda library, x: library.asarray(x),
    "mlx.core": lambda library, x: library.array(x),
    "paddle": lambda library, x: library.to_tensor(x),
    "tvm_ffi": lambda library, x: library.from_dlpack(x),
}


def normalised(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") == "cuda":
        pytest.skip("these lie on the CPU")


@pytest.fixture(params=LIBRARIES)
def make(request: pytest.FixtureRequest) -> Any:
    library = pytest.importorskip(request.param)
    return lambda x: LIBRARIES[request.param](library, x)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((5, 24)).astype(np.float32)


def test_they_are_read(make: Any, x: np.ndarray) -> None:
    out, weight = np.zeros_like(x), np.linspace(0, 1, 24, dtype=np.float32)
    pykv.rms_norm(out, make(x), make(weight))
    np.testing.assert_allclose(out, normalised(x) * weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["array_api_strict", "paddle", "tvm_ffi"])
def test_they_are_written(name: str, x: np.ndarray) -> None:
    out = LIBRARIES[name](pytest.importorskip(name), np.zeros_like(x))
    pykv.rms_norm(out, x, np.ones(24, np.float32))
    np.testing.assert_allclose(np.from_dlpack(out), normalised(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mlx.core", "paddle"])
def test_functional_makes_theirs(name: str, x: np.ndarray) -> None:
    library = pytest.importorskip(name)
    make = lambda a: LIBRARIES[name](library, a)  # noqa: E731
    theirs, ones = make(x), make(np.ones(24, np.float32))
    out = functional.rms_norm(theirs, ones)
    assert type(out) is type(theirs)
    np.testing.assert_allclose(np.asarray(out), normalised(x), rtol=1e-5, atol=1e-6)
    small = theirs.astype("bfloat16" if name == "paddle" else library.bfloat16)
    out = functional.rms_norm(small, None)
    assert out.dtype == small.dtype
    np.testing.assert_allclose(np.asarray(out.astype(theirs.dtype)), normalised(x), rtol=2**-6, atol=2**-6)
    codes = functional.static_scaled_int8_quant(theirs, make(np.float32([0.1])))
    assert type(codes) is type(theirs)
    np.testing.assert_array_equal(np.asarray(codes), np.rint(x / np.float32(0.1)).astype(np.int8))
    given = np.zeros_like(x)
    assert functional.rms_norm(theirs, ones, out=given) is given


def test_mlx_lazy_and_bfloat16(x: np.ndarray) -> None:
    mx = pytest.importorskip("mlx.core")
    out = np.zeros_like(x)
    pykv.rms_norm(out, mx.array(x) * 3 - mx.array(x), mx.ones(24))  # computed when it is asked for
    np.testing.assert_allclose(out, normalised(2 * x), rtol=1e-5, atol=1e-6)
    small = np.zeros(x.shape, ml_dtypes.bfloat16)
    pykv.rms_norm(small, mx.array(x).astype(mx.bfloat16), mx.ones(24, mx.bfloat16))
    np.testing.assert_allclose(small.astype(np.float64), normalised(x), rtol=2**-6, atol=2**-6)


def test_paddle_strides_and_bfloat16(x: np.ndarray) -> None:
    paddle = pytest.importorskip("paddle")
    wide = paddle.to_tensor(np.concatenate([x, x], axis=1))
    out = paddle.zeros(x.shape, dtype="bfloat16")
    pykv.rms_norm(out, wide.astype("bfloat16")[:, 24:], None)
    np.testing.assert_allclose(out.astype("float32").numpy(), normalised(x), rtol=2**-6, atol=2**-6)
    with pytest.raises(ValueError, match="input: the last dimension must be contiguous"):
        pykv.rms_norm(paddle.zeros([24, 5]), paddle.to_tensor(x).t(), None)


def test_mlx_is_not_written(x: np.ndarray) -> None:
    """Its arrays share buffers, and what was computed from them lazily would see the write."""
    mx = pytest.importorskip("mlx.core")
    with pytest.raises(ValueError, match="rms_norm: out: an array of JAX or MLX cannot be written in place"):
        pykv.rms_norm(mx.zeros(x.shape), x, np.ones(24, np.float32))


def test_tinygrad_exports_a_buffer(x: np.ndarray) -> None:
    """It has no DLPack: its memory is taken as NumPy's array, and the tensor itself is refused with words."""
    tinygrad = pytest.importorskip("tinygrad")
    tensor, out = tinygrad.Tensor(x, device="PYTHON"), np.zeros_like(x)
    with pytest.raises(TypeError, match=r"rms_norm: input: an array .* is required, got Tensor"):
        pykv.rms_norm(out, tensor, np.ones(24, np.float32))
    pykv.rms_norm(out, np.asarray(tensor.data()), np.ones(24, np.float32))
    np.testing.assert_allclose(out, normalised(x), rtol=1e-5, atol=1e-6)
