"""A captured call of paged_attention splits its work anew at every replay, by the lengths of that moment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention import inputs
from attention.graphs import CapturedCalls, check_what_the_kernel_before_wrote
from attention.inputs import Sizes

LONGEST = (700, 3000, 64, 1, 130, 2049)
REPLAYED = [LONGEST, (1, 1, 1, 1, 1, 1), (0, 3000, 0, 1, 0, 0), (650, 17, 64, 0, 129, 2048)]


@pytest.mark.parametrize("room", [0, 10000], ids=["", "long tables"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_replayed_with_other_lengths(cupy: Any, layout: str, head_size: int, room: int) -> None:
    lens = [(1, n) for n in LONGEST]
    sizes = Sizes(head_size=head_size)
    b = inputs.batch(np.random.default_rng(0), lens, sizes, layout=layout, dtype="float16", decode=True, room=room)
    captured = CapturedCalls(cupy, b)
    for now in REPLAYED:
        captured.check(now)


@pytest.mark.parametrize("seqs", [5, 16, 20])
@pytest.mark.parametrize(("group", "head_size"), [(9, 128), (16, 128), (8, 64), (5, 48), (16, 64), (3, 80)])
@pytest.mark.parametrize(
    ("kind", "layout"), [("fp8_e4m3", "NHD"), ("int8", "NHD"), ("fp8_e4m3", "packed"), ("auto", "packed")]
)
def test_many_heads_replayed_in_wide_tables(
    cupy: Any, kind: str, layout: str, group: int, head_size: int, seqs: int
) -> None:
    """Lengths that are alike, and a long sequence beside short ones, are for kernels of different kinds."""
    sizes = Sizes(heads=8 * group, kv_heads=8, head_size=head_size)
    lens = [(1, 3000), *[(1, 700)] * (seqs - 1)]
    b = inputs.batch(np.random.default_rng(0), lens, sizes, kind=kind, layout=layout, decode=True, room=10_000)
    captured = CapturedCalls(cupy, b)
    others = [0] * (seqs - 4)
    for now in ([700] * seqs, [3000, *[1] * (seqs - 1)], [3000, 700, 64, 0, *others], [65, 63, 0, 1, *others]):
        captured.check(now)


WRITTEN = np.array((700, 1900, 64, 1, 130))


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("layout", "page"), [("NHD", 16), ("packed", 16), ("NHD", 1)])
def test_reads_what_the_kernel_before_wrote(cupy: Any, layout: str, page: int, window: int | None) -> None:
    """Short calls look at lengths and pages before the kernel before has ended; what it writes is what counts."""
    sizes = Sizes(block_size=page)
    b = inputs.batch(np.random.default_rng(0), [(1, n) for n in WRITTEN], sizes, layout=layout, decode=True)
    b.options["window"] = window
    check_what_the_kernel_before_wrote(cupy, WRITTEN, b)


@pytest.mark.parametrize(("group", "head_size"), [(4, 128), (8, 128), (16, 128), (8, 64), (16, 64), (4, 256)])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in ("auto", "fp8_e4m3", "int8") for layout in ("NHD", "packed")] + [("nvfp4", "NHD")],
)
def test_windows_begin_where_the_kernel_before_says(
    cupy: Any, kind: str, layout: str, group: int, head_size: int
) -> None:
    sizes = Sizes(heads=2 * group, head_size=head_size)
    lens = [(1, n) for n in WRITTEN]
    b = inputs.batch(np.random.default_rng(0), lens, sizes, kind=kind, layout=layout, decode=True)
    b.options["window"] = 100
    check_what_the_kernel_before_wrote(cupy, WRITTEN, b)
