"""Figures of the layouts as SVG, from shapes and the formulas of ``pykv/cache.h``: ``python docs/drawings.py``."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

WIDTH, MARGIN = 640, 24
INK, FAINT, PAPER = "#1f2933", "#7b8794", "#ffffff"
# (light, dark) of a hue; they differ in brightness also for the colour-blind
BLUE, ORANGE, GREEN, GREY = (
    ("#cfe3f7", "#9cc5ec"),
    ("#fde3c4", "#f8c283"),
    ("#d3eed9", "#a3d9b1"),
    ("#eef1f4", "#d9dfe5"),
)


class Drawing:
    """A card of a fixed width that grows downwards."""

    def __init__(self, title: str) -> None:
        self.title, self.height, self.parts = title, 0.0, list[str]()

    def _reach(self, y: float) -> None:
        self.height = max(self.height, y)

    def text(self, x: float, y: float, words: str, *, size: float = 15, at: str = "start", color: str = INK,
             bold: bool = False, mono: bool = False) -> None:  # fmt: skip
        family = "ui-monospace, 'DejaVu Sans Mono', monospace" if mono else "system-ui, 'DejaVu Sans', sans-serif"
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-family="{family}" text-anchor="{at}" '
            f'fill="{color}"{weight}>{escape(words)}</text>'
        )
        self._reach(y + size / 2)

    def box(self, x: float, y: float, width: float, height: float, fill: str, words: str = "", below: str = "",
            *, size: float = 14, edge: str = "#52606d") -> None:  # fmt: skip
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" stroke="{edge}"/>'
        )
        middle = x + width / 2
        if below:
            self.text(middle, y + height / 2 - 2, words, size=size, at="middle")
            self.text(middle, y + height / 2 + size - 2, below, size=size - 2, at="middle", color="#3e4c59")
        elif words:
            self.text(middle, y + height / 2 + size * 0.35, words, size=size, at="middle")
        self._reach(y + height)

    def curve(self, x0: float, y0: float, x1: float, y1: float, color: str) -> None:
        bend = (x1 - x0) / 2
        self.parts.append(
            f'<path d="M{x0:.1f} {y0:.1f} C{x0 + bend:.1f} {y0:.1f} {x1 - bend:.1f} {y1:.1f} {x1 - 7:.1f} {y1:.1f}" '
            f'fill="none" stroke="{color}" stroke-width="1.6"/>'
            f'<path d="M{x1:.1f} {y1:.1f} l-8 -4 v8 z" fill="{color}"/>'
        )

    def line(self, x0: float, y0: float, x1: float, y1: float, color: str = FAINT) -> None:
        self.parts.append(f'<path d="M{x0:.1f} {y0:.1f} L{x1:.1f} {y1:.1f}" stroke="{color}"/>')
        self._reach(max(y0, y1))

    def svg(self) -> str:
        height = self.height + MARGIN
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
            f'height="{height:.0f}" role="img">\n<title>{escape(self.title)}</title>\n'
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8" fill="{PAPER}" '
            f'stroke="#cbd2d9"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def pages() -> Drawing:
    """Two sequences, their rows of block_tables, and the blocks that these name."""
    block, blocks = 4, 7
    sequences = {"A": (10, [5, 0, 3], BLUE, "#2b6cb0"), "B": (6, [1, 4], ORANGE, "#c05621")}
    drawing = Drawing("A block table names the blocks of each sequence, in order")
    pool_x, cell, top = 348, 48, 84
    drawing.text(MARGIN, 40, "block_tables, seq_lens", bold=True)
    drawing.text(pool_x, 40, f"the cache: {blocks} blocks of {block} slots", bold=True)
    drawing.text(pool_x, 62, "a slot is block * 4 + offset", size=13, color=FAINT)
    rows = {b: top + 46 * b for b in range(blocks)}
    held: dict[int, tuple[str, int, Any]] = {}
    for i, (name, (length, table, hues, color)) in enumerate(sequences.items()):
        x, y = MARGIN + 40, top + 20 + 170 * i
        drawing.text(MARGIN, y - 12, f"row {i}: {name}, {length} tokens", size=14)
        for j in range(3):
            used = j < len(table)
            drawing.box(x, y + 38 * j, 72, 38, (hues if used else GREY)[0], str(table[j] if used else -1), size=16)
            drawing.text(x - 12, y + 38 * j + 24, str(j), size=14, at="end", color=FAINT)
        for j, b in enumerate(table):
            held[b] = (name, j * block, (length, hues))
            drawing.curve(x + 72, y + 38 * j + 19, pool_x - 34, rows[b] + 20, color)
    for b, y in rows.items():
        drawing.text(pool_x - 10, y + 25, str(b), size=14, at="end", color=FAINT)
        for offset in range(block):
            fill, words = GREY[0], ""
            if b in held:
                name, first, (length, hues) = held[b]
                if first + offset < length:
                    fill, words = hues[0], f"{name}{first + offset}"
            drawing.box(pool_x + cell * offset, y, cell, 40, fill, words)
    drawing.text(pool_x + cell * block + 10, rows[3] + 25, "A9: slot 13", size=13)
    end = top + 46 * blocks
    drawing.text(
        MARGIN, end + 22, "A9: entry 9 / 4 = 2 of row 0 is block 3, offset 9 % 4 = 1, slot 3 * 4 + 1 = 13", size=14
    )
    return drawing


BS, HEADS, HEAD = 4, 2, 8  # of the block in the figures of layouts
PIECE = 4  # elements of float32 in 16 bytes


def _pieces(order: npt.NDArray[np.int64]) -> list[tuple[int, str, str, int]]:
    """Memory in its order, 16 bytes at a time: head, what is written on it, and which of two shades it has."""
    found = []
    for t, h, d in np.moveaxis(np.array(np.unravel_index(order.reshape(-1, PIECE), (BS, HEADS, HEAD))), 0, 1):
        if len(set(t)) == 1:
            found.append((int(h[0]), f"t{t[0]}", f"d{d[0]}-{d[-1]}", int(d[0] // PIECE)))
        else:
            found.append((int(h[0]), f"d{d[0]}", f"t{t[0]}-{t[-1]}", int(d[0] % 2)))
    return found


def layouts() -> Drawing:
    """What lies where in a block, by the strides that each layout has."""
    elements = np.arange(BS * HEADS * HEAD).reshape(BS, HEADS, HEAD)  # [t, h, d]
    chunks = elements.reshape(BS, HEADS, HEAD // PIECE, PIECE)
    flash = "[NB, BS, num_kv_heads, head_size]"
    shown = [
        ("NHD, keys and values", flash, elements),
        (
            "HND, keys and values: the same shape, other strides",
            "[NB, BS, num_kv_heads, head_size]",
            elements.transpose(1, 0, 2),
        ),
        ("packed, keys", "[NB, num_kv_heads, head_size / x, BS, x]", chunks.transpose(1, 2, 0, 3)),
        ("packed, values", "[NB, num_kv_heads, head_size, BS]", elements.transpose(1, 2, 0)),
    ]
    drawing = Drawing("One block in memory, in four layouts")
    drawing.text(
        MARGIN, 36, f"A block of {BS} tokens, {HEADS} KV heads of size {HEAD}, float32 (x = {PIECE})", bold=True
    )
    drawing.text(MARGIN, 58, "each cell is 16 bytes; memory runs from left to right, then down", size=13, color=FAINT)
    drawing.box(MARGIN, 72, 20, 16, BLUE[0])
    drawing.text(MARGIN + 28, 85, "head 0", size=14)
    drawing.box(MARGIN + 100, 72, 20, 16, ORANGE[0])
    drawing.text(MARGIN + 128, 85, "head 1", size=14)
    drawing.text(MARGIN + 210, 85, "t: token in the block, d: element of the head", size=14)
    y, width = 124.0, (WIDTH - 2 * MARGIN) / 8
    for title, shape, order in shown:
        drawing.text(MARGIN, y, title, bold=True)
        drawing.text(MARGIN, y + 21, shape, size=13, mono=True, color="#3e4c59")
        for i, (head, words, below, shade) in enumerate(_pieces(np.ascontiguousarray(order))):
            drawing.box(
                MARGIN + width * (i % 8), y + 32 + 44 * (i // 8), width, 44, (BLUE, ORANGE)[head][shade], words, below
            )
        y += 32 + 88 + 38
    return drawing


def mla_record() -> Drawing:
    """A token of an fp8_ds_mla cache."""
    latent, group, rope = 512, 128, 64
    parts = [
        (latent, f"{latent} values, e4m3", BLUE),
        (latent // group * 4, "", GREEN),
        (2 * rope, f"{rope} of 16 bit", ORANGE),
    ]
    total = sum(size for size, *_ in parts)
    assert total == 656
    drawing = Drawing("The record of 656 bytes")
    scale = (WIDTH - 2 * MARGIN) / total
    drawing.text(MARGIN, 36, f'"fp8_ds_mla": a token is a record of {total} bytes', bold=True)
    drawing.text(MARGIN, 58, "drawn to scale; numbers are byte offsets", size=13, color=FAINT)
    at, y = 0, 96
    for size, words, hues in parts:
        if hues is BLUE:
            for g in range(latent // group):
                x = MARGIN + g * group * scale
                drawing.box(x, y, group * scale, 52, hues[g % 2], "128 x e4m3", f"group {g}")
        else:
            drawing.box(MARGIN + at * scale, y, size * scale, 52, hues[0], words and f"{rope} x 2", words and "rope")
        at += size
    for offset in (0, 128, 256, 384, 512, 656):
        anchor = "end" if offset in (512, 656) else "start" if offset == 0 else "middle"
        drawing.text(MARGIN + offset * scale, y - 8, str(offset), size=13, at=anchor, color=FAINT)
    drawing.text(MARGIN + 528 * scale, y - 8, "528", size=13, color=FAINT)
    left, zoom, top = MARGIN + 150, 92, y + 84
    for g in range(4):
        drawing.box(left + g * zoom, top, zoom, 42, GREEN[g % 2], f"scale {g}", "float32", size=13)
        drawing.text(left + g * zoom, top + 60, str(512 + 4 * g), size=13, at="middle", color=FAINT)
    drawing.text(left + 4 * zoom, top + 60, "528", size=13, at="middle", color=FAINT)
    drawing.line(MARGIN + 512 * scale, y + 52, left, top)
    drawing.line(MARGIN + 528 * scale, y + 52, left + 4 * zoom, top)
    drawing.text(
        MARGIN,
        top + 92,
        "latent[i] = e4m3[i] * scale[i / 128]; the rope is as it came",
        size=14,
    )
    return drawing


def nvfp4_block() -> Drawing:
    """Where the scales of four tokens lie."""
    head_size = 128
    scales = head_size // 16
    drawing = Drawing("A block of an nvfp4 cache")
    drawing.text(MARGIN, 36, f"nvfp4 values: one head of a block of 4 tokens, head_size {head_size}", bold=True)
    drawing.text(MARGIN, 58, "first the four-bit floats of all tokens and heads, then all scales", size=13, color=FAINT)
    y, hues = 76.0, (BLUE[0], ORANGE[0], GREEN[0], GREY[1])
    width = (WIDTH - 2 * MARGIN - 60) / scales
    for t in range(4):
        drawing.text(MARGIN, y + 24, f"t{t}", size=14)
        drawing.box(MARGIN + 36, y, width * scales, 34, hues[t], f"{head_size} four-bit floats: {head_size // 2} bytes")
        y += 34
    drawing.text(MARGIN, y + 34, f"the {4 * scales} scales (e4m3) as they lie in memory, {scales} in a row", size=14)
    place = {}
    for t in range(4):
        for s in range(scales):
            place[(t // 4) * 4 + s // (scales // 4), (s % (scales // 4)) * 4 + t % 4] = (t, s)
    assert len(place) == 4 * scales
    for (row, column), (t, s) in place.items():
        drawing.box(MARGIN + 36 + width * column, y + 46 + 34 * row, width, 34, hues[t], f"t{t} s{s}")
    end = y + 46 + 34 * 4
    drawing.text(MARGIN, end + 24, "s: the scale of elements 16 s to 16 s + 15 of the token", size=14)
    return drawing


def indexer_block() -> Drawing:
    """A block of the sparse-attention indexer: all values, then all scales."""
    block, head, group = 4, 128, 128
    drawing = Drawing("A block of the indexer's cache")
    drawing.text(MARGIN, 36, f"Indexer: a block of BS = {block} tokens, head_dim {head}, groups of {group}", bold=True)
    drawing.text(MARGIN, 58, "numbers are byte offsets in the block", size=13, color=FAINT)
    y, width, narrow = 74.0, 112, 33
    for o in range(block):
        x = MARGIN + width * o
        drawing.box(x, y, width, 46, BLUE[o % 2], f"o{o}: 128", "x e4m3")
        drawing.text(x, y + 64, str(o * head), size=13, color=FAINT)
    for o in range(block):
        drawing.box(MARGIN + width * block + narrow * o, y, narrow, 46, GREEN[o % 2], f"o{o}", size=13)
    drawing.text(MARGIN + width * block, y + 64, str(block * head), size=13, color=FAINT)
    drawing.text(MARGIN + (width + narrow) * block, y + 64, str(block * (head + 4)), size=13, at="end", color=FAINT)
    drawing.text(MARGIN, y + 92, "values of all tokens, then a float32 scale for each group of each token", size=14)
    return drawing


FIGURES = (pages, layouts, mla_record, nvfp4_block, indexer_block)


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for figure in FIGURES:
        (folder / f"{figure.__name__}.svg").write_text(figure().svg())


if __name__ == "__main__":
    write(Path(__file__).parent / "drawn")
