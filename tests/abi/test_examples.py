"""The examples in C, C++ and Rust, built against the installed package."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from abi.building import build, run
from test_contract import declarations

import pykv

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "model"
# After these the likeliest token leads by 0.01 at each of 40 steps: far more than the order of a sum can change.
TEXTS = [
    "Elizabeth had been a week at Netherfield, and the rain had not ceased since Tuesday. Mr. Darcy",
    "Her mother",
    "Emma",
    "Mr. Knightley",
]
NEW = 40


def test_c(tmp_path: Path) -> None:
    printed = run(build(EXAMPLES / "c", tmp_path) / "decode", cwd=tmp_path)
    difference = re.search(r"largest difference from a plain loop: (\S+)", printed)
    assert difference, printed
    assert float(difference[1]) < 1e-5


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = []
    if request.config.getoption("--device") not in (None, request.param):
        pytest.skip(f"--device {request.config.getoption('--device')}")
    if request.param == "cuda":
        if pykv._C.cuda_device_count() == 0:
            pytest.skip("no CUDA device")
        if shutil.which("nvcc") is None:
            pytest.skip("no CUDA toolkit, of which cuBLAS is a part")
        options = ["-DENGINE_CUDA=ON"]
    return build(EXAMPLES / "cpp", tmp_path_factory.mktemp("engine"), *options) / "engine"


def tokens_of_python(
    folder: Path, prompts: list[list[int]], temperature: float = 0.0, seed: int = 0
) -> list[list[int]]:
    """What examples/generate.py computes."""
    from arrays import open_arrays
    from engine import Engine
    from llama import open_model

    model = open_model(folder, open_arrays("numpy"))
    loop = Engine(model, model.make_cache(64))
    requests = [loop.add(prompt, NEW, temperature, seed) for prompt in prompts]
    while loop.busy:
        loop.step()
    return [request.tokens[request.prompt_length :] for request in requests]


def test_cpp_makes_the_tokens_of_python(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("ml_dtypes")
    pytest.importorskip("safetensors")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]

    def tokens_of_cpp(folder: Path, *options: object) -> list[list[int]]:
        ids = [",".join(map(str, prompt)) for prompt in prompts]
        lines = run(engine, *options, folder, NEW, *ids, cwd=tmp_path).splitlines()
        return [[int(i) for i in line.split()] for line in lines]

    expected = tokens_of_python(MODEL, prompts)
    assert [len(tokens) for tokens in expected] == [NEW] * len(prompts)
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    assert tokens_of_cpp(MODEL) == expected

    drawn = tokens_of_python(MODEL, prompts, 0.7, 5)
    assert all(a != b for a, b in zip(drawn, expected, strict=True))
    assert tokens_of_cpp(MODEL, "--temperature", 0.7, "--seed", 5) == drawn
    assert tokens_of_cpp(MODEL, "--temperature", 0.7, "--top-k", 1) == expected
    assert tokens_of_cpp(MODEL, "--temperature", 0.7, "--top-p", 0.01) == expected
    others = tokens_of_cpp(MODEL, "--temperature", 0.7, "--seed", 5, "--top-k", 2, "--top-p", 0.9)
    assert all(a not in (b, c) for a, b, c in zip(others, drawn, expected, strict=True))

    # where a common token ends sequences, they leave the batch one after the other
    shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((MODEL / "config.json").read_text()) | {"eos_token_id": tokenizer.encode(",").ids[-1]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    shorter = tokens_of_python(tmp_path / "model", prompts)
    assert len({len(tokens) for tokens in shorter}) > 1
    assert tokens_of_cpp(tmp_path / "model") == shorter


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage"),
        (["--top", "1", "nowhere", "1", "1"], "there is no option --top"),
        (["--seed", "one", str(MODEL), "1", "1"], "sto"),
        (["--top-k", "1.5", str(MODEL), "1", "1"], "--top-k: not a number: 1.5"),
        (["nowhere", "1", "1"], "cannot read nowhere/config.json"),
        ([str(MODEL), "1", "2048"], "token 2048 is not in the vocabulary"),
        ([str(MODEL), "1", ""], "a prompt must have 1 to 1023 tokens"),
    ],
)
def test_cpp_says_what_is_wrong(engine: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run([engine, *arguments], capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert message in done.stderr


def test_rust(tmp_path: Path) -> None:
    if shutil.which("cargo") is None:
        pytest.skip("cargo is not installed")
    version = re.match(r"cargo (\d+)\.(\d+)", run("cargo", "--version", cwd=tmp_path))
    if version is None or (int(version[1]), int(version[2])) < (1, 77):
        pytest.skip("cargo 1.77 or later is needed")
    for folder in ("examples/rust", "rust"):
        shutil.copytree(EXAMPLES.parent / folder, tmp_path / folder, ignore=shutil.ignore_patterns("target"))
    where = {"PYKV_LIBRARY_DIR": pykv.get_library_dir(), "CARGO_TARGET_DIR": str(tmp_path / "target")}
    printed = run("cargo", "test", "--offline", "--test", "decode", cwd=tmp_path / "examples" / "rust", env=where)
    assert "4 passed" in printed
    (declared,) = (tmp_path / "target").rglob("functions.rs")
    functions = set(re.findall(r"pub fn (\w+)\(", declared.read_text()))
    assert functions == set(declarations())
