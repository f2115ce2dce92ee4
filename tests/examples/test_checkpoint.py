"""What is not served is refused in one line that names the file and the key or tensor, not computed wrongly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

Checkpoint = Callable[..., Path]
PROGRAM = Path(__file__).parents[2] / "examples" / "generate.py"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def edited(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint with other keys (None: without) and tensors."""

    def edit(keys: dict[str, Any], tensors: dict[str, Any], variant: str = "llama") -> Path:
        source = checkpoint(variant)
        config = json.loads((source / "config.json").read_text()) | keys
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        weights = load_file(source / "model.safetensors") | tensors
        save_file({k: v for k, v in weights.items() if v is not None}, tmp_path / "model.safetensors")
        return tmp_path

    return edit


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "mixtral"}, "config.json: model_type: "),
        ({"num_local_experts": 8}, "config.json: num_local_experts: is not understood"),
        ({"kv_lora_rank": 512}, "config.json: kv_lora_rank: is not understood"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "config.json: quantization_config: weights quantised",
        ),
        ({"quantization_config": "awq"}, "config.json: quantization_config: weights quantised"),
        ({"num_key_value_heads": 4}, "config.json: num_key_value_heads: must divide num_attention_heads = 6, got 4"),
        ({"model_type": "qwen3", "layer_types": [[1]] * 3}, "config.json: layer_types: must be 3 of"),
        ({"model_type": "qwen3", "max_window_layers": "x"}, "config.json: max_window_layers: must be an integer"),
        ({"model_type": "gemma3", "text_config": [1]}, "config.json: text_config: must be an object"),
        ({"rms_norm_eps": None}, "config.json: rms_norm_eps: is missing"),
        ({"hidden_size": "48"}, "config.json: hidden_size: must be an integer from 1 to 16777216, got '48'"),
        ({"num_hidden_layers": 10**30}, "config.json: num_hidden_layers: must be an integer from 1 to 10000"),
        ({"hidden_act": ["silu"]}, "config.json: hidden_act: must be a text"),
        ({"eos_token_id": "</s>"}, "config.json: eos_token_id: must be a token"),
        ({"rms_norm_eps": -1.0}, "config.json: rms_norm_eps: must be a positive number, got -1.0"),
        ({"rope_scaling": {"rope_type": "xpos"}}, "config.json: rope_type: rope type 'xpos' is not supported"),
        ({"intermediate_size": 81}, r"gate_proj.weight: must have the shape \[81, 48\], got \[80, 48\]"),
        ({"tie_word_embeddings": True}, "config.json: tie_word_embeddings: is true, but lm_head.weight differs"),
    ],
)
def test_keys(edited: Callable[..., Path], keys: dict[str, Any], message: str) -> None:
    from arrays import open_arrays
    from llama import open_model

    with pytest.raises(ValueError, match=message):
        open_model(edited(keys, {}), open_arrays("numpy"))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({DOWN: None}, f"model.safetensors: {DOWN}: the tensor is missing"),
        ({"model.layers.1.mlp.gate.weight": np.ones(3, np.float32)}, "mlp.gate.weight: the tensor is not understood"),
        ({"model.layers.3.mlp.up_proj.weight": np.ones(3, np.float32)}, "layers.3.mlp.up_proj.weight: the tensor is"),
        ({DOWN: np.ones((48, 80), np.int8)}, f"{DOWN}: weights of I8 are not served"),
        ({DOWN: np.ones((48, 80), ml_dtypes.float8_e4m3fn)}, f"{DOWN}: weights of F8_E4M3 are not served"),
    ],
)
def test_tensors(edited: Callable[..., Path], tensors: dict[str, Any], message: str) -> None:
    from arrays import open_arrays
    from llama import open_model

    with pytest.raises(ValueError, match=message):
        open_model(edited({}, tensors), open_arrays("numpy"))


def test_an_embedding_of_another_name(edited: Callable[..., Path]) -> None:
    """Where the file has a head and says that it is the embedding."""
    from arrays import open_arrays
    from llama import open_model

    table = "model.embed_tokens.weight"
    folder = edited({"tie_word_embeddings": True}, {table: None, "embed_tokens.weight": np.ones((160, 48), np.float32)})
    with pytest.raises(ValueError, match=f"model.safetensors: {table}: the tensor is missing"):
        open_model(folder, open_arrays("numpy"))


DEEP = '{"a":' * 100_000


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", DEEP, "config.json: "),
        ("config.json", "[]", "config.json: must be an object, got list"),
        ("generation_config.json", '{"eos', "generation_config.json: "),
        ("model.safetensors.index.json", "{}", "model.safetensors.index.json: weight_map: must say"),
        ("model.safetensors.index.json", '{"weight_map": {"a": [1]}}', "model.safetensors.index.json: weight_map: "),
        ("model.safetensors.index.json", '{"weight_map": {"a": "no.safetensors"}}', "no.safetensors: is not in"),
        ("model.safetensors", "no such thing", "model.safetensors: "),
        ("tokenizer_config.json", DEEP, "tokenizer_config.json: "),
        ("tokenizer_config.json", "null", "tokenizer_config.json: must be an object, got NoneType"),
        ("tokenizer_config.json", '{"chat_template": 3}', "tokenizer_config.json: chat_template: must be a text"),
        ("tokenizer_config.json", '{"chat_template": [3]}', "tokenizer_config.json: chat_template: is missing"),
        ("tokenizer_config.json", '{"chat_template": "{{ 1 / 0 }}"}', "tokenizer_config.json: chat_template: division"),
    ],
)
def test_damaged_files(edited: Callable[..., Path], file: str, text: str, message: str) -> None:
    from checkpoint import open_folder
    from text import open_words

    if "{{" in text:
        pytest.importorskip("jinja2")
    folder = edited({}, {})
    (folder / "tokenizer.json").write_bytes((PROGRAM.parent / "model" / "tokenizer.json").read_bytes())
    (folder / file).write_text(text)

    def read() -> None:
        open_folder(folder)
        open_words(folder).encode("x", chat=True)

    with pytest.raises(ValueError, match=f"^{message}"):
        read()


def test_what_changes_nothing_is_read_over(edited: Callable[..., Path]) -> None:
    from arrays import open_arrays
    from llama import open_model

    keys = {"torch_dtype": "bfloat16", "use_mamba": False, "attention_dropout": 0.1, "_name_or_path": "x"}
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert open_model(edited(keys, buffers), open_arrays("numpy")).config.num_kv_heads == 2


def test_a_file_without_a_head_is_tied(edited: Callable[..., Path]) -> None:
    from arrays import open_arrays
    from llama import open_model

    model = open_model(edited({"tie_word_embeddings": None}, {"lm_head.weight": None}), open_arrays("numpy"))
    assert model.weights.head is model.weights.embedding


@pytest.mark.parametrize("option", [["--model", "no"], ["--max-tokens", "0"], ["--device", "tpu"], ["--seed", "-1"],
                                    ["--blocks", "2147483647"], ["--array", "jax", "--device", "cpu:99"]])  # fmt: skip
def test_the_program_answers_in_one_line(option: list[str]) -> None:
    if option[0] == "--blocks" and os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 1 << 36:
        pytest.skip("so much memory is promised here")
    done = subprocess.run([sys.executable, str(PROGRAM), *option], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().split("\n")[-1].startswith("generate.py: error: ")
    assert "Traceback" not in done.stderr
