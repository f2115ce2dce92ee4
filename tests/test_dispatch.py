"""Which implementation of an operation a call takes."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from tolerance import assert_close

import pykv
from pykv import dispatch, functional, native
from pykv._tools.samples import sample

rms_norm = pykv.rms_norm  # a name of before anything is registered


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    dispatch.configure("all")
    for choice in dispatch._choices().values():
        for implementation in list(choice.implementations):
            if implementation.provider not in ("pykv", "native"):
                dispatch.unregister(choice.op.name, implementation.provider)


def call(function=pykv.rms_norm):
    out = np.full((2, 8), 7, np.float32)
    function(out, np.ones((2, 8), np.float32), None)
    return out


def fives(out, input, weight, epsilon=1e-6, *, stream=None):
    out[...] = 5


def routed(name="rms_norm"):
    return dispatch._choices()[name].is_routed


def test_nothing_is_left_of_it_where_there_is_nothing_to_choose():
    dispatch.register("rms_norm", "mine")(fives)
    assert routed()
    assert not routed("relu2")
    dispatch.unregister("rms_norm", "mine")
    assert not routed()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):  # of C again: it names what it lacks
        rms_norm(1, 2)


def test_what_comes_after_ours_is_taken_where_ours_cannot_be():
    """A negative priority: behind the kernels, for a platform that they are not built for."""
    choice = dispatch._choices()["rms_norm"]
    ours = choice.implementations[0]
    choice.implementations[0] = replace(ours, platforms=frozenset({"cuda"}))
    try:
        assert call()[0, 0] != 5
        dispatch.register("rms_norm", "spare", priority=-1)(fives)
        assert (call() == 5).all()
        assert pykv.explain("rms_norm", *(np.ones((2, 8), np.float32),) * 2, None).chosen == "spare"
    finally:
        choice.implementations = [ours if i.provider == "pykv" else i for i in choice.implementations]


def test_what_comes_after_ours_leaves_the_direct_way_where_ours_always_can():
    dispatch.register("rms_norm", "spare", priority=-1, platforms=["cpu"])(fives)
    assert not routed()
    assert pykv.explain("rms_norm", *(np.ones((2, 8), np.float32),) * 2, None).chosen == "pykv"
    assert_close(call(), np.ones((2, 8)), np.float32)


def test_a_registered_function_is_taken_under_every_name():
    dispatch.register("rms_norm", "mine")(fives)
    assert (call() == 5).all()
    assert (call(rms_norm) == 5).all()
    assert list(inspect.signature(rms_norm).parameters) == ["out", "input", "weight", "epsilon", "stream"]
    dispatch.unregister("rms_norm", "mine")
    assert_close(call(), np.ones((2, 8)), np.float32)


def test_platforms_and_arguments_decide():
    dispatch.register("rms_norm", "gpu", platforms=["cuda"])(fives)
    dispatch.register("rms_norm", "wide", accepts=lambda out, *_, **__: out.shape[-1] > 8 or "rows are too short")(
        fives
    )
    assert_close(call(), np.ones((2, 8)), np.float32)
    explanation = pykv.explain("rms_norm", *(np.ones((2, 8), np.float32),) * 2, None)
    assert explanation.chosen == "pykv"
    assert str(explanation).splitlines() == [
        "rms_norm on cpu: pykv",
        "  gpu: is for cuda, the call is on cpu",
        "  wide: rows are too short",
        "  pykv: is taken",
        "  native: is not asked any more",
    ]


def test_higher_priorities_are_asked_first():
    dispatch.register("rms_norm", "low", priority=1)(lambda *_, **__: None)
    dispatch.register("rms_norm", "high", priority=99)(fives)
    assert (call() == 5).all()


def test_a_provider_registers_once():
    dispatch.register("rms_norm", "mine")(fives)
    with pytest.raises(ValueError, match="rms_norm: mine has an implementation already"):
        dispatch.register("rms_norm", "mine")
    dispatch.register("rms_norm", "mine", override=True)(lambda *_, **__: None)
    assert (call() == 7).all()
    with pytest.raises(ValueError, match="no operation is called 'rms'"):
        dispatch.register("rms", "mine")
    with pytest.raises(ValueError, match="platforms: must be of cpu, cuda, got 'tpu'"):
        dispatch.register("rms_norm", "other", platforms=["tpu"])


def test_one_platform_needs_no_list():
    dispatch.register("rms_norm", "mine", platforms="cpu")(fives)
    assert (call() == 5).all()
    with pytest.raises(ValueError, match="platforms: must be of cpu, cuda, got 'tpu'"):
        dispatch.register("rms_norm", "other", platforms="tpu")


def test_pykv_functional_calls_by_keyword():
    asked = []

    def accepts(**arguments):
        asked.append(set(arguments))
        return True

    dispatch.register("rms_norm", "mine", accepts=accepts)(fives)
    assert (functional.rms_norm(np.ones((2, 8), np.float32), None) == 5).all()
    assert asked == [{"out", "input", "weight"}]


@pytest.mark.parametrize(
    ("entries", "enabled", "disabled"),
    [
        (["all", "-rms_norm"], ["relu2"], ["rms_norm"]),
        ("all,-rms_norm", ["relu2"], ["rms_norm"]),
        ("none, +rms_norm", ["rms_norm"], ["relu2"]),
        (["-rms_norm", "-rms_norm"], ["relu2"], ["rms_norm"]),
        (["+rms_norm"], ["rms_norm", "relu2"], []),
        ("none", [], ["rms_norm", "relu2"]),
    ],
)
def test_grammar(entries, enabled, disabled):
    dispatch.configure(entries)
    for name, chosen in [*((n, "pykv") for n in enabled), *((n, "native") for n in disabled)]:
        assert pykv.explain(name, **sample(name)).chosen == chosen


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["all", "none"], "only one of 'all' and 'none'"),
        (["all", "all"], "only one of 'all' and 'none'"),
        (["rms_norm"], "an entry must be"),
        (["all,-rms_norm"], "an entry must be"),
        ("", "an entry must be"),
        (["+"], "an entry must be"),
        (["+rms_norm", "-rms_norm"], "rms_norm is both enabled and disabled"),
        (["-what"], "no operation is called 'what'"),
    ],
)
def test_wrong_entries_change_nothing(entries, message):
    dispatch.configure("-relu2")
    with pytest.raises(ValueError, match=message):
        dispatch.configure(entries)
    assert pykv.explain("relu2", **sample("relu2")).chosen == "native"


def test_a_disabled_operation_without_a_native_one_says_so():
    dispatch.configure("-concat_mla_q")
    with pytest.raises(NotImplementedError, match=r"concat_mla_q on cpu: no implementation\n  pykv: .* is disabled"):
        pykv.concat_mla_q(**sample("concat_mla_q"))


@pytest.mark.parametrize("name", sorted(native.FUNCTIONS))
def test_native_implementations_agree(array, name):
    if array.name in ("jax", "interface"):
        pytest.skip("no arrays that can be written by this library")
    pytest.importorskip("array_api_compat")
    values = sample(name)
    ours = {k: array.output(v) if isinstance(v, np.ndarray) else v for k, v in values.items()}
    theirs = {k: array.output(v) if isinstance(v, np.ndarray) else v for k, v in values.items()}
    getattr(pykv, name)(**ours)
    dispatch.configure(f"-{name}")
    getattr(pykv, name)(**theirs)
    for k, v in values.items():
        if isinstance(v, np.ndarray):
            assert_close(array.numpy(theirs[k]), array.numpy(ours[k]), np.float32)


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, 1.0, -1.0, 88.0, -88.0], np.float32)


@pytest.mark.parametrize("name", sorted(native.FUNCTIONS))
def test_native_implementations_agree_about_special_values(name):
    """NaN and infinities come out where they come out of the kernels."""
    pytest.importorskip("array_api_compat")
    first, second = (grid.reshape(-1, 1) for grid in np.meshgrid(SPECIAL, SPECIAL))
    rows = np.concatenate([first, second], axis=1)
    values = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in sample(name).items()}
    written = list(values)[0]  # noqa: RUF015
    read = "residual" if "residual" in values else "input"
    width = 1 if values[written].shape[-1] < values["input"].shape[-1] else 2
    values |= {"input": rows.copy(), written: np.zeros((len(rows), width), np.float32)}
    if written == "input":
        values |= {"input": rows.copy(), read: rows[::-1].copy()}
    if values.get("weight") is not None:
        values["weight"] = np.ones(2, np.float32)
    ours, theirs = ({k: v.copy() if isinstance(v, np.ndarray) else v for k, v in values.items()} for _ in range(2))
    getattr(pykv, name)(**ours)
    dispatch.configure(f"-{name}")
    with np.errstate(all="ignore"):
        getattr(pykv, name)(**theirs)
    for a, b in ((ours[k], theirs[k]) for k in {written, read}):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))


@pytest.mark.parametrize("name", sorted(native.FUNCTIONS))
def test_native_implementations_refuse_what_the_kernels_refuse(name):
    pytest.importorskip("array_api_compat")
    right = sample(name)
    arrays = [k for k, v in right.items() if isinstance(v, np.ndarray)]
    wrong = [{**right, k: v} for k in arrays for v in spoilt(right[k])]
    wrong += [{k: v for k, v in right.items() if k != arrays[0]}, {**right, "nothing": 1}]
    for arguments in wrong:
        before = {k: v.copy() for k, v in arguments.items() if isinstance(v, np.ndarray)}
        dispatch.configure("all")
        theirs = refusal(name, arguments)
        dispatch.configure(f"-{name}")
        assert refusal(name, arguments) == theirs
        for k, v in before.items():
            assert theirs is None or arguments[k].tobytes() == v.tobytes()


def spoilt(x):
    fixed = x.copy()
    fixed.setflags(write=False)
    unaligned = np.ndarray(x.shape, x.dtype, np.zeros(x.nbytes + 1, np.uint8), 1)
    return [fixed, unaligned, x.astype(np.int64), x.astype(np.float64), x[..., :-1], x[None, None], x.tolist(), "text"]


def refusal(name, arguments):
    try:
        getattr(pykv, name)(**arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        return type(error), str(error)
    return None


def test_the_environment_is_read():
    program = "import pykv, numpy as np; x = np.ones((2, 8)); print(pykv.explain('relu2', x, x).chosen)"
    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-c", program],
        env=os.environ | {"PYKV_OPS": "all,-relu2", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "native"


def test_entry_points_are_found(tmp_path):
    (tmp_path / "mine.py").write_text("def relu2(out, input, *, stream=None):\n    out[...] = 42\n")
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pykv.ops]\nrelu2.mine = mine:relu2\n")
    program = (
        "import pykv, numpy as np; x = np.ones((1, 2), np.float32); y = x.copy(); pykv.relu2(y, x); print(y.max())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": ":".join([str(tmp_path), *sys.path]), "PYTHONSAFEPATH": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "42.0"
