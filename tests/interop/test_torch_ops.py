"""torch.ops.pykv: every operation passes opcheck, survives torch.compile and writes what a direct call writes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
from fresh import fresh

import pykv
from pykv._schema import all_ops
from pykv._tools.samples import ON_HOST, SAMPLES, sample

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

    if device == "cuda" and name == "concat_and_cache_mla_grouped":
        pytest.skip("its kernel reads the sample's addresses, which are those of the host")
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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_view_as_output(device, backend, by_name):
    qkv, weight = torch.randn(6, 3, 64, device=device), torch.rand(64, device=device)

    def norm_query(qkv):
        query = qkv[:, :1]
        if by_name:
            pykv.rms_norm(out=query, input=query, weight=weight, epsilon=1e-5)
        else:
            pykv.rms_norm(query, query, weight, 1e-5)
        return qkv * 2

    expected = norm_query(qkv.clone())
    torch._dynamo.reset()
    assert torch.equal(torch.compile(norm_query, fullgraph=True, backend=backend)(qkv.clone()), expected)


def test_lists_as_arguments(device):
    direct, compiled = tensors("mrope", device), tensors("mrope", device)
    sections = [int(n) for n in direct.pop("mrope_section")]
    del compiled["mrope_section"]
    pykv.mrope(**direct, mrope_section=sections)

    def rotate(values):
        pykv.mrope(**values, mrope_section=sections)

    torch._dynamo.reset()
    torch.compile(rotate, fullgraph=True, backend="aot_eager")(compiled)
    assert_equal(direct, compiled)


def test_lists_of_addresses():
    source, target = torch.arange(16.0), torch.zeros(16)
    first, second = source.data_ptr(), target.data_ptr()

    def copy(x):
        pykv.swap_blocks_batch([first], [second], [64])
        return x + 1

    torch._dynamo.reset()
    torch.compile(copy, fullgraph=True, backend="aot_eager")(torch.zeros(1))
    assert torch.equal(source, target)


FIRST_USES = {
    "compile": "torch.compile(step, fullgraph=True, backend='aot_eager')(x.clone())",
    "export": "torch.export.export(Step(), (x.clone(),), strict=False).module()(x.clone())",
}


@pytest.mark.parametrize("order", ["torch, pykv", "pykv, torch"])
@pytest.mark.parametrize("use", FIRST_USES)
def test_nobody_has_to_import_pykv_torch(order, use):
    program = f"""
        import sys
        import {order}
        assert ("pykv.torch" in sys.modules) == {order == "torch, pykv"}
        def step(x):
            out = torch.empty_like(x)
            pykv.rms_norm(out, x * 2, None)
            return out + 1
        class Step(torch.nn.Module):
            def forward(self, x):
                return step(x)
        x = torch.randn(2, 8)
        got = {FIRST_USES[use]}
        assert torch.equal(got, step(x))
        assert "rms_norm" in sys.modules["pykv.torch"]._kernels.in_c
        """
    fresh(program)


def test_pykv_imports_torch_for_nobody():
    assert fresh("import sys, pykv; print('torch' in sys.modules)").endswith("False")


class Normed(torch.nn.Module):
    def forward(self, x, weight):
        out = torch.empty_like(x)
        pykv.rms_norm(out, x * 2, weight, epsilon=1e-5)
        return out + 1


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_has_the_operation_as_a_node(strict):
    given = torch.randn(2, 8), torch.randn(8)
    torch._dynamo.reset()
    program = torch.export.export(Normed(), given, strict=strict)
    assert torch.ops.pykv.rms_norm.default in [node.target for node in program.graph.nodes]
    assert torch.equal(program.module()(*given), Normed()(*given))


def test_fake_tensors_go_through_torch():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        out, x = torch.empty(2, 8), torch.empty(2, 8)
    assert pykv._C.way_in(type(x)) == "torch's dispatcher"
    pykv.rms_norm(out, x, None)
    with pytest.raises(TypeError, match="rms_norm: out: a FakeTensor goes through torch's dispatcher"):
        all_ops()["rms_norm"].direct(out, x, None)


def test_what_tracers_see_of_a_call_is_a_call():
    assert pykv.torch.rms_norm is pykv.rms_norm
    out, direct = np.zeros((2, 8), np.float32), np.zeros((2, 8), np.float32)
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    pykv.rms_norm(direct, x, None)
    pykv.rms_norm.__call__(out, x, weight=None)
    assert out.tobytes() == direct.tobytes()
    assert out.any()


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


def test_torch_calls_c_where_nothing_of_python_is_needed():
    listed = {n for n, op in all_ops().items() if any(p.kind == "written list" for p in op.parameters)}
    expected = set(NAMES) - listed - {"swap_blocks_batch"}
    if torch.__version__.startswith("2.9."):  # its shim knows no strings
        expected -= {n for n, op in all_ops().items() if any(p.kind == "str" for p in op.parameters)}
    assert pykv.torch._kernels.in_c == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_strides_offsets_and_dtypes_reach_c(device, dtype):
    x = torch.randn(3, 2, 40, device=device).to(dtype)[:, 1, 4:36]
    assert x.storage_offset() == 44
    assert x.stride() == (80, 1)
    direct, through = torch.zeros(5, 32, device=device, dtype=dtype), torch.zeros(5, 32, device=device, dtype=dtype)
    weight = torch.randn(32, device=device).to(dtype)
    pykv.rms_norm(direct[1:4], x, weight, epsilon=0.5)
    torch.ops.pykv.rms_norm(through[1:4], x, weight, epsilon=0.5)
    assert torch.equal(direct, through)
    assert direct.any()


NORMED = torch.zeros(2, 8)
ATTENDED = dict(
    out=torch.zeros(1, 2, 64),
    query=torch.zeros(1, 2, 64),
    key_cache=torch.zeros(2, 16, 2, 64),
    value_cache=torch.zeros(2, 16, 2, 64),
    block_tables=torch.zeros(1, 2, dtype=torch.int32),
    seq_lens=torch.ones(1, dtype=torch.int32),
)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda op: op.rms_norm(NORMED, torch.zeros(3, 8), None), ValueError, "rms_norm: out: must have the shape"),
        (lambda op: op.rms_norm(NORMED, NORMED.int(), None), TypeError, "rms_norm: input: dtype must be"),
        (lambda op: op.rms_norm(NORMED, NORMED, torch.zeros(8).to_sparse()), ValueError, "rms_norm: weight: is a ten"),
        (lambda op: op.rms_norm(NORMED.to(torch.complex64), NORMED, None), TypeError, "rms_norm: out: has a dtype"),
        (lambda op: op.rms_norm(torch.zeros([1] * 9), NORMED, None), ValueError, "out: at most 8 dimensions"),
        (lambda op: op.paged_attention(**ATTENDED, window=0), ValueError, "paged_attention: window: must be positive"),
        (lambda op: op.paged_attention(**ATTENDED, softcap=-1.0), ValueError, "softcap: must be positive, got -1"),
        (lambda op: op.paged_attention(**ATTENDED, kv_cache_dtype="no"), ValueError, "kv_cache_dtype: must be one of"),
    ],
)
def test_refusals_keep_type_and_text_and_let_go_of_the_arguments(call, error, text):
    tensors = [NORMED, *ATTENDED.values()]
    before = [t._use_count() for t in tensors]
    for _ in range(3):
        with pytest.raises(error, match=text):
            call(torch.ops.pykv)
    assert [t._use_count() for t in tensors] == before


def test_none_is_what_is_left_out():
    given = dict(scale=None, window=None, softcap=None, cu_query_lens=None, k_scale=None, kv_cache_dtype="auto")
    query = torch.randn(1, 2, 64)
    cache = torch.randn(2, 16, 2, 64)
    outs = [torch.zeros(1, 2, 64) for _ in range(3)]
    arguments = ATTENDED | dict(query=query, key_cache=cache, value_cache=cache)
    torch.ops.pykv.paged_attention(**arguments | dict(out=outs[0]))
    torch.ops.pykv.paged_attention(**arguments | dict(out=outs[1]), **given)
    pykv.paged_attention(**arguments | dict(out=outs[2]))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert outs[0].any()


def test_an_implementation_that_comes_first_is_taken():
    taken = []

    def mine(out, input, weight, epsilon=1e-6, *, stream=None):
        taken.append(epsilon)

    out, x = torch.zeros(2, 8), torch.randn(2, 8)
    pykv.dispatch.register("rms_norm", "mine")(mine)
    try:
        torch.ops.pykv.rms_norm(out, x, None, 0.25)
    finally:
        pykv.dispatch.unregister("rms_norm", "mine")
    assert taken == [0.25]
    assert not out.any()
    torch.ops.pykv.rms_norm(out, x, None, 0.25)
    assert taken == [0.25]
    assert out.any()


def test_a_torch_without_the_shim_calls_the_functions_of_python(tmp_path):
    program = """
    import torch
    torch.version.hip = "6.0"  # another library's GPUs
    import pykv.torch
    assert not pykv.torch._kernels.in_c
    x, out, direct = torch.randn(2, 8), torch.zeros(2, 8), torch.zeros(2, 8)
    torch.ops.pykv.rms_norm(out, x, None)
    pykv.rms_norm(direct, x, None)
    assert torch.equal(out, direct)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    command = [sys.executable, tmp_path / "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_functions_keep_name_signature_and_text():
    assert pykv.torch.rms_norm.__name__ == "rms_norm"
    assert pykv.torch.rms_norm.__doc__ == pykv.rms_norm.__doc__
    assert set(pykv.torch.__all__) == set(NAMES)
