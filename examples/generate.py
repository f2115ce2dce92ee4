"""Continue prompts with a language model: continuous batching over a paged KV cache, with pykv's kernels.

    python examples/generate.py                      # the small model that lies beside this file, with NumPy
    python examples/generate.py --model smollm2 --chat --prompt "Why is the sky blue?" --stream
    python examples/generate.py --array torch --device cuda --model FOLDER --prompt "Once" --prompt "It was"

Read llama.py for the model, families.py for what else it is (Qwen, Mistral, Phi, SmolLM, Gemma, OLMo, GLM, Granite,
StarCoder), steps.py for pykv's part of it (llama_jax.py with JAX), arrays.py for that of the array library, engine.py
for the batching, cuda_graphs.py for steps that are replayed; checkpoint.py, gguf_file.py and text.py for the files.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
from arrays import open_arrays
from checkpoint import Checkpoint, open_folder
from cuda_graphs import Captured
from engine import Engine, Request, common_prefix
from gguf_file import find_smollm2, open_gguf
from llama import make_model
from profiled import Profile
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from show import Rates, Stream, progress_bar, report
from text import Growing, Words, open_words

import pykv

OPENING = "Elizabeth had been a week at Netherfield, and the rain had not ceased since Tuesday. "
PROMPTS = [
    OPENING + "Mr. Darcy",
    OPENING + "Her sister",
    OPENING + '"You must allow me to say,"',
    OPENING + "The next morning",
]


def refuse(reason: object) -> NoReturn:
    """What cannot be served ends the program with one line."""
    print(f"generate.py: error: {str(reason).partition(chr(10))[0]}", file=sys.stderr)
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
    add("--model", default=Path(__file__).parent / "model", help="a Hugging Face folder, a GGUF file, or smollm2")
    add("--array", choices=["numpy", "torch", "cupy", "jax"], default="numpy", help="the array library")
    add("--device", help="cpu, cuda or cuda:N (default: a GPU if the library has one)")
    add("--dtype", choices=["auto", "float32", "float16", "bfloat16"], default="auto", help="of the weights")
    add("--kv-dtype", choices=["auto", "fp8_e4m3"], default="auto", help="of the cache (auto: as --dtype)")
    add("--prompt", action="append", help="a text to continue; may be given many times")
    add("--chat", action="store_true", help="a prompt is a user's message, which the model answers")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a text before it; may be given many times")
    add("--stream", action="store_true", help="show each text as it grows, one after the other")
    add("--max-tokens", type=positive, default=120, help="new tokens for each prompt")
    add("--temperature", type=not_negative, default=0.7, help="0: always the likeliest token")
    add("--seed", type=int, default=0, help="other seeds draw other tokens; each prompt has its own from it")
    add("--chunk", type=positive, default=64, help="tokens computed per step at most; a long prompt takes several")
    add("--blocks", type=positive, default=512, help="blocks in the cache")
    add("--block-size", type=positive, default=16, help="tokens in a block")
    add("--compile", action="store_true", help="let torch compile the step; JAX always does")
    add("--cuda-graphs", action="store_true", help="with torch on a GPU: steps of decoding are replayed CUDA graphs")
    add("--profile", action="store_true", help="say how much of the time each operation takes")
    args = parser.parse_args()
    for option in ("compile", "cuda_graphs"):
        if getattr(args, option) and args.array != "torch":
            parser.error(f"--{option.replace('_', '-')} goes with --array torch")
    if args.profile and (args.array == "jax" or args.compile or args.cuda_graphs):
        parser.error("--profile goes with steps that are not compiled or replayed")
    if args.seed < 0:
        parser.error(f"argument --seed: must not be negative, got {args.seed}")
    if "" in args.stop:
        parser.error("argument --stop: must not be empty")
    return args


def main() -> None:
    args = parse_arguments()
    console = Console()
    prompts = args.prompt or PROMPTS
    try:
        checkpoint, words = open_files(args.model)
        engine = open_engine(checkpoint, args)
        rates = Rates(engine.counters)
        requests = add_requests(engine, [words.encode(text, args.chat) for text in prompts], args)
    except (ImportError, MemoryError, OSError, ValueError, pykv.OutOfBlocks) as error:
        refuse(error)
    profile = Profile(engine) if args.profile else None
    texts = {r.id: Growing(words.tokenizer, r.tokens, args.stop) for r in requests}
    try:
        if args.stream:
            serve(engine, texts, rates, Stream(console, [p + "\n" * args.chat for p in prompts], requests, texts))
        else:
            with progress_bar(console, engine, rates, sum(r.max_length - r.prompt_length for r in requests)) as bar:
                serve(engine, texts, rates, bar)
            for prompt, text in zip(prompts, texts.values(), strict=True):
                text.finish()
                console.print(Panel(Text.assemble((prompt, "bold"), "\n\n" * args.chat, text.text)))
    except pykv.OutOfBlocks as error:
        refuse(f"--blocks {args.blocks}: {error}")
    except ValueError as error:  # such as logits that are no numbers
        refuse(error)
    library = args.array + " compiled" * args.compile + " with CUDA graphs" * args.cuda_graphs
    report(console, engine, library, rates)
    if profile:
        profile.report(console)
    engine.close()


def serve(engine: Engine, texts: dict[int, Growing], rates: Rates, show: Callable[[], None]) -> None:
    """Steps until all texts are whole."""
    rates.count()  # a shared prefix
    while engine.busy:
        for request in engine.step():
            text = texts[request.id]
            if request.tokens[-1] not in engine.model.config.end_ids:
                text.add(request.tokens[-1])
            if text.stopped:
                engine.end(request)
        rates.count()
        show()


def open_files(model: str | Path) -> tuple[Checkpoint, Words]:
    """The checkpoint and what turns texts into its tokens."""
    path = find_smollm2() if model == "smollm2" else Path(model)
    if path.suffix == ".gguf":
        return open_gguf(path)
    if not path.is_dir():
        raise ValueError(f"--model: {path} is not a folder")
    return open_folder(path), open_words(path)


def open_engine(checkpoint: Checkpoint, args: argparse.Namespace) -> Engine:
    try:
        arrays = open_arrays(args.array, args.device, args.dtype)
        arrays.put(np.zeros(1))  # for torch says so now
    except (AssertionError, LookupError, RuntimeError) as error:  # as torch and JAX say that there is none
        raise ValueError(f"--device {args.device}: {error}") from None
    if args.cuda_graphs and not arrays.device.startswith("cuda"):
        raise ValueError("--cuda-graphs needs a GPU")
    model = make_model(checkpoint, arrays, longest=args.blocks * args.block_size)
    if args.compile:
        model.forward = arrays.namespace.compile(model.forward)
    if args.cuda_graphs:
        model.forward = Captured(arrays.namespace, model.forward)
    return Engine(model, model.make_cache(args.blocks, args.block_size, args.kv_dtype), args.chunk)


def add_requests(engine: Engine, prompts: list[list[int]], args: argparse.Namespace) -> list[Request]:
    """One for each prompt; what all begin with is computed once."""
    size = engine.model.config.vocab_size
    if strange := [token for ids in prompts for token in ids if token >= size]:
        raise ValueError(f"tokenizer.json: token {strange[0]} is not among the model's {size}")
    requests = [engine.add(ids, args.max_tokens, args.temperature, args.seed) for ids in prompts]
    shared = common_prefix(prompts)
    if len(prompts) > 1 and len(shared) >= args.block_size:
        engine.share_prefix(shared)
    return requests


if __name__ == "__main__":
    main()
