"""Results do not depend on the caller's floating-point environment: rounding, and what becomes of denormal numbers."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import pykv
from pykv._schema import all_ops
from pykv._tools.samples import ADDRESSED, sample

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="sets MXCSR through glibc's fenv_t of x86-64")

FLUSH = 1 << 15 | 1 << 6  # results and operands
UPWARD, TOWARD_ZERO = 2 << 13, 3 << 13
MXCSR = 28 // 4  # where fenv_t holds it, in words
libm = ctypes.CDLL("libm.so.6")


@contextmanager
def environment(bits: int) -> Iterator[None]:
    before, wanted = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    libm.fegetenv(before)
    libm.fegetenv(wanted)
    wanted[MXCSR] |= bits
    libm.fesetenv(wanted)
    try:
        yield
        libm.fegetenv(wanted)
        assert wanted[MXCSR] & bits == bits, "the call changed its caller's environment"
    finally:
        libm.fesetenv(before)


@pytest.mark.parametrize("bits", [FLUSH | UPWARD, TOWARD_ZERO], ids=["flush, upward", "toward zero"])
@pytest.mark.parametrize("name", [name for name in all_ops() if name not in ADDRESSED])
def test_an_operation_gives_the_same_bits(name: str, bits: int) -> None:
    op, usual, other = all_ops()[name], sample(name), sample(name)
    op.direct(**usual)
    with environment(bits):
        op.direct(**other)
    kinds = {p.name: p.kind for p in op.parameters}
    written = [key for key in usual if kinds[key].startswith("written")]
    assert written
    for key in written:
        parts = zip(*(x if isinstance(x, list) else [x] for x in (other[key], usual[key])), strict=True)
        for got, wanted in parts:
            np.testing.assert_array_equal(got, wanted, err_msg=key)


def test_denormal_numbers_are_kept() -> None:
    x = np.full((64, 256), 2.0**-130, np.float32)  # enough rows for the workers to have some
    usual, other = np.empty_like(x), np.empty_like(x)
    weight = np.full(256, 2.0**-10, np.float32)
    pykv.rms_norm(usual, x, weight, 1.0)
    assert (usual == 2.0**-140).all()
    with environment(FLUSH):
        pykv.rms_norm(other, x, weight, 1.0)
    np.testing.assert_array_equal(other.view(np.uint32), usual.view(np.uint32))


@pytest.mark.parametrize("scale", [0.1, 1e-39])
def test_a_number_is_the_nearest_float(scale: float) -> None:
    """0.1 lies between two floats; 1e-39 is denormal as one."""
    x = np.full((1, 1, 1, 64), scale, np.float32)
    usual, other = (np.empty(x.shape, np.uint8) for _ in range(2))
    pykv.convert_fp8(usual, x, scale, "fp8_e4m3")
    assert (usual == 0x38).all()  # exactly 1
    with environment(FLUSH | UPWARD):
        pykv.convert_fp8(other, x, scale, "fp8_e4m3")
    np.testing.assert_array_equal(other, usual)
