"""The operations as callables: of C, and yet what their Python definitions say."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing

import numpy as np
import pytest
from tolerance import assert_close

import pykv
from pykv._schema import NoneIs, all_ops, operation
from pykv._tools.samples import sample

OUT, X = np.zeros((2, 8), np.float32), np.ones((2, 8), np.float32)


@pytest.mark.parametrize("name", sorted(all_ops()))
def test_they_are_callables_of_c(name):
    function = getattr(pykv, name)
    assert type(function) is pykv._C.Function
    assert function.__name__ == function.__qualname__ == name
    assert inspect.isroutine(function)  # help() shows it as a function
    assert inspect.signature(function) == inspect.signature(function.__wrapped__)
    assert typing.get_type_hints(function)["return"] is type(None)
    assert pickle.loads(pickle.dumps(function)) is copy.deepcopy(function) is function
    assert repr(function) == f"<operation {name}>"


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((OUT, X, None), {}),
        ((OUT, X, None, 1e-6), {"stream": None}),
        ((OUT, X), {"weight": None}),
        ((OUT,), {"epsilon": 1e-6, "weight": None, "input": X}),
        ((), {"stream": None, "epsilon": 1e-6, "weight": None, "input": X, "out": OUT}),
        ((OUT, X), {"".join(["wei", "ght"]): None}),  # a name that is not interned
    ],
)
def test_arguments_by_position_and_by_name(args, kwargs):
    OUT[...] = 0
    pykv.rms_norm(*args, **kwargs)
    assert_close(OUT, np.ones((2, 8)), np.float32)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((OUT, X), {}),
        ((OUT, X), {"stream": None}),
        ((OUT, X, None, 1e-6, None), {}),
        ((OUT, X, None), {"out": OUT}),
        ((OUT, X, None), {"what": 1}),
        ((OUT, X, None), {"epsilon": 1, "what": 1}),
    ],
)
def test_wrong_arguments_are_refused_in_the_words_of_python(args, kwargs):
    with pytest.raises(TypeError) as wanted:
        pykv.rms_norm.__wrapped__(*args, **kwargs)
    with pytest.raises(TypeError) as got:
        pykv.rms_norm(*args, **kwargs)
    assert str(got.value) == str(wanted.value)


def test_converters_make_what_c_takes():
    calls = []

    def halved(value):
        calls.append(value)
        if value is None:
            return 1e-6
        if value < 0:
            raise ValueError("negative")
        return value / 2

    def rms_norm(out, input, weight, epsilon=None, *, stream=None): ...

    function = operation(converters={"epsilon": halved})(rms_norm)
    assert calls == [None]  # the default, once and for all
    for arguments in ((OUT, X, None), (OUT, X, None, None)):
        function(*arguments)
        assert_close(OUT, np.ones((2, 8)), np.float32)
    assert calls == [None]
    function(OUT, X, None, epsilon=6.0)
    assert_close(OUT, np.full((2, 8), 0.5), np.float32)
    with pytest.raises(ValueError, match="negative"):
        function(OUT, X, None, -1.0)
    assert calls == [None, 6.0, -1.0]


def test_a_definition_with_a_body_takes_the_calls_itself():
    def rms_norm(out, input, weight, epsilon=1e-6, *, stream=None):
        out[...] = epsilon

    function = operation(has_body=True)(rms_norm)
    function(OUT, X, None, epsilon=3)
    assert (OUT == 3).all()


def test_in_a_class_they_bind_as_functions_do():
    class Norm:
        norm = pykv.rms_norm

    assert Norm.norm is pykv.rms_norm
    with pytest.raises(TypeError, match=r"rms_norm: out: an array .* is required, got Norm"):
        Norm().norm(X, None)


NUMBERS = [
    (op.name, p.name, p.convert) for op in all_ops().values() for p in op.parameters if type(p.convert) is NoneIs
]


@pytest.mark.parametrize(("name", "parameter", "convert"), NUMBERS)
def test_numbers_that_none_stands_for_are_refused_by_name(name, parameter, convert):
    wrong = [(np.ones(2), TypeError), ("x", TypeError)]
    wrong += [(-1, ValueError), (float("nan"), ValueError)] * convert.positive
    wrong += [(float("nan"), ValueError)] * convert.number
    for value, error in wrong:
        with pytest.raises(error, match=f"^{name}: {parameter}: "):
            getattr(pykv, name)(**sample(name) | {parameter: value})


BOOLS = [(op.name, p.name, p.default) for op in all_ops().values() for p in op.parameters if p.kind == "bool"]


@pytest.mark.parametrize(("name", "parameter", "default"), BOOLS)
def test_what_is_no_truth_value_is_refused(name, parameter, default):
    for value in ("false", b"", [], None, float("nan"), 0.0, object()):
        with pytest.raises(TypeError, match=f"^{name}: {parameter}: a bool is required, got {type(value).__name__}"):
            getattr(pykv, name)(**sample(name) | {parameter: value})
    given = sample(name).get(parameter, default)
    for value in (int(given), np.bool_(given), np.array([given])):
        getattr(pykv, name)(**sample(name) | {parameter: value})


STRINGS = [(op.name, p.name) for op in all_ops().values() for p in op.parameters if p.kind == "str"]


@pytest.mark.parametrize(("name", "parameter"), STRINGS)
def test_a_string_does_not_end_at_a_null_character(name, parameter):
    given = sample(name)
    with pytest.raises(ValueError, match=f"^{name}: {parameter}: must not hold a null character"):
        getattr(pykv, name)(**given | {parameter: f"{given.get(parameter, '')}\0x"})
