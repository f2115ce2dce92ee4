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


NESTED = {
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "no_attention": None,
    },
}
GEMMA_3 = {
    "model_type": "gemma3_text",
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}


@pytest.mark.parametrize(("config", "share"), [(NESTED, 0.5), (GEMMA_3, 1), (GEMMA_3 | {"model_type": None}, 1)])
def test_rope_by_layer_type(config, share):
    full = rope.frequencies_of_config(config, 128, layer_type="full_attention")
    np.testing.assert_allclose(full.inverse, rope.linear(128, 1e6, 8.0).inverse)
    sliding = rope.frequencies_of_config(config, 128, layer_type="sliding_attention")
    np.testing.assert_allclose(sliding.inverse, rope.default(int(128 * share), 1e4).inverse)
    table = rope.cache_of_config(config, 128, 9, layer_type="sliding_attention")
    np.testing.assert_array_equal(table, rope.cos_sin_cache(sliding, 9))
    with pytest.raises(ValueError, match=r"^layer_type: is required, .*: full_attention, sliding_attention$"):
        rope.frequencies_of_config(config, 128)
    with pytest.raises(ValueError, match=r"^layer_type: must be one of full_attention, sliding_.*, got 'full'$"):
        rope.frequencies_of_config(config, 128, layer_type="full")


def test_a_layer_type_in_other_configs():
    with pytest.raises(ValueError, match="no_attention is null: layers of this type have no rope"):
        rope.parameters_of_config(NESTED, "no_attention")
    stray = {"rope_parameters": NESTED["rope_parameters"] | {"rope_theta": 5.0}}
    assert rope.parameters_of_config(stray, "full_attention")["rope_theta"] == 1e6
    stray["rope_parameters"] |= {"beta_fast": 5.0}
    with pytest.raises(ValueError, match=r"^config: beta_fast: not understood beside the types of layers"):
        rope.parameters_of_config(stray, "full_attention")
    flat = {"rope_theta": 5e5, "layer_types": ["full_attention", "sliding_attention"]}
    assert rope.parameters_of_config(flat, "sliding_attention")["rope_theta"] == 5e5
    with pytest.raises(ValueError, match=r"^layer_type: must be one of full_attention, sliding_attention, got 'full'"):
        rope.parameters_of_config(flat, "full")
    olmo = {"model_type": "olmo3", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert rope.parameters_of_config(olmo, "full_attention")["rope_type"] == "linear"
    assert rope.parameters_of_config(olmo, "sliding_attention")["rope_type"] == "default"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"rotary_dim": 64, "rope_theta": 5e6}, rope.default(64, 5e6)),
        ({"rotary_pct": 0.25, "rotary_emb_base": 2e4}, rope.default(32, 2e4)),
        ({"rotary_emb_fraction": 0.5, "rotary_emb_scale_base": None}, rope.default(64)),
        ({"model_type": "glm"}, rope.default(64)),
        ({"model_type": "gpt_neox"}, rope.default(32)),
        ({"model_type": "smollm3"}, rope.default(128, 2e6)),
        ({"model_type": "chatglm", "rope_ratio": 500, "original_rope": True}, rope.default(64, 5e6)),
        ({"rotary_dim": 64, "partial_rotary_factor": 0.5}, rope.default(64)),
        (
            {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "beta_slow": 1}},
            rope.default(128, 1e4 * 1000 ** (128 / 126)),
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [2.0] * 64, "long_factor": [4.0] * 64, "factor": 1.0}},
            rope.linear(128, 1e4, 2.0),
        ),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]}}, rope.default(128)),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attn_factor": 0.5, "extrapolation_factor": 0.9}},
            rope.yarn(128, 1e4, 4.0, 4096, extrapolation_factor=0.9, attention_factor=0.5 * (0.1 * math.log(4) + 1)),
        ),
    ],
)
def test_other_names(config, wanted):
    ours = rope.frequencies_of_config({"max_position_embeddings": 4096} | config, 128)
    np.testing.assert_allclose(ours.inverse, wanted.inverse)
    assert ours.magnitude == pytest.approx(wanted.magnitude)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling_factor": 2.0}, "config: rope_scaling_factor: not understood"),
        ({"use_dynamic_ntk": True}, "config: use_dynamic_ntk: not understood"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 3}}, "beta_fast: .* by rope type 'linear'"),
        ({"rope_scaling": {"factor": 2.0}}, "config: factor: not understood by rope type 'default'"),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}},
            "rope_type = 'linear' and type = 'yarn'",
        ),
        ({"rope_scaling": {"rope_type": 3}}, "config: rope_type: must be a string, got 3"),
        ({"rope_scaling": "linear"}, "config: rope_scaling: must be a mapping, got str"),
        ({"rope_theta": [1e4, 1e6]}, r"config: rope_theta: must be a positive number, got \[10000.0, 1000000.0\]"),
        ({"partial_rotary_factor": 4.0}, "config: partial_rotary_factor: must be a number between 0 and 1, got 4.0"),
        (
            {"partial_rotary_factor": 0.5, "rotary_dim": 32},
            "partial_rotary_factor .*= 64 and rotary_dim = 32 contradict",
        ),
        ({"partial_rotary_factor": 0.31}, "partial_rotary_factor of 128: must be even .*, got 39 elements"),
        ({"rotary_dim": 256}, "rotary_dim: must be even and within a head of 128, got 256"),
        ({"rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 2.0}}, "factor = 2.0 .* contradict"),
        ({"model_type": "qwen2_vl_vision"}, "config: model_type 'qwen2_vl_vision' does not rotate by positions alone"),
        ({"model_type": "gemma4_text"}, "config: model_type 'gemma4_text' needs rope_parameters for each type"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 4.0}},
            "rope_scaling's factor = 2.0 and rope_parameters' factor = 4.0 contradict each other",
        ),
    ],
)
def test_what_is_not_understood_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        rope.frequencies_of_config({"max_position_embeddings": 4096} | config, 128)


def test_odd_heads_and_text_configs_are_told():
    with pytest.raises(ValueError, match=r"^head_size: must be a positive integer, got 0$"):
        rope.frequencies_of_config({"rope_theta": 1e4}, 0)
    with pytest.raises(ValueError, match=r"text_config speaks of rope: give config\['text_config'\]"):
        rope.frequencies_of_config({"model_type": "any", "text_config": {"rope_theta": 1e4}}, 64)
    with pytest.raises(TypeError, match=r"^config: must be a mapping"):
        rope.frequencies_of_config("config.json", 64)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": None},
        {"partial_rotary_factor": None},
        {"rope_scaling": None, "rope_parameters": None},
        {"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None, "beta_fast": None}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": None, "truncate": None}},
    ],
)
def test_null_is_absence(change):
    def without(mapping):
        return {k: without(v) if isinstance(v, dict) else v for k, v in mapping.items() if v is not None}

    config = {"max_position_embeddings": 32768} | change
    ours, wanted = (rope.frequencies_of_config(c, 128) for c in (config, without(config)))
    np.testing.assert_array_equal(ours.inverse, wanted.inverse)
    assert ours.magnitude == wanted.magnitude


def test_each_position_has_the_factors_of_its_own_length():
    config = config_of("longrope")
    config["rope_scaling"] = config["rope_scaling"] | {"short_mscale": 1.5, "long_mscale": 1.5}
    each = rope.frequencies_of_config(config, 64, np.array([1, 4096, 4097]))
    plain = rope.default(64).inverse
    np.testing.assert_allclose(each.inverse, [plain / SHORT, plain / SHORT, plain / LONG])
    table = rope.cos_sin_cache(each, 3)
    np.testing.assert_allclose(table[2, :32], 1.5 * np.cos(2 * plain / LONG), rtol=1e-5)
    config["rope_scaling"]["short_mscale"] = 1.25
    assert [rope.frequencies_of_config(config, 64, n).magnitude for n in (4096, 4097)] == [1.25, 1.5]
    with pytest.raises(ValueError, match="length: must be one number where short_mscale and long_mscale"):
        rope.frequencies_of_config(config, 64, np.array([1, 4097]))
    dynamic = rope.frequencies_of_config(config_of("dynamic"), 64, np.array([1, 8000])).inverse
    np.testing.assert_allclose(dynamic[1], rope.frequencies_of_config(config_of("dynamic"), 64, 8000).inverse)
    np.testing.assert_array_equal(dynamic[0], plain)


def test_what_is_no_table_of_frequencies_is_told():
    with pytest.raises(TypeError, match=r"frequencies: must be Frequencies, such as default\(rotary_dim\), got int"):
        rope.cos_sin_cache(64, 1000)
    with pytest.raises(ValueError, match="rotary_dim: must be even, got 33"):
        rope.default(33)
    with pytest.raises(ValueError, match="rotary_dim: must be more than 2 where the base grows, got 2"):
        rope.dynamic_ntk(2, 1e4, 2.0, 100, 200)
