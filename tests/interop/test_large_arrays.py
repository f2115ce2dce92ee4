"""Arrays of more than 2^31 elements: a row gets what it gets alone."""

from __future__ import annotations

from typing import Any

import pytest

import pykv
import pykv.functional

torch = pytest.importorskip("torch")
MOST = 2**31
WIDTH, VOCABULARY = 4096, 8192
ROWS = MOST // WIDTH + 3

OF_ROWS: dict[str, dict[str, Any]] = {
    "dynamic_scaled_int8_quant": {},
    "dynamic_per_token_scaled_fp8_quant": {},
    "static_scaled_fp8_quant": {"scale": 0.01},
    "static_scaled_int8_quant": {"scale": 0.01},
    "per_token_group_fp8_quant": {"group_size": 128},
    "per_token_group_quant_int8": {"group_size": 64},
    "per_token_group_fp8_quant_packed": {"group_size": 128},
    "scaled_fp4_quant": {"input_scale": 100.0, "is_sf_swizzled_layout": False},
    "mxfp4_quantize": {},
    "mxfp8_quantize": {},
    "hadacore_transform": {},
    "silu_and_mul": {},
    "silu_and_mul_quant": {"scale": 0.01},
}
OF_LOGITS: dict[str, dict[str, Any]] = {
    "sample": {"top_k": 50, "top_p": 0.9},
    "softmax": {"temperature": 0.7},
    "top_k_top_p_mask": {"top_k": 40, "top_p": 0.9},
    "top_k_per_row": {"k": 300, "sorted": True},
}


@pytest.fixture(scope="module")
def numbers(request: pytest.FixtureRequest) -> Any:
    if request.config.getoption("--device") == "cpu" or not (pykv.has_cuda() and torch.cuda.is_available()):
        pytest.skip("no CUDA device")
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("there is no room for 40 GB")
    return torch.empty(ROWS * WIDTH, dtype=torch.bfloat16, device="cuda").normal_()


def equal_rows(function: Any, x: Any, options: dict[str, Any]) -> None:
    border = MOST // x.shape[1]
    rows = torch.tensor([0, border - 1, border, len(x) - 1], device=x.device)
    found, alone = function(x, **options), function(x[rows].contiguous(), **options)
    pairs = zip(found, alone, strict=True) if isinstance(found, tuple) else [(found, alone)]
    for many, few in pairs:
        assert torch.equal(many[rows].contiguous().view(torch.uint8), few.contiguous().view(torch.uint8))
    pykv.check_errors()


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows(numbers: Any, name: str) -> None:
    equal_rows(getattr(pykv.functional, name), numbers.view(ROWS, WIDTH), OF_ROWS[name])


@pytest.mark.parametrize("name", OF_LOGITS)
def test_logits(numbers: Any, name: str) -> None:
    x = numbers[: (MOST // VOCABULARY + 1) * VOCABULARY].view(-1, VOCABULARY)
    equal_rows(getattr(pykv.functional, name), x, OF_LOGITS[name])
