"""However the work is cut, the tokens are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.checkpoints import prompts

Checkpoint = Callable[..., Path]


def generate(
    folder: Path,
    arrays: Any,
    texts: list[list[int]],
    *,
    step: int = 64,
    blocks: int = 64,
    shared: int = 0,
    new: int = 15,
    kv_dtype: str = "auto",
    **sampling: Any,
) -> tuple[list[list[int]], Any]:
    """The new tokens of each prompt, and the engine's counters."""
    from engine import Engine
    from llama import open_model

    model = open_model(folder, arrays)
    cache = model.make_cache(blocks, 4, kv_dtype)
    engine = Engine(model, cache, step)
    if shared:
        engine.share_prefix(texts[0][:shared])
    requests = [engine.add(tokens, new, **sampling) for tokens in texts]
    while engine.busy:
        engine.step()
    engine.close()
    assert cache.num_free_blocks == blocks
    return [r.tokens[r.prompt_length :] for r in requests], engine.counters


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_same_tokens_from_every_library(checkpoint: Checkpoint, arrays: Any, variant: str) -> None:
    from arrays import open_arrays

    folder, texts = checkpoint(variant), prompts(4)
    expected, _ = generate(folder, open_arrays("numpy"), texts)
    assert len({tuple(tokens) for tokens in expected}) == 4
    assert generate(folder, arrays, texts)[0] == expected


def test_batched_equals_alone(checkpoint: Checkpoint, arrays: Any) -> None:
    folder, texts = checkpoint("llama"), prompts(5)
    alone = [generate(folder, arrays, [tokens])[0][0] for tokens in texts]
    assert generate(folder, arrays, texts)[0] == alone


@pytest.mark.parametrize("step", [1, 3, 8])
def test_chunked_equals_whole(checkpoint: Checkpoint, arrays: Any, step: int) -> None:
    folder, texts = checkpoint("qwen3"), prompts(4)
    whole, _ = generate(folder, arrays, texts, step=1000)
    assert generate(folder, arrays, texts, step=step)[0] == whole


@pytest.mark.parametrize("shared", [8, 10])  # whole blocks, and a block that is copied when written
def test_forked_equals_fresh(checkpoint: Checkpoint, arrays: Any, shared: int) -> None:
    folder, texts = checkpoint("llama"), prompts(4, shared=shared)
    fresh, without = generate(folder, arrays, texts)
    forked, counters = generate(folder, arrays, texts, shared=shared, step=7)
    assert forked == fresh
    assert without.prompt_tokens - counters.prompt_tokens == 3 * shared
    assert counters.peak_blocks < without.peak_blocks


def test_too_small_a_cache_only_takes_longer(checkpoint: Checkpoint, arrays: Any) -> None:
    folder, texts = checkpoint("llama"), prompts(5)
    ample, unhurried = generate(folder, arrays, texts)
    tight, counters = generate(folder, arrays, texts, blocks=12)
    assert tight == ample
    assert unhurried.preemptions == 0
    assert counters.preemptions > 0


def test_no_room_for_a_single_sequence(checkpoint: Checkpoint, arrays: Any) -> None:
    import pykv

    with pytest.raises(pykv.OutOfBlocks):
        generate(checkpoint("llama"), arrays, prompts(1, shared=18), blocks=3)


def test_end_token_ends_a_sequence(checkpoint: Checkpoint, arrays: Any, tmp_path: Path) -> None:
    folder, texts = checkpoint("llama"), prompts(2)
    endless, _ = generate(folder, arrays, texts)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    end = endless[0][6]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{end}]}}')
    ended, _ = generate(tmp_path, arrays, texts)
    assert ended[0] == endless[0][: endless[0].index(end) + 1]
    assert ended[1] == (endless[1][: endless[1].index(end) + 1] if end in endless[1] else endless[1])


def test_length_stops_at_what_the_model_knows(checkpoint: Checkpoint, arrays: Any) -> None:
    folder, texts = checkpoint("llama"), prompts(1, shared=110)
    (tokens,), _ = generate(folder, arrays, texts, new=100)
    assert len(texts[0]) + len(tokens) == 128
    with pytest.raises(ValueError, match="a prompt must have 1 to 127 tokens, got 128"):
        generate(folder, arrays, [[2] * 128])
    with pytest.raises(ValueError, match="a prompt must have 1 to 127 tokens, got 0"):
        generate(folder, arrays, [[]])


def test_no_new_tokens_wanted(checkpoint: Checkpoint, arrays: Any) -> None:
    tokens, counters = generate(checkpoint("llama"), arrays, prompts(2), new=0)
    assert tokens == [[], []]
    assert counters.steps == 0


def test_sampling_depends_on_seed_and_prompt_alone(checkpoint: Checkpoint, arrays: Any) -> None:
    from arrays import open_arrays

    folder, texts = checkpoint("llama"), prompts(3)
    one, _ = generate(folder, arrays, texts, temperature=1.0, seed=1)
    assert generate(folder, arrays, texts, temperature=1.0, seed=1, step=5)[0] == one
    assert generate(folder, open_arrays("numpy"), texts, temperature=1.0, seed=1)[0] == one
    assert generate(folder, arrays, texts[:1], temperature=1.0, seed=1)[0] == one[:1]
    assert generate(folder, arrays, texts, temperature=1.0, seed=2)[0] != one
    assert generate(folder, arrays, texts)[0] != one


def test_fp8_cache_generates(checkpoint: Checkpoint, arrays: Any) -> None:
    folder, texts = checkpoint("qwen3"), prompts(3)
    tokens, counters = generate(folder, arrays, texts, kv_dtype="fp8_e4m3")
    assert generate(folder, arrays, texts, kv_dtype="fp8_e4m3", step=3)[0] == tokens
    assert counters.generated_tokens == sum(map(len, tokens))


def test_every_library_draws_the_same_from_equal_logits(arrays: Any) -> None:
    from arrays import open_arrays

    random = np.random.default_rng(5)
    logits = random.normal(size=(64, 500)).astype(np.float32)
    logits[:, 7] = logits[:, 499] = 3  # which ties with the largest of some rows
    seeds, steps = (random.integers(0, 2**31, 64).astype(np.int32) for _ in range(2))
    temperatures = random.choice([0, 0.3, 1, 5], 64).astype(np.float32)
    tokens = arrays.host(arrays.sample(arrays.put(logits), seeds, steps, temperatures))
    assert tokens.tolist() == open_arrays("numpy").sample(logits, seeds, steps, temperatures).tolist()
    greedy = temperatures == 0
    assert (tokens == logits.argmax(-1))[greedy].all()
    assert not (tokens == logits.argmax(-1))[~greedy].all()


def test_a_request_that_is_ended_leaves_its_blocks(checkpoint: Checkpoint, arrays: Any) -> None:
    from engine import Engine
    from llama import open_model

    model = open_model(checkpoint("llama"), arrays)
    engine = Engine(model, model.make_cache(64, 4), 64)
    one, two = (engine.add(tokens, 15) for tokens in prompts(2))
    engine.step()
    engine.end(one)
    while engine.busy:
        engine.step()
    assert one.finished
    assert len(one.tokens) == one.prompt_length + 1
    assert len(two.tokens) == two.prompt_length + 15
    assert engine.cache.num_free_blocks == 64


def test_a_request_is_ended_before_it_was_computed(checkpoint: Checkpoint, arrays: Any) -> None:
    """While it waits, and when there was no room to begin it."""
    from engine import Engine
    from llama import open_model

    import pykv

    model = open_model(checkpoint("llama"), arrays)
    engine = Engine(model, model.make_cache(8, 4), 64)
    one, two = (engine.add(tokens, 3) for tokens in prompts(2))
    engine.end(one)
    while engine.busy:
        engine.step()
    assert (one.prompt_length, len(two.tokens) - two.prompt_length) == (len(one.tokens), 3)
    large = engine.add([2] * 40, 3)
    with pytest.raises(pykv.OutOfBlocks):
        engine.step()
    engine.end(large)
    assert not engine.busy
    assert engine.cache.num_free_blocks == 8


def test_another_prefix_takes_the_place_of_the_first(checkpoint: Checkpoint, arrays: Any) -> None:
    from engine import Engine
    from llama import open_model

    folder, texts = checkpoint("llama"), prompts(2, shared=9)
    expected, _ = generate(folder, arrays, texts)
    model = open_model(folder, arrays)
    engine = Engine(model, model.make_cache(64, 4), 64)
    engine.share_prefix([2] * 7)
    engine.share_prefix(texts[0][:9])
    requests = [engine.add(tokens, 15) for tokens in texts]
    while engine.busy:
        engine.step()
    engine.close()
    assert [r.tokens[r.prompt_length :] for r in requests] == expected
    assert engine.cache.num_free_blocks == 64


def test_memory_of_a_copy_that_nobody_reads_is_kept() -> None:
    """As CuPy gives it back at once; here a stand-in for CuPy."""
    from types import SimpleNamespace

    from arrays import NumpyArrays

    class Event:
        done = False

        def record(self) -> None:
            events.append(self)

        def synchronize(self) -> None:
            self.done = True

    class OnDevice(np.ndarray):
        def get(self, out: np.ndarray, blocking: bool) -> None:
            assert not blocking
            out[:] = self

    events: list[Event] = []
    cuda = SimpleNamespace(alloc_pinned_memory=bytearray, Event=Event)
    arrays = NumpyArrays(SimpleNamespace(cuda=cuda), "float32")  # type: ignore[arg-type]
    x = np.arange(3).view(OnDevice)
    for _ in range(3):  # as of steps that are dropped
        arrays.reader(x)
    assert len(arrays._copies) == 3
    events[1].done = True
    assert arrays.reader(x)().tolist() == [0, 1, 2]
    assert [event for event, _ in arrays._copies] == [events[0], *events[2:]]


@pytest.mark.parametrize("blocks", [64, 12])
def test_a_device_that_is_ahead_gives_the_same_tokens(
    checkpoint: Checkpoint, arrays: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """The host sees the tokens of a step when the next one has started; requests that end are in that one."""
    from engine import Engine
    from llama import open_model

    folder, texts = checkpoint("llama"), prompts(5)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    monkeypatch.setattr(arrays, "asynchronous", False)
    end = generate(folder, arrays, texts, temperature=0.5)[0][0][6]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{end}]}}')
    expected, in_turn = generate(tmp_path, arrays, texts, temperature=0.5)
    assert len({len(tokens) for tokens in expected}) > 1

    monkeypatch.setattr(arrays, "asynchronous", True)
    tokens, ahead = generate(tmp_path, arrays, texts, temperature=0.5, blocks=blocks)
    assert tokens == expected
    assert ahead.generated_tokens == in_turn.generated_tokens

    model = open_model(folder, arrays)
    engine = Engine(model, model.make_cache(64, 4), 64)
    one, two = (engine.add(tokens, 15) for tokens in texts[:2])
    engine.step()
    assert engine._ahead is not None
    engine.end(one)  # by the caller, while the next step is under way
    three = engine.add(texts[2], 15)
    while engine.busy:
        engine.step()
    assert [len(r.tokens) - r.prompt_length for r in (one, two, three)] == [1, 15, 15]
    assert engine.cache.num_free_blocks == 64


def test_replayed_steps_give_the_same_tokens(checkpoint: Checkpoint, arrays: Any) -> None:
    """Also where a step of more sequences is replayed for fewer; here by a stand-in for CUDA graphs."""
    torch = pytest.importorskip("torch")
    if arrays.namespace is not torch:
        pytest.skip("with torch alone")
    from cuda_graphs import Captured
    from engine import Engine
    from llama import open_model

    class Again(Captured):
        def _record(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
            result = run()
            return lambda: result.copy_(run()), result

    folder, texts = checkpoint("qwen3-alternating"), prompts(11)
    expected = [generate(folder, arrays, [tokens], new=12 + i)[0][0] for i, tokens in enumerate(texts)]
    model = open_model(folder, arrays)
    model.forward = captured = Again(torch, model.forward)
    engine = Engine(model, model.make_cache(128, 4), 64)
    requests = [engine.add(tokens, 12 + i) for i, tokens in enumerate(texts)]
    while engine.busy:
        engine.step()
    assert [r.tokens[r.prompt_length :] for r in requests] == expected
    assert {sequences for sequences, _ in captured.steps} <= {1, 2, 4, 8, 16}
    assert len(captured.steps) > 4
