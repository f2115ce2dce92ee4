"""What the README says is so; that its code runs, tests/test_docs.py sees to."""

from __future__ import annotations

from documents import ROOT, run_python

import pykv

README = ROOT / "README.md"


def test_ten_lines_of_use() -> None:
    out = run_python(README)["out"]
    assert float(abs(out).max()) > 0.1


def test_every_operation_is_in_the_table() -> None:
    text = README.read_text()
    table = text[text.index("## Operations") : text.index("Each on CPU")].replace("`_v2`", "`paged_attention_v2`")
    operations = {n for n in pykv.__all__ if "stream" in getattr(getattr(pykv, n), "__annotations__", {})}
    assert len(operations) >= 13
    assert not {name for name in operations if f"`{name}`" not in table}
