"""Families of models, each by what sets it apart from Llama, and what their config.json says of the computation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from checkpoint import Keys
from rope import Table, rope_table

from pykv.rope import parameters_of_config

SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATIONS = {  # pykv's operation, where the up projection has a gate beside it and where it has none
    "silu": ("silu_and_mul", None),
    "gelu": ("gelu_and_mul", None),
    "gelu_pytorch_tanh": ("gelu_tanh_and_mul", "gelu_new"),
    "gelu_new": ("gelu_tanh_and_mul", "gelu_new"),
}


@dataclass(frozen=True)
class Family:
    """Names of weights, keys of config.json, and the shape of a layer.  The defaults are Llama's."""

    # Weights that are stacked are one matrix product; a file may have them so already.
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    has_gate: bool = True

    norm: str = "rms_norm"  # pykv's operation; layer_norm has biases
    epsilon: str = "rms_norm_eps"  # the key
    # What is normed: the input of attention and MLP, and their outputs before they are added to the residual.
    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    qk_norm: str | None = None  # of each "head" of queries and keys, or of the whole "row" of heads

    activation: str = "hidden_act"  # the key
    is_neox: bool = True  # rope turns elements half a head apart, not neighbours
    rope_by_kind: bool = False  # a table for each kind of attention
    may_lack_rope: bool = False  # some layers have no positions
    kinds: Callable[[Keys, int], list[str]] | None = None  # of attention, in each layer; None: all full
    scaled_embedding: bool = False  # by the root of its width
    query_scalar: str | None = None  # the key of what stands for the head size in the scale of attention
    multipliers: bool = False  # Granite's four
    softcaps: bool = False

    also: tuple[str, ...] = ("attention_bias", "mlp_bias")  # keys that say what the tensors say, too
    defaults: dict[str, Any] = field(default_factory=dict)  # of keys that published files leave out
    only: dict[str, Any] = field(default_factory=dict)  # keys of which one value is served


def _from_some_layer(keys: Keys, layers: int) -> list[str]:
    uses, full = keys.get("use_sliding_window", False), keys.get("max_window_layers", layers)
    if not isinstance(full, int):
        keys.refuse("max_window_layers", f"must be an integer, got {full!r}")
    return _listed(keys, [SLIDING if uses and i >= full else FULL for i in range(layers)])


def _all_alike(keys: Keys, layers: int) -> list[str]:
    return [FULL if keys.get("sliding_window") is None else SLIDING] * layers


def _every_nth_full(keys: Keys, layers: int) -> list[str]:
    pattern = keys.size("sliding_window_pattern", 2)
    return _listed(keys, [SLIDING if (i + 1) % pattern else FULL for i in range(layers)])


def _where_no_rope(keys: Keys, layers: int) -> list[str]:
    uses = keys.get("use_sliding_window", False)
    return _listed(keys, [SLIDING if uses and not rope else FULL for rope in _layers_with_rope(keys, layers)])


def _listed(keys: Keys, usual: list[str]) -> list[str]:
    keys.get("sliding_window")  # is there where no layer has one, too
    kinds = keys.get("layer_types", usual)
    if not isinstance(kinds, list) or len(kinds) != len(usual) or any(k not in (FULL, SLIDING) for k in kinds):
        keys.refuse("layer_types", f"must be {len(usual)} of {FULL} and {SLIDING}, got {kinds!r}")
    return list(kinds)


def _layers_with_rope(keys: Keys, layers: int) -> list[bool]:
    interval = keys.size("no_rope_layer_interval", 4)
    has_rope = keys.get("no_rope_layers", [(i + 1) % interval != 0 for i in range(layers)])  # 1: has rope
    if not isinstance(has_rope, list) or len(has_rope) != layers:
        keys.refuse("no_rope_layers", f"must be {layers} of 0 and 1, got {has_rope!r}")
    return list(map(bool, has_rope))


LLAMA = Family()
QWEN2 = Family(kinds=_from_some_layer)
MISTRAL = Family(kinds=_all_alike)
GEMMA2 = Family(
    norm="gemma_rms_norm",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    activation="hidden_activation",
    kinds=_every_nth_full,
    scaled_embedding=True,
    query_scalar="query_pre_attn_scalar",
    softcaps=True,
    defaults={"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50, "final_logit_softcapping": 30},
    only={"hidden_act": "gelu_pytorch_tanh"},  # old files have it beside hidden_activation
)
GEMMA3 = replace(
    GEMMA2,
    qk_norm="head",
    rope_by_kind=True,
    defaults={
        **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window_pattern": 6},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208},
        **{"rms_norm_eps": 1e-6, "max_position_embeddings": 131072},
    },
)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": replace(QWEN2, qk_norm="head"),
    "mistral": MISTRAL,
    "phi3": replace(
        MISTRAL,
        qkv=("self_attn.qkv_proj",),
        gate_up=("mlp.gate_up_proj",),
        only={"full_attn_mod": 1, "interpolate_factor": 1},
    ),
    "smollm3": replace(LLAMA, kinds=_where_no_rope, may_lack_rope=True, also=(*LLAMA.also, "max_window_layers")),
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "olmo2": replace(
        LLAMA,
        attention_norm=None,
        attention_out_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_out_norm="post_feedforward_layernorm",
        qk_norm="row",
    ),
    "glm4": replace(
        LLAMA,
        gate_up=("mlp.gate_up_proj",),
        attention_out_norm="post_self_attn_layernorm",
        mlp_out_norm="post_mlp_layernorm",
        is_neox=False,
    ),
    "granite": replace(LLAMA, multipliers=True),
    "starcoder2": replace(
        MISTRAL,
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
        has_gate=False,
        norm="layer_norm",
        epsilon="norm_epsilon",
        also=("use_bias", "layer_norm_epsilon", "activation_function"),  # which transformers does not read, either
        only={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
    ),
}
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_local_base_freq",
             "original_max_position_embeddings", "max_position_embeddings")  # fmt: skip


@dataclass(frozen=True)
class LayerConfig:
    window: int | None  # None: attention to everything before
    rope: str | None  # the kind of attention whose table it takes; None: no positions


@dataclass(frozen=True)
class Config:
    """The part of config.json that the computation needs."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    layers: tuple[LayerConfig, ...]
    norm: str  # pykv's operation
    epsilon: float
    qk_norm: str | None  # of each "head", or of the whole "row"
    activation: str  # pykv's operation
    has_gate: bool
    is_neox: bool
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    embedding_scale: float
    residual_scale: float  # of what attention and MLP add
    logit_scale: float
    max_length: int
    end_ids: frozenset[int]


def read_config(keys: Keys, longest: int | None = None) -> tuple[Family, Config]:
    name = keys.text("model_type")
    if name not in FAMILIES:
        keys.refuse("model_type", f"{', '.join(FAMILIES)} are served, got {name!r}")
    family = FAMILIES[name]
    keys.raw = family.defaults | keys.raw
    for key, value in family.only.items():
        if keys.get(key, value) != value:
            keys.refuse(key, f"only {value!r} is served, got {keys.get(key)!r}")
    for key in (*family.also, *ROPE_KEYS):
        keys.get(key)

    layers, heads, hidden = (
        keys.size(key, most=most)
        for key, most in (("num_hidden_layers", 10_000), ("num_attention_heads", 10_000), ("hidden_size", 2**24))
    )
    head_size, kv_heads = keys.size("head_dim", hidden // heads), keys.size("num_key_value_heads", heads)
    if heads % kv_heads:
        keys.refuse("num_key_value_heads", f"must divide num_attention_heads = {heads}, got {kv_heads}")
    kinds = family.kinds(keys, layers) if family.kinds else [FULL] * layers
    has_rope = _layers_with_rope(keys, layers) if family.may_lack_rope else [True] * layers
    rope = rope_of(keys, FULL if family.rope_by_kind else None)
    stretch = rope.get("factor", 1) if rope["rope_type"] == "dynamic" else 1  # longer than the file says
    activation = ACTIVATIONS.get(keys.text(family.activation), (None, None))[0 if family.has_gate else 1]
    if activation is None:
        keys.refuse(family.activation, f"{keys[family.activation]!r} is not served")
    attention_scale = (keys.number(family.query_scalar) if family.query_scalar else head_size) ** -0.5
    multiply = keys.number if family.multipliers else lambda key, default: default
    max_length = int(keys.size("max_position_embeddings") * stretch)
    end = keys.get("eos_token_id", [])
    if not all(isinstance(token, int) for token in (end if isinstance(end, list) else [end])):
        keys.refuse("eos_token_id", f"must be a token or a list of them, got {end!r}")
    return family, Config(
        hidden_size=hidden,
        intermediate_size=keys.size("intermediate_size"),
        vocab_size=keys.size("vocab_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        layers=tuple(
            LayerConfig(
                window=keys.size("sliding_window") if kind == SLIDING else None,
                rope=(kind if family.rope_by_kind else FULL) if positions else None,
            )
            for kind, positions in zip(kinds, has_rope, strict=True)
        ),
        norm=family.norm,
        epsilon=keys.number(family.epsilon),
        qk_norm=family.qk_norm,
        activation=str(activation),
        has_gate=family.has_gate,
        is_neox=family.is_neox,
        attention_scale=multiply("attention_multiplier", attention_scale),
        attention_softcap=keys.get("attn_logit_softcapping") if family.softcaps else None,
        logit_softcap=keys.get("final_logit_softcapping") if family.softcaps else None,
        embedding_scale=multiply("embedding_multiplier", math.sqrt(hidden) if family.scaled_embedding else 1.0),
        residual_scale=multiply("residual_multiplier", 1.0),
        logit_scale=1 / multiply("logits_scaling", 1.0),
        max_length=min(max_length, longest or max_length),
        end_ids=frozenset(end if isinstance(end, list) else [end]),
    )


def rope_of(keys: Keys, kind: str | None) -> dict[str, Any]:
    """What pykv understands of the keys about rope."""
    try:
        return parameters_of_config(keys.raw, kind)
    except ValueError as error:
        raise ValueError(f"{keys.file}: {str(error).removeprefix('config: ')}") from None


def rope_tables(keys: Keys, family: Family, config: Config) -> dict[str, Table]:
    """The tables of cosines and sines that layers name."""
    kinds = {layer.rope for layer in config.layers if layer.rope}
    try:
        return {
            kind: rope_table(keys.raw, config.head_size, config.max_length, kind if family.rope_by_kind else None)
            for kind in sorted(kinds)
        }
    except ValueError as error:
        raise ValueError(f"{keys.file}: {str(error).removeprefix('config: ')}") from None
