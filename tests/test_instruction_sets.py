"""CPU twins are compiled for several instruction sets: the best one runs in all other tests, the lesser ones here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# files, and which of their tests
SOME = {
    "attention": (
        ["attention/test_paged_attention.py", "attention/test_paged_attention_codes.py"]
        + ["attention/test_merge_attn_states.py"],
        "layouts or options or long_sequences or in_fp8 or every_code or groups",
    ),
    "activation": (
        ["activation/test_elementwise_activation.py", "activation/test_gated_variants.py"]
        + ["activation/test_silu_and_mul_quant.py", "activation/test_silu_and_mul_per_block_quant.py"],
        "whole_range or nan or widths or any_group_size or any_width or limits or saturate",
    ),
    "norm": (
        ["norm/test_rms_norm.py", "norm/test_rms_norm_static_fp8_quant.py", "norm/test_rms_norm_dynamic_quant.py"]
        + ["norm/test_rms_norm_gated.py", "norm/test_layer_norm.py", "norm/test_fused_qk_norm_rope.py"],
        "widths or sizes or nan or any",
    ),
    "rotary": (
        ["rotary/test_rotary_embedding.py", "rotary/test_mrope.py", "rotary/test_dual_chunk_rotary_embedding.py"],
        "dimensions or dtype or nan or any",
    ),
    "quantization": (
        ["quantization/test_int8_quant.py", "quantization/test_fp8_quant.py", "quantization/test_group_quant.py"]
        + ["quantization/test_fp4_quant.py", "quantization/test_mx_quant.py"],
        "widths or nan or any or sizes or ties or groups or packed",
    ),
    "dequantization": (
        ["dequantization/test_ggml_dequantize.py", "dequantization/test_packed_dequantize.py"]
        + ["dequantization/test_scaled_dequantize.py", "dequantization/test_hadacore_transform.py"],
        "format or books or awq or gptq or mx or fp4 or any or orders",
    ),
    "embedding": (["embedding/test_masked_embedding.py"], "any or tables"),
    "gemm": (
        ["gemm/test_packed_gemm.py", "gemm/test_scaled_mm.py", "gemm/test_fp4_mm.py", "gemm/test_dense_gemm.py"],
        "sources or bits or any or blocks or dtypes or points or nan or exact",
    ),
    "moe": (
        ["moe/test_routing.py", "moe/test_fused_moe.py", "moe/test_fused_moe_w8a8.py", "moe/test_rows.py"],
        "any_logits or groups or activations or packed or sum",
    ),
    "sampling": (
        ["sampling/test_top_k_per_row.py", "sampling/test_apply_repetition_penalties.py"]
        + ["sampling/test_sample.py", "sampling/test_row_filter.py"]
        + ["sampling/test_rejection_sample.py", "sampling/test_vocab_shards.py"]
        + ["sampling/test_apply_penalties.py", "sampling/test_verify_tree.py"],
        "sizes or shapes or any or hard or special or nan",
    ),
    "cache": (
        ["cache/test_reshape_and_cache.py", "cache/test_nvfp4.py", "cache/test_nvfp4_rounding.py"]
        + ["cache/test_gather_cache.py", "cache/test_indexer_cache.py", "cache/test_concat_and_cache_mla.py"]
        + ["cache/test_convert_fp8.py"],
        "layouts or scales or rounding or sizes or any",
    ),
}


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
def test_lesser_instruction_sets(isa: str, family: str, tmp_path: Path) -> None:
    """The choice is made once a process, so the tests run in another one."""
    files, which = SOME[family]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--device", "cpu"]
    # many tokens are for the division among threads, which knows no instruction set
    command += ["-k", f"numpy and not many and ({which})"]
    done = subprocess.run(
        # whatever plugins the outer run has: this one is alone, and nobody's worker
        [*command, "-p", "no:xdist", "-p", "no:benchmark", "-c", TESTS.parent / "pyproject.toml"]
        + ["--rootdir", TESTS.parent, *(TESTS / file for file in files)],
        cwd=tmp_path,  # -m puts the working directory on sys.path, and pykv/ in the sources must not be found there
        env={name: value for name, value in os.environ.items() if "XDIST" not in name} | {"PYKV_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
