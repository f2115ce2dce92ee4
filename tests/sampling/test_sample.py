from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, name_of, padded, random
from sampling import reference

import pykv

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
ADJUSTMENTS = {"repetition_penalty", "frequency_penalty", "presence_penalty"} | {
    "prompt_bitmap", "output_counts", "logit_bias", "allowed_bitmap"
}  # fmt: skip


def sample(array, x, seeds, steps, *, offset=0, **options):
    """Tokens and log-probabilities for NumPy arrays.  The same tokens come without the latter, in another way."""
    rows = len(x)
    out, logprobs = array.output(np.full(rows, -7, np.int32)), array.output(np.zeros(rows, np.float32))
    arrays = {name: array.input(v) if isinstance(v, np.ndarray) else v for name, v in options.items()}
    keys = array.input(x, offset=offset), array.input(seeds), array.input(steps)
    pykv.sample(out, *keys, **arrays)
    alone = array.numpy(out)
    pykv.sample(out, *keys, **arrays, logprobs=logprobs)
    np.testing.assert_array_equal(alone, array.numpy(out))
    return alone, array.numpy(logprobs)


def keys(rows, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(-(2**62), 2**62, rows), rng.integers(0, 2**40, rows)


def check(array, x, *, offset=0, first_token=0, **options):
    """Against the reference, but where that is within rounding of another result; most are not."""
    seeds, steps = keys(len(x), x.shape[1])
    tokens, logprobs = sample(array, x, seeds, steps, offset=offset, first_token=first_token, **options)
    adjusted = reference.adjusted(x, **{k: v for k, v in options.items() if k in ADJUSTMENTS})
    unclear = 0
    for row in range(len(x)):
        own = {k: (v if np.ndim(v) == 0 else v[row]) for k, v in options.items() if k not in ADJUSTMENTS}
        token, logprob, lead = reference.sample(
            adjusted[row], int(seeds[row]), int(steps[row]), first=first_token, **own
        )
        if lead < 2e-6:
            unclear += 1
            continue
        assert tokens[row] == token, (row, lead)
        assert abs(logprobs[row] - logprob) < 1e-5 * max(1, abs(logprob)), row
    assert unclear <= max(1, len(x) // 20)


@dtypes
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 1), (3, 5), (5, 1000), (2, 50257), (1, 130001), (40, 4099), (300, 257)], ids=name_of
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.9},
        {"top_p": 0.5, "temperature": 1.5},
        {"min_p": 0.05},
        {"top_k": 3000},
        {"top_k": 1500, "top_p": 0.7, "min_p": 0.01, "temperature": 0.8},
        {"top_k": 1},
        {"temperature": 0.0},
        {"top_p": 0.0},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_sizes(array, dtype, rows, cols, options):
    check(array, random((rows, cols), dtype, cols) * dtype.type(2), **options)


@pytest.mark.parametrize("options", [{"top_k": 40}, {"top_k": 2000}, {"top_p": 0.9}, {}], ids=str)
def test_logits_near_the_largest_float(array, options):
    x = np.random.default_rng(3).uniform(-3e38, 3e38, (9, 5000)).astype(np.float32)
    x[:3] *= np.float32(0.01)
    check(array, x, **options)


@pytest.mark.parametrize("top_k", [40, 1500])
def test_top_k_of_logits_near_the_largest_float_at_a_high_temperature(array, top_k):
    """All that is kept may be drawn, and nothing else."""
    x = np.random.default_rng(3).uniform(-2e36, 2e36, (300, 5000)).astype(np.float32)
    tokens, _ = sample(array, x, *keys(300), top_k=top_k, temperature=1e37)
    places = np.argsort(np.argsort(-x, axis=1), axis=1)[np.arange(300), tokens]
    assert places.max() < top_k
    assert len(np.unique(places)) > 30


@dtypes
def test_each_row_has_its_own_parameters(array, dtype):
    rows = 48
    rng = np.random.default_rng(1)
    options = {
        "temperature": rng.choice([0, 0.3, 1, 2], rows).astype(np.float32),
        "top_k": rng.choice([-1, 0, 1, 7, 40, 900, 2500, 5000], rows).astype(np.int32),
        "top_p": rng.choice([0.1, 0.8, 0.95, 1, 2], rows).astype(np.float32),
        "min_p": rng.choice([0, 0.001, 0.2], rows).astype(np.float32),
    }
    check(array, random((rows, 4001), dtype) * dtype.type(3), **options)


def adjustments(rows, cols, seed=0):
    rng = np.random.default_rng(seed)
    words = (cols + 31) // 32
    return {
        "repetition_penalty": rng.uniform(0.8, 1.6, rows).astype(np.float32),
        "frequency_penalty": rng.uniform(0, 0.5, rows).astype(np.float32),
        "presence_penalty": 0.25,
        "prompt_bitmap": rng.integers(-(2**31), 2**31, (rows, words)).astype(np.int32),
        "output_counts": np.maximum(rng.integers(-20, 4, (rows, cols)), 0).astype(np.int32),
        "logit_bias": rng.standard_normal((rows, cols)).astype(np.float32),
        "allowed_bitmap": rng.integers(-(2**31), 2**31, (rows, words)).astype(np.int32),
    }


@dtypes
@pytest.mark.parametrize("cols", [33, 2000, 20011])
@pytest.mark.parametrize("options", [{}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.9}, {"temperature": 0.0}], ids=str)
def test_adjustments(array, dtype, cols, options):
    check(array, random((6, cols), dtype) * dtype.type(2), **adjustments(6, cols), **options)


@pytest.mark.parametrize("name", sorted(ADJUSTMENTS))
def test_one_adjustment(array, name):
    x = random((9, 300), np.dtype(np.float32)) * 2
    given = adjustments(9, 300)
    needs = {"repetition_penalty": "prompt_bitmap", "frequency_penalty": "output_counts"}.get(name, name)
    needs = "output_counts" if name == "presence_penalty" else needs
    check(array, x, temperature=0.4, **{k: given[k] for k in {name, needs}})


@pytest.mark.parametrize("options", [{"top_k": 50, "top_p": 0.9}, {"top_k": 1000}, {"top_p": 0.9}, {}], ids=str)
@pytest.mark.parametrize("count", [1, 7, 300])
def test_few_tokens_are_allowed(array, options, count):
    """As by a grammar: fewer than top_k; by a bitmap, and of rows that hold -infinity."""
    x, rng = random((4, 40003), np.dtype(np.float32)), np.random.default_rng(count)
    allowed = np.zeros((4, 1251 * 32), bool)
    for row in allowed:
        row[rng.permutation(40003)[:count]] = True
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    check(array, x, allowed_bitmap=bits, **options)
    check(array, np.where(allowed[:, :40003], x, np.float32(-np.inf)), **options)


def test_one_bias_for_all_rows(array):
    x, bias = random((4, 100), np.dtype(np.float32)), random((1, 100), np.dtype(np.float32), 1) * 9
    tokens = np.zeros(4, np.int32)
    pykv.sample(tokens, x, temperature=0.0, logit_bias=np.broadcast_to(bias, (4, 100)))
    assert tokens.tolist() == (x + bias).argmax(1).tolist()


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 6),
    cols=st.integers(1, 300) | st.integers(1, 20000),
    padding=st.integers(0, 9),
    offset=st.integers(0, 9),
    first_token=st.integers(0, 9),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 20, 700, 2000]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    spread=st.sampled_from([0.1, 1.0, 8.0]),
)
def test_any_rows(
    array, dtype, rows, cols, padding, offset, first_token, temperature, top_k, top_p, min_p, spread
):  # fmt: skip
    x = (random((rows, cols), dtype, cols) * spread).astype(dtype)
    check(
        array, padded(x, padding), offset=offset, first_token=first_token, temperature=temperature, top_k=top_k,
        top_p=top_p, min_p=min_p,
    )  # fmt: skip


@pytest.mark.parametrize("none", [0, -1, -5000])
def test_a_top_k_that_is_none(array, none):
    x = random((4, 300), np.dtype(np.float32))
    np.testing.assert_array_equal(sample(array, x, *keys(4), top_k=none)[0], sample(array, x, *keys(4))[0])
    out = array.output(np.zeros_like(x))
    pykv.top_k_top_p_mask(out, array.input(x), top_k=none)
    np.testing.assert_array_equal(array.numpy(out), x)


@pytest.mark.parametrize("levels", [1, 2, 40])
@pytest.mark.parametrize("options", [{"top_p": 0.6}, {"top_k": 2000, "top_p": 0.50012}, {"top_k": 33}, {}], ids=str)
def test_ties_go_to_the_lower_token(array, levels, options):
    """Sums of equal shares are clear where the border lies between two of them."""
    x = np.random.default_rng(0).integers(0, levels, (3, 30001)).astype(np.float32)
    check(array, x, **options)


@dtypes
@pytest.mark.parametrize("times", [1, 40])
@pytest.mark.parametrize("options", [{"top_p": 0.3}, {"top_p": 0.9}, {"top_p": 0.9, "temperature": 0.1}], ids=str)
def test_what_a_row_begins_with_tells_nothing(array, dtype, times, options):
    """One row, which a cluster shares, and many: all that is drawn of them lies near the end, or far from 0."""
    x = random((6, 24001), dtype).astype(np.float32)
    x[0, :20000] = -np.inf
    x[1, :20000] = -60
    x[2, :23900] = -1000
    x[3] += 300
    x[4] = np.where(np.arange(24001) % 999 == 7, x[4], -np.inf)
    x[5] *= 20
    x = x.astype(dtype)
    if times > 1:
        check(array, np.tile(x, (times, 1)), **options)
    else:
        for row in x:
            check(array, row[None], **options)


@dtypes
@pytest.mark.parametrize("options", [{}, {"top_k": 30}, {"top_p": 0.8}, {"temperature": 0.0}], ids=str)
def test_nothing_but_the_row_decides(array, dtype, options):
    x = random((300, 5003), dtype)
    seeds, steps = keys(300)
    together, logprobs = sample(array, x, seeds, steps, **options)
    for rows in (slice(0, 1), slice(5, 7), slice(30, 100)):
        some, some_logprobs = sample(array, padded(x[rows], 5), seeds[rows], steps[rows], offset=3, **options)
        np.testing.assert_array_equal(some, together[rows])
        np.testing.assert_array_equal(some_logprobs, logprobs[rows])


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 50, "top_p": 0.9}, {"top_k": 3000}, {"top_p": 0.9}, {"temperature": 0.0}], ids=str
)
def test_any_number_of_rows_gives_the_same_tokens(array, options):
    """A row is shared by more blocks, or larger ones, where rows are few."""
    x = random((140, 70001), np.dtype(np.float16))
    seeds, steps = keys(140)
    together, logprobs = sample(array, x, seeds, steps, **options)
    for rows in (1, 2, 4, 5, 8, 9, 33, 64, 67):
        some, some_logprobs = sample(array, x[:rows], seeds[:rows], steps[:rows], **options)
        np.testing.assert_array_equal(some, together[:rows])
        np.testing.assert_array_equal(some_logprobs, logprobs[:rows])


@pytest.mark.parametrize("shards", [2, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shards_of_the_vocabulary(array, shards, temperature):
    x = (random((20, 3001), np.dtype(np.float32)) * 4).round() / 4
    seeds, steps = keys(20)
    whole, _ = sample(array, x, seeds, steps, temperature=temperature)
    best = np.full(20, -np.inf, np.float32)
    tokens = np.zeros(20, np.int32)
    first = 0
    for part in np.array_split(x, shards, axis=1):
        out, scores = array.output(np.zeros(20, np.int32)), array.output(np.zeros(20, np.float32))
        pykv.sample(
            out, array.input(part), array.input(seeds), array.input(steps), temperature, first_token=first,
            scores=scores,
        )  # fmt: skip
        wins = array.numpy(scores) > best  # the lower token of equals came before
        tokens[wins], best[wins] = array.numpy(out)[wins], array.numpy(scores)[wins]
        first += part.shape[1]
    np.testing.assert_array_equal(tokens, whole)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize(("cols", "bound"), [(12, 60), (40, 110)])
def test_draws_have_the_distribution(array, options, cols, bound):
    """Chi-square over many steps; the bound is passed once in 10^7 runs.  16 tokens share a number."""
    draws = 20000
    x = random((1, cols), np.dtype(np.float32), 4)
    steps = np.arange(draws)
    tokens, _ = sample(array, np.repeat(x, draws, 0), np.full(draws, 99), steps, **options)
    kept, _ = reference.kept(x[0], **options)
    p = np.zeros(cols)
    p[kept] = np.exp((x[0, kept] - x.max()).astype(np.float64) / options.get("temperature", 1.0))
    wanted = draws * p / p.sum()
    counts = np.bincount(tokens, minlength=cols)
    assert (counts[wanted == 0] == 0).all()
    chi_square = ((counts - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()
    assert chi_square < bound


def test_noise_has_the_distribution():
    """That of the reference, and so of the library: Gumbel's, and that of neighbours is independent."""
    found = np.array([reference.noise(7, step, 0, 48) for step in range(4000)])
    uniform = np.exp(-np.exp(-found))
    expected = (np.arange(uniform.size) + 0.5) / uniform.size
    assert np.abs(np.sort(uniform.ravel()) - expected).max() < 2.0 / np.sqrt(
        uniform.size
    )  # Kolmogorov: once in 1500 runs
    correlation = np.corrcoef(uniform.T) - np.eye(48)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(len(found))  # of 1128 pairs, once in 20000 runs
    small = (uniform > 0.95).astype(float)  # the largest noise is what draws
    assert np.abs(np.corrcoef(small.T) - np.eye(48)).max() < 6.5 / np.sqrt(len(found))


def test_known_answers_of_philox():
    """Those of the authors' implementation (Random123, kat_vectors)."""
    ones = 0xFFFFFFFF
    zero = reference.philox(np.zeros(4, np.uint64), (0, 0))
    assert [hex(int(w)) for w in zero] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    full = reference.philox(np.full(4, ones, np.uint64), (ones, ones))
    assert [hex(int(w)) for w in full] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


@dtypes
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 30}, {"top_k": 2000}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.0}], ids=str
)
@pytest.mark.parametrize("cols", [50, 9000])
def test_rows_without_a_token_are_marked_and_reported(array, dtype, options, cols):
    x = random((4, cols), dtype)
    x[1, cols - 3] = np.nan
    x[2] = -np.inf
    seeds, steps = keys(4)
    for bad, message in ((1, "logits: row 1 holds NaN"), (2, "logits: row 2 has nothing to choose from")):
        y = x.copy()
        y[3 - bad] = x[0]
        out = array.output(np.zeros(4, np.int64))
        with array.reports(message):
            pykv.sample(out, array.input(y), array.input(seeds), array.input(steps), **options)
        tokens = array.numpy(out)
        assert tokens[bad] == -1
        good = [row for row in range(4) if row != bad]
        np.testing.assert_array_equal(tokens[good], sample(array, y[good], seeds[good], steps[good], **options)[0])


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.0}], ids=str)
def test_infinity(array, options):
    x = random((2, 4000), np.dtype(np.float32))
    x[:, 7:] = -np.inf
    x[1, 3] = np.inf
    seeds, steps = keys(2)
    for step in range(20):
        tokens, _ = sample(array, x, seeds, steps + step, **options)
        assert tokens[0] < 7
        assert tokens[1] == 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seeds": np.zeros(3, np.int64)}, ValueError, "seeds: "),
        ({"steps": np.zeros(2, np.float32)}, TypeError, "steps: "),
        ({"temperature": np.ones(3, np.float32)}, ValueError, "temperature: must have 1 element"),
        ({"top_k": 2.5}, TypeError, "top_k: must be an integer"),
        ({"top_k": 1 << 24}, ValueError, "top_k: must be below 2"),
        ({"top_k": np.ones(2, np.float32)}, TypeError, "top_k: "),
        ({"top_p": np.ones(2, np.int32)}, TypeError, "top_p: "),
        ({"allowed_bitmap": np.zeros((2, 2), np.int32)}, ValueError, "allowed_bitmap: "),
        ({"output_counts": np.zeros((2, 20), np.int64)}, TypeError, "output_counts: "),
        ({"first_token": -1}, ValueError, "first_token: "),
        ({"out": np.zeros(2, np.float32)}, TypeError, "out: "),
        ({"logits": np.zeros((2, 0), np.float32)}, ValueError, "logits: vocab_size"),
    ],
)
def test_wrong_arguments(change, error, message):
    right = {"out": np.zeros(2, np.int32), "logits": np.zeros((2, 20), np.float32)}
    with pytest.raises(error, match=message):
        pykv.sample(**right | change)
