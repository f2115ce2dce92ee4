"""Every family computes what transformers computes, from a checkpoint that transformers wrote."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.checkpoints import logits_of, prompts

SMALL = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
NO_HEAD_DIM = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None}  # 48 / 3 = 16
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], "long_factor": [4.0] * 6,
    "partial_rotary_factor": 0.75,
}  # fmt: skip
# By the name of the class in transformers: what differs from SMALL.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "head_dim": None, "num_attention_heads": 3,
                        "num_key_value_heads": 1}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1} | NO_HEAD_DIM),
    "qwen3-bias": ("Qwen3", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "phi3": ("Phi3", {"sliding_window": 7} | NO_HEAD_DIM),
    "phi4-mini": ("Phi3", {"rope_parameters": LONGROPE, "tie_word_embeddings": True} | NO_HEAD_DIM),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2} | NO_HEAD_DIM),
    "gemma2": ("Gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
                          "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {
        "num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    }),
    "olmo2": ("Olmo2", dict(NO_HEAD_DIM)),
    "glm4": ("Glm4", {"attention_bias": True}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4,
                            "logits_scaling": 2.0, "tie_word_embeddings": True} | NO_HEAD_DIM),
    "starcoder2": ("Starcoder2", {"sliding_window": 6, "tie_word_embeddings": True} | NO_HEAD_DIM),
}  # fmt: skip
NEW = 20


class Reference:
    """A random model of transformers, and the folder that it was saved to."""

    def __init__(self, variant: str, folder: Path):
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers", minversion="5.0")
        name, differing = VARIANTS[variant]
        options = {
            k: v for k, v in (SMALL | differing).items() if v is not None or k in ("eos_token_id", "sliding_window")
        }
        config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # products this small only wait for one another
        torch.manual_seed(sum(variant.encode()))
        config = config_class(**options, attn_implementation="eager")  # "sdpa", the default of many, drops soft caps
        self.model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0, 0.25)
                else:  # norms and biases
                    parameter.uniform_(0.5, 1.5)
        self.model.save_pretrained(folder)
        torch.set_num_threads(threads)
        self.folder = folder

    @cache  # noqa: B019  # a few models for the length of the session
    def logits(self, tokens: tuple[int, ...]) -> np.ndarray:
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].numpy()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return cache(lambda variant: Reference(variant, tmp_path_factory.mktemp(variant)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_family_equals_transformers(reference: Callable[[str], Reference], arrays: Any, variant: str) -> None:
    """Logits of a prompt, whole and in chunks; greedy tokens, batched and alone."""
    from engine import Engine
    from llama import open_model

    expected = reference(variant)
    tokens = prompts(1, shared=18)[0]
    logits = expected.logits(tuple(tokens))
    assert np.ptp(logits, axis=1).min() > 1  # not all alike
    for chunk in (len(tokens), 5):
        got = logits_of(expected.folder, arrays, tokens, chunk=chunk)
        np.testing.assert_allclose(got, logits, atol=2e-4, rtol=1e-4)

    model, texts = open_model(expected.folder, arrays), prompts(3)
    made = []
    for batch in (texts, texts[:1]):
        engine = Engine(model, model.make_cache(64, 4), tokens_per_step=8)
        requests = [engine.add(ids, max_new_tokens=NEW) for ids in batch]
        while engine.busy:
            engine.step()
        made.append([r.tokens for r in requests])
    assert made[1] == made[0][:1]
    for text, whole in zip(texts, made[0], strict=True):
        assert len(whole) == len(text) + NEW
        best = expected.logits(tuple(whole[:-1])).argmax(-1)  # each token is the likeliest after those before it
        assert best[len(text) - 1 :].tolist() == whole[len(text) :]


@pytest.mark.parametrize(
    ("name", "of_text", "vision"),
    [
        ("Gemma3", {"sliding_window": 5, "query_pre_attn_scalar": 24}, {}),
        ("Mistral3", {"model_type": "mistral", "sliding_window": None}, {"model_type": "pixtral", "head_dim": 16}),
    ],
)
def test_the_part_for_text_of_a_model_for_images(
    tmp_path: Path, name: str, of_text: dict[str, Any], vision: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from arrays import open_arrays

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "image_size": 28, "patch_size": 14}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(text_config=SMALL | of_text, vision_config=small | vision)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25)
    model.save_pretrained(tmp_path)
    tokens = prompts(1, shared=18)[0]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(logits_of(tmp_path, open_arrays("numpy"), tokens, 5), expected, atol=2e-4, rtol=1e-4)


NOTES = {"transformers_version": "4.49.0", "torch_dtype": "bfloat16", "use_cache": True, "attention_dropout": 0.0,
         "initializer_range": 0.02, "bos_token_id": 1, "rope_scaling": None}  # fmt: skip
SIZES = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
         "hidden_act": "silu"}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"model_type": "llama", "pretraining_tp": 1, "attention_bias": False, "eos_token_id": [5, 6]},
         {"end_ids": {5, 6}, "windows": [None] * 6, "attention_scale": 24**-0.5}),
        ({"model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "rope_theta": 100000},
         {"is_neox": True}),
        ({"model_type": "qwen2", "max_window_layers": 4, "sliding_window": 32768, "use_sliding_window": False},
         {"windows": [None] * 6}),
        ({"model_type": "mistral", "sliding_window": 4096, "rope_theta": 10000.0}, {"windows": [4096] * 6}),
        ({"model_type": "phi3", "auto_map": {}, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "full_attn_mod": 1,
          "interpolate_factor": 1, "lm_head_bias": False, "partial_rotary_factor": 0.75, "sliding_window": None,
          "original_max_position_embeddings": 4096}, {"windows": [None] * 6}),
        ({"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0, 1, 1], "no_rope_layer_interval": 4,
          "layer_types": ["full_attention"] * 6, "use_sliding_window": False, "max_window_layers": 28},
         {"ropes": ["full_attention"] * 3 + [None] + ["full_attention"] * 2}),
        ({"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
          "attn_logit_softcapping": 50.0, "final_logit_softcapping": None, "query_pre_attn_scalar": 256,
          "sliding_window": 7, "cache_implementation": "hybrid"},
         {"windows": [7, None] * 3, "attention_scale": 1 / 16, "attention_softcap": 50.0, "logit_softcap": None,
          "embedding_scale": 96**0.5}),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 4, "sliding_window": 7, "hidden_act": None},
         {"attention_softcap": 50, "logit_softcap": 30}),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None,
          "final_logit_softcapping": None, "rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window": 7,
          "sliding_window_pattern": 3, "cache_implementation": "hybrid", "hidden_act": None},
         {"windows": [7, 7, None] * 2, "ropes": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
          "attention_softcap": None, "attention_scale": 1 / 16}),
        ({"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 32},
         {"is_neox": False, "head_size": 32}),
        ({"model_type": "granite", "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
          "logits_scaling": 16.0, "residual_multiplier": 0.22, "mlp_bias": False},
         {"attention_scale": 0.0078125, "embedding_scale": 12.0, "logit_scale": 1 / 16, "residual_scale": 0.22}),
        ({"model_type": "starcoder2", "activation_function": "gelu", "hidden_act": "gelu_pytorch_tanh",
          "layer_norm_epsilon": 1e-05, "mlp_type": "default", "norm_epsilon": 1e-5, "norm_type": "layer_norm",
          "rms_norm_eps": None, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "use_bias": True,
          "sliding_window": 4096, "residual_dropout": 0.1}, {"activation": "gelu_new", "windows": [4096] * 6}),
    ],
)  # fmt: skip
def test_keys_as_older_files_have_them(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    from checkpoint import Keys
    from families import read_config

    read = Keys(SIZES | NOTES | keys)
    _, config = read_config(read)
    read.refuse_the_rest()
    got = vars(config) | {"windows": [x.window for x in config.layers], "ropes": [x.rope for x in config.layers]}
    assert {key: got[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "llama", "sliding_window": 8}, "sliding_window: is not understood"),
        ({"model_type": "llama", "no_rope_layers": [1] * 6}, "no_rope_layers: is not understood"),
        ({"model_type": "llama", "rope_interleaved": True}, "rope_interleaved: is not understood"),
        ({"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config: is"),
        ({"model_type": "gemma2", "hidden_act": None}, "query_pre_attn_scalar: is missing"),
        (
            {"model_type": "gemma3_text", "hidden_act": None, "sliding_window": 5, "use_bidirectional_attention": True},
            "use_bidirectional_attention: ",
        ),
        ({"model_type": "phi3", "interpolate_factor": 2}, "interpolate_factor: only 1 is served, got 2"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 6}, "layer_types: must be 6 of"),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 2}, "sliding_window: is missing"),
        ({"model_type": "starcoder2", "norm_type": "rms_norm"}, "norm_type: only 'layer_norm' is served"),
    ],
)
def test_keys_that_would_change_results(keys: dict[str, Any], message: str) -> None:
    from checkpoint import Keys
    from families import read_config

    def read() -> None:
        everything = Keys(SIZES | NOTES | keys)
        read_config(everything)
        everything.refuse_the_rest()

    with pytest.raises(ValueError, match=message):
        read()
