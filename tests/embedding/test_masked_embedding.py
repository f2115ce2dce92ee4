from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from dequantization.reference import DECODE, FORMATS
from embedding import reference
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, assert_rounded_once, name_of, padded, random, turned

import pykv
import pykv.functional

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
CODES = [np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]


def embed(array, out, ids, weight, *shard, offset=0, **more):
    """``out`` gives the shape, strides and dtype of the result."""
    y = array.output(out, offset=offset)
    more = {k: array.input(v) if isinstance(v, np.ndarray) else v for k, v in more.items()}
    pykv.masked_embedding(y, array.input(ids), array.input(weight, offset=offset), *shard, **more)
    return array.numpy(y)


def table(rows, width, dtype, seed=0):
    if dtype == np.int8:
        return np.random.default_rng(seed).integers(-128, 128, (rows, width)).astype(np.int8)
    return random((rows, width), dtype, seed)


@pytest.mark.parametrize("dtype", [*FLOATS, *CODES, np.dtype(np.int64)], ids=name_of)
@pytest.mark.parametrize("width", [1, 7, 8, 64, 1000, 4096])
def test_tables_are_copied(array, dtype, width):
    """Bit by bit, NaN too."""
    if not array.keeps(dtype):
        pytest.skip("the library has no such dtype")
    weight = table(9, width, np.dtype(np.int8)).astype(dtype)
    if dtype in FLOATS:
        weight[0, 0] = np.nan
    ids = np.array([[0, 8, 3], [3, 3, 7]], np.int32)
    result = embed(array, np.ones((2, 3, width), dtype), ids, weight)
    np.testing.assert_array_equal(result.view(np.uint8), weight[ids].view(np.uint8))


def test_many_tokens_are_copied(array):
    """So many that results go past the caches; rows of an odd width begin anywhere in a line."""
    weight, ids = random((50, 801), FLOATS[0]), np.random.default_rng(0).integers(0, 50, 2000)
    result = embed(array, np.ones((2000, 801), np.float32), ids, weight, offset=3)
    np.testing.assert_array_equal(result, weight[ids])


@dtypes
@pytest.mark.parametrize("of", [*FLOATS, *CODES, np.dtype(np.uint8)], ids=name_of)
def test_tables_of_every_dtype(array, dtype, of):
    """Scaled by row and as a whole, with positions added."""
    rng, rows, width = np.random.default_rng(1), 11, 200
    weight, scales = table(rows, width, CODES[1] if of == np.uint8 else of), rng.random(rows, np.float32)
    position_weight = random((5, width), dtype, 3)
    ids, positions = rng.integers(0, rows, 17), rng.integers(0, 5, 17).astype(np.int32)
    more = {"scale": 0.75, "weight_scale": scales, "positions": positions, "position_weight": position_weight}
    given = weight.view(np.uint8) if of == np.uint8 else weight
    if of in CODES[1:] and not array.keeps(of):
        pytest.skip("the library has no such dtype")
    result = embed(array, np.ones((17, width), dtype), ids, given, **more)
    assert_rounded_once(result, reference.masked_embedding(ids, weight, **more), atol=1e-6)


@given(
    dtype=st.sampled_from(FLOATS),
    of=st.sampled_from([*FLOATS, CODES[0]]),
    shape=st.sampled_from([(0,), (1,), (13,), (3, 5), (2, 3, 4), (0, 4)]),
    groups=st.integers(0, 5),
    group=st.integers(1, 40),
    padding=st.integers(0, 9),
    offset=st.integers(0, 9),
    swapped=st.booleans(),
    wide=st.booleans(),
)
def test_any_rows(array, dtype, of, shape, groups, group, padding, offset, swapped, wide):
    rng, rows, width = np.random.default_rng(group), 6, max(groups, 1) * group
    weight = padded(table(rows, width, of), padding) if of != np.int8 else table(rows, width + padding, of)[:, :width]
    out = np.zeros((*shape, width), dtype)
    out = turned(out) if swapped and len(shape) > 1 else padded(out, padding)
    ids = rng.integers(0, rows, shape).astype(np.int64 if wide else np.int32)
    more = {"weight_scale": rng.random((rows, groups), np.float32)} if groups else {}
    if (of == dtype and offset % 2) or of == np.int8:
        more["scale"] = 1.5
    result = embed(array, out, ids, weight, offset=offset, **more)
    assert_rounded_once(result, reference.masked_embedding(ids, weight, **more))


@pytest.mark.parametrize(("org", "added", "ranks", "padding"), [(100, 7, 2, 64), (64, 0, 4, 16), (1, 1, 2, 2)])
@pytest.mark.parametrize("converted", [False, True])
def test_shards_add_up(array, org, added, ranks, padding, converted):
    whole = random((org + added, 24), np.dtype(np.float32))
    ids = np.random.default_rng(0).permutation(org + added).astype(np.int32)
    total = np.zeros((len(ids), 24), np.float32)
    for rank in range(ranks):
        shard = pykv.vocab_shard(org, added, ranks, rank, padding)
        parts = [whole[shard.org_start : shard.org_end], np.full((shard.num_org_pad, 24), np.nan, np.float32)]
        parts += [whole[shard.added_start : shard.added_end], np.full((2, 24), np.nan, np.float32)]
        total += embed(array, total, ids, np.concatenate(parts), *shard, scale=2.0 if converted else 1.0)
    np.testing.assert_array_equal(total, whole[ids] * (2 if converted else 1))


def test_shards_are_those_of_vllm():
    """Base ids and added ids of every rank, with the padding between them."""
    shards = [pykv.vocab_shard(100, 7, 2, rank) for rank in range(2)]
    assert shards == [(0, 64, 0, 100, 107, 107), (64, 100, 28, 107, 107, 107)]
    assert [(s.num_org, s.num_added) for s in shards] == [(64, 7), (36, 0)]
    assert pykv.vocab_shard(100, 7, 1, 0) == (0, 100, 28, 100, 107, 107)
    assert pykv.vocab_shard(32000, 200, 4, 3) == (24000, 32000, 0, 32192, 32200, 32200)
    for wrong in [(100, 7, 3, 0), (100, 7, 2, 2), (-1, 7, 2, 0), (100, 7, 0, 0), (100, 7, 2, 0, 0)]:
        with pytest.raises(ValueError, match="vocab_shard: "):
            pykv.vocab_shard(*wrong)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("bad", [-1, 20, 2**40, -(2**63)])
def test_ids_out_of_range(array, converted, bad):
    weight, ids = random((6, 40), FLOATS[0]), np.array([4, bad, 12, 9], np.int64)
    shard, more = (4, 8, 0, 12, 14, 20), {"scale": 3.0} if converted else {}
    y = array.output(np.ones((4, 40), np.float32))
    with array.reports(rf"masked_embedding: ids: {bad} is out of range \[0, 20\)"):
        pykv.masked_embedding(y, array.input(ids), array.input(weight), *shard, **more)
    assert_rounded_once(array.numpy(y), reference.masked_embedding(ids, weight, *shard, **more))


def test_ids_without_a_vocabulary_end_with_the_table(array):
    y = array.output(np.ones((2, 8), np.float32))
    with array.reports(r"ids: 5 is out of range \[0, 5\)"):
        pykv.masked_embedding(y, array.input(np.array([4, 5])), array.input(np.ones((5, 8), np.float32)))
    np.testing.assert_array_equal(array.numpy(y), [[1] * 8, [0] * 8])


@pytest.mark.parametrize("bad", [-1, 3])
def test_positions_out_of_range(array, bad):
    weight, more = random((5, 24), FLOATS[0]), random((3, 24), FLOATS[0], 1)
    ids, positions = np.array([1, 2], np.int32), np.array([bad, 2], np.int32)
    y = array.output(np.ones((2, 24), np.float32))
    with array.reports(rf"positions: {bad} is out of range \[0, 3\)"):
        pykv.masked_embedding(
            y,
            array.input(ids),
            array.input(weight),
            positions=array.input(positions),
            position_weight=array.input(more),
        )
    expected = reference.masked_embedding(ids, weight, positions=positions, position_weight=more)
    assert_rounded_once(array.numpy(y), expected, atol=1e-6)


def blocks(quant_type, rows, count, seed=0):
    """Random bytes, with scales that are infinite or NaN among them; and what they stand for."""
    name, elements, size = FORMATS[quant_type]
    made = np.random.default_rng(seed).integers(0, 256, (rows * count, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        if name in DECODE:
            values = DECODE[name](made)
        else:
            gguf = pytest.importorskip("gguf", reason="has the code books")
            values = gguf.dequantize(made, gguf.GGMLQuantizationType(quant_type))
        return made.reshape(rows, count * size), values.astype(np.float32).reshape(rows, count * elements)


@pytest.mark.parametrize("quant_type", FORMATS, ids=lambda i: FORMATS[i][0])
@pytest.mark.parametrize("count", [1, 33])
def test_blocks_of_gguf(array, quant_type, count):
    """To the bit as they are decoded; NaN is NaN.  Ids of no row give zeros."""
    weight, values = blocks(quant_type, 9, count)
    ids = np.array([[8, 3, 0], [14, 3, 15]], np.int32)
    result = embed(
        array, np.ones((2, 3, values.shape[1]), np.float32), ids, weight, 0, 9, 0, vocab_size=20, quant_type=quant_type
    )
    expected = np.concatenate([values, np.zeros_like(values)])[ids]
    np.testing.assert_array_equal(result, expected)


@dtypes
@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("offset", [0, 1])
def test_blocks_of_gguf_in_a_shard(array, dtype, padding, offset):
    """Scaled, with positions added, of rows that begin anywhere."""
    weight = np.random.default_rng(0).integers(0, 256, (6, 170 + padding), dtype=np.uint8)[:, :170]
    weight[:, [0, 34, 68, 102, 136]], weight[:, [1, 35, 69, 103, 137]] = 0, 0x34  # scales of Q8_0: 0.25
    codes = np.ascontiguousarray(weight).reshape(6, 5, 34)[..., 2:]
    values = codes.view(np.int8).astype(np.float32).reshape(6, 160) / 4
    shard, ids = (4, 8, 1, 12, 13, 20), np.array([4, 12, 7, 9, 5], np.int64)
    more = {
        "scale": 1.5,
        "positions": np.array([0, 2, 1, 1, 0], np.int32),
        "position_weight": random((3, 160), FLOATS[0]),
    }
    out = padded(np.ones((5, 160), dtype), padding)
    result = embed(array, out, ids, weight, *shard, offset=offset, quant_type=8, **more)
    assert_rounded_once(result, reference.masked_embedding(ids, values, *shard, **more), atol=1e-5)


def test_blocks_of_gguf_are_of_a_known_dtype_and_width():
    ids, weight = np.array([1, 0], np.int32), np.zeros((3, 68), np.uint8)
    made = pykv.functional.masked_embedding(ids, weight, quant_type=8)
    assert (made.shape, made.dtype) == ((2, 64), np.float16)


def test_wrong_arguments():
    out, ids, weight = np.zeros((3, 8), np.float32), np.zeros(3, np.int64), np.zeros((5, 8), np.float32)
    for arguments, options, error, message in [
        ((out[:2], ids, weight), {}, ValueError, "ids: "),
        ((out[:, :4], ids, weight), {}, ValueError, "out: "),
        ((out, ids.astype(np.float32), weight), {}, TypeError, "ids: "),
        ((out, ids, weight.astype(np.int64)), {}, TypeError, "weight: "),
        ((out.astype(np.int8), ids, weight), {}, TypeError, "out: "),
        ((out, ids, weight, 3, 2), {}, ValueError, "org_start, org_end: "),
        ((out, ids, weight, 0, 6), {}, ValueError, "weight: "),
        ((out, ids, weight, 2**63 - 2, None, 5), {}, ValueError, "weight: "),
        ((out, ids, weight, -1), {}, ValueError, "org_start, org_end: "),
        ((out, ids, weight, 0, 4, 1, 4, 5), {}, ValueError, "weight: "),
        ((out, ids, weight, 0, 4, -1), {}, ValueError, "weight: "),
        ((out, ids, weight), {"vocab_size": -2}, ValueError, "vocab_size: "),
        ((out, ids, weight), {"weight_scale": np.ones(4, np.float32)}, ValueError, "weight_scale: "),
        ((out, ids, weight), {"weight_scale": np.ones((5, 3), np.float32)}, ValueError, "weight_scale: "),
        ((out, ids, weight), {"quant_type": 8}, TypeError, "weight: "),
        ((out, ids, weight), {"quant_type": 1}, ValueError, "quant_type: "),
        ((out, ids, np.zeros((5, 33), np.uint8)), {"quant_type": 8}, ValueError, "weight: its rows must be whole"),
        ((out, ids, np.zeros((5, 34), np.uint8)), {"quant_type": 8}, ValueError, "out: "),
        ((out, ids, np.zeros((5, 34), np.uint8)), {"quant_type": 8, "weight_scale": out[:, 0]}, ValueError,
         "weight_scale: must be None with quant_type"),
        ((out, ids, weight), {"positions": ids}, ValueError, "position_weight: "),
        ((out, ids, weight), {"position_weight": weight}, ValueError, "position_weight: "),
        ((out, ids, weight), {"positions": ids, "position_weight": weight[:, :4]}, ValueError, "position_weight: "),
        ((np.zeros((2, 3, 8), np.float32).transpose(1, 0, 2), np.zeros((2, 3), np.int64).T, weight), {}, ValueError,
         "ids: must be contiguous"),
    ]:  # fmt: skip
        with pytest.raises(error, match=f"masked_embedding: {message}"):
            pykv.masked_embedding(*arguments, **options)
