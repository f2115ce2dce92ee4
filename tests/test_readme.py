"""What the README shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import pykv

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_ten_lines_of_use() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    scope: dict[str, object] = {}
    exec(block.replace("import cupy as cp", "import numpy as cp"), scope)
    out = scope["out"]
    assert float(abs(out).max()) > 0.1  # type: ignore[arg-type]


def test_every_operation_is_in_the_table() -> None:
    table = README[README.index("## Operations") : README.index("Each on CPU")].replace("`_v2`", "`paged_attention_v2`")
    operations = {n for n in pykv.__all__ if "stream" in getattr(getattr(pykv, n), "__annotations__", {})}
    assert len(operations) >= 13
    assert not {name for name in operations if f"`{name}`" not in table}
