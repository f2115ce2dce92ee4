"""Which arrays are taken, which are refused, and with which words."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from libraries import Library

import pykv


def normalised(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((5, 24)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_every_library(array: Library, x: np.ndarray, dtype: Any) -> None:
    x = x.astype(dtype)
    out = array.output(np.zeros_like(x))
    pykv.rms_norm(out, array.input(x), array.input(np.ones(24, dtype)))
    eps = float(ml_dtypes.finfo(x.dtype).eps)
    np.testing.assert_allclose(array.numpy(out).astype(np.float64), normalised(x), atol=eps, rtol=4 * eps)


def test_libraries_mix(array: Library, x: np.ndarray) -> None:
    """Arrays of several libraries in one call: all that counts is that they lie on one device."""
    made = pykv.from_pointer(x.ctypes.data, x.shape, x.dtype, "cpu", owner=x)
    out = np.zeros_like(x)
    if array.device == "cuda":
        with pytest.raises(ValueError, match=r"rms_norm: \w+: must lie on \S+ like the arguments before it, got \S+$"):
            pykv.rms_norm(out, array.input(x), made)
        return
    pykv.rms_norm(out, made, array.input(np.ones(24, np.float32)))
    np.testing.assert_allclose(out, normalised(x), rtol=1e-5, atol=1e-6)


def test_from_pointer(array: Library, x: np.ndarray) -> None:
    if array.name != "cupy" and array.name != "numpy":
        pytest.skip("raw addresses are read from NumPy and CuPy")
    where = "cuda:0" if array.device == "cuda" else "cpu"

    def raw(a: Any) -> pykv._C.Pointer:
        address = a.data.ptr if array.device == "cuda" else a.ctypes.data
        return pykv.from_pointer(address, (3, 24), "float32", where, strides=(48, 1), owner=a)

    source, out, ones = array.output(x), array.output(np.zeros_like(x)), array.input(np.ones(24, np.float32))
    pykv.rms_norm(raw(out), raw(source), ones)
    expected = np.where(np.arange(5)[:, None] % 2 == 0, normalised(x), 0)
    np.testing.assert_allclose(array.numpy(out), expected, rtol=1e-5, atol=1e-6)


def test_pointer_is_an_array_for_others(x: np.ndarray) -> None:
    view = pykv.from_pointer(x.ctypes.data, (24, 5), "float32", "cpu", strides=(1, 24), owner=x)
    assert (view.shape, view.strides, view.address) == ((24, 5), (1, 24), x.ctypes.data)
    back = np.from_dlpack(view)
    np.testing.assert_array_equal(back, x.T)
    del view
    np.testing.assert_array_equal(back, x.T)


def test_pointer_to_no_dtype() -> None:
    with pytest.raises(TypeError, match="dtype: must be a dtype of NumPy or ml_dtypes, or its name, got 'foo'"):
        pykv.from_pointer(4096, (4,), "foo", "cpu")


def test_pointer_keeps_its_owner() -> None:
    class Owner:
        pass

    import weakref

    owner = Owner()
    alive = weakref.ref(owner)
    buffer = np.zeros(4, np.float32)
    view = pykv.from_pointer(buffer.ctypes.data, [4], np.float32, "cpu", owner=owner)
    exported = np.from_dlpack(view)
    del owner, view
    assert alive() is not None
    del exported
    assert alive() is None


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ("text", TypeError, r"rms_norm: out: an array .* is required, got str"),
        (None, TypeError, r"rms_norm: out: an array is required, got None"),
        (1.5, TypeError, r"rms_norm: out: an array is required, got a number"),
        (
            np.zeros((5, 24), np.float64),
            TypeError,
            r"rms_norm: out: elements of float64 are not supported; pykv knows float32, float16, .*, int64$",
        ),
        (np.zeros((5, 24), ">f4"), TypeError, r"rms_norm: out: dtype '>f4' is not in native byte order"),
        (np.zeros((5, 24), np.float16), TypeError, r"rms_norm: out: dtype must be that of input, float32, got float16"),
        (np.zeros((5, 23), np.float32), ValueError, r"rms_norm: out: must have the shape of input|rms_norm: out: dim"),
        (np.broadcast_to(np.float32(0), (5, 24)), ValueError, r"rms_norm: out: is read-only, but it is written"),
        (np.zeros((1,) * 9, np.float32), ValueError, r"rms_norm: out: at most 8 dimensions are supported, got 9"),
    ],
)
def test_refused(x: np.ndarray, bad: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pykv.rms_norm(bad, x, np.ones(24, np.float32))


def test_strides_that_split_elements(x: np.ndarray) -> None:
    bytes_ = np.zeros(5 * 98, np.uint8)
    odd = np.ndarray((5, 24), np.float32, bytes_, strides=(98, 4))
    with pytest.raises(
        ValueError, match=r"rms_norm: input: strides must be multiples of the element size of 4 bytes, got 98"
    ):
        pykv.rms_norm(x, odd, np.ones(24, np.float32))


def test_arguments_that_are_no_arrays(x: np.ndarray) -> None:
    with pytest.raises(TypeError, match=r"rms_norm: epsilon: must be real number, not str"):
        pykv.rms_norm(x, x, np.ones(24, np.float32), "small")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rms_norm: stream: must be an int or a stream .*, got str"):
        pykv.rms_norm(x, x, np.ones(24, np.float32), stream="first")


def test_jax_is_not_written(x: np.ndarray) -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(ValueError, match=r"rms_norm: out: an array of JAX or MLX cannot be written in place"):
        pykv.rms_norm(jax.numpy.asarray(x), x, np.ones(24, np.float32))


def test_torch_that_requires_grad_is_not_written(x: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    out = torch.zeros(5, 24, requires_grad=True)
    with pytest.raises(ValueError, match=r"rms_norm: out: requires grad"):
        pykv.rms_norm(out, x, np.ones(24, np.float32))
    pykv.rms_norm(out.detach(), x, np.ones(24, np.float32))
    np.testing.assert_allclose(out.detach().numpy(), normalised(x), rtol=1e-5, atol=1e-6)


def test_torch_without_memory_is_refused(x: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=r"^rms_norm: input: [^\n]*$"):
        pykv.rms_norm(x, torch.zeros(5, 24, device="meta"), np.ones(24, np.float32))
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(5, 24)
    with pytest.raises((TypeError, ValueError, RuntimeError)):  # which, torch decides if pykv.torch was imported
        pykv.rms_norm(x, fake, np.ones(24, np.float32))


def test_torch_is_read_by_its_shim(x: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    assert pykv._C.way_in(torch.Tensor) == pykv._C.way_in(torch.nn.Parameter) == "stable shim of torch"


def test_cupy_is_read_by_its_struct() -> None:
    cupy = pytest.importorskip("cupy")

    class Derived(cupy.ndarray):  # type: ignore[misc]
        pass

    assert pykv._C.way_in(cupy.ndarray) == pykv._C.way_in(Derived) == "struct of cupy.ndarray"


def test_a_tensor_whose_object_another_owner_keeps(x: np.ndarray) -> None:
    """Up to torch 2.10 such an object refers to its tensor in another way."""
    torch = pytest.importorskip("torch")
    kept, given = torch.zeros(5, 24, requires_grad=True), torch.from_numpy(x.copy())
    reference = weakref.ref(given)
    kept.grad = given
    del given
    pykv.rms_norm(expected := np.zeros_like(x), x, None)
    pykv.rms_norm(out := np.zeros_like(x), reference(), None)
    assert out.tobytes() == expected.tobytes()
    assert out.any()


class Exporter:
    """A producer of ``__dlpack__`` alone, with what NumPy answers."""

    def __init__(self, array: np.ndarray, old: bool = False, copies: bool = False) -> None:
        self.array, self.old, self.copies = array, old, copies

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and options:
            raise TypeError("unexpected keyword argument")
        if self.copies:
            options["copy"] = True
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("old", [False, True])
def test_plain_dlpack(x: np.ndarray, old: bool) -> None:
    out = np.zeros_like(x)
    pykv.rms_norm(Exporter(out, old), Exporter(x, old), Exporter(np.ones(24, np.float32), old))
    np.testing.assert_allclose(out, normalised(x), rtol=1e-5, atol=1e-6)


def test_dlpack_flags(x: np.ndarray) -> None:
    frozen = np.zeros_like(x)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"rms_norm: out: is read-only"):
        pykv.rms_norm(Exporter(frozen), x, np.ones(24, np.float32))
    with pytest.raises(ValueError, match=r"rms_norm: out: was copied by its producer"):
        pykv.rms_norm(Exporter(np.zeros_like(x), copies=True), x, np.ones(24, np.float32))


def test_threads_call_side_by_side(x: np.ndarray) -> None:
    """The GIL is released around the call, and the thread pool serves several callers."""
    wide = np.tile(x, (400, 10))
    outs = [np.zeros_like(wide) for _ in range(8)]
    ones = np.ones(wide.shape[1], np.float32)

    def work(out: np.ndarray) -> None:
        for _ in range(20):
            pykv.rms_norm(out, wide, ones)

    threads = [threading.Thread(target=work, args=(out,)) for out in outs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    expected = normalised(wide)
    for out in outs:
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_number_of_threads() -> None:
    before = pykv.get_num_threads()
    try:
        pykv.set_num_threads(1)
        assert pykv.get_num_threads() == 1
        with pytest.raises(ValueError, match=r"num_threads: must be at least 1, got 0"):
            pykv.set_num_threads(0)
    finally:
        pykv.set_num_threads(before)


def test_devices_have_names() -> None:
    pykv.check_errors("cpu")
    with pytest.raises(ValueError, match=r"device: must be 'cpu', 'cuda', 'cuda:<n>' or an int, got 'gpu'"):
        pykv.check_errors("gpu")


def test_cuda_arrays_without_a_gpu() -> None:
    """The library loads without a driver; a call on CUDA memory then says what is missing."""
    if pykv._C.cuda_device_count() > 0:
        pytest.skip("there is a GPU")
    there = pykv.from_pointer(4096, (2, 8), "float32", "cuda:0")
    error, text = (
        (RuntimeError, "rms_norm: no CUDA device can be used here: ")
        if pykv.has_cuda()
        else (NotImplementedError, "rms_norm: got CUDA arrays, but this pykv was built for the CPU alone")
    )
    with pytest.raises(error, match=text):
        pykv.rms_norm(there, there, pykv.from_pointer(8192, (8,), "float32", "cuda:0"))
    pykv.check_errors()
