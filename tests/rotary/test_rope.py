"""Tables of angles, by closed forms and against transformers."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pykv
from pykv import rope

LONG = [1.0 + 0.1 * i for i in range(32)]
SHORT = [1.0 + 0.01 * i for i in range(32)]
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 5e5},
    "partial": {"partial_rotary_factor": 0.5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {
        "rope_theta": 5e5,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
    "yarn, blended within pairs": {
        "rope_theta": 1.5e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "yarn of DeepSeek": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        }
    },
    "yarn, sharpened by hand": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.0,
            "attention_factor": 1.25,
            "original_max_position_embeddings": 4096,
        }
    },
    "longrope": {
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": 4096,
        },
    },
    "proportional": {
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    },
}


def config_of(name: str) -> dict[str, Any]:
    return {"max_position_embeddings": 4096, "rope_theta": 10000.0} | CONFIGS[name]


@pytest.mark.parametrize("length", [None, 3000, 20000])
@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_those_of_transformers(name, length):
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = config_of(name)
    theirs = transformers.LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, **config)
    if not hasattr(theirs, "standardize_rope_params"):
        pytest.skip("a transformers of before 5")
    theirs.standardize_rope_params()
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        from transformers.models.glm.modeling_glm import GlmRotaryEmbedding  # which knows partial rotation

        module = GlmRotaryEmbedding(theirs)
        inverse, magnitude = module.inv_freq, module.attention_scaling
    elif kind in utils.ROPE_INIT_FUNCTIONS:
        inverse, magnitude = utils.ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=length)
    else:
        pytest.skip(f"this transformers does not know {kind}")
    ours = rope.frequencies_of_config(config, 64, length)
    np.testing.assert_allclose(ours.inverse, inverse.numpy(), rtol=2e-6)
    assert ours.magnitude == pytest.approx(magnitude, rel=1e-7)


def test_default_frequencies():
    np.testing.assert_allclose(rope.default(4, 100.0).inverse, [1, 0.1])
    assert rope.default(4).magnitude == 1
    assert len(rope.default(0).inverse) == 0


def test_linear_scaling_divides_positions():
    plain = rope.cos_sin_cache(rope.default(8), 20)
    np.testing.assert_allclose(rope.cos_sin_cache(rope.linear(8, 1e4, 4.0), 80)[::4], plain, atol=2e-6)


def test_dynamic_scaling_begins_beyond_the_trained_length():
    np.testing.assert_array_equal(rope.dynamic_ntk(8, 1e4, 2.0, 100, 100).inverse, rope.default(8).inverse)
    grown = rope.dynamic_ntk(8, 1e4, 2.0, 100, 150).inverse  # the base doubles to the power of 8 / 6
    np.testing.assert_allclose(grown, rope.default(8, 1e4 * 2 ** (8 / 6)).inverse)
    each = rope.dynamic_ntk(8, 1e4, 2.0, 100, np.array([1, 100, 150]))
    np.testing.assert_allclose(each.inverse, [rope.default(8).inverse, rope.default(8).inverse, grown])
    table = rope.cos_sin_cache(each, 3)
    np.testing.assert_allclose(table[2, :4], np.cos(2 * grown), rtol=1e-6)


def test_llama3_keeps_fast_pairs_and_slows_slow_ones():
    inverse, plain = rope.llama3(64, 5e5, 8.0, 1.0, 4.0, 8192).inverse, rope.default(64, 5e5).inverse
    waves = 2 * math.pi / plain
    np.testing.assert_array_equal(inverse[waves < 8192 / 4], plain[waves < 8192 / 4])
    np.testing.assert_allclose(inverse[waves > 8192], plain[waves > 8192] / 8)
    between = (waves > 8192 / 4) & (waves < 8192)
    assert between.any()
    share = (8192 / waves[between] - 1) / 3
    np.testing.assert_allclose(inverse[between], (1 - share) * plain[between] / 8 + share * plain[between])
    step = rope.llama3(64, 5e5, 8.0, 1.0, 1.0, 8192).inverse
    np.testing.assert_allclose(step, np.where(waves < 8192, plain, plain / 8))


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    frequencies, plain = rope.yarn(128, 1e4, 16.0, 4096), rope.default(128, 1e4).inverse
    # pairs at which 4096 positions are 32 turns and 1 turn: 20.95 and 45.03
    ramp = np.clip((np.arange(64) - 20) / (46 - 20), 0, 1)
    np.testing.assert_allclose(frequencies.inverse, plain * (1 - ramp) + plain / 16 * ramp)
    assert frequencies.magnitude == pytest.approx(0.1 * math.log(16) + 1)
    assert rope.yarn(128, 1e4, 0.5, 4096).magnitude == 1
    assert rope.yarn(128, 1e4, 16.0, 4096, attention_factor=0.7).magnitude == 0.7
    both = rope.yarn(128, 1e4, 16.0, 4096, mscale=2.0, mscale_all_dim=0.5).magnitude
    assert both == pytest.approx((0.2 * math.log(16) + 1) / (0.05 * math.log(16) + 1))
    half = rope.yarn(128, 1e4, 16.0, 4096, extrapolation_factor=0.5).inverse
    np.testing.assert_allclose(half[:20], plain[:20] * (1 + 1 / 16) / 2)
    step = rope.yarn(8, 1e4, 16.0, 4096, beta_fast=1.0, truncate=False).inverse  # nothing between
    np.testing.assert_allclose(step, rope.default(8).inverse * [1, 1, 1, 1 / 16])


def test_longrope():
    frequencies = rope.longrope(64, 1e4, LONG, 4096, 32.0)
    np.testing.assert_allclose(frequencies.inverse, rope.default(64).inverse / LONG)
    assert frequencies.magnitude == pytest.approx(math.sqrt(1 + 5 / 12))
    assert rope.longrope(64, 1e4, LONG, 4096, 1.0).magnitude == 1
    with pytest.raises(ValueError, match="factors: one for each of 16 pairs is needed, got 32"):
        rope.longrope(32, 1e4, LONG, 4096, 32.0)
    config = config_of("longrope")
    for length, factors in ((4096, SHORT), (4097, LONG)):
        inverse = rope.frequencies_of_config(config, 64, length).inverse
        np.testing.assert_allclose(inverse, rope.default(64).inverse / factors)


def test_proportional():
    inverse = rope.proportional(64, 1e4, 0.25).inverse
    np.testing.assert_array_equal(inverse[:8], rope.default(64).inverse[:8])
    assert (inverse[8:] == 0).all()
    assert len(inverse) == 32


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tables(dtype):
    table = rope.cos_sin_cache(rope.Frequencies(np.array([1.0, 0.1]), 1.5), 5, dtype=dtype)
    angles = np.arange(5)[:, None] * [1, 0.1]
    wanted = 1.5 * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    assert table.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
    np.testing.assert_allclose(table.astype(np.float64), wanted, atol=1e-6 if dtype == "float32" else 8e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_table_is_of_the_library_that_is_asked_for(array, dtype):
    if array.name == "interface":
        pytest.skip("no library that makes arrays")
    like = array.input(np.zeros(3, np.float32))
    table = rope.cache_of_config(config_of("llama3"), 64, 50, dtype=dtype, like=like)
    assert type(table) is type(like)
    wanted = rope.cache_of_config(config_of("llama3"), 64, 50, dtype=dtype)
    np.testing.assert_array_equal(array.numpy(table).astype(np.float32), wanted.astype(np.float32))
    query = array.output(np.ones((4, 2, 64), np.float32))
    pykv.rotary_embedding(array.input(np.arange(4)), query, None, 64, table, True)
    cosines, sines = np.split(wanted[:4].astype(np.float32), 2, axis=1)
    np.testing.assert_allclose(array.numpy(query)[:, 1], np.hstack([cosines - sines, cosines + sines]), atol=1e-6)


def test_old_and_new_spelling_of_a_config_agree():
    old = config_of("llama3")
    new = {"max_position_embeddings": 131072, "rope_parameters": {"rope_theta": 5e5, **old["rope_scaling"]}}
    older = old | {"rope_scaling": {"type": "llama3", **old["rope_scaling"]}}
    del older["rope_scaling"]["rope_type"]
    tables = [rope.cache_of_config(config, 64, 1000) for config in (old, new, older)]
    np.testing.assert_array_equal(tables[0], tables[1])
    np.testing.assert_array_equal(tables[0], tables[2])
    assert np.abs(tables[0] - rope.cos_sin_cache(rope.default(64, 5e5), 1000)).max() > 0.1


def test_a_type_that_is_not_known_is_named():
    with pytest.raises(ValueError, match="rope type 'xpos' is not supported"):
        rope.frequencies_of_config({"max_position_embeddings": 8, "rope_scaling": {"rope_type": "xpos"}}, 64)
    with pytest.raises(TypeError, match="like: must be an array or the module of NumPy, CuPy, torch or JAX, got str"):
        rope.cos_sin_cache(rope.default(8), 4, like="numpy")


def test_what_a_config_lacks_is_named():
    with pytest.raises(ValueError, match=r"^config: max_position_embeddings is required, got hidden_size$"):
        rope.frequencies_of_config({"hidden_size": 64}, 64)
    lacking = {"max_position_embeddings": 8, "rope_scaling": {"rope_type": "linear"}}
    with pytest.raises(ValueError, match=r"^config: factor is required, got .*rope_type"):
        rope.frequencies_of_config(lacking, 64)


def test_what_is_no_table_of_frequencies_is_told():
    with pytest.raises(TypeError, match=r"frequencies: must be Frequencies, such as default\(rotary_dim\), got int"):
        rope.cos_sin_cache(64, 1000)
    with pytest.raises(ValueError, match="rotary_dim: must be even, got 33"):
        rope.default(33)
