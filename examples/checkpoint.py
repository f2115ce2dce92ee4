"""A checkpoint, read with care: what changes results and is not understood is an error, not passed over.

Every error is a ValueError of one line that begins with the file's name and has the key's or the tensor's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from arrays import Host
from safetensors import safe_open

# Keys that do not change what is computed: notes, training, and what transformers generates with.
_NOTES = """architectures auto_map dtype id2label initializer_range is_llama_config label2id model_type pretraining_tp
task_specific_params tokenizer_class torch_dtype transformers.js_config transformers_version unsloth_fixed
unsloth_version use_cache
attention_dropout embd_pdrop embedding_dropout hidden_dropout resid_pdrop residual_dropout
attention_softmax_in_fp32 scale_attention_softmax_in_fp32
bos_token_id cache_implementation chunk_size_feed_forward decoder_start_token_id diversity_penalty
encoder_no_repeat_ngram_size length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
num_return_sequences pad_token_id pruned_heads repetition_penalty return_dict sep_token_id temperature top_k top_p
typical_p"""
NOTES = frozenset(_NOTES.split())
DTYPES = ("F32", "F16", "BF16")
WITH_IMAGES = ("gemma3", "mistral3")  # models of which the part for text is served
OF_IMAGES = ("vision_tower.", "multi_modal_projector.")
BUFFERS = (".rotary_emb.inv_freq",)  # old files keep what is computed anyway


class Keys:
    """The keys of a config.json, which remembers those that were asked for."""

    def __init__(self, raw: dict[str, Any], file: str = "config.json"):
        self.raw = raw
        self.file = file
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where there is none or null."""
        self._asked.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            self.refuse(key, "is missing")
        return value

    def size(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """A positive integer."""
        value = self[key] if default is None else self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            self.refuse(key, f"must be an integer from 1 to {most}, got {value!r}")
        return int(value)

    def text(self, key: str) -> str:
        value = self[key]
        if not isinstance(value, str):
            self.refuse(key, f"must be a text, got {value!r}")
        return str(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self[key] if default is None else self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            self.refuse(key, f"must be a positive number, got {value!r}")
        return float(value)

    def refuse(self, key: str, reason: str) -> NoReturn:
        raise ValueError(f"{self.file}: {key}: {reason}")

    def refuse_the_rest(self) -> None:
        """An error if there are keys that nobody asked for, unless they are notes or switched off."""
        for key, value in self.raw.items():
            if not (key in self._asked or key in NOTES or key.startswith("_") or value in (None, False)):
                self.refuse(key, "is not understood, and may change results (if not, take it out)")


class Stored(NamedTuple):
    file: str
    read: Callable[[], Host]


class Checkpoint:
    """Keys and tensors by their names in Hugging Face's files, which remembers those that were asked for."""

    def __init__(self, keys: Keys, tensors: dict[str, Stored], file: str):
        self.keys = keys
        self._tensors, self._file = tensors, file
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str, *shape: int) -> Host:
        """A tensor, which must have this shape."""
        self._asked.add(name)
        if name not in self._tensors:
            raise ValueError(f"{self._file}: {name}: the tensor is missing")
        stored = self._tensors[name]
        data = stored.read()
        if data.shape != shape:
            raise ValueError(f"{stored.file}: {name}: must have the shape {list(shape)}, got {list(data.shape)}")
        return data

    def refuse_the_rest(self) -> None:
        """An error if there are tensors or keys that nobody asked for."""
        for name, stored in self._tensors.items():
            if name not in self._asked and not name.endswith(BUFFERS):
                raise ValueError(f"{stored.file}: {name}: the tensor is not understood")
        self.keys.refuse_the_rest()

    def is_tied(self, embedding: str, head: str) -> bool:
        """Whether the head is the embedding; a file without a head says so, too."""
        tied = bool(self.keys.get("tie_word_embeddings", head not in self))
        both = [self._tensors[name].read() for name in (embedding, head) if tied and name in self]
        if len(both) == 2 and not np.array_equal(*both):
            self.keys.refuse("tie_word_embeddings", f"is true, but {head} differs from {embedding}")
        if tied:
            self._asked.add(head)
        return tied


def open_folder(folder: Path) -> Checkpoint:
    """config.json, and the tensors of one safetensors file or of the parts that an index names."""
    raw = read_json(folder, "config.json")
    if quantization := raw.get("quantization_config"):
        method = (quantization if isinstance(quantization, dict) else {}).get("quant_method", "a way it does not name")
        raise ValueError(f"config.json: quantization_config: weights quantised by {method} are not served")
    if (folder / "generation_config.json").exists():  # may name more end tokens
        raw |= {k: v for k, v in read_json(folder, "generation_config.json").items() if k == "eos_token_id"}
    is_part = raw.get("model_type") in WITH_IMAGES
    if is_part:
        of_all = {k: raw[k] for k in ("eos_token_id", "tie_word_embeddings") if raw.get(k) is not None}
        if not isinstance(raw.get("text_config"), dict):
            raise ValueError("config.json: text_config: must be an object")
        raw = raw["text_config"] | of_all
    index, parts = "model.safetensors.index.json", {"model.safetensors"}
    if (folder / index).exists():
        homes = read_json(folder, index).get("weight_map")
        if not (isinstance(homes, dict) and homes and all(isinstance(part, str) for part in homes.values())):
            raise ValueError(f"{index}: weight_map: must say in which file each tensor is")
        parts = set(homes.values())
    tensors = {}
    for part, file in _open(folder, parts):
        for name in file.keys():  # noqa: SIM118  # it is no dictionary
            if is_part and any(part in name for part in OF_IMAGES):
                continue
            if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
                raise ValueError(f"{part}: {name}: weights of {dtype} are not served, only {', '.join(DTYPES)}")
            known_as = name.replace("language_model.", "", 1) if is_part else name
            tensors[known_as] = Stored(part, partial(file.get_tensor, name))
    return Checkpoint(Keys(raw), tensors, min(parts))


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object that a file holds."""
    try:
        raw = json.loads((folder / name).read_text())
    except FileNotFoundError:
        raise ValueError(f"{name}: is not in {folder}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{name}: must be an object, got {type(raw).__name__}")
    return raw


def _open(folder: Path, parts: set[str]) -> list[tuple[str, Any]]:
    files = []
    for part in sorted(parts):
        try:
            files.append((part, safe_open(folder / part, framework="numpy")))
        except FileNotFoundError:
            raise ValueError(f"{part}: is not in {folder}") from None
        except Exception as error:  # safetensors has an exception of its own, a subclass of none of ours
            raise ValueError(f"{part}: {error}") from None
    return files
