"""The figures of bench_paged_attention.py against what the memory and the tensor cores allow.

    python benchmarks/attention/plot_roofline.py [RESULTS.json] [PICTURE.png]

Left, one query for each sequence: bandwidth over the bytes of keys and values that a call reads, under that of a plain
read of as many bytes in the same run.  Right, all calls: arithmetic over its intensity, in operations for each byte of
keys and values, under the same bandwidth and the peak of the tensor cores.  Wants matplotlib (pykv-kernels[cli]).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

sys.path.insert(0, str(Path(__file__).parent))  # under PYTHONSAFEPATH, too

from bench_paged_attention import HEAD_SIZE, HEADS, Case, cases

ROOT = Path(__file__).parents[2]
PEAK = 989.0  # TFLOP/s of an H200 in bf16, dense
KINDS = {"auto": ("bf16", "C0"), "fp8_e4m3": ("fp8 e4m3", "C1"), "fp8_e5m2": ("fp8 e5m2", "C4"),
         "int8": ("int8", "C2"), "nvfp4": ("nvfp4", "C3")}  # fmt: skip
MARKERS = {"NHD": "o", "HND": "^", "packed": "s"}
Point = tuple[Case, float, float | None]  # microseconds, and those of a plain read


def load(path: Path) -> tuple[str, list[Point]]:
    """The device, and the figures of the cases that the benchmark still has."""
    results = json.loads(path.read_text())
    known = {key(vars(case)): case for case in cases()}
    found = [(known.get(key(f["case"])), f["us"], f["read_us"]) for f in results["figures"]]
    return results["device"]["name"], [(case, us, read_us) for case, us, read_us in found if case]


def key(case: dict[str, Any]) -> tuple[object, ...]:
    return tuple(case[name] for name in ("op", "name", "kind", "layout", "kv_heads"))


def rate(case: Case, us: float) -> float:
    return case.kv_bytes / us / 1e6  # TB/s


def decode(axes: Axes, points: Sequence[Point]) -> None:
    points = [p for p in points if max(p[0].queries) == 1 and p[0].op == "paged_attention" and not p[0].batch_invariant]
    roof = sorted({(c.kv_bytes, rate(c, read_us)) for c, _, read_us in points if read_us})
    axes.plot(*zip(*roof, strict=True), color="0.3", linewidth=1.5, zorder=1)
    axes.fill_between(*zip(*roof, strict=True), 6, color="0.93", zorder=0)
    for c, us, _ in points:
        color = KINDS[c.kind][1]
        if c.peer:
            axes.plot([c.kv_bytes] * 2, [rate(c, c.peer), rate(c, us)], color=color, linewidth=1, alpha=0.5, zorder=1)
            axes.plot(c.kv_bytes, rate(c, c.peer), "_", color=color, markersize=9, alpha=0.8, zorder=2)
        axes.plot(c.kv_bytes, rate(c, us), MARKERS[c.layout], **style(c))
    axes.set(xscale="log", xlim=(1.5e6, 1.3e10), ylim=(0, 5.2), title="Decoding: bandwidth", ylabel="TB/s",
             xlabel="bytes of keys and values that a call reads")  # fmt: skip
    axes.annotate("a plain read of as many bytes", (1.1e7, 4.6), color="0.3", ha="center")
    for c, us, _ in points:
        if (c.kind, c.layout, c.kv_heads) == ("auto", "NHD", 8) and c.name in (
            "1 x 1024",
            "1 x 8192",
            "8 x 8192",
            "64 x 8192",
        ):
            axes.annotate(c.name, (c.kv_bytes, rate(c, us)), (8, -10), textcoords="offset points", fontsize="small")


def roofline(axes: Axes, points: Sequence[Point]) -> None:
    bandwidth = max(rate(c, read_us) for c, _, read_us in points if read_us)
    ridge = PEAK / bandwidth
    axes.plot([0.1, ridge, 1e6], [0.1 * bandwidth, PEAK, PEAK], color="0.3", linewidth=1.5, zorder=1)
    axes.fill_between([0.1, ridge, 1e6], [0.1 * bandwidth, PEAK, PEAK], 1e5, color="0.93", zorder=0)
    for c, us, _ in points:
        place = c.flops / c.kv_bytes, c.flops / us / 1e6
        axes.plot(*place, MARKERS[c.layout], **style(c))
        if c.name.endswith("queries"):
            text = c.name.split(", ")[1] if max(c.queries) == 2 else str(max(c.queries))
            axes.annotate(text, place, (6, -9), textcoords="offset points", fontsize="small")
    axes.annotate("prefill", (1.6e4, 350), ha="center", fontsize="small")
    along = math.degrees(math.atan(bandwidth))
    axes.text(10, 10 * bandwidth * 1.25, f"{bandwidth:.2f} TB/s, the best plain read", rotation=along, ha="center",
              va="bottom", color="0.3", rotation_mode="anchor", transform_rotates_text=True)  # fmt: skip
    axes.annotate(f"{PEAK:.0f} TFLOP/s, tensor cores in bf16", (9e4, PEAK * 1.15), ha="right", color="0.3")
    axes.set(xscale="log", yscale="log", xlim=(0.7, 1e5), ylim=(1, 3000), title="All calls: arithmetic",
             xlabel="operations for each byte of keys and values", ylabel="TFLOP/s")  # fmt: skip


def style(case: Case) -> dict[str, Any]:
    return {
        "color": KINDS[case.kind][1],
        "markersize": 6,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
        "zorder": 3,
    }


def legend(figure: Figure) -> None:
    kinds = [Line2D([], [], marker="o", linestyle="", color=color, label=name) for name, color in KINDS.values()]
    layouts = [Line2D([], [], marker=m, linestyle="", color="0.5", label=name) for name, m in MARKERS.items()]
    peer = Line2D([], [], marker="_", markersize=9, linestyle="", color="0.45", label="best other library")
    figure.legend(handles=[*kinds, *layouts, peer], loc="outside lower center", ncols=9, frameon=False,
                  fontsize="small", handletextpad=0.1, columnspacing=1.4)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / "benchmarks/results/paged_attention.json")
    parser.add_argument("picture", type=Path, nargs="?", default=ROOT / "docs/images/paged_attention.png")
    arguments = parser.parse_args()
    device, points = load(arguments.results)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    decode(left, [p for p in points if p[0].decode])
    roofline(right, points)
    for axes in (left, right):
        axes.grid(color="0.85", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"paged_attention on one {device}, {HEADS} query heads of size {HEAD_SIZE}, pages of 16 tokens")
    legend(figure)
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
