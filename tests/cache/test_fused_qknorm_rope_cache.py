"""The norm and the rotation against float64; what is cached is, bit by bit, what is returned."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libraries import Library
from norm import reference as norm
from rotary.reference import cos_sin_cache, rotary_embedding
from rows import FLOATS, assert_rounded_once, name_of, padded, random

import pykv

EPSILON, MAX_POSITION, BLOCKS, BLOCK_SIZE = 1e-6, 64, 6, 8
F32 = np.dtype(np.float32)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


class Case:
    def __init__(
        self,
        array: Library,
        dtype: np.dtype,
        head_dim: int = 128,
        rotary_dim: int = 128,
        heads: tuple[int, int] = (6, 2),
        rows: int = 17,
        kind: str = "auto",
        weights: np.dtype | None = None,
        angles: np.dtype | None = None,
        bias: float = 0.0,
        hnd: bool = False,
        wide: int = 0,  # columns that the table of angles has for each half beyond those of rotary_dim
        padding: int = 0,
        offset: int = 0,
        slots: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        ids: Any = np.int64,
    ) -> None:
        rng = np.random.default_rng(0)
        queries, kv = heads
        self.array, self.head_dim, self.heads, self.bias = array, head_dim, heads, bias
        self.pairs, self.kind = rotary_dim // 2, kind
        self.qkv = padded(random((rows, (queries + 2 * kv) * head_dim), dtype, 1), padding)
        self.weights = [random((head_dim,), weights or dtype, seed) for seed in (2, 3)]
        table = cos_sin_cache(MAX_POSITION, rotary_dim + 2 * wide, angles or dtype)
        half = table.shape[1] // 2
        self.cos, self.sin = table[:, :half], table[:, half:]
        self.positions = rng.integers(0, MAX_POSITION, rows) if positions is None else positions
        all_slots = rng.permutation(BLOCKS * BLOCK_SIZE)[: max(rows - 2, 0)]
        all_slots[3::5] = -1
        self.slots = (all_slots if slots is None else slots).astype(ids)
        stored = dtype if kind == "auto" else np.dtype(np.int8 if kind == "int8" else np.uint8)
        shape = (BLOCKS, kv, BLOCK_SIZE, head_dim) if hnd else (BLOCKS, BLOCK_SIZE, kv, head_dim)
        self.caches = [np.zeros(shape, stored) for _ in range(2)]
        self.hnd, self.offset = hnd, offset
        self.scales = (0.375, 2.1) if kind != "auto" else (None, None)

    def cache(self, memory: Any) -> Any:
        return memory.swapaxes(1, 2) if self.hnd else memory

    def run(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What it returns, and the caches."""
        rows, dtype = len(self.qkv), self.qkv.dtype
        sizes = [count * self.head_dim for count in (self.heads[0], self.heads[1], self.heads[1])]
        outs = [self.array.output(np.full((rows, n), 3, dtype), offset=self.offset) for n in sizes]
        caches = [self.array.output(self.cache(memory)) for memory in self.caches]
        qkv = self.array.input(self.qkv, offset=self.offset)
        given = [self.array.input(x) for x in (*self.weights, self.cos, self.sin, self.positions, self.slots)]
        pykv.fused_qknorm_rope_cache(
            *outs, qkv, *given, *caches, self.head_dim, *self.heads, self.pairs, EPSILON, self.bias, self.kind,
            *self.scales,
        )  # fmt: skip
        return [self.array.numpy(x) for x in outs], [self.array.numpy(x) for x in caches]

    def check(self) -> None:
        (q, k, v), caches = self.run()
        rows, (queries, kv) = len(self.qkv), self.heads
        parts = np.split(self.qkv.reshape(rows, queries + 2 * kv, self.head_dim), [queries, queries + kv], axis=1)
        np.testing.assert_array_equal(v, parts[2].reshape(v.shape))
        table = np.concatenate([self.cos[:, : self.pairs], self.sin[:, : self.pairs]], axis=1)
        for part, weight, result in zip(parts, self.weights, (q, k), strict=False):
            exact = norm.rms_norm(part, (weight.astype(F32) + np.float32(self.bias)).astype(np.float64), EPSILON)
            self.check_rotation(exact, table, result.reshape(part.shape))
        # the caches hold the very numbers that it returns
        tokens = slice(len(self.slots))
        wanted = [np.zeros_like(x) for x in caches]
        heads = [np.ascontiguousarray(x[tokens].reshape(len(self.slots), kv, self.head_dim)) for x in (k, v)]
        scales = [1.0 if s is None else s for s in self.scales]
        pykv.reshape_and_cache_flash(*heads, *wanted, self.slots, self.kind, *scales)
        for cache, other in zip(caches, wanted, strict=True):
            np.testing.assert_array_equal(cache, other)

    def check_rotation(self, exact: np.ndarray, table: np.ndarray, result: np.ndarray) -> None:
        """A number may be rounded to either neighbour before the rotation; else it is rounded once more."""
        normed = exact.astype(result.dtype).astype(np.float64)
        wanted = rotary_embedding(self.positions, normed, table, True)
        if self.pairs == 0:
            return assert_rounded_once(result, exact)
        one_off = 2.0 * float(ml_dtypes.finfo(result.dtype).eps)
        # of 16 bits nearly all are right to the last bit, and those that are not as the neighbour before makes them
        assert_rounded_once(result, wanted, atol=one_off * np.abs(exact).max(initial=1))
        if result.dtype != F32:
            differ = result != wanted.astype(result.dtype)
            assert np.count_nonzero(differ) <= 4 + 0.01 * result.size
        return None


@dtypes
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, 64), (128, 128), (192, 192), (256, 256), (128, 64), (128, 8), (256, 0), (80, 72), (96, 24), (7, 6)],
)
def test_head_sizes(array, dtype, head_dim, rotary_dim):
    Case(array, dtype, head_dim, rotary_dim).check()


@dtypes
@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
def test_caches(array, dtype, kind, hnd):
    if hnd and array.name == "interface":
        pytest.skip("its arrays cannot be sliced")
    Case(array, dtype, kind=kind, hnd=hnd).check()


@given(
    dtype=st.sampled_from(FLOATS),
    weights=st.sampled_from(FLOATS),
    angles=st.sampled_from(FLOATS),
    head_dim=st.sampled_from([64, 128, 192, 256]) | st.integers(1, 300),
    pairs=st.integers(0, 40),
    heads=st.tuples(st.integers(0, 9), st.integers(0, 3)),
    rows=st.integers(0, 40),
    bias=st.sampled_from([0.0, 1.0, -0.25]),
    wide=st.integers(0, 9),
    padding=st.integers(0, 17),
    offset=st.integers(0, 3),
)
def test_anything_else(array, dtype, weights, angles, head_dim, pairs, heads, rows, bias, wide, padding, offset):
    rotary_dim = 2 * min(pairs, head_dim // 2)
    case = Case(
        array, dtype, head_dim, rotary_dim, heads, rows, weights=weights, angles=angles, bias=bias, wide=wide,
        padding=padding, offset=offset, ids=np.int32,
    )  # fmt: skip
    case.check()


def run_and_check(case):
    case.run()
    pykv.check_errors()


def test_a_position_outside_is_reported_and_its_token_is_not_rotated(array):
    positions = np.array([3, MAX_POSITION, 5])
    case = Case(array, F32, rows=3, positions=positions, slots=np.array([1, 2, 3]))
    with pytest.raises(ValueError, match=r"fused_qknorm_rope_cache: positions: 64 is out of range \[0, 64\)"):
        run_and_check(case)


def test_a_slot_outside_is_reported(array):
    case = Case(array, F32, rows=3, slots=np.array([1, BLOCKS * BLOCK_SIZE, 3]))
    with pytest.raises(ValueError, match="fused_qknorm_rope_cache: slot_mapping: 48 is out of range"):
        run_and_check(case)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("heads", (7, 2), r"qkv: must have num_q_heads \+ 2 \* num_kv_heads = 11 heads, got shape \[17, 1280\]"),
        ("heads", (11, 2), "num_q_heads: must lie between 0 and the 10 heads of qkv, got 11"),
        ("head_dim", 100, "qkv: the last dimension must be a multiple of head_dim = 100"),
        ("pairs", 65, "rotary_pairs: must lie between 0 and head_dim / 2 = 64, got 65"),
        ("cos", np.zeros((MAX_POSITION, 63), np.float32), "cos: must have at least rotary_pairs = 64 columns"),
        ("sin", np.zeros((9, 64), np.float32), "sin: dimension 0 must equal max_position = 64"),
        ("weights", [np.zeros(9, np.float32)] * 2, "q_weight: dimension 0 must equal head_dim = 128"),
        ("slots", np.zeros(18, np.int64), "k_out: must have a row for each of the 18 slots"),
        ("caches", [np.zeros((2, 8, 3, 128), np.float32)] * 2, "k_cache: dimension 2 must equal num_kv_heads = 2"),
    ],
)
def test_what_does_not_fit_is_named(array, name, value, message):
    case = Case(array, F32)
    setattr(case, name, value)
    if name == "head_dim":
        case.heads = (1, 1)
    with pytest.raises(ValueError, match=f"fused_qknorm_rope_cache: {message}"):
        case.run()
