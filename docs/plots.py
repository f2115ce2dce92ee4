"""The plots of the pages on performance, from ``benchmarks/results``: ``python docs/plots.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pykv._tools.bench import plot
from pykv._tools.timing import Figure as Timed

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
BLUE, ORANGE, GREY = "#2b6cb0", "#dd8452", "#9aa5b1"
THROUGHPUT = {
    "rms_norm": "Norms",
    "gated_activation": "Gated activations",
    "elementwise_activation": "Activations",
    "rotary_embedding": "Rotary embedding",
    "rotary_and_cache": "Rotation and cache write in one launch",
    "reshape_and_cache": "Writes into the cache",
    "mla": "MLA and indexer caches",
    "copy_blocks": "Copies of blocks",
}

Results = dict[str, Any]


def results(name: str) -> Results:
    read: Results = json.loads((RESULTS / f"{name}.json").read_text())
    return read


def measured_on(found: Results) -> str:
    return f"{found['device']['name']}, commit {found['commit']}"


def _bars(path: Path, title: str, labels: Sequence[str], series: dict[str, tuple[Sequence[float | None], str]],
          xlabel: str, limit: float | None = None) -> None:  # fmt: skip
    """Horizontal bars, one below the other; where a series has nothing to show there is no bar."""
    height = 0.9 / len(series)
    figure = Figure(figsize=(7, 1.1 + 0.21 * len(labels) * (1 + 0.6 * (len(series) - 1))), layout="constrained")
    axes = figure.subplots()
    for i, (name, (values, color)) in enumerate(series.items()):
        places = [n + i * height for n, v in enumerate(values) if v is not None]
        shown = [v for v in values if v is not None]
        bars = axes.barh(places, shown, height=0.9 * height, color=color, label=name)
        axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=7)
    if limit is not None:
        axes.axvline(limit, color="black", linewidth=0.8)
    axes.set_yticks([n + height * (len(series) - 1) / 2 for n in range(len(labels))], labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.01)
    axes.set_xlabel(xlabel)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        figure.legend(fontsize=8, loc="outside lower center", ncols=len(series))
    figure.savefig(path)


def decode(path: Path) -> None:
    found = results("paged_attention")
    lines = [f for f in found["figures"] if f["read_us"] is not None and f["case"]["op"] == "paged_attention"]
    lines = [f for f in lines if f["case"]["kind"] != "nvfp4"]  # measured later: paged_attention_nvfp4.json
    labels = [
        f"{f['case']['name']}, {f['case']['kind'].replace('auto', 'bf16')}"
        + (f", {f['case']['layout']}" if f["case"]["layout"] != "NHD" else "")
        + (f", {f['case']['kv_heads']} KV heads" if f["case"]["kv_heads"] != 8 else "")
        for f in lines
    ]
    ours = [100 * f["read_us"] / f["us"] for f in lines]
    others = [100 * f["read_us"] / min(f["here"].values()) if f["here"] else None for f in lines]
    libraries = ", ".join(f"{name} {version}" for name, version in found["peers"].items())
    series = {"pykv": (ours, BLUE), f"the best of {libraries}, same run": (others, GREY)}
    _bars(
        path,
        f"Decode attention: {measured_on(found)}",
        labels,
        series,
        "% of a plain read of as many bytes",
        100,
    )


def prefill(path: Path) -> None:
    found = results("paged_attention")
    lines = [f for f in found["figures"] if f["tflops"] is not None]
    series = {
        "pykv": ([f["tflops"] for f in lines], BLUE),
        "FlashAttention 3 (another run)": ([f["case"]["peer"] for f in lines], GREY),
    }
    _bars(path, f"Prefill: {measured_on(found)}", [f["case"]["name"] for f in lines], series, "TFLOP/s")


def on_the_cpu(path: Path) -> None:
    found = results("paged_attention_cpu")
    lines = found["figures"]
    labels = [
        f"{f['case']['sequences']} x {f['tokens']}, {f['case']['layout']}, {f['case']['dtype']}"
        + (f", {f['case']['kind']}" if f["case"]["kind"] != "auto" else "")
        for f in lines
    ]
    read = [f["num_bytes"] / f["read_ms"] / 1e6 for f in lines]
    series = {"pykv": ([f["gb_per_s"] for f in lines], BLUE), "a plain read beside it": (read, GREY)}
    _bars(path, f"Decode attention on the CPU: {measured_on(found)}", labels, series, "GB/s of the cache")


def swap(path: Path) -> None:
    found = results("swap")
    lines = [f for f in found["figures"] if f["mapping"]]
    labels = [f"{f['method']}, {f['mapping']}, {f['direction']}" for f in lines]
    shares = [100 * f["of_link"] for f in lines]
    title = f"{found['blocks']} blocks x {found['layers']} layers to and from pinned memory: {measured_on(found)}"
    _bars(path, title, labels, {"": (shares, BLUE)}, "% of the link")


def call_cost(path: Path) -> None:
    found = results("call_cost")
    lines = found["figures"]
    labels = [f"{f['op']}, {f['arrays']}, {f['through']}" for f in lines]
    _bars(path, f"Cost of a call: {measured_on(found)}", labels, {"": ([f["ns"] for f in lines], BLUE)}, "nanoseconds")


def throughput(path: Path, name: str, title: str) -> None:
    found = results(name)
    kept = ("op", "size", "dtype", "num_bytes", "us", "copy_us")
    figures = [Timed(**{k: f[k] for k in kept}) for f in found["figures"]]
    plot(path, f"{title}: {measured_on(found)}", figures)


def roofline(path: Path) -> None:
    """By the script that draws it for the README."""
    script = RESULTS.parent / "attention" / "plot_roofline.py"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}  # its neighbours are imported
    subprocess.run([sys.executable, script, RESULTS / "paged_attention.json", path], check=True, env=environment)


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for draw in (roofline, decode, prefill, on_the_cpu, swap, call_cost):
        draw(folder / f"{draw.__name__}.svg")
    for name, title in THROUGHPUT.items():
        throughput(folder / f"{name}.svg", name, title)


if __name__ == "__main__":
    write(Path(__file__).parent / "plots")
