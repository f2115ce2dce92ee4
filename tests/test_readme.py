"""What the README says is so; that its code runs, tests/test_docs.py sees to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from documents import ROOT, run_python

import pykv
from pykv._schema import all_ops
from pykv._tools.samples import sample

README = ROOT / "README.md"


def test_ten_lines_of_use() -> None:
    out = run_python(README)["out"]
    assert float(abs(out).max()) > 0.1


@pytest.mark.parametrize(("name", "most"), [("README.md", 200), ("CHANGELOG.md", 40)])
def test_what_is_read_first_is_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


def table() -> str:
    text = README.read_text()
    return text[text.index("## Operations") : text.index("Each on CPU")]


def rows() -> list[Any]:
    """Operations, dtypes and formats of KV caches of each line; no operation can tell of its layouts."""
    found: list[Any] = []
    for line in table().splitlines():
        cells = [c.strip() for c in line.split("|")[1:-1]]
        if not cells or not cells[0].startswith("`"):
            continue
        names, dtypes, caches, _ = cells
        caches = found[-1].values[2] if caches in ("as above", "the same") else caches
        names = re.findall(r"`(\w+)`", names)
        found.append(pytest.param(names, dtypes, caches, id=names[0]))
    return found


def refusals(name: str) -> Iterator[str]:
    """What an operation says of arrays of a dtype that it may not take; nothing is computed where it does."""
    op = all_ops()[name]
    arrays = [p.name for p in op.parameters if p.is_array and not p.kind.endswith("list")]
    for parameter in arrays:
        for dtype in (np.float32, np.int32, np.uint8):
            values = sample(name)
            if not isinstance(values.get(parameter), np.ndarray):
                continue
            values[parameter] = np.zeros(values[parameter].shape, dtype)
            try:
                op.direct(**values)
            except (TypeError, ValueError) as error:
                yield str(error)


def formats(name: str) -> set[str]:
    """The formats that an operation offers for its KV cache, as the README calls them."""
    op = all_ops()[name]
    chosen = [p.name for p in op.parameters if p.name in ("kv_cache_dtype", "kv_dtype")]
    if not chosen:
        return set()

    def says(value: str) -> str:
        values = sample(name) | {chosen[0]: value}
        while True:
            try:
                op.direct(**values)
            except (TypeError, ValueError) as error:
                wants_bytes = re.match(rf"{name}: (\w+): dtype must be .* for kv_cache_dtype", str(error))
                given = values[wants_bytes[1]] if wants_bytes else None
                caches = given if isinstance(given, list) else [given]
                if not wants_bytes or caches[0].dtype == np.uint8:
                    return str(error)
                as_bytes = [np.zeros(cache.shape, np.uint8) for cache in caches]
                values[wants_bytes[1]] = as_bytes if isinstance(given, list) else as_bytes[0]
            else:
                return ""

    refused = says("of no such name").rpartition("must be ")[2].partition(", got")[0]
    listed = [*re.findall(r"'(\w+)'", refused), "fp8_ds_mla", "nvfp4_ds_mla"]  # which the list does not name
    if "ue8m0" in listed:  # a kind of scales, in a cache of one format
        return set()
    # those that it takes, or refuses for the shape of the sample's arrays alone
    offered = {f for f in listed if f"{name}: {chosen[0]}: " not in says(f)}
    called = {"auto": "same", "fp8": "fp8 e4m3", "fp8_e4m3": "fp8 e4m3", "fp8_e5m2": "e5m2", "nvfp4_4over6": "nvfp4"}
    return {called.get(f, f) for f in offered} - {"float32", "float16", "bfloat16"}


@pytest.mark.parametrize(("names", "dtypes", "caches"), rows())
def test_dtypes_and_formats_of_the_table_are_those_of_the_operations(names, dtypes, caches) -> None:
    said = [r for name in names for r in refusals(name)]
    lists = [set(m.group(1).split(" or ")) for r in said if (m := re.search(r"dtype must be ((?:\w+ or )+\w+)", r))]
    lists = [found for found in lists if "int64" not in found]  # of ids
    short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    floats = {short[t] for found in lists if len(found & short.keys()) > 1 for t in found & short.keys()}
    assert floats == set(re.findall(r"\b(?:f32|f16|bf16)\b", dtypes))
    assert bool(floats) != (dtypes == "any")
    for name in names:
        told = set(re.findall(r"same|fp8 e4m3|e5m2|int8|nvfp4_ds_mla|nvfp4|fp8_ds_mla", caches))
        offered = formats(name)
        assert offered in (told, set()), name


def test_every_operation_is_in_the_table() -> None:
    operations = {n for n in pykv.__all__ if "stream" in getattr(getattr(pykv, n), "__annotations__", {})}
    assert len(operations) >= 13
    assert not {name for name in operations if f"`{name}`" not in table()}
