"""NaN and infinity come out of the rows that see them, and of no others; where nobody sees them they are harmless."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from attention import inputs, reference
from attention.inputs import KINDS, Batch, Sizes
from attention.test_paged_attention import rng
from cache.inputs import DTYPES
from libraries import Library
from tolerance import assert_attention, assert_close

import pykv

NAN = np.float32(np.nan)
# One token each, some of them, many; short, longer than a chunk of the CPU, and cut by borders of blocks on a GPU.
LENS = {
    "decode": [(1, 77), (1, 5200), (1, 1), (1, 640)],
    "few": [(4, 77), (4, 5200), (4, 4), (4, 640)],
    "prefill": [(70, 77), (130, 2500), (1, 1), (33, 640)],
}
ROWS = pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
INVARIANT = pytest.mark.parametrize("invariant", [False, True], ids=["", "batch_invariant"])


def batch(lens: list[tuple[int, int]], **how: Any) -> Batch:
    options = {"batch_invariant": True} if how.pop("invariant", False) else {}
    decode = all(queries == 1 for queries, _ in lens)
    b = inputs.batch(rng(), lens, how.pop("sizes", Sizes(8, 2, 128)), decode=decode, **how)
    return b.changed(options=b.options | options)


def check(array: Library, b: Batch) -> np.ndarray:
    """NaN exactly where the reference has it, all else near it.  Returns which rows have an lse that is NaN."""
    out, lse = (array.output(x) for x in inputs.outputs(b))
    inputs.run(array, b, out, lse)
    options = {name: value for name, value in b.options.items() if name != "batch_invariant"}
    want_out, want_lse = inputs.expected_or_nan(b.changed(options=options))
    got_out, got_lse = array.numpy(out).copy(), array.numpy(lse).copy()
    for got, want in ((got_out, want_out), (got_lse, want_lse)):
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), np.isnan(want))
        got[np.isnan(want)] = 0
    assert_attention(got_out, np.nan_to_num(want_out, nan=0.0, neginf=-np.inf))
    assert_close(got_lse, np.nan_to_num(want_lse, nan=0.0, neginf=-np.inf), atol=2e-5, rtol=1e-5)
    return np.isnan(want_lse)


def at(b: Batch, sequence: int, tokens: Any, head: int) -> tuple[Any, ...]:
    """Where a flash or packed cache has these tokens of a KV head: for ``cache[...] = x``."""
    tokens = np.arange(b.seq_lens[sequence])[tokens]
    page = b.key_cache.shape[3 if b.key_cache.ndim == 5 else 1]
    blocks, offsets = b.block_tables[sequence, tokens // page], tokens % page
    if b.key_cache.ndim == 5:
        return blocks, head, slice(None), offsets
    return blocks, offsets, head


@pytest.mark.of_cuda_kernels
@INVARIANT
@ROWS
@pytest.mark.parametrize("kind", [*KINDS, "nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_query(array: Library, dtype: str, kind: str, lens: list[tuple[int, int]], invariant: bool) -> None:
    """A head of the first row, of a long sequence and of the last row: their results and no others."""
    b = batch(lens, dtype=dtype, kind=kind, invariant=invariant)
    first = [0, *np.cumsum([queries for queries, _ in lens])]
    b.query[0, 0, 3] = b.query[first[1], 5] = b.query[-1, 7, 0] = NAN
    assert check(array, b).sum() == 3


@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
@INVARIANT
@ROWS
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_logits(
    array: Library, dtype: str, lens: list[tuple[int, int]], invariant: bool, infinity: float
) -> None:
    """inf - inf is no number, so a logit of +inf makes NaN, as a softmax does; one of -inf has no weight."""
    b = batch(lens, dtype=dtype, invariant=invariant)
    b.query[:, 2] = 0
    b.query[:, 2, 0] = 1
    b.key_cache[(*at(b, 1, slice(None, None, 3), 0), 0)] = infinity
    assert check(array, b)[2].any() == (infinity > 0)


@pytest.mark.of_cuda_kernels
@INVARIANT
@ROWS
@pytest.mark.parametrize("layout", ["NHD", "packed"])
@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8_e4m3"), ("float16", "fp8_e5m2")]
)
@pytest.mark.parametrize("tokens", [slice(None), slice(0, 2048), slice(100, 700), slice(-1, None)], ids=str)
def test_keys(
    array: Library, tokens: slice, dtype: str, kind: str, layout: str, lens: list[tuple[int, int]], invariant: bool
) -> None:
    """Of one KV head of the long sequence: all keys, chunks of them that some block has alone, single ones."""
    b = batch(lens, dtype=dtype, kind=kind, layout=layout, invariant=invariant)
    b.key_cache[at(b, 1, tokens, 1)] = NAN
    rows = check(array, b)
    assert rows.any()
    assert not rows[:4].any()  # of the other KV head


@INVARIANT
@ROWS
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_nvfp4_keys(array: Library, dtype: str, lens: list[tuple[int, int]], invariant: bool) -> None:
    """Every scale of the long sequence's keys that lie in a page."""
    b = batch(lens, dtype=dtype, kind="nvfp4", invariant=invariant)
    for block in b.block_tables[1, : b.seq_lens[1] // 16]:
        page = b.key_cache[block].reshape(-1)
        page[-(page.size // 9) :] = 0x7F
    assert check(array, b).any()


@INVARIANT
@ROWS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changed", ["alibi_slopes", "sinks", "k_scale", "v_scale"])
def test_options(array: Library, changed: str, dtype: str, lens: list[tuple[int, int]], invariant: bool) -> None:
    """Of one head.  A sink is a logit, of rows without keys as well."""
    scale = "scale" in changed
    if changed == "sinks":
        lens = [*lens[:3], (lens[3][0], 0)]
    b = batch(lens, dtype=dtype, kind="fp8_e4m3" if scale else "auto", invariant=invariant)
    value = np.linspace(0.1, 0.3, 2 if scale else 8, dtype=np.float32)
    value[1] = NAN
    rows = check(array, b.changed(options=b.options | {changed: value}))
    assert rows.any() == (changed != "v_scale")


@INVARIANT
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["auto", "fp8_e5m2"])
def test_keys_that_some_rows_do_not_see(array: Library, kind: str, dtype: str, invariant: bool) -> None:
    """Of the last token, which earlier queries do not see, and of one that later queries have left behind."""
    b = batch([(4, 77), (40, 2500)], dtype=dtype, kind=kind, invariant=invariant)
    b.key_cache[at(b, 0, -1, 0)] = b.key_cache[at(b, 1, -20, 1)] = NAN
    assert check(array, b).sum() == 4 + 4 * 20
    b = b.changed(options=b.options | {"window": 15})
    assert check(array, b).sum() == 4 + 4 * 15


@INVARIANT
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("head_size", [64, 128, 40])
@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", "auto"), ("float32", "fp8_e5m2"), ("bfloat16", "auto"), ("float16", "fp8_e5m2")]
)
def test_values_that_some_rows_do_not_see(
    array: Library, dtype: str, kind: str, head_size: int, bad: float, invariant: bool
) -> None:
    """Weight zero times NaN is not added.  On a GPU the tensor cores add it to the other rows of their tile."""
    if array.device == "cuda" and dtype != "float32":
        pytest.skip("by tensor cores")
    b = batch([(4, 77), (40, 2500)], sizes=Sizes(8, 2, head_size), dtype=dtype, kind=kind, invariant=invariant)
    b.value_cache[(*at(b, 0, -1, 0), 3)] = b.value_cache[(*at(b, 1, -20, 1), 5)] = bad
    for options in ({}, {"window": 15}):
        changed = b.changed(options=b.options | options)
        out = array.output(inputs.outputs(b)[0])
        inputs.run(array, changed, out)
        kept = {k: v for k, v in changed.options.items() if k != "batch_invariant"}
        want = inputs.expected_or_nan(changed.changed(options=kept))[0]
        got = array.numpy(out).astype(np.float64)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        assert (~np.isfinite(got)).sum() == 4 + 4 * (15 if options else 20)
        assert_attention(
            np.where(np.isfinite(want), got, 0).astype(b.query.dtype), np.where(np.isfinite(want), want, 0)
        )


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_v1_and_v2(array: Library, layout: str, dtype: str, version: int) -> None:
    lens = LENS["decode"]
    b = batch(lens, dtype=dtype, layout=layout)
    b.query[0, 1] = NAN
    b.key_cache[at(b, 1, slice(None), 0)] = NAN
    b.value_cache[at(b, 3, 7, 1)] = NAN
    out = array.output(inputs.outputs(b)[0])
    scratch = []
    if version == 2:
        shape = (4, 8, 6000 // 512 + 1)
        scratch = [array.output(np.zeros(shape, np.float32)) for _ in range(2)]
        scratch.append(array.output(np.zeros((*shape, 128), DTYPES[dtype])))
    call = pykv.paged_attention_v1 if version == 1 else pykv.paged_attention_v2
    call(
        out, *scratch, array.input(b.query), *inputs.caches(array, b), 2, 128**-0.5, array.input(b.block_tables),
        array.input(b.seq_lens), 16, 6000, None, "auto", 1.0, 1.0,
    )  # fmt: skip
    got = array.numpy(out).astype(np.float32)
    want = inputs.expected_or_nan(b, epsilon=1e-6)[0]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert_attention(np.where(np.isnan(want), 0, got).astype(b.query.dtype), np.where(np.isnan(want), 0, want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sparsity_hides_nan(array: Library, dtype: str) -> None:
    """Sparsity blocks that one head of a group sees and another does not; keys that are NaN in one of them."""
    b = batch([(1, 640), (1, 300)], dtype=dtype)
    sparse = reference.BlockSparse(0, 1, 3, 64, 1)
    b.key_cache[at(b, 0, slice(64, 128), 0)] = NAN
    if array.device == "cpu" or dtype == "float32":
        b.value_cache[at(b, 0, slice(64, 128), 0)] = NAN
    out = array.output(inputs.outputs(b)[0])
    pykv.paged_attention_v1(
        out, array.input(b.query), *inputs.caches(array, b), 2, 128**-0.5, array.input(b.block_tables),
        array.input(b.seq_lens), 16, 640, None, "auto", 1.0, 1.0, 0, 1, 3, 64, 1,
    )  # fmt: skip
    got = array.numpy(out).astype(np.float32)
    want = inputs.expected_or_nan(b, epsilon=1e-6, sparse=sparse)[0]
    assert 0 < np.isnan(want).any(-1).sum() < 4
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


@INVARIANT
@pytest.mark.parametrize("queries", [1, 4, 60])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e3, 1e6, 1e8, 1e20, 3e38, 1e300, np.inf, 1e-45, 1e-300])
def test_any_softcap(array: Library, softcap: float, dtype: str, queries: int, invariant: bool) -> None:
    """Far above the logits it changes nothing; far below them nothing is left of them."""
    b = batch([(queries, 77), (queries, 900)], dtype=dtype, invariant=invariant)
    b = b.changed(options=b.options | {"softcap": softcap})
    out, lse = (array.output(x) for x in inputs.outputs(b))
    inputs.run(array, b, out, lse)
    none = np.isinf(softcap)
    want_out, want_lse = inputs.expected(b.changed(options={}), softcap=None if none else softcap)
    assert_attention(array.numpy(out), want_out)
    assert_close(array.numpy(lse), want_lse, atol=2e-5, rtol=1e-5)


def test_scale_must_be_a_number() -> None:
    b = batch([(1, 20)])
    out, _ = inputs.outputs(b)
    with pytest.raises(ValueError, match=r"^paged_attention: scale: must be a number, got nan"):
        pykv.paged_attention(out, b.query, b.key_cache, b.value_cache, b.block_tables, b.seq_lens, scale=np.nan)
    with pytest.raises(ValueError, match=r"^paged_attention: softcap: must be positive, got nan"):
        pykv.paged_attention(out, b.query, b.key_cache, b.value_cache, b.block_tables, b.seq_lens, softcap=np.nan)


CHANGING = """
import sys, threading, time
import numpy as np, pykv
S, by_lens = 2048, sys.argv[1] == "lens"
q, k = np.ones((S, 1, 8), np.float32), np.ones((2, 16, 1, 8), np.float32)
out, lens, cu = np.zeros_like(q), np.ones(S, np.int64), np.arange(S + 1)
tables = np.zeros((S, 1024 if by_lens else 1), np.int32)
some, none, end = np.arange(S + 1), np.zeros(S + 1, np.int64), time.time() + 2
def change():
    while time.time() < end:
        if by_lens:
            lens[:] = 1; lens[:] = 16384; lens[:] = 1
        else:
            cu[:] = none; cu[:] = some; cu[:] = some[::-1]
        tables[:] = -(2 ** 31); tables[:] = 0
thread = threading.Thread(target=change)
thread.start()
while time.time() < end:
    try:
        pykv.paged_attention(out, q, k, k, tables, lens, cu_query_lens=None if by_lens else cu)
    except ValueError:
        pass
thread.join()
"""


@pytest.mark.parametrize("what", ["lens", "bounds"])
def test_ids_may_change_during_a_call(what: str) -> None:
    """Another thread prepares the next step: results are anybody's guess, but only ``out`` is written."""
    done = subprocess.run([sys.executable, "-c", CHANGING, what], cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
