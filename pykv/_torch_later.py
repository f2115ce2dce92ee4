"""Makes the operations known to torch without the user's ``import pykv.torch``; imports torch for nobody.

Where torch is there before pykv, at once.  Where it comes later, when it compiles, exports or hands over a tensor that
only its dispatcher can read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pykv import _C
from pykv._schema import Op, all_ops


def register() -> None:
    """Registers now if torch is there, else when it is asked for."""
    _C.set_traced_call(_traced_call)
    for op in all_ops().values():
        op.function.dispatch(_through_torch(op))
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if spec is not None and not getattr(spec, "_initializing", False):
        try:
            _import()
        except Exception:  # a torch that is too old, say: who imports pykv.torch is told
            sys.modules.pop("pykv.torch", None)


def _import() -> Any:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():  # which would give fake tensors to what it tries out
        import pykv.torch

    return pykv.torch


def _traced_call(self: Any, *args: Any, **kwargs: Any) -> None:
    """A call of any operation, for those who look into it."""
    from pykv import torch as with_torch  # tracers import, too; from now on they find its own function

    with_torch._traced_call(self, *args, **kwargs)


def _through_torch(op: Op) -> Callable[..., None]:
    def function(*args: Any, **kwargs: Any) -> None:
        _import()._registered[op.name](*args, **kwargs)

    return function
