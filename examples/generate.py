"""Continue prompts with a Llama or Qwen3 checkpoint: continuous batching over a paged KV cache, with pykv's kernels.

    python examples/generate.py                      # the small model that lies beside this file, with NumPy
    python examples/generate.py --array torch --device cuda --model FOLDER --prompt "Once" --prompt "It was"

Read llama.py for the model (llama_jax.py with JAX), engine.py for the batching, arrays.py for what is asked of the
array library, cuda_graphs.py for steps that are replayed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, NoReturn

from arrays import open_arrays
from cuda_graphs import Captured
from engine import Engine, Request, common_prefix
from llama import open_model
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from tokenizers import Tokenizer

import pykv

OPENING = "Elizabeth had been a week at Netherfield, and the rain had not ceased since Tuesday. "
PROMPTS = [
    OPENING + "Mr. Darcy",
    OPENING + "Her sister",
    OPENING + '"You must allow me to say,"',
    OPENING + "The next morning",
]


class Step(NamedTuple):
    tokens: int
    seconds: float


def refuse(reason: object) -> NoReturn:
    """What cannot be served ends the program with one line."""
    print(f"generate.py: error: {reason}", file=sys.stderr)
    raise SystemExit(2)


def positive(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def not_negative(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or a positive number, got {text!r}")
    return float(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=Path(__file__).parent / "model", help="a Hugging Face checkpoint folder")
    add("--array", choices=["numpy", "torch", "cupy", "jax"], default="numpy", help="the array library")
    add("--device", help="cpu, cuda or cuda:N (default: a GPU if the library has one)")
    add("--dtype", choices=["auto", "float32", "float16", "bfloat16"], default="auto", help="of the weights")
    add("--kv-dtype", choices=["auto", "fp8_e4m3"], default="auto", help="of the cache (auto: as --dtype)")
    add("--prompt", action="append", help="a text to continue; may be given many times")
    add("--max-tokens", type=positive, default=120, help="new tokens for each prompt")
    add("--temperature", type=not_negative, default=0.7, help="0: always the likeliest token")
    add("--seed", type=int, default=0)
    add("--chunk", type=positive, default=64, help="tokens computed per step at most; a long prompt takes several")
    add("--blocks", type=positive, default=512, help="blocks in the cache")
    add("--block-size", type=positive, default=16, help="tokens in a block")
    add("--compile", action="store_true", help="let torch compile the step; JAX always does")
    add("--cuda-graphs", action="store_true", help="with torch on a GPU: steps of decoding are replayed CUDA graphs")
    args = parser.parse_args()
    for option in ("compile", "cuda_graphs"):
        if getattr(args, option) and args.array != "torch":
            parser.error(f"--{option.replace('_', '-')} goes with --array torch")
    if args.seed < 0:
        parser.error(f"argument --seed: must not be negative, got {args.seed}")
    return args


def main() -> None:
    args = parse_arguments()
    console = Console()
    try:
        tokenizer = open_tokenizer(args.model)
        engine = open_engine(args)
        began = time.perf_counter()
        requests = add_requests(engine, tokenizer, args)
    except (ImportError, OSError, ValueError, pykv.OutOfBlocks) as error:
        refuse(error)

    steps: list[Step] = []
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} tokens"),
               TimeElapsedColumn()]  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("generating", total=sum(r.max_length - r.prompt_length for r in requests))
        while engine.busy:
            step_began = time.perf_counter()
            try:
                tokens = len(engine.step())
            except pykv.OutOfBlocks as error:
                refuse(f"--blocks {args.blocks}: {error}")
            steps.append(Step(tokens, time.perf_counter() - step_began))
            progress.advance(bar, tokens)
            progress.update(bar, description=f"{len(engine.running)} running, cache {engine.cache.usage:.0%}")
    seconds = time.perf_counter() - began

    for request in requests:
        start, continued = texts(tokenizer, request.tokens, request.prompt_length)
        console.print(Panel(Text.assemble((start, "bold"), continued)))
    library = args.array + " compiled" * args.compile + " with CUDA graphs" * args.cuda_graphs
    report(console, engine, library, seconds, steps)
    engine.close()


def open_tokenizer(folder: Path) -> Tokenizer:
    if not folder.is_dir():
        raise ValueError(f"--model: {folder} is not a folder")
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises no other
        raise ValueError(f"tokenizer.json: {error}") from None


def open_engine(args: argparse.Namespace) -> Engine:
    arrays = open_arrays(args.array, args.device, args.dtype)
    if args.cuda_graphs and not arrays.device.startswith("cuda"):
        raise ValueError("--cuda-graphs needs a GPU")
    model = open_model(args.model, arrays, longest=args.blocks * args.block_size)
    if args.compile:
        model.forward = arrays.namespace.compile(model.forward)
    if args.cuda_graphs:
        model.forward = Captured(arrays.namespace, model.forward)
    return Engine(model, model.make_cache(args.blocks, args.block_size, args.kv_dtype), args.chunk)


def add_requests(engine: Engine, tokenizer: Tokenizer, args: argparse.Namespace) -> list[Request]:
    """One for each prompt; what all begin with is computed once."""
    prompts = [tokenizer.encode(text).ids for text in args.prompt or PROMPTS]
    size = engine.model.config.vocab_size
    if strange := [token for ids in prompts for token in ids if token >= size]:
        raise ValueError(f"tokenizer.json: token {strange[0]} is not among the model's {size}")
    requests = [engine.add(ids, args.max_tokens, args.temperature, args.seed) for ids in prompts]
    shared = common_prefix(prompts)
    if len(prompts) > 1 and len(shared) >= args.block_size:
        engine.share_prefix(shared)
    return requests


def texts(tokenizer: Tokenizer, tokens: list[int], prompt_length: int) -> tuple[str, str]:
    """The text of the prompt and of what follows.  Many decoders strip the space that a text begins with, so that the
    whole is decoded at once, and what it has in common with the prompt taken off."""
    whole, prompt = tokenizer.decode(tokens), tokenizer.decode(tokens[:prompt_length])
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False)))
    return whole[:length], whole[length:]


def report(console: Console, engine: Engine, library: str, seconds: float, steps: list[Step]) -> None:
    count, cache = engine.counters, engine.cache
    block_bytes = sum(array.nbytes for array in cache.key_caches + cache.value_caches) / cache.num_blocks
    lines = [
        f"{library}, {engine.model.arrays.dtype} weights, {cache.dtype} cache",
        f"{count.generated_tokens} new tokens in {seconds:.2f} s: {count.generated_tokens / seconds:.0f} tokens/s "
        f"({count.steps} steps, {1e3 * statistics.median(s.seconds for s in steps):.2f} ms each at the median: "
        f"{statistics.median(s.tokens / s.seconds for s in steps):.0f} tokens/s)",
        f"{count.prompt_tokens} prompt tokens computed, {len(engine.prefix)} of them once for all prompts",
        f"cache: at most {count.peak_blocks} of {cache.num_blocks} blocks in use "
        f"({count.peak_blocks * block_bytes / 2**20:.1f} MiB), {count.preemptions} preemptions",
    ]
    console.print("\n".join(lines), highlight=False)


if __name__ == "__main__":
    main()
