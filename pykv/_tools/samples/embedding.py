"""Small right calls of the operations on embeddings, and calls of a size that means something."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pykv._schema import Spec
from pykv._tools.samples._arrays import Sample, floats
from pykv._tools.samples._workload import Tokens, Workload

SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "masked_embedding": lambda: {
        "out": floats(2, 3, 8),
        "ids": np.array([[0, 4, 7], [3, 5, 9]], np.int32),
        "weight": floats(8, 8, seed=1),
        "org_start": 3,
        "org_end": 6,
        "num_org_pad": 1,
        "added_start": 8,
        "added_end": 10,
        "vocab_size": 12,
        "scale": 2.5,
        "weight_scale": np.abs(floats(8, 2)),
        "positions": np.array([[0, 1, 2], [4, 0, 1]], np.int32),
        "position_weight": floats(5, 8, seed=2),
    },
}

VOCABULARY, HIDDEN = 1 << 13, 2048


def _embedded(t: Tokens) -> Workload:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, t.count)
    return Workload({"ids": ids, "weight": Spec((VOCABULARY, HIDDEN), t.dtype)}, {"weight": t.bytes(HIDDEN)})


WORKLOADS: Mapping[str, Callable[[Tokens], Workload]] = {"masked_embedding": _embedded}
