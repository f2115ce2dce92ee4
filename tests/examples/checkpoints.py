"""Small random checkpoints in Hugging Face layout, prompts for them, and their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.25,
    "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **parameters}}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-linear": ("Llama", _rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", {**_rope("dynamic", factor=4.0), "max_position_embeddings": 24}),
    "llama-llama3": (
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied-mqa": ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-sliding": ("Qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
}


def write_checkpoint(folder: Path, variant: str, **save_options: Any) -> None:
    """Needs torch and transformers.  All weights are random, those of the norms too."""
    import torch
    import transformers

    family, options = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    torch.manual_seed(sum(map(ord, variant)))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **save_options)


def prompts(count: int, longest: int = 20, shared: int = 0) -> list[list[int]]:
    """Prompts of different lengths, all beginning with ``shared`` same tokens."""
    random = np.random.default_rng(7)
    first = random.integers(2, SIZES["vocab_size"], shared).tolist()
    lengths = [1 + (4 + 7 * i) % longest for i in range(count)]
    return [first + random.integers(2, SIZES["vocab_size"], n).tolist() for n in lengths]


def logits_of(folder: Path, arrays: Any, tokens: list[int], chunk: int, **cache_options: Any) -> np.ndarray:
    """The logits of every token, the sequence computed ``chunk`` tokens at a time."""
    from llama import Batch, Llama

    model, put = Llama(folder, arrays), arrays.put
    cache = model.make_cache(num_blocks=20, block_size=4, **cache_options)
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
