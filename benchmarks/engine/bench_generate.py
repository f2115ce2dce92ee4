"""How fast examples/generate.py decodes with torch and CUDA graphs, beside reading weights and cache once a step.

    python benchmarks/engine/bench_generate.py [--batch 1 --batch 64] [--context 1024] [--json FILE]

The model has the shape of Llama 3 8B and random bfloat16 weights, made on the GPU.  A step is all that the engine does
for one token of each sequence, from choosing who computes to the new tokens on the host; steps in which a graph is
captured are left out.  The floor is the time of a plain read, in this run, of the bytes that a step must read: all
weights but the embedding, of which it reads a row a token, and the keys and values of all sequences.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pykv._tools import output

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from arrays import Array, Host, TorchArrays
from checkpoint import Checkpoint, Keys
from cuda_graphs import Captured
from engine import Engine
from llama import make_model
from timing import Cuda, write_json

LLAMA_3_8B = {
    "model_type": "llama", "hidden_act": "silu", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip
READ_BYTES = 1 << 32
BLOCK_SIZE = 16


class Shapes(Checkpoint):
    """A checkpoint of zeros that take no memory, for arrays that look at shapes alone."""

    def __init__(self, keys: dict[str, Any]):
        super().__init__(Keys(keys), {}, "no file")

    def tensor(self, name: str, *shape: int) -> Host:
        return np.broadcast_to(np.float32(0), shape)


class RandomArrays(TorchArrays):
    """Weights that are made where they lie."""

    weight_bytes = 0

    def matrix(self, *parts: Host) -> Array:
        made = self.empty(sum(len(part) for part in parts), parts[0].shape[1]).normal_(0, 0.02)
        self.weight_bytes += made.nbytes
        return made

    def vector(self, host: Host) -> Array:
        made = self.empty(*host.shape).fill_(1)
        self.weight_bytes += made.nbytes
        return made


class Parts:
    """Where the time of a step goes."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            result = function(*args)
            self.seconds.setdefault(name, []).append(time.perf_counter() - began)
            return result

        return call

    def median(self, name: str, last: int) -> float:
        return statistics.median(self.seconds[name][-last:])


def bytes_per_second() -> float:
    device = Cuda()
    seconds = device.time([device.copy(READ_BYTES, 1 << 16, "bfloat16")])
    device.cupy.get_default_memory_pool().free_all_blocks()
    return READ_BYTES / seconds


def graph_seconds(torch: Any, captured: Captured) -> float:
    """The GPU's time of the step with the most sequences and the widest tables."""
    step = captured.steps[max(captured.steps)]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(20):
        start.record()
        step.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(torch: Any, keys: dict[str, Any], batch: int, context: int, steps: int, rate: float) -> dict[str, object]:
    arrays = RandomArrays(torch, "cuda", "bfloat16")
    model = make_model(Shapes(keys), arrays, context + steps + BLOCK_SIZE)
    config = model.config
    captured, parts = Captured(torch, model.forward), Parts()
    model.forward = parts.timed("launch", captured)  # type: ignore[method-assign]
    arrays.sample = parts.timed("sample", arrays.sample)  # type: ignore[method-assign]
    blocks = batch * -(-(context + steps) // BLOCK_SIZE) + 8
    engine = Engine(model, model.make_cache(blocks, BLOCK_SIZE), tokens_per_step=8192)
    random = np.random.default_rng(0)
    reader = arrays.reader
    arrays.reader = lambda x: parts.timed("wait", reader(x))  # type: ignore[method-assign]
    requests = [engine.add(random.integers(0, config.vocab_size, context).tolist(), steps + 1) for _ in range(batch)]

    times, began = [], time.perf_counter()
    while engine.busy:
        graphs, decoding = len(captured.steps), all(r.due == 1 for r in requests)
        step_began = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - step_began
        if decoding and graphs == len(captured.steps):
            times.append(seconds)
    step = statistics.median(times)
    embedding = model.weights.embedding.nbytes
    of_token = 2 * 2 * len(config.layers) * config.num_kv_heads * config.head_size
    read = arrays.weight_bytes - embedding + batch * (context + steps // 2) * of_token
    floor = read / rate
    launch, sample, wait = (parts.median(name, len(times) // 2) for name in ("launch", "sample", "wait"))
    return {
        "batch": batch, "context": context + steps // 2, "steps": len(times), "step_ms": 1e3 * step,
        "tokens_per_s": batch / step, "read_gb": read / 1e9, "read_gb_per_s": rate / 1e9, "floor_ms": 1e3 * floor,
        "of_floor": floor / step, "graph_ms": 1e3 * graph_seconds(torch, captured), "launch_ms": 1e3 * launch,
        "sample_ms": 1e3 * sample, "wait_ms": 1e3 * wait, "host_ms": 1e3 * (step - launch - sample - wait),
        "all_s": time.perf_counter() - began,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, action="append", help="sequences (default: 1 and 64)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=128, help="tokens decoded")
    parser.add_argument("--small", action="store_true", help="a small model, to see whether this runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    import torch

    rate = bytes_per_second()
    keys = LLAMA_3_8B | (SMALL if args.small else {})
    figures = []
    for batch in args.batch or [1, 64]:
        figures.append(measure(torch, keys, batch, args.context, args.steps, rate))
        gc.collect()
        torch.cuda.empty_cache()
    names = ["batch", "context", "step_ms", "tokens_per_s", "floor_ms", "of_floor", "graph_ms", "launch_ms",
             "sample_ms", "wait_ms", "host_ms"]  # fmt: skip
    rows = [[f"{f[name]:.2f}" if isinstance(f[name], float) else str(f[name]) for name in names] for f in figures]
    output.show(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", names, rows, right=0)
    if args.json:
        write_json(args.json, Cuda(), figures, torch=torch.__version__)


if __name__ == "__main__":
    main()
