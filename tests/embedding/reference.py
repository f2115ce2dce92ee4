"""NumPy references in float64."""

from __future__ import annotations

from typing import Any

import numpy as np


def masked_embedding(
    ids: np.ndarray,
    weight: np.ndarray,
    org_start: int = 0,
    org_end: int | None = None,
    num_org_pad: int = 0,
    added_start: int = 0,
    added_end: int = 0,
    vocab_size: int | None = None,
    *,
    scale: float = 1.0,
    weight_scale: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    position_weight: np.ndarray | None = None,
    **_: Any,
) -> np.ndarray:
    """In the parameters of the operation; ids and positions out of range give zeros."""
    table = weight.astype(np.float64)
    if weight_scale is not None:
        scales = weight_scale.reshape(len(weight), -1).astype(np.float64)
        table = table * np.repeat(scales, table.shape[1] // scales.shape[1], axis=1)
    org_end = org_start + len(weight) if org_end is None else org_end
    row_of = {org_start + i: i for i in range(org_end - org_start)}
    first_added = org_end - org_start + num_org_pad
    row_of |= {
        added_start + i: first_added + i for i in range(added_end - added_start) if added_start + i not in row_of
    }
    nothing = np.zeros(table.shape[1])
    rows = [scale * table[row_of[i]] if i in row_of else nothing for i in ids.reshape(-1).tolist()]
    out = np.array(rows).reshape(*ids.shape, table.shape[1])
    if positions is not None and position_weight is not None:
        there = (positions >= 0) & (positions < len(position_weight))
        out += np.where(there[..., None], position_weight.astype(np.float64)[np.where(there, positions, 0)], 0)
    return out
