"""The program itself, on the model that ships with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from libraries import Library

import pykv

PROGRAM = Path(__file__).parents[2] / "examples" / "generate.py"


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stdout).split())


def test_default_run_makes_english(tmp_path: Path) -> None:
    text = run("--max-tokens", "40")
    assert "160 new tokens" in text or re.search(r"and \d+ new tokens in \d+ steps", text)
    words = re.findall(r"[a-z]+", text.lower())
    common = {"the", "to", "of", "and", "a", "was", "her", "in", "i", "it", "not", "she", "he", "had", "be", "that"}
    assert sum(word in common for word in words) > 0.2 * len(words)


def test_numpy_computes_in_bfloat16() -> None:
    text = run("--dtype", "bfloat16", "--temperature", "0", "--prompt", "It was a", "--max-tokens", "4")
    assert "numpy, bfloat16 weights, bfloat16 cache" in text


def test_rates_agree_and_fit_in_80_columns() -> None:
    command = [sys.executable, str(PROGRAM), "--max-tokens", "9", "--temperature", "0", "--chunk", "8"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=True, env=os.environ | {"COLUMNS": "200"}
    )
    lines = done.stdout.split("\n")[-6:-1]
    assert lines[1].startswith("36 new tokens in ")
    assert max(map(len, lines)) <= 80
    for name, tokens in (("prompts:", 43), ("generation:", 32)):
        (line,) = (line for line in lines if line.startswith(name))
        count, seconds, rate = (float(x) for x in re.search(r"(\d+) tokens in (\S+) s: (\d+) tok", line).groups())
        assert count == tokens
        assert count / (seconds + 0.006) - 1 <= rate <= count / max(seconds - 0.006, 1e-9) + 1


def text(*options: str) -> str:
    """From the first prompt to the report."""
    return re.search(r"It was a .*(?=numpy,)", run(*options))[0]


def test_stream_and_panels_have_the_same_text() -> None:
    options = ["--max-tokens", "12", "--temperature", "0", "--prompt", "It was a", "--prompt", "Her mother"]
    panels, stream = (text(*options, *more) for more in ([], ["--stream"]))
    assert panels == stream
    assert "Her mother" in panels


def test_stop_and_seed() -> None:
    options = ["--max-tokens", "30", "--prompt", "It was a"]
    first, again, other = (text(*options, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other
    word = first.split()[5]
    for more in ([], ["--stream"]):
        stopped = text(*options, "--seed", "1", "--stop", " " + word, *more)
        assert stopped.strip() == first[: first.index(" " + word)]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_every_library_runs_it(array: Library, kv_dtype: str) -> None:
    if array.name == "interface":
        pytest.skip("Numba's arrays have no products")
    options = ["--array", array.name, "--device", array.device, "--kv-dtype", kv_dtype, "--temperature", "0"]
    text = run(*options, "--prompt", "It was a", "--prompt", "Her mother", "--max-tokens", "8", "--chunk", "3")
    assert f"{array.name}, " in text
    assert "16 new tokens" in text
    assert "It was a" in text
    assert "Her mother" in text


def test_torch_compiles_the_step(request: pytest.FixtureRequest) -> None:
    """The text is the same as without."""
    if request.config.getoption("--device") == "cuda":
        pytest.skip("runs on the CPU")
    pytest.importorskip("torch")
    if shutil.which("g++") is None:
        pytest.skip("torch compiles for the CPU with g++")
    options = [
        "--array",
        "torch",
        "--device",
        "cpu",
        "--temperature",
        "0",
        "--max-tokens",
        "20",
        "--prompt",
        "It was a",
    ]
    plain, compiled = run(*options), run(*options, "--compile")
    assert "torch, float32" in plain
    assert "torch compiled, float32" in compiled
    assert compiled.partition("torch compiled")[0] == plain.partition("torch,")[0]


@pytest.mark.parametrize("options", [["--cuda-graphs"], ["--compile", "--cuda-graphs"]])
def test_torch_replays_steps(request: pytest.FixtureRequest, options: list[str]) -> None:
    """The text is the same as without, also when sequences end and when their tables grow."""
    torch = pytest.importorskip("torch")
    if request.config.getoption("--device") == "cpu" or not (torch.cuda.is_available() and pykv.has_cuda()):
        pytest.skip("CUDA graphs want a GPU")
    common = ["--array", "torch", "--dtype", "float32", "--temperature", "0", "--max-tokens", "40", "--block-size", "4"]
    common += ["--prompt", "It was a", "--prompt", "Her mother and her sisters"]
    plain, replayed = run(*common), run(*common, *options)
    assert "with CUDA graphs, float32" in replayed
    assert replayed.partition("torch")[0] == plain.partition("torch")[0]


def test_profile_adds_up() -> None:
    done = run("--max-tokens", "9", "--prompt", "It was a", "--profile")
    assert "matrix products" in done
    shares = [float(share) for share in re.findall(r" (-?[\d.]+)%", done.partition("share")[2].partition("outside")[0])]
    assert len(shares) > 8
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))
    calls = dict(re.findall(r"(\w+) (\d+) [\d.]+ [\d.]+%", done))
    assert (calls["products"], calls["paged_attention"], calls["sample"]) == (str(9 * 21), str(9 * 5), "9")


def test_profile_goes_without_compilers() -> None:
    command = [sys.executable, str(PROGRAM), "--profile", "--array", "jax"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--profile goes with steps that are not compiled" in done.stderr


@pytest.mark.parametrize("option", ["--compile", "--cuda-graphs"])
def test_some_options_are_for_torch(option: str) -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), option], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{option} goes with --array torch" in done.stderr


def test_cuda_graphs_want_a_gpu() -> None:
    pytest.importorskip("torch")
    options = ["--array", "torch", "--device", "cpu", "--cuda-graphs"]
    done = subprocess.run([sys.executable, str(PROGRAM), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--cuda-graphs needs a GPU" in done.stderr
