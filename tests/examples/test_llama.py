"""The model of the examples computes what transformers computes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.checkpoints import VARIANTS, logits_of, prompts

Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for one another."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def transformers_model(folder: Path) -> Any:
    torch = pytest.importorskip("torch")
    AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def transformers_logits(folder: Path, tokens: tuple[int, ...]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return transformers_model(folder)(torch.tensor([tokens])).logits[0].numpy()  # type: ignore[no-any-return]


@cache
def transformers_greedy(folder: Path, tokens: tuple[int, ...], count: int) -> list[int]:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([tokens])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, "do_sample": False}
    return transformers_model(folder).generate(ids, **options)[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(checkpoint: Checkpoint, arrays: Any, variant: str) -> None:
    folder, tokens = checkpoint(variant), prompts(1, shared=18)[0]
    expected = transformers_logits(folder, tuple(tokens))
    assert np.ptp(expected, axis=1).min() > 1  # not all alike
    np.testing.assert_allclose(logits_of(folder, arrays, tokens, chunk=len(tokens)), expected, atol=2e-4, rtol=1e-4)
    np.testing.assert_allclose(logits_of(folder, arrays, tokens, chunk=5), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_those_of_transformers(checkpoint: Checkpoint, arrays: Any, variant: str) -> None:
    """40 tokens each, which takes the dynamic variant beyond the length it was trained for."""
    from engine import Engine
    from llama import open_model

    folder = checkpoint(variant)
    model = open_model(folder, arrays)
    engine = Engine(model, model.make_cache(64, 4), tokens_per_step=8)
    texts = prompts(3)
    requests = [engine.add(tokens, max_new_tokens=40) for tokens in texts]
    while engine.busy:
        engine.step()
    for text, request in zip(texts, requests, strict=True):
        if variant == "llama-dynamic":  # logits of a token depend on how long the text was when it was computed
            assert request.tokens == transformers_greedy(folder, tuple(text), 40)
            continue
        best = transformers_logits(folder, tuple(request.tokens[:-1])).argmax(-1)
        assert len(request.tokens) == len(text) + 40
        assert best[len(text) - 1 :].tolist() == request.tokens[len(text) :]  # each is the likeliest after those before


def test_checkpoint_in_parts(checkpoint: Checkpoint, arrays: Any) -> None:
    whole, parts = checkpoint("llama"), checkpoint("llama", parts=3)
    assert len(list(parts.glob("*.safetensors"))) == 3
    tokens = prompts(1)[0]
    np.testing.assert_array_equal(logits_of(parts, arrays, tokens, 64), logits_of(whole, arrays, tokens, 64))


def test_fp8_cache_is_near_but_not_equal(checkpoint: Checkpoint, arrays: Any) -> None:
    folder, tokens = checkpoint("llama"), prompts(1, shared=18)[0]
    exact = logits_of(folder, arrays, tokens, chunk=5)
    fp8 = logits_of(folder, arrays, tokens, chunk=5, kv_dtype="fp8_e4m3")
    error = np.linalg.norm(fp8 - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "starcoder2 are served, got 'gemma'"),
        ({"hidden_act": "relu"}, "hidden_act: 'relu' is not served"),
        ({"rope_parameters": {"rope_type": "xpos", "rope_theta": 1e4}}, "rope type 'xpos' is not supported"),
    ],
)
def test_unsupported_models_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    from arrays import open_arrays
    from llama import open_model

    folder = checkpoint("llama")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | change))
    with pytest.raises(ValueError, match=message):
        open_model(tmp_path, open_arrays("numpy"))


def test_old_and_new_spelling_of_rope_agree() -> None:
    from rope import rope_table

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}, "max_position_embeddings": 256}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}, "max_position_embeddings": 256}
    plain = {"rope_theta": 5e5, "max_position_embeddings": 256}
    np.testing.assert_array_equal(rope_table(old, 64, 100), rope_table(new, 64, 100))
    assert np.abs(rope_table(old, 64, 100) - rope_table(plain, 64, 100)).max() > 0.1
