"""Calls that type checkers must refuse: each line that says so, and no other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import pykv
import pykv.functional
import pykv.rope


def mistakes(x: npt.NDArray[np.float32], kv: pykv.PagedKVCache) -> None:
    pykv.rms_norm(x, x)  # wrong: no weight
    pykv.rms_norm(x, x, "weight")  # wrong
    pykv.rms_norm(x, x, None, "1e-6")  # wrong
    pykv.rms_norm(x, x, None, 1e-6, 0)  # wrong: stream is a keyword
    pykv.rms_norm([1.0, 2.0], x, None)  # wrong: a list is no array
    pykv.rms_norm(x, x, None, eps=1e-6)  # wrong
    pykv.silu_and_mul_quant(x, x, "1.0")  # wrong
    pykv.copy_blocks(x, [x], x)  # wrong: one cache is no list
    pykv.paged_attention(x, x, x, x, x, x, x)  # wrong: cu_query_lens is a keyword
    pykv.paged_attention(x, x, x, x, x, x, windw=3)  # wrong
    y: str = pykv.functional.rms_norm(x, None)  # wrong
    pykv.functional.rms_norm(x, None, result=x)  # wrong: the output is called out
    pykv.functional.swap_blocks(x, x, 1, x)  # wrong: it has no output
    pykv.functional.nothing(x)  # wrong
    pykv.nothing(x)  # wrong
    kv.append([0])  # wrong
    kv.num_free_blocks = 3  # wrong
    pykv.from_pointer("0x10", (3,), "float32")  # wrong
    pykv.rope.linear(64, 1e4)  # wrong
    print(y)
