"""With JAX a step is one compiled function of the caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from examples.checkpoints import prompts
from libraries import Library


@pytest.fixture
def engine(array: Library, checkpoint: Callable[..., Path]):
    if array.name != "jax":
        pytest.skip("JAX alone")
    from arrays import open_arrays
    from engine import Engine
    from llama import open_model

    model = open_model(checkpoint("llama"), open_arrays("jax", array.device, "float32"))
    return Engine(model, model.make_cache(64, 4), tokens_per_step=16)


def test_caches_are_updated_in_place(engine) -> None:
    """Also when a block that is shared is copied: the prefix ends within one."""
    caches = engine.cache.key_caches + engine.cache.value_caches
    before = [cache.unsafe_buffer_pointer() for cache in caches]
    texts = prompts(3, shared=10)
    engine.share_prefix(texts[0][:10])
    for tokens in texts:
        engine.add(tokens, 5)
    while engine.busy:
        engine.step()
    caches = engine.cache.key_caches + engine.cache.value_caches
    assert [cache.unsafe_buffer_pointer() for cache in caches] == before
    assert all(cache.any() for cache in caches)


def test_few_shapes_are_compiled(engine, monkeypatch) -> None:
    import llama_jax

    shapes, padded = set(), llama_jax._padded

    def watched(batch):
        result = padded(batch)
        shapes.add(tuple(x.shape for x in vars(result).values()))
        return result

    monkeypatch.setattr(llama_jax, "_padded", watched)
    for tokens in prompts(6):
        engine.add(tokens, 30)
    while engine.busy:
        engine.step()
    assert engine.counters.steps > 30
    assert len(shapes) <= 4
