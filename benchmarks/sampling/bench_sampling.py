"""From logits to tokens, beside a plain read of the logits, and beside torch where there is one on a GPU.

torch draws as vLLM does without FlashInfer: probabilities divided by exponential numbers, which are made before here (a
captured graph makes none by itself).

Logits are normal, as those of no model are: with top_p alone, half the vocabulary is kept.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, has_torch, main, on_cupys_stream

ROWS = [1, 64, 256]
VOCABULARIES = [128256]


def keys(rows: int, device: Device) -> tuple[Any, Any]:
    return device.array(np.arange(rows)), device.array(np.full(rows, 7))


def sample(options: dict[str, float], rows: int, vocabulary: int, dtype: str, device: Device) -> Call:
    x, (seeds, steps) = device.random((rows, vocabulary), dtype), keys(rows, device)
    out = device.array(np.zeros(rows, np.int32))
    numbers = {
        name: device.array(np.full(rows, value, np.int32 if name == "top_k" else np.float32))
        for name, value in options.items()
    }
    return lambda: pykv.sample(out, x, seeds, steps, **numbers)


def top_k(k: int, rows: int, vocabulary: int, dtype: str, device: Device) -> Call:
    x, out = device.random((rows, vocabulary), dtype), device.array(np.zeros((rows, k), np.int32))
    return lambda: pykv.top_k_per_row(out, x, k)


def in_place(operation: Callable[..., None], rows: int, vocabulary: int, dtype: str, device: Device) -> Call:
    x, out = device.random((rows, vocabulary), dtype), device.random((rows, vocabulary), dtype)
    options = {"top_p": 0.9} if operation is pykv.top_k_top_p_mask else {}
    return lambda: operation(out, x, **options)


@functools.cache
def masks(rows: int, vocabulary: int) -> list[np.ndarray[Any, np.dtype[np.bool_]]]:
    return [np.random.default_rng(i).random((rows, vocabulary), np.float32) < 0.005 for i in range(2)]


def penalties(rows: int, vocabulary: int, dtype: str, device: Device) -> Call:
    x = device.random((rows, vocabulary), dtype)
    occurs = [device.array(mask) for mask in masks(rows, vocabulary)]
    ones = device.array(np.ones(rows, np.float32))
    return lambda: pykv.apply_repetition_penalties_(x, *occurs, ones)


def torch_sample(how: str, rows: int, vocabulary: int, dtype: str, device: Device) -> Call:
    import torch.utils.dlpack

    def tensor(dtype: str) -> Any:  # CuPy's bfloat16 is not torch's
        a = device.random((rows, vocabulary), dtype)
        return torch.utils.dlpack.from_dlpack(a.view(f"i{a.itemsize}")).view(getattr(torch, dtype))

    x, out = tensor(dtype), tensor(dtype)
    numbers = tensor("float32").exp()

    def draw(logits: Any) -> Any:
        return torch.softmax(logits, -1, dtype=torch.float32).div_(numbers).argmax(-1)

    def of_share() -> Any:
        ordered, tokens = x.sort(-1, descending=True)
        shares = torch.softmax(ordered, -1, dtype=torch.float32).cumsum(-1)
        ordered[:, 1:].masked_fill_(shares[:, :-1] >= 0.9, -torch.inf)
        return tokens.gather(1, draw(ordered)[:, None])

    calls: dict[str, Callable[[], object]] = {
        "softmax, argmax": lambda: draw(x),
        "argmax": lambda: x.argmax(-1),
        "sort, top_p 0.9": of_share,
        "topk, 50": lambda: torch.topk(x, 50),
        "topk, 2048": lambda: torch.topk(x, 2048),
        "softmax": lambda: torch.softmax(x, -1, out=out),
    }
    return on_cupys_stream(calls[how])


TORCH = ["softmax, argmax", "argmax", "sort, top_p 0.9", "topk, 50", "topk, 2048", "softmax"]


# name -> (a call, bytes beside the logits for each of them, of these written)
OPS: dict[str, tuple[Callable[..., Call], float, float]] = {
    "sample": (functools.partial(sample, {}), 0, 0),
    "sample, greedy": (functools.partial(sample, {"temperature": 0.0}), 0, 0),
    "sample, top_k 50, top_p 0.9": (functools.partial(sample, {"top_k": 50, "top_p": 0.9}), 0, 0),
    "sample, top_p 0.9": (functools.partial(sample, {"top_p": 0.9}), 0, 0),
    "sample, min_p 0.05": (functools.partial(sample, {"min_p": 0.05}), 0, 0),
    "top_k_per_row, 50": (functools.partial(top_k, 50), 0, 0),
    "top_k_per_row, 2048": (functools.partial(top_k, 2048), 0, 0),
    "softmax": (functools.partial(in_place, pykv.softmax), 1, 1),
    "top_k_top_p_mask, top_p 0.9": (functools.partial(in_place, pykv.top_k_top_p_mask), 1, 1),
}


def cases(dtypes: list[str]) -> Iterator[Case]:
    ops = OPS | {
        f"torch: {how}": (functools.partial(torch_sample, how), float(how == "softmax"), float(how == "softmax"))
        for how in (TORCH if has_torch() else [])
    }
    for dtype, (name, (op, more, written)), vocabulary, rows in itertools.product(
        dtypes, ops.items(), VOCABULARIES, ROWS
    ):
        size = rows * vocabulary * np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
        yield Case(
            name,
            {"rows": rows, "vocabulary": vocabulary},
            dtype,
            int((1 + more) * size),
            functools.partial(op, rows, vocabulary, dtype),
            int(written * size),
        )
    for dtype, vocabulary, rows in itertools.product(dtypes, VOCABULARIES, ROWS):
        yield Case(
            "apply_repetition_penalties_",
            {"rows": rows, "vocabulary": vocabulary},
            dtype,
            2 * rows * vocabulary,
            functools.partial(penalties, rows, vocabulary, dtype),
            0,
        )


if __name__ == "__main__":
    main(cases)
