"""Train the small model that ``generate.py`` runs by default: Jane Austen's six novels, Llama architecture.

    python examples/train.py prepare                      # text -> tokenizer.json and tokens.npz in .train/
    python examples/train.py train --out examples/model   # -> config.json, model.safetensors, tokenizer.json

The novels (public domain) come from Debian's package r-cran-janeaustenr, which `prepare` fetches with apt-get; a .deb
that was downloaded otherwise is named with --package (dpkg-deb unpacks it).  Training needs torch, tokenizers and
safetensors: under a minute on an H200, hours on a CPU; `--minutes 15 --batch 8 --length 128` makes a lesser one on a
single core.  pykv has no part in this file, which makes an ordinary Hugging Face checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

BEGIN, END = "<|begin|>", "<|end|>"  # around every chapter; ids 0 and 1


# ---- text ----------------------------------------------------------------------------------------------------------


def read_package(package: Path | None) -> bytes:
    """The package's R data; without ``package``, Debian's archive is asked for it."""
    with tempfile.TemporaryDirectory() as folder:
        if package is None:
            subprocess.run(["apt-get", "download", "r-cran-janeaustenr"], cwd=folder, check=True)
            package = next(Path(folder).glob("*.deb"))
        archive = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        stream = tar.extractfile(next(member for member in tar if member.name.endswith("data/Rdata.rdb")))
        assert stream is not None
        return stream.read()


def read_r_strings(database: bytes) -> Iterator[list[str]]:
    """Every character vector in an R lazy-load database: chunks of (size, zlib stream of R's big-endian format)."""
    while database:
        inflate = zlib.decompressobj()
        chunk = inflate.decompress(database[4:])
        database = inflate.unused_data
        # "X\n", three version words, the encoding's name with its length, then the vector's type (16) and length.
        offset = 18 + struct.unpack_from(">i", chunk, 14)[0]
        kind, count = struct.unpack_from(">ii", chunk, offset)
        assert kind == 16, "a character vector was expected"
        offset += 8
        lines = []
        for _ in range(count):
            (size,) = struct.unpack_from(">i", chunk, offset + 4)  # after the flags of the string
            lines.append(chunk[offset + 8 : offset + 8 + size].decode())
            offset += 8 + size
        yield lines


def chapters(novel: list[str]) -> Iterator[str]:
    """The chapters of one novel, headings dropped, one line a paragraph, a blank line between paragraphs."""
    text = "\n".join(line.strip() for line in novel)
    text = re.split(r"\nA NOTE ON THE TEXT|\n(?:THE END|FINIS|Finis)\b", text)[0]
    text = re.sub(r"^(VOLUME [IVX]+|\[At this point.*|\*.*)$", "", text, flags=re.MULTILINE)
    for chapter in re.split(r"^chapter [0-9ivxlc]+\.?$", text, flags=re.MULTILINE | re.IGNORECASE)[1:]:
        paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", chapter)]
        yield "\n\n".join(p.replace("_", "") for p in paragraphs if p)


# ---- tokens --------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[BEGIN, END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return tokenizer


def tokenize(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all texts in a row, and the positions where paragraphs begin."""
    ids: list[int] = []
    starts: list[int] = []
    for text in texts:
        ids.append(0)
        for paragraph in text.split("\n\n"):
            starts.append(len(ids))
            ids += tokenizer.encode(paragraph + "\n\n", add_special_tokens=False).ids
        ids.append(1)
    return np.array(ids, np.uint16), np.array(starts, np.int64)


def prepare(database: bytes, data: Path, vocab_size: int) -> None:
    data.mkdir(parents=True, exist_ok=True)
    texts = [text for novel in read_r_strings(database) for text in chapters(novel)]
    held_out = texts[10::20]
    kept = [text for i, text in enumerate(texts) if i % 20 != 10]
    tokenizer = train_tokenizer(kept, vocab_size)
    tokenizer.save(str(data / "tokenizer.json"))
    train_ids, train_starts = tokenize(tokenizer, kept)
    valid_ids, _ = tokenize(tokenizer, held_out)
    valid_chars = sum(map(len, held_out))
    np.savez_compressed(
        data / "tokens.npz", train=train_ids, starts=train_starts, valid=valid_ids, valid_chars=valid_chars
    )
    print(f"{len(texts)} chapters, {sum(map(len, texts)):,} characters; {train_ids.size:,} tokens to train on, "
          f"{valid_ids.size:,} held out ({valid_chars / valid_ids.size:.2f} characters a token)")  # fmt: skip


# ---- model ---------------------------------------------------------------------------------------------------------


@dataclass
class Config:
    """The keys of a Hugging Face config.json that matter here, under their names there."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True
    bos_token_id: int = 0
    eos_token_id: int = 1


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [batch, heads, length, head_dim]

        def rotate(y: Tensor) -> Tensor:
            a, b = y.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(y.dtype)

        q, k, v = rotate(heads(self.q_proj(x))), rotate(heads(self.k_proj(x))), heads(self.v_proj(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, c: Config, dropout: float):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.drop(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.drop(self.mlp(self.post_attention_layernorm(x)))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Module names are those of a Hugging Face checkpoint, so the state dict is the checkpoint."""

    def __init__(self, c: Config, dropout: float = 0.0):
        super().__init__()
        self.config = c
        self.model: Any = nn.ModuleDict({
            "embed_tokens": nn.Embedding(c.vocab_size, c.hidden_size),
            "layers": nn.ModuleList(Layer(c, dropout) for _ in range(c.num_hidden_layers)),
            "norm": nn.RMSNorm(c.hidden_size, c.rms_norm_eps),
        })  # fmt: skip
        self.drop = nn.Dropout(dropout)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # what is added to the residual stream starts smaller, the deeper the model
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * c.num_hidden_layers) if into_stream else 1))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of ``targets``, in nats a token."""
        c = self.config
        frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, device=ids.device) / c.head_dim)
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        x = self.drop(self.model["embed_tokens"](ids))
        for layer in self.model["layers"]:
            x = layer(x, cos, sin)
        logits = F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def save(model: Llama, tokenizer: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "attention_bias": False, "mlp_bias": False, **asdict(model.config),
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if tokenizer.resolve() != (out / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, out / "tokenizer.json")


# ---- training ------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    data = np.load(args.data / "tokens.npz")
    config = Config(vocab_size=Tokenizer.from_file(str(args.data / "tokenizer.json")).get_vocab_size())
    ids = torch.from_numpy(data["train"].astype(np.int64)).to(device)
    valid = torch.from_numpy(data["valid"].astype(np.int64)).to(device)
    starts = torch.from_numpy(data["starts"]).to(device)
    starts = starts[starts < ids.numel() - args.length]
    span = torch.arange(args.length, device=device)

    model = Llama(config, args.dropout).to(device)
    matrices = [w for w in model.parameters() if w.dim() == 2]
    vectors = [w for w in model.parameters() if w.dim() == 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    print(f"{sum(w.numel() for w in model.parameters()):,} parameters, {ids.numel():,} tokens, on {device}")

    @torch.no_grad()
    def held_out_loss() -> float:
        model.eval()
        n = (valid.numel() - 1) // args.length * args.length
        inputs, targets = valid[:n].view(-1, args.length), valid[1 : n + 1].view(-1, args.length)
        with autocast:
            losses = [model(i, t).item() * len(i) for i, t in zip(inputs.split(16), targets.split(16), strict=True)]
        model.train()
        return float(sum(losses) / len(inputs))

    chars_per_token = int(data["valid_chars"]) / valid.numel()
    began, best = time.monotonic(), math.inf
    for step in range(1, args.steps + 1):
        # Whichever runs out first, steps or minutes, ends the schedule: the learning rate always comes down to zero.
        progress = max(step / args.steps, (time.monotonic() - began) / (60 * args.minutes))
        rate = args.lr * min(step / 100, 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        # A window begins at a paragraph and has BEGIN before it: so a prompt may be the opening of any paragraph.
        first = starts[torch.randint(len(starts), (args.batch,), device=device)]
        targets = ids[first[:, None] + span]
        inputs = torch.cat((torch.zeros_like(targets[:, :1]), targets[:, :-1]), dim=1)
        with autocast:
            loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.every == 0 or step == args.steps or progress >= 1:
            held_out = held_out_loss()
            if held_out < best:
                best = held_out
                save(model, args.data / "tokenizer.json", args.out)
            print(f"step {step:5d}  {time.monotonic() - began:6.1f} s  loss {loss.item():.4f}  held out {held_out:.4f} "
                  f"({held_out / chars_per_token / math.log(2):.3f} bits a character)", flush=True)  # fmt: skip
        if progress >= 1:
            break
    print(f"best held-out loss {best:.4f}; written to {args.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    p = verbs.add_parser("prepare", help="make tokenizer and token ids from the text")
    p.add_argument("--package", type=Path, help="a downloaded r-cran-janeaustenr .deb (default: apt-get download)")
    p.add_argument("--data", type=Path, default=Path(".train"))
    p.add_argument("--vocab-size", type=int, default=2048)
    t = verbs.add_parser("train", help="train and write the checkpoint with the lowest held-out loss")
    t.add_argument("--data", type=Path, default=Path(".train"))
    t.add_argument("--out", type=Path, required=True)
    t.add_argument("--device", help="default: cuda if there is one, else cpu")
    t.add_argument("--steps", type=int, default=1500)
    t.add_argument("--minutes", type=float, default=math.inf)
    t.add_argument("--batch", type=int, default=32)
    t.add_argument("--length", type=int, default=512)
    t.add_argument("--lr", type=float, default=2e-3)
    t.add_argument("--dropout", type=float, default=0.3)
    t.add_argument("--weight-decay", type=float, default=0.1)
    t.add_argument("--every", type=int, default=200, help="steps between looks at the held-out text")
    t.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.verb == "prepare":
        prepare(read_package(args.package), args.data, args.vocab_size)
    else:
        train(args)


if __name__ == "__main__":
    main()
