"""What a user of torch writes, for type checkers; it is never run."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

import pykv
import pykv.functional
import pykv.torch


def mlp(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    pykv.torch.fused_add_rms_norm(x, residual, weight)
    y = pykv.functional.silu_and_mul(x)
    assert_type(y, torch.Tensor)
    pykv.rms_norm(y, y, weight, stream=torch.cuda.current_stream())
    pykv.torch.nothing(y)  # wrong
    pykv.torch.fused_add_rms_norm(x)  # wrong
    return y
