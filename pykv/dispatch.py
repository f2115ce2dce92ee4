"""Several implementations of one operation: which one a call takes, and how to have a say in it.

An operation has the implementation ``pykv`` (the kernels of this package, on ``cpu`` and, if built so, ``cuda``), some
have one in array-API terms, ``native`` (``pykv.native``), and others may be registered::

    @pykv.dispatch.register("rms_norm", "mine", platforms=["cuda"], accepts=lambda out, *_, **__: out.ndim == 2)
    def rms_norm(out, input, weight, epsilon=1e-6, *, stream=None): ...

or come from an installed package by an entry point of the group ``pykv.ops`` whose name is that of the operation and
the provider, ``rms_norm.mine = package.module:function`` (taken as they are, for both platforms).

An implementation is called as the caller wrote it, by position or by keyword (``pykv.functional`` gives all by
keyword), and so is ``accepts``: both must take the parameters of the operation under its names.

What ``native`` is asked to do it does behind the checks of the kernels.

A call takes the first that is enabled, is for the platform of its first array and accepts the arguments: in the order
of their priorities, registered ones (10 unless they say otherwise), ``pykv`` (0), ``native`` (-10).  ``-op`` (see
:func:`configure`) leaves ``native`` alone.  As long as an operation is enabled and nothing is registered that comes
before ``pykv`` or is for another platform, none of this exists for it: calls go straight to the kernels.  ``pykv.jax``,
whose calls are XLA's, always takes these.

:func:`log`, or the environment variable ``PYKV_LOG``, shows the calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pykv import _C
from pykv._schema import Op, all_ops

if TYPE_CHECKING:
    from pykv import _watching

PLATFORMS: Final = ("cpu", "cuda")
_PLANNED: Final = ("paged_attention", "paged_attention_v1", "paged_attention_v2")
_PLATFORM_OF_DEVICE: Final = {1: "cpu", 3: "cpu", 2: "cuda", 13: "cuda"}  # DLDeviceType

_Function = TypeVar("_Function", bound=Callable[..., None])


@dataclass(frozen=True)
class Implementation:
    """One way to carry out an operation; ``accepts`` says False, or why not, to calls that it cannot do."""

    provider: str
    function: Callable[..., None]
    platforms: frozenset[str]
    priority: int
    accepts: Callable[..., bool | str] | None = None

    def refusal(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if platform not in self.platforms:
            return f"is for {' and '.join(sorted(self.platforms))}, the call is on {platform}"
        if self.accepts is None:
            return None
        answer = self.accepts(*args, **kwargs)
        return None if answer is True else answer if isinstance(answer, str) else "does not accept these arguments"


@dataclass(frozen=True)
class Explanation:
    """What a call would do: ``str()`` of it is one line for each implementation, in the order they are asked."""

    op: str
    platform: str
    chosen: str | None
    reasons: Sequence[tuple[str, str]]
    plan: Sequence[str] = ()  # of attention: the kernels with their grids, and the workspace
    device: str | None = None  # what the plan is made for; None: the device of the arrays

    def __str__(self) -> str:
        lines = [f"  {provider}: {reason}" for provider, reason in self.reasons]
        if self.device:
            lines.append(f"  on {self.device} it would be")
        lines += [f"  {line}" for line in self.plan]
        return "\n".join([f"{self.op} on {self.platform}: {self.chosen or 'no implementation'}", *lines])


@dataclass
class _Choice:
    """All that is known of one operation."""

    op: Op
    implementations: list[Implementation] = field(default_factory=list)
    is_routed: bool = False  # calls come here

    @property
    def registered(self) -> list[Implementation]:
        return [i for i in self.implementations if i.provider not in ("pykv", "native")]

    def take(self, *args: Any, **kwargs: Any) -> None:
        chosen, explanation = self.look(args, kwargs)
        if chosen is None:
            raise NotImplementedError(f"no implementation takes this call\n{explanation}")
        chosen.function(*args, **kwargs)

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Implementation | None, Explanation]:
        platform = _platform_of(self.op, args, kwargs)
        reasons, chosen = [], None
        for candidate in self.implementations:
            if not _is_enabled(self.op.name) and candidate.provider != "native":
                reason = f"{self.op.name} is disabled"
            elif chosen:
                reason = "is not asked any more"
            elif not self.is_routed and candidate.provider != "pykv":
                reason = "is not asked: no implementation is registered that would be, and none is disabled"
            else:
                refusal = candidate.refusal(platform, args, kwargs)
                reason, chosen = (refusal, None) if refusal else ("is taken", candidate)
            reasons.append((candidate.provider, reason))
        return chosen, Explanation(self.op.name, platform, chosen.provider if chosen else None, reasons)


def _platform_of(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    arguments = dict(zip((p.name for p in op.parameters), args, strict=False)) | kwargs
    for p in op.parameters:
        value = arguments.get(p.name)
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if p.is_array and (device := getattr(first, "__dlpack_device__", None)):
            return _PLATFORM_OF_DEVICE.get(int(device()[0]), "cpu")
        if p.is_array and hasattr(first, "__cuda_array_interface__"):
            return "cuda"
    return "cpu"


_lock = RLock()  # held while choices are made or changed; calls read them without it


def _choices() -> dict[str, _Choice]:
    """All operations, from the first time that anybody asks: an import of pykv alone does not."""
    with _lock:
        return _make_choices()


@cache
def _make_choices() -> dict[str, _Choice]:
    from pykv import native

    platforms = frozenset(PLATFORMS if _C.has_cuda() else ("cpu",))
    choices = {}
    for name, op in all_ops().items():
        choices[name] = _Choice(op, [Implementation("pykv", op.direct, platforms, 0)])
        if name in native.FUNCTIONS:
            function = _checked(op, native.FUNCTIONS[name])
            choices[name].implementations.append(Implementation("native", function, frozenset(PLATFORMS), -10))
    return choices


def _checked(op: Op, function: Callable[..., None]) -> Callable[..., None]:
    """The function behind the checks of the kernels: what they refuse is refused, in their words."""

    def stand_in(position: int, value: Any) -> Any:
        p = op.parameters[position]
        if not p.is_array or value is None or isinstance(value, (bool, int, float)):
            return value
        return _C.untouched(value, p.kind != "read", op.name, position)

    def checked(*args: Any, **kwargs: Any) -> None:
        places = {p.name: i for i, p in enumerate(op.parameters)}
        op.direct(
            *(stand_in(i, value) if i < len(places) else value for i, value in enumerate(args)),
            **{k: stand_in(places[k], value) if k in places else value for k, value in kwargs.items()},
        )
        function(*args, **kwargs)

    return checked


_entries: list[str] = ["all"]
_log: _watching.Watcher | None = None


def register(
    op: str,
    provider: str,
    *,
    platforms: Iterable[str] = PLATFORMS,
    priority: int = 10,
    accepts: Callable[..., bool | str] | None = None,
    override: bool = False,
) -> Callable[[_Function], _Function]:
    """Decorates a function with the signature of an operation: from now on calls may take it.

    Args:
        op: name of the operation.
        provider: whose it is; the name it has in :func:`explain`.
        platforms: ``"cpu"``, ``"cuda"``, or several of them.
        priority: higher ones are asked first.
        accepts: called with the arguments of a call, as the function would be: True to take it; False, or a text that
            says why not, to leave it to the next implementation.
        override: replace the implementation that the provider has registered before.

    Raises:
        ValueError: no such operation or platform; or the provider has one already.
    """
    choice = _choice_of(op)
    wanted = frozenset([platforms] if isinstance(platforms, str) else platforms)
    if unknown := wanted - set(PLATFORMS):
        raise ValueError(f"platforms: must be of {', '.join(PLATFORMS)}, got {min(unknown)!r}")
    if not override and any(i.provider == provider for i in choice.implementations):
        raise ValueError(f"{op}: {provider} has an implementation already; say override=True to replace it")

    def attach(function: _Function) -> _Function:
        with _lock:
            others = [i for i in choice.implementations if i.provider != provider]
            new = Implementation(provider, function, wanted, priority, accepts)
            choice.implementations = sorted([*others, new], key=lambda i: -i.priority)
            _route(choice)
        return function

    return attach


def unregister(op: str, provider: str) -> None:
    """Takes back what :func:`register` did."""
    choice = _choice_of(op)
    if provider == "pykv" or not any(i.provider == provider for i in choice.implementations):
        raise ValueError(f"{op}: {provider!r} has registered nothing")
    with _lock:
        choice.implementations = [i for i in choice.implementations if i.provider != provider]
        _route(choice)


def configure(ops: str | Sequence[str]) -> None:
    """Enables and disables operations: ``"all"``, ``"none"``, ``"+op"``, ``"-op"``, as a list or joined by commas.

    ``all`` is what counts if neither is said.  A disabled operation is carried out by its ``native`` implementation.
    The environment variable ``PYKV_OPS`` says the same when pykv is imported.  The last call counts.

    Raises:
        ValueError: an entry is none of these, names no operation, contradicts another one, or more than one of ``all``
            and ``none`` is given; nothing has changed.
    """
    global _entries
    entries = [e.strip() for e in ops.split(",")] if isinstance(ops, str) else list(ops)
    if len([e for e in entries if e in ("all", "none")]) > 1:
        raise ValueError(f"ops: only one of 'all' and 'none' may be given, once, got {entries}")
    for entry in entries:
        if entry in ("all", "none"):
            continue
        if len(entry) < 2 or entry[0] not in "+-":
            raise ValueError(f"ops: an entry must be 'all', 'none', '+op' or '-op', got {entry!r}")
        _choice_of(entry[1:])
        if ("-" if entry[0] == "+" else "+") + entry[1:] in entries:
            raise ValueError(f"ops: {entry[1:]} is both enabled and disabled")
    with _lock:
        _entries = entries
        for choice in _choices().values():
            _route(choice)


def log(to: str) -> None:
    """Shows all calls from now on: in a line each, as NVTX ranges, or as ranges of torch's profiler.

    A line has the operation, of each array its dtype, shape and device, and the stream; it is written before the call.
    ``PYKV_LOG`` says the same when pykv is imported.  While nothing is asked for, calls know nothing of this.  Calls in
    compiled functions of torch and JAX are not seen: they do not come by Python.

    Args:
        to: ``"stderr"`` or the path of a file, to which is appended; ``"nvtx"`` (wants the package nvtx); ``"torch"``
            (``torch.profiler.record_function``); several of them joined by commas; ``""`` for nothing.

    Raises:
        ValueError: an entry is none of these, two say where lines go, or nvtx is not installed.
        OSError: the file cannot be opened.
    """
    from pykv import _watching

    global _log
    new = _watching.watcher(to)
    with _lock:
        _log = new
        for choice in _choices().values():
            _route(choice)


def explain(op: str, *args: Any, device: str | None = None, **kwargs: Any) -> Explanation:
    """Which implementation the call ``pykv.<op>(*args, **kwargs)`` would take, and why; nothing is called.

    For ``paged_attention``, ``paged_attention_v1`` and ``paged_attention_v2`` also the plan of our kernels: their names
    with the head size and rows of their tiles, their grids, and the bytes of workspace.  The arguments are checked as
    in the call.

    Args:
        op: the name of an operation.
        args: its arguments,
        kwargs: and those by name.
        device: ``"A100"``, ``"H100"`` or ``"H200"``: the plan is made for such a GPU, which need not be there, instead
            of the device of the arrays.

    Raises:
        ValueError: there is no such operation; or a device is given that is none of these, or for an operation of
            which there is no plan.  Of attention also what the call raises.
    """
    choice = _choice_of(op)
    if device is not None and op not in _PLANNED:
        raise ValueError(f"device: must be None for {op}, of which there is no plan, got {device!r}")
    chosen, explanation = choice.look(args, kwargs)
    if op not in _PLANNED or chosen is None or chosen.provider != "pykv":
        return explanation
    try:
        _C.paged_attention_only_plan(True)
        _C.paged_attention_plan_for(device)
        chosen.function(*args, **kwargs)
        return replace(explanation, plan=tuple(_C.paged_attention_plan().splitlines()), device=device)
    finally:
        _C.paged_attention_only_plan(False)
        _C.paged_attention_plan_for(None)


def _choice_of(op: str) -> _Choice:
    if op not in _choices():
        raise ValueError(f"no operation is called {op!r}")
    return _choices()[op]


def _is_enabled(op: str) -> bool:
    return ("none" not in _entries or f"+{op}" in _entries) and f"-{op}" not in _entries


def _route(choice: _Choice) -> None:
    """Sends calls here if there is anything to choose, else straight to the kernels, which then know nothing of it.

    There is something to choose if an implementation comes before ours, or is for a platform that ours has not.
    """
    ours = next(i for i in choice.implementations if i.provider == "pykv")
    choice.is_routed = not _is_enabled(choice.op.name) or any(
        i.priority >= ours.priority or i.platforms - ours.platforms for i in choice.registered
    )
    taker = choice.take if choice.is_routed else None
    if _log is not None:
        taker = _log.around(choice.op, taker or choice.op.direct)
    choice.op.function.route(taker)
    for watcher in _watchers:
        watcher(choice.op, taker is not None)


_watchers: list[Callable[[Op, bool], None]] = []


def _watch(watcher: Callable[[Op, bool], None]) -> None:
    """Tells the watcher, now and at each change, of which operations Python sees the calls."""
    with _lock:
        _watchers.append(watcher)
        for choice in _choices().values():
            watcher(choice.op, choice.is_routed or _log is not None)


def _register_installed() -> None:
    """What other packages offer by entry points, and what the environment wants."""
    for entry in entry_points(group="pykv.ops"):
        op, _, provider = entry.name.partition(".")
        register(op, provider or entry.name)(_on_first_call(entry))
    if "PYKV_OPS" in os.environ:
        configure(os.environ["PYKV_OPS"])
    if os.environ.get("PYKV_LOG"):
        log(os.environ["PYKV_LOG"])


def _on_first_call(entry: Any) -> Callable[..., None]:
    def function(*args: Any, **kwargs: Any) -> None:
        entry.load()(*args, **kwargs)

    return function


_register_installed()
