"""Wrong arguments are named, and nothing is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention import inputs
from attention.inputs import Sizes
from cache.inputs import DTYPES

import pykv


def call(**changes: Any) -> None:
    b = inputs.batch(np.random.default_rng(0), [(1, 30), (2, 40)], Sizes(4, 2, 32))
    arguments = {
        "out": inputs.outputs(b)[0],
        "query": b.query,
        "key_cache": b.key_cache,
        "value_cache": b.value_cache,
        "block_tables": b.block_tables,
        "seq_lens": b.seq_lens,
        "cu_query_lens": b.cu_query_lens,
        **changes,
    }
    out = np.asarray(arguments["out"])
    before = out.copy()
    try:
        pykv.paged_attention(**arguments)
    finally:
        np.testing.assert_array_equal(out, before)


BF16 = DTYPES["bfloat16"]


def zeros(*shape: int, dtype: Any = BF16) -> np.ndarray:
    return np.zeros(shape, dtype)


CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": zeros(3, 4)}, ValueError, r"query: must have 3 dimensions, got shape \[3, 4\]"),
    ({"query": zeros(3, 4, 32, dtype=np.int32)}, TypeError, "query: .*float32 or float16 or bfloat16, got int32"),
    ({"out": zeros(3, 4, 31)}, ValueError, r"out: dimension 2 must equal head_size = 32, got shape \[3, 4, 31\]"),
    ({"out": zeros(3, 4, 32, dtype=np.float16)}, TypeError, "out: .*bfloat16, got float16"),
    ({"out": None}, TypeError, "out: an array is required, got None"),
    ({"key_cache": zeros(7, 16, 2, 33)}, ValueError, "key_cache: dimension 3 must equal head_size = 32"),
    ({"key_cache": zeros(7, 16)}, ValueError, "key_cache: must have 4 to 5 dimensions"),
    ({"key_cache": zeros(7, 16, 2, 32, dtype=np.float16)}, TypeError, "value_cache: .*float16, got bfloat16"),
    ({"value_cache": zeros(2, 16, 2, 32)}, ValueError, "value_cache: dimension 0 must equal num_blocks"),
    ({"value_cache": zeros(7, 8, 2, 32)}, ValueError, "value_cache: dimension 1 must equal block_size = 16"),
    ({"value_cache": zeros(7, 16, 3, 32)}, ValueError, "value_cache: dimension 2 must equal num_kv_heads = 2"),
    (
        {"key_cache": zeros(7, 16, 3, 32), "value_cache": zeros(7, 16, 3, 32)},
        ValueError,
        "query: num_heads must be a multiple of num_kv_heads = 3, got 4",
    ),
    ({"block_tables": np.zeros((3, 4), np.int32)}, ValueError, "seq_lens: dimension 0 must equal num_seqs = 3"),
    ({"block_tables": np.zeros((2, 4), np.float32)}, TypeError, "block_tables: .*int64 or int32, got float32"),
    ({"seq_lens": np.zeros(2, np.int16)}, TypeError, "seq_lens: "),
    ({"cu_query_lens": np.zeros(2, np.int32)}, ValueError, r"cu_query_lens: dimension 0 must equal num_seqs \+ 1 = 3"),
    ({"cu_query_lens": None}, ValueError, "query: without cu_query_lens there must be one query for each of the 2"),
    ({"alibi_slopes": np.zeros(2, np.float32)}, ValueError, "alibi_slopes: dimension 0 must equal num_heads = 4"),
    ({"alibi_slopes": np.zeros(4)}, TypeError, "alibi_slopes: .*float64"),
    ({"sinks": np.zeros((4, 1), np.float32)}, ValueError, "sinks: must have 1 dimension"),
    ({"lse": np.zeros((3, 4), np.float32)}, ValueError, "lse: dimension 0 must equal num_heads = 4"),
    ({"window": 0}, ValueError, "window: must be positive, got 0"),
    ({"softcap": -1.0}, ValueError, "softcap: must be positive, got -1"),
    ({"softcap": np.array([1.0, 2.0])}, TypeError, "softcap: must be a positive number or None, got ndarray"),
    ({"scale": np.array([1.0, 2.0])}, TypeError, "scale: must be a number or None, got ndarray"),
    ({"kv_cache_dtype": "\ud800"}, ValueError, "kv_cache_dtype: .*surrogate"),  # has no UTF-8
    ({"kv_cache_dtype": "fp4"}, ValueError, "kv_cache_dtype: "),
    ({"kv_cache_dtype": "fp8"}, TypeError, "key_cache: "),
]


@pytest.mark.parametrize(("changes", "error", "message"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^paged_attention: {message}"):
        call(**changes)


@pytest.mark.parametrize(
    ("cache", "head_size", "error", "message"),
    [
        (
            zeros(7, 2, 4, 16, 16, dtype=np.uint8),
            64,
            NotImplementedError,
            "key_cache: .*'nvfp4' has pages of the flash",
        ),
        (
            zeros(7, 16, 2, 64, dtype=np.uint8),
            64,
            ValueError,
            r"key_cache: dimension 3 .*head_size / 16 = 36, got shape",
        ),
        (
            zeros(7, 16, 2, 18, dtype=np.uint8),
            32,
            NotImplementedError,
            "query: head_size must be a multiple of 64 .* 32",
        ),
        (zeros(7, 6, 2, 36, dtype=np.uint8), 64, NotImplementedError, "key_cache: block_size must be a multiple of 4"),
        (zeros(7, 16, 2, 40, dtype=np.uint8)[..., :36], 64, ValueError, "key_cache: pages of nvfp4 must be contiguous"),
        (zeros(7, 16, 2, 36, dtype=np.float16), 64, TypeError, "key_cache: dtype must be uint8"),
    ],
)
def test_pages_of_nvfp4(cache: np.ndarray, head_size: int, error: type[Exception], message: str) -> None:
    changes = {"key_cache": cache, "value_cache": cache, "kv_cache_dtype": "nvfp4"}
    query, out = zeros(3, 4, head_size), zeros(3, 4, head_size)
    with pytest.raises(error, match=f"^paged_attention: {message}"):
        call(query=query, out=out, **changes)


def test_scales_must_fit_the_heads() -> None:
    b = inputs.batch(np.random.default_rng(0), [(1, 30)], Sizes(4, 2, 32), kind="fp8_e4m3", decode=True)
    with pytest.raises(
        ValueError, match="paged_attention: v_scale: must have 1 element, or one for each of the 2 heads"
    ):
        pykv.paged_attention(
            inputs.outputs(b)[0],
            b.query,
            b.key_cache,
            b.value_cache,
            b.block_tables,
            b.seq_lens,
            kv_cache_dtype="fp8",
            v_scale=np.ones(3, np.float32),
        )
