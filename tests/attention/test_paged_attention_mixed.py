"""Prompts beside sequences of few query rows, which Hopper takes by two kernels at the same time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention import inputs
from attention.graphs import CapturedCalls, check_what_the_kernel_before_wrote
from attention.inputs import Sizes
from attention.plans import plan
from attention.test_paged_attention import check, rng
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import Library

Lens = list[tuple[int, int]]
ROOM = 40_000  # tokens of a table's row
ROOMS = {"short": 2_048, "any": ROOM}  # where no sequence can be long, clusters take the few rows
BATCHES: dict[str, Lens] = {  # (queries, length with them); 16 rows, of four heads, are few
    "a prompt": [*[(1, n) for n in range(40, 640, 40)], (300, 300)],
    "prompts among decodes": [(1, 700), (130, 500), (1, 1), (4, 300), (5, 301), (90, 90), (0, 90), (1, 2000)],
    "a prompt on many keys": [*[(1, 50)] * 6, (70, 4000)],
    "long decodes": [(1, 4000), (1, 4090), (60, 60), (70, 100)],
    "prompts alone": [(100, 100), (129, 700), (64, 64)],
    "more than their keys": [(1, 0), (70, 30), (1, 400), (90, 95), (3, 2)],
}


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("head_size", "dtype"), [(64, "bfloat16"), (80, "float16"), (128, "bfloat16")])
def test_batches(array: Library, head_size: int, dtype: str, lens: Lens, room: int) -> None:
    room = max(room, *(n for _, n in lens))
    check(array, inputs.batch(rng(), lens, Sizes(8, 2, head_size), dtype=dtype, extra_rows=3, room=room))


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("heads", [(2, 2), (16, 2), (32, 2), (6, 2), (34, 2)])
def test_groups(array: Library, heads: tuple[int, int], room: int) -> None:
    lens = BATCHES["prompts among decodes"]
    check(array, inputs.batch(rng(), lens, Sizes(*heads, 128), room=room))
    check(array, inputs.batch(rng(), lens[::-1], Sizes(*heads, 64), room=room))


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("options", inputs.OPTIONS_OF_8_HEADS, ids=str)
def test_options(array: Library, options: dict[str, Any], room: int) -> None:
    b = inputs.batch(rng(), BATCHES["prompts among decodes"], Sizes(8, 2, 128), room=room)
    check(array, b.changed(options=options))


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_pages(array: Library, block_size: int, layout: str) -> None:
    if layout == "packed" and block_size % 8:
        pytest.skip("packed pages have whole pieces of 16 bytes")
    sizes = Sizes(8, 2, 128, block_size)
    check(array, inputs.batch(rng(), BATCHES["prompts among decodes"], sizes, layout=layout, ids=np.int64, room=ROOM))


@given(data=st.data())
@settings(max_examples=8)
def test_any_lengths(array: Library, data: st.DataObject) -> None:
    lens = []
    for _ in range(data.draw(st.integers(2, 12))):
        queries = data.draw(st.sampled_from([0, 1, 1, 1, 2, 4, 5, 70, 150]))
        lens.append((queries, queries + data.draw(st.integers(0, 900))))
    sizes = Sizes(8, 2, data.draw(st.sampled_from([64, 128])))
    check(array, inputs.batch(rng(), lens, sizes, room=data.draw(st.sampled_from([1_056, ROOM]))))


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
def test_replayed_with_other_lengths(cupy: Any, room: int) -> None:
    """The device alone knows which sequences are prompts, and how many of its blocks they are worth."""
    queries = (1, 200, 1, 1, 90, 1, 1, 1)
    lens = (2040, 200, 800, 1, 2000, 64, 65, 1200)
    captured = CapturedCalls(
        cupy, inputs.batch(rng(), list(zip(queries, lens, strict=True)), Sizes(8, 2, 128), room=room), calls=3
    )
    captured.check(lens, queries)
    captured.check(lens, (1, 1, 1, 1, 1, 1, 1, 1))
    captured.check(lens, (0, 100, 100, 1, 90, 0, 5, 0))
    captured.check((10, 0, 0, 0, 0, 0, 0, 0), (5, 0, 0, 0, 0, 0, 0, 0))
    captured.check(lens, (0, 0, 0, 0, 295, 0, 0, 1))
    captured.check(lens, queries)


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize(
    "batch",
    [[(1, 1700), (150, 400), (1, 64), (1, 1), (90, 330)], [(1, 9), (1500, 2000)]],
    ids=["several", "a long prompt beside a short decode"],
)
def test_reads_what_the_kernel_before_wrote(cupy: Any, batch: Lens, room: int) -> None:
    """And nothing after it comes before its end, which is prefill's."""
    b = inputs.batch(rng(), batch, Sizes(8, 2, 128), room=room)
    check_what_the_kernel_before_wrote(cupy, np.array([n for _, n in batch]), b)


def test_prompts_and_others_are_planned_together() -> None:
    def names(**call: Any) -> list[str]:
        lines = plan(**{"device": "H100", "room": 8192, **call})
        return [line.partition("<")[0].partition(":")[0] for line in lines if not line.startswith("workspace")]

    together = ["clear", "prefill", "verify_line", "combine"]
    for call in ({"seqs": 64, "tokens": 17}, {"seqs": 256, "tokens": 4, "more": 200}):
        for same in ({}, {"head_size": 64}, {"window": 100}, {"dtype": "float16"}):
            assert names(**call, **same) == together
        for other in ({"batch_invariant": True}, {"kind": "fp8_e4m3"}, {"softcap": 3.0}, {"head_size": 256}):
            assert names(**call, **other) != together
    small = {"seqs": 4, "more": 100, "room": 512}
    assert names(**small) == ["clear", "prefill", "tokens_cluster"]
