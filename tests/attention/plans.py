"""What calls of paged attention launch, as a table: ``python tests/attention/plans.py`` writes ``plans.txt`` anew.

A change of what cuda/plan.cc decides is then a diff of that file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pykv

TABLE = Path(__file__).with_name("plans.txt")
ADDRESS = 1 << 20  # what a plan is made for is never looked at


def call(
    array: Callable[[str, tuple[int, ...], str], Any],  # of a parameter's name, a shape and a dtype
    *,
    seqs: int = 1,
    tokens: int = 1,  # of each sequence
    more: int = 0,  # tokens of some
    room: int = 1024,  # tokens of a row of block_tables
    heads: int = 32,
    kv_heads: int = 8,
    head_size: int = 128,
    page: int = 16,
    dtype: str = "bfloat16",
    kind: str = "auto",
    layout: str = "NHD",
    **options: Any,
) -> dict[str, Any]:
    """Its arguments."""
    element = dtype if kind == "auto" else "uint8"
    row = head_size * 9 // 16 if kind == "nvfp4" else head_size
    shapes = [(64, page, kv_heads, row)] * 2
    if layout == "packed":
        x = 16 // (2 if kind == "auto" else 1)
        shapes = [(64, kv_heads, head_size // x, page, x), (64, kv_heads, head_size, page)]
    queries = (seqs * tokens + more, heads, head_size)
    return {
        "out": array("out", queries, dtype),
        "query": array("query", queries, dtype),
        "key_cache": array("key_cache", shapes[0], element),
        "value_cache": array("value_cache", shapes[1], element),
        "block_tables": array("block_tables", (seqs, room // page), "int32"),
        "seq_lens": array("seq_lens", (seqs,), "int32"),
        "cu_query_lens": None if tokens == 1 and more == 0 else array("cu_query_lens", (seqs + 1,), "int32"),
        "kv_cache_dtype": kind,
        **options,
    }


def plan(*, device: str | None = None, **sizes: Any) -> Any:
    """Of such a call; ``device`` need not exist, ``None`` is the GPU that is there."""

    def array(name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return pykv.from_pointer(ADDRESS, shape, dtype, device="cpu" if device else "cuda:0")

    return pykv.explain("paged_attention", device=device, **call(array, **sizes)).plan


def calls() -> Iterator[dict[str, Any]]:
    """Arguments of plan() for each line of the table."""
    kinds = "auto", "fp8_e4m3", "int8", "nvfp4"
    sizes = (1, 1024), (1, 8192), (1, 131072), (8, 1024), (8, 32768), (64, 1024), (64, 8192), (256, 2048)

    def each(of: Any = sizes, **options: Any) -> Iterator[dict[str, Any]]:
        lists = {name: x if isinstance(x, tuple) else (x,) for name, x in options.items()}
        for (seqs, room), *values in product(of, *lists.values()):
            yield {"seqs": seqs, "room": room, **dict(zip(lists, values, strict=True))}

    few = sizes[3:7]
    yield from each(tokens=(1, 2, 4, 8, 16, 512), kind=kinds)
    yield from each(kv_heads=1, heads=(8, 16), tokens=(1, 4), kind=kinds[:2])
    yield from each(few, heads=(8, 64, 128), kv_heads=(4, 8), tokens=(1, 4))
    yield from each(few, heads=28, kv_heads=4, tokens=(1, 4))
    yield from each(few, head_size=(64, 80, 256), tokens=(1, 4, 16), kind=kinds[:2])
    yield from each(few, head_size=64, heads=128, kind=kinds)
    yield from each(batch_invariant=True, tokens=(1, 4, 512), kind=kinds[:2])
    yield from each(few, batch_invariant=True, head_size=(64, 256))
    yield from each(few, window=(128, 1024, 16384), tokens=(1, 4), kind=kinds[:2])
    yield from each(few, page=(1, 12, 64), tokens=(1, 4, 16), kind=kinds[:2])
    yield from each(few, layout="packed", tokens=(1, 4, 512), kind=kinds[:2])
    yield from each(few, dtype="float32", tokens=(1, 16))
    yield from each(sizes[3:], more=(500, 2001), kind=kinds[:2])
    yield from each(few, more=2001, head_size=(64, 256))
    yield from each(few, more=2001, batch_invariant=True)
    yield from each(few, softcap=30.0, tokens=(1, 512))
    yield from each(few, device="A100", tokens=(1, 4, 512), kind=kinds[:2])


def table() -> str:
    """The text of the table: a call, then its launches, each with grid, threads, cluster and bytes of shared memory."""
    lines = []
    for call in calls():
        said = [
            f"{name} {value}" for name, value in call.items() if (name, value) not in (("kind", "auto"), ("tokens", 1))
        ]
        *launches, workspace = plan(**{"device": "H100", **call})
        lines.append(" ".join(said).replace("batch_invariant True", "batch_invariant"))
        lines += [f"  {launch}" for launch in launches]
        lines.append(f"  {workspace}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
