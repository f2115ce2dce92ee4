"""torch.ops.pykv: every operation passes opcheck, survives torch.compile and writes what a direct call writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pykv
from pykv._samples import ON_HOST, SAMPLES, sample
from pykv._schema import all_ops

torch = pytest.importorskip("torch")
import pykv.torch  # noqa: E402

NAMES = sorted(all_ops())
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.config.getoption("--device") not in (None, request.param):
        pytest.skip(f"--device {request.config.getoption('--device')}")
    if request.param == "cuda" and not (torch.cuda.is_available() and pykv.has_cuda()):
        pytest.skip("no CUDA device, or this pykv was built without CUDA")
    return request.param


def tensors(name: str, device: str) -> dict[str, Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(v) for v in value]
        return torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value

    values = sample(name)
    return {k: torch.from_numpy(v) if k in ON_HOST else convert(v) for k, v in values.items()}


def flat(values: dict[str, Any]) -> list[Any]:
    found = []
    for value in values.values():
        found += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, torch.Tensor)]
    return found


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    for x, y in zip(flat(a), flat(b), strict=True):
        assert x.cpu().numpy().tobytes() == y.cpu().numpy().tobytes()


def with_tensors_for_numbers(name: str, values: dict[str, Any]) -> dict[str, Any]:
    numbers = {p.name for p in all_ops()[name].parameters if p.may_be_number}
    return {k: torch.tensor(v) if k in numbers and isinstance(v, float) else v for k, v in values.items()}


def test_every_operation_has_a_sample():
    assert set(SAMPLES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, device):
    op = getattr(torch.ops.pykv, name).default
    torch.library.opcheck(op, (), with_tensors_for_numbers(name, tensors(name, device)))


@pytest.mark.parametrize("name", NAMES)
def test_written_arguments_are_declared(name):
    schema = getattr(torch.ops.pykv, name).default._schema
    mutated = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert mutated == {p.name for p in all_ops()[name].parameters if p.kind.startswith("written")}


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_function_writes_what_a_direct_call_writes(name, device):
    direct, compiled = tensors(name, device), tensors(name, device)
    getattr(pykv, name)(**direct)

    def function(arguments):
        getattr(pykv.torch, name)(**arguments)

    torch._dynamo.reset()  # `function` is another one for each operation, its code is not
    torch.compile(function, fullgraph=True, backend="aot_eager")(compiled)
    assert_equal(direct, compiled)


def test_inductor_keeps_the_order_of_writes(device):
    x, weight = torch.randn(5, 64, device=device), torch.randn(64, device=device)

    def function(x, weight):
        y = x * 2
        pykv.torch.fused_add_rms_norm(y, x, weight)
        z = torch.empty_like(y)
        pykv.torch.rms_norm(z, y + 1, weight)
        return z + y, x

    expected = function(x.clone(), weight)
    torch._dynamo.reset()
    got = torch.compile(function, fullgraph=True)(x.clone(), weight)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)


def test_an_output_that_requires_grad_is_refused():
    out, x = torch.zeros(2, 8, requires_grad=True), torch.zeros(2, 8)
    for call in (pykv.torch.rms_norm, torch.ops.pykv.rms_norm):
        with pytest.raises(Exception, match="requires grad"):
            call(out, x, None)


def test_defaults_may_be_left_out():
    out, x = torch.zeros(2, 8), torch.randn(2, 8)
    torch.ops.pykv.rms_norm(out, x, None)
    expected = torch.empty_like(out)
    pykv.rms_norm(expected, x, None)
    assert torch.equal(out, expected)


def test_functions_keep_name_signature_and_text():
    assert pykv.torch.rms_norm.__name__ == "rms_norm"
    assert pykv.torch.rms_norm.__doc__ == pykv.rms_norm.__doc__
    assert set(pykv.torch.__all__) == set(NAMES)
