"""Random calls come to every operation: right ones other than its sample, wrong ones, and those whose ids change."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cases import BELIEVED, Case
from ids_that_change import Page

import pykv
from pykv._schema import all_ops

MOST = 80  # seeds: of each kind there are several among so many


def made(seed, name=None):
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Case(seed, name)


def outcomes(name):
    """What became of right and wrong calls, until both were seen."""
    seen = set()
    for seed in range(MOST):
        case = made(seed, name)
        is_wrong = any("WRONG" in change for change in case.changes)
        try:
            getattr(pykv, name)(**case.arguments)
            seen.add("done" if case.changes and not is_wrong else "wrong and done")
        except (TypeError, ValueError, NotImplementedError):
            seen.add("refused" if is_wrong else "right and refused")
        if {"done", "refused"} <= seen:
            break
    return seen


@pytest.mark.parametrize("name", all_ops())
def test_right_and_wrong_calls(name):
    wanted = {"refused"} if name in BELIEVED else {"done", "refused"}
    assert wanted <= outcomes(name)


def test_a_seed_is_one_call():
    for seed in range(200):
        cases = [made(seed) for _ in range(2)]
        assert cases[0].name == cases[1].name
        assert cases[0].changes == cases[1].changes


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX, which other tests started: the child only copies memory
def test_ids_change():
    page, case = Page(), made(0, "shuffle_rows")
    try:
        for _ in range(100):
            ids = case.arguments["dst2src_map"] = np.array([1, 0, 2, 1])
            with page.holding({"dst2src_map": ids}) as held:
                found = {tuple(held["dst2src_map"]) for _ in range(20_000)}
            if len(found) > 1:
                break
        assert len(found) > 1
        assert (ids == [1, 0, 2, 1]).all()
    finally:
        page.close()
