"""What a Hugging Face ``config.json`` says of rotary embeddings, under one set of names.

Files name these things in many ways, and a key that is passed over gives a wrong table without an error.  So every key
that speaks of rope is either known here or refused by its name.  ``null`` is absence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

_ABOUT_ROPE = re.compile(r"(^|_)(m|xd)?(rope|rotary|ntk|yarn|xpos|mscale)")

# Names of one thing at the top of a config; the first is the one used here.
_BASE = ("rope_theta", "rotary_emb_base", "rotary_embedding_base")
_SHARE = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_emb_fraction")
_TOP = {*_BASE, *_SHARE, "rope_parameters", "rope_scaling", "rope_ratio", "rotary_dim"}

# Keys that change no frequency: which elements form a pair, which head size is given, which layers have no rope,
# which pairs belong to which axis (`pykv.mrope` takes those), what a query is multiplied by.
_NO_MATTER = {
    *("rope_interleave", "rope_interleaved", "indexer_rope_interleave", "rotary_emb_interleaved", "original_rope"),
    *("qk_rope_head_dim", "no_rope_layers", "no_rope_layer_interval", "rotary_value"),
    *("mrope_section", "mrope_interleaved", "xdrope_section", "llama_4_scaling_beta", "finetuned"),
}

_YARN = {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
_OF_EVERY_TYPE = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "rotary_dim"),
    *("original_max_position_embeddings", "max_position_embeddings"),
    *_NO_MATTER,
}
_OF_TYPE: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "alpha"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": _YARN | {"truncate", "attention_factor", "attn_factor", "extrapolation_factor"},
    "longrope": {"factor", "short_factor", "long_factor", "attention_factor", "short_mscale", "long_mscale"},
    "proportional": {"factor"},
}
_OTHER_TYPES = {"mrope": "default", "su": "longrope", "deepseek_yarn": "yarn", "xdrope": "dynamic"}
_LISTS = {"short_factor", "long_factor"}
_MAY_BE_ZERO = {"mscale", "mscale_all_dim", "attention_factor", "attn_factor", "extrapolation_factor"}

# What a family means where its config says nothing.
_FAMILY_BASE = {
    1e3: "nomic_bert",
    2e4: "jina_embeddings_v3 pe_audio_encoder pe_audio_video_encoder pe_video_encoder",
    2.5e4: "fuyu",
    1e5: "helium",
    1.5e5: "gpt_oss openai_privacy_filter",
    1.6e5: "gte",
    5e5: "bitnet blt blt_global_transformer blt_local_decoder blt_local_encoder cohere csm csm_depth_decoder_model "
    "ernie4_5 ernie4_5_moe evolla exaone flex_olmo llama4_text mllama_text_model muse_glimmer_assistant olmo3 "
    "paddleocr_vl_text qwen3_vl_moe_text qwen3_vl_text",
    1e6: "cwm emu3_text_model lfm2 lfm2_moe lfm3 minimax mixtral phimoe qwen2_5_omni_talker qwen2_5_omni_text "
    "qwen2_5_vl_text qwen2_vl_text qwen3_omni_moe_text solar_open",
    2e6: "smollm3",
    5e6: "minimax_m2 minimax_m3_vl_text",
    6e6: "bailing_hybrid",
    8e6: "sarvam_moe",
    1e7: "longcat_flash",
    11158840.0: "hy_v3",
    1.2e7: "apertus apertus1p5_text",
    1e8: "cosmos3_edge_text",
}
_FAMILY_SHARE = {
    0.25: "gpt_neox qwen3_5_moe_text qwen3_5_text qwen3_next stablelm",
    0.334: "mimo_v2_flash",
    0.5: "bamba chatglm dots3_note_audio_encoder glm glm4 glm4_moe glm4v_moe_text glmasr_encoder nemotron persimmon "
    "phi recurrent_gemma",
    0.9: "moonshine",
}
# Rotations by coordinates of patches or by times, or of pairs in another order, which no key tells.
_OTHER_ROTATIONS = {
    *("dinov3_vit", "edgetam_video", "efficientloftr", "eomt_dinov3", "ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
    *("musicflamingo", "pixtral", "sam2_video", "sam3_tracker_video", "sam3_vit_model", "sapiens2"),
}


class _OfLayer(NamedTuple):
    """Rope of one type of layers in a family whose older configs are flat."""

    key: str  # of its base
    base: float
    is_scaled: bool  # by rope_scaling


_GEMMA = {
    "full_attention": _OfLayer("rope_theta", 1e6, True),
    "sliding_attention": _OfLayer("rope_local_base_freq", 1e4, False),
}
_MODERNBERT = {
    "full_attention": _OfLayer("global_rope_theta", 1.6e5, True),
    "sliding_attention": _OfLayer("local_rope_theta", 1e4, True),
}
_LAYERED = {
    **dict.fromkeys(("gemma3_text", "gemma3n_text", "t5gemma2_text", "t5gemma2_decoder"), _GEMMA),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), _MODERNBERT),
    "olmo3": {
        "full_attention": _OfLayer("rope_theta", 5e5, True),
        "sliding_attention": _OfLayer("rope_theta", 5e5, False),
    },
    "deepseek_v4": {
        "main": _OfLayer("rope_theta", 1e4, False),
        "compress": _OfLayer("compress_rope_theta", 1.6e5, True),
    },
}
# Families of which only configs that are nested by type of layer say all.
_NESTED = {
    *("beam", "cohere_compass_text", "deepseek_v4", "diffusion_gemma_text", "dots3_note_text", "embedding_gemma2_text"),
    *("gemma4_text", "gemma4_unified_text", "laguna", "mellum", "mimo_v2_flash", "neomme", "step3p5", "ultrabert"),
    "zaya",
}


def parameters(config: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """The parameters of a layer's rope by the names of transformers 5, with the defaults of the family.

    ``rotary_dim`` is there if the config says it; ``partial_rotary_factor`` is then there only if it says both.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"config: must be a mapping, such as a config.json, got {type(config).__name__}")
    config = _without_nulls(config)
    family = str(config.get("model_type"))
    if family in _OTHER_ROTATIONS or "vision" in family:
        raise ValueError(f"config: model_type {family!r} does not rotate by positions alone, which is not supported")
    _refuse_silence(config)
    layers = _LAYERED.get(family)
    if layers is None and "rope_local_base_freq" in config:
        layers = _GEMMA
    top = _TOP | _NO_MATTER | {layer.key for layer in (layers or {}).values()}
    _refuse_unknown("config", (key for key in config if _ABOUT_ROPE.search(key) and key not in top), "")
    given, layer = _of_layer(config, layers, layer_type)

    kind = _type_of(given, family)
    allowed = _OF_EVERY_TYPE | _OF_TYPE[kind]
    if kind == "dynamic" and "alpha" in given:
        allowed |= _YARN  # HunYuan writes yarn's keys, too, and reads none
        _same({"factor": given.get("factor", 1), "its value beside alpha": 1})
    _refuse_unknown("config", given.keys() - allowed, f" by rope type {kind!r}")

    known = {"rope_type": kind, "rope_theta": _base(config, given, layer)} | _width(config, given)
    lengths = {}
    for name in ("original_max_position_embeddings", "max_position_embeddings"):
        if value := _same({name: config.get(name), f"rope's {name}": given.get(name)}):
            lengths[name] = value
    if kind == "dynamic" and "alpha" not in given:
        _same(lengths)  # which of two it grows from, files do not agree on
    if "max_position_embeddings" in lengths:
        lengths.setdefault("original_max_position_embeddings", lengths["max_position_embeddings"])
    known |= lengths | {key: given[key] for key in _OF_TYPE[kind] & given.keys()}
    for key in known.keys() - {"rope_type"}:
        _check(key, known[key])
    return known


def _refuse_silence(config: Mapping[str, Any]) -> None:
    if "max_position_embeddings" in config or any(map(_ABOUT_ROPE.search, config)):
        return
    parts = [k for k, v in config.items() if isinstance(v, Mapping) and any(map(_ABOUT_ROPE.search, v))]
    hint = f"; {parts[0]} speaks of rope: give config[{parts[0]!r}]" if parts else ""
    raise ValueError(
        f"config: max_position_embeddings is required, got {', '.join(sorted(config)) or 'an empty one'}{hint}"
    )


def _of_layer(
    config: Mapping[str, Any], layers: Mapping[str, _OfLayer] | None, layer_type: str | None
) -> tuple[dict[str, Any], _OfLayer | None]:
    """What ``rope_parameters`` or ``rope_scaling`` say of a layer, and where its base stands."""
    given: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        one = config.get(name, {})
        if not isinstance(one, Mapping):
            raise ValueError(f"config: {name}: must be a mapping, got {type(one).__name__}")
        for key in given.keys() & one.keys():
            _same({f"rope_scaling's {key}": given[key], f"rope_parameters' {key}": one[key]})
        given |= one
    nested = {key: value for key, value in given.items() if isinstance(value, Mapping)}
    if not nested and config.get("model_type") in _NESTED:
        raise ValueError(f"config: model_type {config['model_type']!r} needs rope_parameters for each type of layers")
    types: Iterable[str] = nested or layers or config.get("layer_types", ())
    if not nested and layers is None:
        if layer_type is not None and types and layer_type not in types:
            raise ValueError(f"layer_type: must be one of {', '.join(sorted(set(types)))}, got {layer_type!r}")
        return _without_nulls(given), None
    if layer_type is None:
        raise ValueError(f"layer_type: is required, for rope differs between layers: {', '.join(sorted(types))}")
    if layer_type in given and given[layer_type] is None:
        raise ValueError(f"config: {layer_type} is null: layers of this type have no rope")
    if layer_type not in types:
        raise ValueError(f"layer_type: must be one of {', '.join(sorted(types))}, got {layer_type!r}")
    where = layers.get(layer_type) if layers else None
    if not nested:
        return _without_nulls(given) if where and where.is_scaled else {}, where
    own = _without_nulls(nested[layer_type])
    beside = _without_nulls(given).keys() - nested.keys() - own.keys() - _NO_MATTER
    _refuse_unknown("config", beside, " beside the types of layers in rope_parameters")
    return own, where


def _without_nulls(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}


def _type_of(given: Mapping[str, Any], family: str) -> str:
    names = {name: given[name] for name in ("rope_type", "type") if name in given}
    for name, kind in names.items():
        if not isinstance(kind, str):
            raise ValueError(f"config: {name}: must be a string, got {kind!r}")
        if kind == "yarn" and family in ("phi3", "phi4_multimodal"):
            kind = "longrope"  # as early files of Phi-3 call it
        names[name] = _OTHER_TYPES.get(kind, kind)
    kind = str(_same(names) or "default")
    if kind not in _OF_TYPE:
        known = ", ".join((*_OF_TYPE, *_OTHER_TYPES))
        raise ValueError(f"config: {next(iter(names))}: rope type {kind!r} is not supported; {known} are")
    return kind


def _base(config: Mapping[str, Any], given: Mapping[str, Any], where: _OfLayer | None) -> float:
    family = str(config.get("model_type"))
    if where:
        base = given.get("rope_theta", config.get(where.key, where.base))
    else:
        usual = next((base for base, families in _FAMILY_BASE.items() if family in families.split()), 1e4)
        top = _same({name: config.get(name) for name in _BASE})
        base = given.get("rope_theta", usual if top is None else top)
    _check("rope_theta", base)
    ratio = config.get("rope_ratio", 1)
    _check("rope_ratio", ratio)
    return float(base * ratio)


def _width(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """How much of a head is rotated: a share of it, a number of elements, or both."""
    share = given.get("partial_rotary_factor", _same({name: config.get(name) for name in _SHARE}))
    rotary_dim = _same({"rotary_dim": config.get("rotary_dim"), "rope's rotary_dim": given.get("rotary_dim")})
    if share is None and (rotary_dim is None or "rope_parameters" in config):
        family = str(config.get("model_type"))  # rope_parameters leaves out only what is as usual
        share = next((share for share, families in _FAMILY_SHARE.items() if family in families.split()), 1.0)
    both = {"partial_rotary_factor": share, "rotary_dim": rotary_dim}
    return {key: value for key, value in both.items() if value is not None}


def rotary_dim(known: Mapping[str, Any], head_size: int) -> int:
    """Elements of a head that are rotated."""
    if not isinstance(head_size, Integral) or head_size <= 0:
        raise ValueError(f"head_size: must be a positive integer, got {head_size!r}")
    widths = {}
    if "partial_rotary_factor" in known:
        widths[f"partial_rotary_factor of {head_size}"] = int(head_size * known["partial_rotary_factor"])
    if "rotary_dim" in known:
        widths["rotary_dim"] = known["rotary_dim"]
    width, name = int(_same(widths)), " and ".join(widths)
    if width > head_size or width % 2:
        raise ValueError(f"config: {name}: must be even and within a head of {head_size}, got {width} elements")
    return width


def _same(values: Mapping[str, Any]) -> Any:
    """The one value that those names have which are there."""
    there = {name: value for name, value in values.items() if value is not None}
    first = next(iter(there), "")
    for name, value in there.items():
        if value != there[first]:
            raise ValueError(f"config: {first} = {there[first]!r} and {name} = {value!r} contradict each other")
    return there.get(first)


def _refuse_unknown(where: str, keys: Iterable[str], how: str) -> None:
    if unknown := sorted(keys):
        raise ValueError(f"{where}: {', '.join(unknown)}: not understood{how}")


def _check(key: str, value: Any) -> None:
    if key == "truncate":
        wanted, fits = "a boolean", isinstance(value, bool)
    elif key in _LISTS:
        wanted, fits = "a list of positive numbers", isinstance(value, (list, tuple)) and all(map(_is_positive, value))
    elif key == "partial_rotary_factor":
        wanted, fits = "a number between 0 and 1", _is_number(value) and 0 <= value <= 1
    elif key in _MAY_BE_ZERO:
        wanted, fits = "a number that is not negative", _is_number(value) and value >= 0
    elif key == "rotary_dim":
        wanted, fits = "a positive integer", isinstance(value, int) and _is_positive(value)
    else:
        wanted, fits = "a positive number", _is_positive(value)
    if not fits:
        raise ValueError(f"config: {key}: must be {wanted}, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0
