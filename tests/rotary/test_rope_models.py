"""Rope of every model that the installed transformers knows: equal to theirs, or refused by the name of a key."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykv import rope

# One function of a class of a modeling file, without importing the module: that would take minutes for all of them.
_CLASS = re.compile(r"^class \w*Rotary\w*\(.*\):\n((?:(?:    .*)?\n)*)", re.MULTILINE)
_DEFAULT = re.compile(r"    def compute_default_rope_parameters\(.*?(?=\n    (?:@|def )|\Z)", re.DOTALL)


@pytest.fixture(scope="module")
def classes() -> list[Any]:
    """The config classes of all models that have rope."""
    pytest.importorskip("transformers", minversion="5")
    models = Path(importlib.import_module("transformers.models").__file__ or "").parent
    found = []
    for file in sorted(models.glob("*/configuration_*.py")):
        if not re.search("rope|rotary", file.read_text()):
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        configs = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
        found += [c for c in configs if hasattr(c, "model_type") and hasattr(c, "to_dict")]
    return found


@functools.cache
def _definitions(folder: Path) -> dict[str, Any]:
    """What computes the default frequencies, by the name of the config class that it takes."""
    torch = pytest.importorskip("torch")
    found = {}
    for file in folder.glob("modeling_*.py"):
        for body in _CLASS.findall(file.read_text()):
            if function := _DEFAULT.search(body):
                text = textwrap.dedent(function[0])
                scope: dict[str, Any] = {"torch": torch}
                exec(f"from __future__ import annotations\n{text}", scope)  # of the installed transformers
                name = re.search(r"config: \"?(\w+)", text) or re.search(r"def __init__\(self, config: \"?(\w+)", body)
                found[name[1] if name else ""] = scope["compute_default_rope_parameters"]
    return found


def _theirs(config: Any, layer_type: str | None) -> tuple[Any, float] | None:
    """Inverse frequencies and attention scaling by transformers, or None where it does not say."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = getattr(config, "rope_parameters", None) or {}
    kind = (given[layer_type] if layer_type else given).get("rope_type", "default")
    function = ROPE_INIT_FUNCTIONS.get(kind)
    if function is None:
        functions = _definitions(Path(inspect.getfile(type(config))).parent)
        alone = next(iter(functions.values())) if len(functions) == 1 else None
        function = functions.get(type(config).__name__, alone)
    if function is None:
        return None
    try:
        inverse, scaling = function(config, device="cpu", **({"layer_type": layer_type} if layer_type else {}))
    except KeyError:  # it wants types of layers, and the default config names none
        return None
    return inverse.numpy(), scaling


def _defaults(classes: list[Any]) -> Iterator[tuple[Any, str | None]]:
    for one in classes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                config = one()
            except Exception:  # some need parts
                continue
        given = getattr(config, "rope_parameters", None)
        if given is None and not {"rope_theta", "rotary_dim", "rotary_embedding_base"} & vars(config).keys():
            continue
        nested = [key for key, value in (given or {}).items() if isinstance(value, dict)]
        yield from ((config, layer_type) for layer_type in nested or [None])


def _of_layers(config: Any, layer_type: str | None) -> Any:
    """The config of those layers, where heads are not equal in all."""
    try:
        return config.per_layer_config[layer_type]
    except (AttributeError, KeyError, TypeError, ValueError):
        return config


def _keys(config: dict[str, Any]) -> set[str]:
    nested = (_keys(value) for value in config.values() if isinstance(value, dict))
    return set(config).union(*nested)


def test_the_default_config_of_every_model(classes: list[Any]) -> None:
    equal, refused, wrong = 0, [], []
    for config, layer_type in _defaults(classes):
        name = f"{type(config).__name__} {layer_type or ''}"
        raw = json.loads(json.dumps(config.to_dict(), default=str))
        config = _of_layers(config, layer_type)
        heads = getattr(config, "num_attention_heads", 0)
        head_size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // (heads or 1)
        if head_size <= 0 or head_size % 2:
            continue
        try:
            ours = rope.frequencies_of_config(raw, head_size, layer_type=layer_type)
        except ValueError as error:
            refused.append(f"{name}: {error}")
            if not any(re.search(rf"\b{key}\b", str(error)) for key in _keys(raw)):
                wrong.append(f"{name}: no key in {error}")
            continue
        theirs = _theirs(config, layer_type)
        if theirs is None:
            continue
        if ours.inverse.shape != theirs[0].shape or not np.allclose(ours.inverse, theirs[0], rtol=2e-6, atol=0):
            wrong.append(f"{name}: {theirs[0][:3]} x {theirs[0].shape}, ours {ours.inverse[:3]} x {ours.inverse.shape}")
        elif ours.magnitude != pytest.approx(theirs[1], rel=1e-7):
            wrong.append(f"{name}: attention scaling {theirs[1]}, ours {ours.magnitude}")
        else:
            equal += 1
    assert not wrong, "\n".join(wrong)
    text = [message for message in refused if "rotate by positions alone" not in message]
    assert equal > 20 * len(text), f"{equal} equal, refused:\n" + "\n".join(text)


def test_what_is_left_out_is_as_in_the_family(classes: list[Any]) -> None:
    """A config in the old form that says only a scaling."""
    pytest.importorskip("transformers", minversion="5.24")  # what families leave out has changed with its releases
    scaling = {"rope_type": "linear", "factor": 2.0}
    compared, refused, wrong = 0, [], []
    for one in classes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                theirs = one(rope_scaling=dict(scaling)).rope_parameters
            except Exception:  # not for these
                continue
        raw = {"model_type": one.model_type, "rope_scaling": scaling, "max_position_embeddings": 4096}
        layers = [key for key, value in (theirs or {}).items() if isinstance(value, dict)]
        if not theirs or not (layers or {"rope_theta", "factor"} <= theirs.keys()):
            continue
        for layer_type in layers or [None]:
            wanted = theirs[layer_type] if layer_type else theirs
            try:
                ours = rope.parameters_of_config(raw, layer_type)
            except ValueError as error:
                refused.append(str(error))
                continue
            for key, default in (("rope_type", None), ("rope_theta", None), ("partial_rotary_factor", 1.0)):
                if ours[key] != wanted.get(key, default):
                    wrong.append(f"{one.__name__} {layer_type}: {key} {wanted.get(key, default)}, ours {ours[key]}")
            compared += 1
    assert not wrong, "\n".join(wrong)
    assert all("model_type" in message for message in refused)
    assert compared > 100
