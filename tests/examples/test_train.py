"""Training writes a checkpoint that the example's model reads, and both compute the same loss."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from examples.checkpoints import logits_of


def r_database(*vectors: list[str]) -> bytes:
    """Character vectors as R stores the data of a package."""
    chunks = []
    for lines in vectors:
        body = b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(lines))
        for line in lines:
            body += struct.pack(">ii", 0x40009, len(line.encode())) + line.encode()
        chunks.append(struct.pack(">i", len(body)) + zlib.compress(body))
    return b"".join(chunks)


def novel(chapter_count: int) -> list[str]:
    lines = ["A NOVEL", "", "By a Lady", "", "VOLUME I", ""]
    for i in range(chapter_count):
        lines += [f"CHAPTER {i + 1}", "", f"It was the {i}. _very_ rainy", "day of the year.", ""]
        lines += ['"Was it?" said she.', ""]
    return [*lines, "", "THE END", "", "not part of it"]


def test_chapters() -> None:
    train = pytest.importorskip("train", reason="training needs torch", exc_type=ImportError)
    (lines,) = train.read_r_strings(r_database(novel(2)))
    assert lines == novel(2)
    expected = [f'It was the {i}. very rainy day of the year.\n\n"Was it?" said she.' for i in range(2)]
    assert list(train.chapters(lines)) == expected


def test_trained_checkpoint_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = pytest.importorskip("train", reason="training needs torch", exc_type=ImportError)
    import torch
    from arrays import open_arrays
    from safetensors.torch import load_file

    train.prepare(r_database(novel(12), novel(20)), tmp_path, vocab_size=300)
    command = (
        f"train.py train --data {tmp_path} --out {tmp_path} --device cpu --steps 3 --batch 2 --length 16 --every 1"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    train.main()

    ids = np.load(tmp_path / "tokens.npz")["valid"][:33].astype(np.int64)
    model = train.Llama(train.Config(vocab_size=300)).eval()
    model.load_state_dict({name: w.float() for name, w in load_file(tmp_path / "model.safetensors").items()})
    with torch.no_grad():
        expected = model(torch.from_numpy(ids[None, :-1]), torch.from_numpy(ids[None, 1:])).item()

    logits = logits_of(tmp_path, open_arrays("numpy"), ids[:-1].tolist(), chunk=10).astype(np.float64)
    surprise = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, ids[1:, None], -1)[:, 0]
    assert surprise.mean() == pytest.approx(expected, abs=1e-4)
