"""Small random checkpoints in Hugging Face layout, prompts for them, and their logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **parameters}}


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-mha": {"tie_word_embeddings": True, "num_key_value_heads": 6},
    "llama-linear": _rope("linear", factor=4.0),
    "llama-dynamic": {**_rope("dynamic", factor=4.0), "max_position_embeddings": 24},
    "llama-llama3": _rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "llama-yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=32),
    "qwen3": {},
    "qwen3-tied-mqa": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3-sliding": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3-alternating": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def write_checkpoint(folder: Path, variant: str, parts: int = 1) -> None:
    """All weights are random, those of the norms too.  More than one part: with an index, as large models have it."""
    family = variant.split("-")[0]
    config = {**CONFIG, **VARIANTS[variant], "model_type": family, "torch_dtype": "float32"}
    config["architectures"] = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]]
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(list(variant.encode()))
    weights = {
        name: (random.normal(0, 0.25, shape) if len(shape) == 2 else random.uniform(0.5, 1.5, shape)).astype(np.float32)
        for name, shape in _shapes(config)
    }
    if parts == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    home = {name: f"model-{i % parts + 1}-of-{parts}.safetensors" for i, name in enumerate(weights)}
    for part in set(home.values()):
        save_file({n: w for n, w in weights.items() if home[n] == part}, folder / part, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))


def _shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, size = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    heads, kv_heads = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", (hidden,)
        for name, width in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{layer}.self_attn.{name}_proj.weight", (width, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, heads)
        if c["model_type"] == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (size,)
            yield f"{layer}.self_attn.k_norm.weight", (size,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden)


def prompts(count: int, longest: int = 20, shared: int = 0) -> list[list[int]]:
    """Prompts of different lengths, all beginning with ``shared`` same tokens."""
    random = np.random.default_rng(7)
    first = random.integers(2, CONFIG["vocab_size"], shared).tolist()
    lengths = [1 + (4 + 7 * i) % longest for i in range(count)]
    return [first + random.integers(2, CONFIG["vocab_size"], n).tolist() for n in lengths]


def logits_of(source: Any, arrays: Any, tokens: list[int], chunk: int, **cache_options: Any) -> np.ndarray:
    """The logits of every token by the model of a folder or a checkpoint, ``chunk`` tokens computed at a time."""
    from llama import make_model, open_model
    from steps import Batch

    model = open_model(source, arrays) if isinstance(source, Path) else make_model(source, arrays)
    put = arrays.put
    cache = model.make_cache(num_blocks=64, block_size=4, **cache_options)
    rows = []
    for begin in range(0, len(tokens), chunk):
        part = np.array(tokens[begin : begin + chunk])
        batch = Batch(
            tokens=put(part),
            positions=put(np.arange(begin, begin + len(part))),
            slots=cache.append([0], len(part)),
            cu_query_lens=put(np.array([0, len(part)], np.int32)),
            seq_lens=cache.seq_lens([0]),
            block_tables=cache.block_tables([0]),
            wanted=put(np.arange(len(part))),
        )
        rows.append(arrays.host(model.forward(batch, cache)))
    return np.concatenate(rows)
