"""Small right calls of the operations of rotary, and calls of a size that means something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv._tools.samples import _sizes as sizes
from pykv._tools.samples._arrays import Sample, floats, ids
from pykv._tools.samples._workload import HEAD, HEADS, POSITIONS, Tokens, Workload, rotated_workload


def rotated(positions: npt.NDArray[Any], **options: Any) -> Sample:
    return {
        "positions": positions,
        "query": floats(3, sizes.HEADS * sizes.HEAD_SIZE),
        "key": floats(3, sizes.KV_HEADS * sizes.HEAD_SIZE),
        "head_size": sizes.HEAD_SIZE,
        "cos_sin_cache": floats(5, sizes.HEAD_SIZE),
        "is_neox": True,
        **options,
    }


SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "rotary_embedding": lambda: rotated(ids(0, 4, 2)),
    "batched_rotary_embedding": lambda: rotated(
        ids(0, 1, 2), rot_dim=sizes.HEAD_SIZE, cos_sin_cache_offsets=ids(0, 3, 2)
    ),
    "mrope": lambda: rotated(
        ids([0, 1, 2], [4, 3, 2], [0, 0, 1]), mrope_section=ids(4, 2, 2) * (sizes.HEAD_SIZE // 16)
    ),
    "dual_chunk_rotary_embedding": lambda: {
        "query_out": floats(3, 5 * sizes.HEADS * sizes.HEAD_SIZE),
        "positions": ids(0, 7, 30),
        "query": floats(3, sizes.HEADS * sizes.HEAD_SIZE, seed=1),
        "key": floats(3, sizes.KV_HEADS * sizes.HEAD_SIZE),
        "head_size": sizes.HEAD_SIZE,
        "cos_sin_cache": floats(14, sizes.HEAD_SIZE),
        "is_neox": True,
        "chunk_size": 8,
        "local_size": 3,
    },
}


def mrope_workload(t: Tokens) -> Workload:
    plain = rotated_workload(t, mrope_section=np.array([16, 24, 24]))
    return Workload({**plain.arguments, "positions": np.stack([t.positions] * 3)}, plain.touched)


def dual_chunk_workload(t: Tokens) -> Workload:
    # its angles are those of five rows for each token
    plain = rotated_workload(t, chunk_size=POSITIONS // 4, local_size=POSITIONS // 16)
    return Workload(plain.arguments, {"query": t.bytes(HEADS * HEAD), "cos_sin_cache": 5 * t.bytes(HEAD)})


WORKLOADS: Mapping[str, Callable[[Tokens], Workload]] = {
    "rotary_embedding": rotated_workload,
    "batched_rotary_embedding": lambda t: rotated_workload(
        t, rot_dim=HEAD, cos_sin_cache_offsets=np.zeros(t.count, np.int64)
    ),
    "mrope": mrope_workload,
    "dual_chunk_rotary_embedding": dual_chunk_workload,
}
