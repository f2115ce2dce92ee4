"""torch.ops.pykv.f as a callable of ours: nobody sees a difference to torch's own but the time."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

import pykv
from pykv._schema import all_ops

torch = pytest.importorskip("torch")
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import pykv.torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
PACKET = torch.ops.pykv.rms_norm


def own(packet: Any = PACKET) -> Any:
    """torch's packet of the same operation."""
    return torch._ops.OpOverloadPacket(packet._qualified_op_name, packet.__name__, packet.op, packet._overload_names)


def arguments() -> tuple[Any, Any, Any]:
    torch.manual_seed(7)
    return torch.zeros(2, 8), torch.randn(2, 8), torch.randn(8)


def both(call: Any) -> list[Any]:
    """What a call does to its output, or how it fails, by our packet and by torch's own."""
    seen = []
    for packet in (PACKET, own()):
        out, x, weight = arguments()
        try:
            call(packet, out, x, weight)
        except Exception as error:
            seen.append((type(error), str(error).partition("\n")[0]))
        else:
            seen.append((None, out.tolist()))
    return seen


def test_every_kernel_of_c_has_such_a_packet():
    ours = {n for n in all_ops() if type(getattr(torch.ops.pykv, n)) is not torch._ops.OpOverloadPacket}
    assert ours == pykv.torch._kernels.in_c


def test_torch_knows_it_for_its_own():
    ours, other = PACKET, own()
    assert isinstance(ours, torch._ops.OpOverloadPacket)
    assert (repr(ours), str(ours), ours.__name__) == (repr(other), str(other), other.__name__)
    assert ours.__module__ == "torch._ops.pykv"
    assert ours.overloads() == other.overloads() == ["default"]
    assert ours._schemas == other._schemas
    assert ours.default._schema == other.default._schema
    assert ours.default.overloadpacket is ours
    assert ours.op is other.op
    assert hash(ours) == hash(other)
    assert copy.deepcopy(ours) is ours
    assert copy.deepcopy(torch.ops.pykv.rms_norm.default) is PACKET.default
    assert torch.ops.pykv.rms_norm is PACKET
    with pytest.raises(AttributeError, match="no overload name 'other'"):
        _ = ours.other


CALLS = {
    "positional": lambda op, o, x, w: op(o, x, w),
    "a number": lambda op, o, x, w: op(o, x, w, 0.5),
    "by name": lambda op, o, x, w: op(epsilon=0.5, weight=w, input=x, out=o),
    "by a name that is not interned": lambda op, o, x, w: op(o, x, w, **{"".join(["epsi", "lon"]): 0.5}),
    "an int for a float": lambda op, o, x, w: op(o, x, w, 1),
    "a bool for a float": lambda op, o, x, w: op(o, x, w, True),
    "a tensor for a float": lambda op, o, x, w: op(o, x, w, torch.tensor(0.5)),
    "none": lambda op, o, x, w: op(o, x, None),
    "a parameter": lambda op, o, x, w: op(o, x, torch.nn.Parameter(w)),
    "too few": lambda op, o, x, w: op(o, x),
    "too many": lambda op, o, x, w: op(o, x, w, 0.5, 1),
    "twice": lambda op, o, x, w: op(o, x, w, weight=w),
    "unknown": lambda op, o, x, w: op(o, x, w, eps=0.5),
    "none for a tensor": lambda op, o, x, w: op(o, None, w),
    "a number for a tensor": lambda op, o, x, w: op(o, 2.0, w),
    "a string for a number": lambda op, o, x, w: op(o, x, w, "much"),
    "a list for a tensor": lambda op, o, x, w: op(o, [1.0], w),
    "wrong shape": lambda op, o, x, w: op(o, x[:1], w),
    "wrong dtype": lambda op, o, x, w: op(o, x.int(), w),
    "sparse": lambda op, o, x, w: op(o, x, w.to_sparse()),
    "meta": lambda op, o, x, w: op(o, x.to("meta"), w),
    "conjugated": lambda op, o, x, w: op(o, x.to(torch.complex64).conj(), w),
    "negated": lambda op, o, x, w: op(o, torch._neg_view(x), w),
    "requires grad, read": lambda op, o, x, w: op(o, x.requires_grad_(), w),
    "requires grad, written": lambda op, o, x, w: op(o.requires_grad_(), x, w),
    "inside vmap": lambda op, o, x, w: torch.func.vmap(lambda a, b: op(a, b, w))(o, x),
    "inside grad": lambda op, o, x, w: torch.func.grad(lambda b: (op(o, b, w), b.sum())[1])(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_do_what_torchs_own_do(name):
    ours, theirs = both(CALLS[name])
    assert ours == theirs


@pytest.mark.parametrize(
    "context",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("cpu"),
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True),
    ],
)
def test_calls_inside_contexts(context):
    def call(op, o, x, w):
        with context():
            op(o, x, w)

    ours, theirs = both(call)
    assert ours == theirs
    assert ours[0] is None


def test_the_profiler_sees_the_call():
    out, x, weight = arguments()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        PACKET(out, x, weight)
    assert "pykv::rms_norm" in {e.name for e in profile.events()}


def test_modes_see_the_call():
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    out, x, weight = arguments()
    with Functions():
        PACKET(out, x, weight)
    with Dispatch():
        PACKET(out, x, weight)
    assert seen[0] in (PACKET, PACKET.default)
    assert seen[1:] == [PACKET.default]
    assert out.any()


def test_an_error_of_a_mode_is_raised_once_and_as_it_is():
    class Refused(Exception):
        pass

    class Refuses(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += 1
            raise Refused("no")

    with Refuses() as mode, pytest.raises(Refused, match="no"):
        PACKET(*arguments())
    assert mode.count == 1


def test_subclasses_see_the_call():
    seen = []

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    out, x, weight = arguments()
    PACKET(out, x.as_subclass(Mine), weight)
    assert seen[0] in (PACKET, PACKET.default)
    assert out.any()


def test_a_trace_and_a_script_hold_the_operation():
    def normed(x, weight):
        out = torch.empty_like(x)
        torch.ops.pykv.rms_norm(out, x, weight)
        return out

    _, x, weight = arguments()
    for made in (torch.jit.trace(normed, (x, weight)), torch.jit.script(normed)):
        assert "pykv::rms_norm" in str(made.graph)
        assert torch.equal(made(x, weight), normed(x, weight))


def test_fake_tensors():
    with torch._subclasses.FakeTensorMode():
        PACKET(torch.empty(2, 8), torch.empty(2, 8), None)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_compiled_function_holds_the_operation(dynamic):
    nodes = []

    def backend(module, _):
        nodes.extend(n.target for n in module.graph.nodes if n.op == "call_function")
        return module

    def function(out, x, weight):
        torch.ops.pykv.rms_norm(out, x, weight)

    out, x, weight = arguments()
    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)(out, x, weight)
    assert nodes in ([PACKET], [PACKET.default])
    assert out.any()


def test_a_kernel_that_somebody_adds_is_taken_and_its_errors_are_seen():
    taken = []

    def mine(out, input, weight, epsilon=1e-6):
        taken.append(epsilon)
        if epsilon > 1:
            raise LookupError("of mine")

    out, x, weight = arguments()
    library = torch.library.Library("pykv", "IMPL")
    try:
        library.impl("rms_norm", mine, "CPU")
        PACKET(out, x, weight, 0.25)
        assert taken == [0.25]
        assert not out.any()
        with pytest.raises(LookupError, match="of mine"):
            PACKET(out, x, weight, 2.0)
    finally:
        library._destroy()
    PACKET(out, x, weight, 0.25)
    assert out.any()


def test_threads():
    failed = []

    def work():
        try:
            for i in range(300):
                out, x = torch.zeros(2, 8), torch.full((2, 8), float(i + 1))
                PACKET(out, x, None)
                assert torch.allclose(out, torch.ones(2, 8))
                with pytest.raises(TypeError, match="rms_norm: input: dtype"):
                    PACKET(out, x.int(), None)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed


def test_arguments_are_let_go():
    tensors = arguments()
    before = [t._use_count() for t in tensors]
    for _ in range(10):
        PACKET(*tensors)
        with pytest.raises(RuntimeError):
            PACKET(*tensors, "much")
    assert [t._use_count() for t in tensors] == before
