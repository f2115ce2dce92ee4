"""concat_and_cache_mla_layers, and concat_and_cache_mla_grouped, which is told addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache import inputs, reference, reference_mla
from cache.inputs import DTYPES
from libraries import Library

import pykv

KINDS = ["auto", "fp8_e4m3", "fp8_e5m2"]


def address_of(array: Any) -> int:
    """Of the memory that a library's array begins at."""
    if hasattr(array, "array"):
        array = array.array
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    if hasattr(array, "__cuda_array_interface__"):
        return int(array.__cuda_array_interface__["data"][0])
    return int(np.asarray(array).ctypes.data)


class Case:
    """Layers of one memory ``[layers, rest ...]``, guarded, and what is written into them."""

    def __init__(
        self,
        array: Library,
        *,
        layers: int = 3,
        latent: int = 128,
        rope: int = 64,
        blocks: int = 6,
        block_size: int = 16,
        num_tokens: int = 33,
        dtype: str = "bfloat16",
        kind: str = "auto",
        padding: int = 0,
        tokens_first: bool = False,
        same_slots: bool = False,
        scales: Any = 0.37,
        ids: type = np.int64,
        slots: np.ndarray | None = None,
        strided: bool = False,
    ) -> None:
        rng = np.random.default_rng(0)
        source, width = DTYPES[dtype], latent + rope
        self.array, self.kind = array, kind
        self.stored = source if kind == "auto" else np.dtype(reference.CODES[kind])
        self.padding, self.block_size, self.blocks = padding, block_size, blocks
        outer = (block_size, blocks) if tokens_first else (blocks, block_size)
        self.expected = inputs.bits(rng, (layers + 2, *outer, width + padding), self.stored)
        self.actual = array.output(self.expected)
        self.take = lambda memory, layer: (
            memory[layer + 1, :, :, padding:].swapaxes(0, 1) if tokens_first else memory[layer + 1, :, :, padding:]
        )
        if slots is None:
            sizes = inputs.Sizes(blocks, block_size)
            slots = np.stack([inputs.slot_mapping(rng, "sequences", num_tokens, sizes) for _ in range(layers)])
        if same_slots:
            slots = np.broadcast_to(slots[0], slots.shape)
        self.slots = slots.astype(ids) if not same_slots else np.broadcast_to(slots[0].astype(ids), slots.shape)
        count = slots.shape[1] + 2
        make = inputs.bits if kind == "auto" else inputs.floats
        both = (
            make(rng, (count, layers, width), source).swapaxes(0, 1)
            if strided
            else make(rng, (layers, count, width), source)
        )
        self.kv_c, self.k_pe = both[..., :latent], both[..., latent:]
        self.scales = scales
        of_layer = np.broadcast_to(np.float32(scales), layers)
        for layer in range(layers):
            cache = self.take(self.expected, layer)
            reference_mla.concat_and_cache_mla(
                self.kv_c[layer], self.k_pe[layer], cache, self.slots[layer], kind, of_layer[layer]
            )
        self.layers = layers

    def inputs(self) -> tuple[Any, Any, Any]:
        return self.array.input(self.kv_c), self.array.input(self.k_pe), self.array.input(self.slots)

    def caches(self) -> list[Any]:
        return [inputs.view(self.actual, lambda m, i=i: self.take(m, i)) for i in range(self.layers)]

    def call_layers(self, as_scales: Any = lambda x: x) -> None:
        kv_c, k_pe, slots = self.inputs()
        pykv.concat_and_cache_mla_layers(kv_c, k_pe, self.caches(), slots, self.kind, as_scales(self.scales))

    def call_grouped(self, as_scales: Any = lambda x: x, null: int | None = None, **options: Any) -> None:
        kv_c, k_pe, slots = self.inputs()
        caches, item = self.take(self.expected, 0), self.stored.itemsize
        step = self.expected.strides[0]
        first = address_of(self.actual) + step + self.padding * item
        addresses = np.array([0 if i == null else first + i * step for i in range(self.layers)], np.int64)
        strides = caches.strides[0] // item, caches.strides[1] // item
        pykv.concat_and_cache_mla_grouped(
            kv_c, k_pe, self.array.input(addresses), slots, self.block_size, *strides,
            as_scales(self.scales), self.kind, **options,
        )  # fmt: skip

    def check(self) -> None:
        got = self.array.numpy(self.actual).reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(got, self.expected.reshape(-1).view(np.uint8))


def check(array: Library, **options: Any) -> None:
    case = Case(array, **options)
    case.call_layers()
    case.check()
    case = Case(array, **options)
    case.call_grouped()
    case.check()
    case = Case(array, **options)
    case.call_grouped(num_blocks=case.blocks)
    case.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [0, 64, 3])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_layouts(array: Library, dtype: str, kind: str, padding: int, tokens_first: bool) -> None:
    check(array, dtype=dtype, kind=kind, padding=padding, tokens_first=tokens_first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (128, 0), (0, 64), (7, 3), (1, 1)])
def test_sizes(array: Library, kind: str, latent: int, rope: int) -> None:
    check(array, kind=kind, latent=latent, rope=rope, dtype="float16")


@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("same_slots", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_strides_of_the_inputs(array: Library, ids: type, same_slots: bool, strided: bool) -> None:
    check(array, ids=ids, same_slots=same_slots, strided=strided)


@pytest.mark.parametrize("layers", [1, 2, 63, 64, 65, 130])
def test_numbers_of_layers(array: Library, layers: int) -> None:
    check(array, layers=layers, blocks=2, num_tokens=9, latent=16, rope=8)


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
def test_many_tokens(array: Library, kind: str) -> None:
    check(array, kind=kind, blocks=200, num_tokens=3000, latent=512)


@pytest.mark.parametrize("where", ["host", "with the arrays"])
def test_a_scale_for_each_layer(array: Library, where: str) -> None:
    as_scales = np.asarray if where == "host" else array.input
    for dtype in DTYPES:
        scales = np.array([0.3, 1.0, 70.0], np.float32)
        for call in ("call_layers", "call_grouped"):
            case = Case(array, kind="fp8", dtype=dtype, scales=scales)
            getattr(case, call)(as_scales)
            case.check()


def test_no_scales(array: Library) -> None:
    case = Case(array, kind="fp8", scales=1.0)
    case.call_grouped(lambda _: None)
    case.check()


def test_an_address_of_nothing(array: Library) -> None:
    case = Case(array)
    case.expected[2] = case.array.numpy(case.actual)[2]
    case.call_grouped(null=1)
    case.check()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_nothing_to_do(array: Library, shape: tuple[int, int]) -> None:
    check(array, layers=shape[0], slots=np.zeros(shape, np.int64))
    check(array, slots=np.full((3, 5), -1))
    check(array, latent=0, rope=0)


@pytest.mark.parametrize("slot", [96, 2**31, 2**62, 2**63 - 1])
def test_slots_beyond_the_caches(array: Library, slot: int) -> None:
    slots = np.array([[3, 4, -1], [5, slot, 6], [-(2**63), 7, 95]])
    for name in ("layers", "grouped"):
        case = Case(array, slots=slots)
        report = rf"^concat_and_cache_mla_{name}: slot_mapping: {slot} is out of range \[0, 96\); it was not used$"
        with array.reports(report):
            case.call_layers() if name == "layers" else case.call_grouped(num_blocks=6)
        case.check()


def zeros(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


CACHES = [zeros(3, 8, 24), zeros(3, 8, 24)]
COMMON: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"kv_c": zeros(4, 16)}, ValueError, r"kv_c: must have 3 dimensions, got shape \[4, 16\]"),
    ({"k_pe": zeros(3, 4, 8)}, ValueError, "k_pe: dimension 0 must equal num_layers = 2"),
    ({"k_pe": zeros(2, 4, 8, dtype=np.float32)}, TypeError, "k_pe: dtype must be that of kv_c, float16, got float32"),
    ({"k_pe": zeros(2, 3, 8)}, ValueError, r"k_pe: must have a row for each of the 4 slots of slot_mapping"),
    ({"slot_mapping": np.zeros(4, np.int64)}, ValueError, "slot_mapping: must have 2 dimensions"),
    ({"slot_mapping": zeros(2, 4)}, TypeError, "slot_mapping: dtype must be int64 or int32"),
    ({"kv_cache_dtype": "fp8_ds_mla"}, ValueError, "kv_cache_dtype: must be one of 'auto'"),
    ({"kv_cache_dtype": "float32"}, TypeError, "kv_cache_dtype: 'float32' needs data of that dtype, got float16"),
]
OF_SCALES = (
    {"kv_scales": np.ones(3, np.float32)},
    ValueError,
    "kv_scales: must have 1 element, or one for each of the 2 l",
)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        *COMMON,
        ({"kv_caches": CACHES[:1]}, ValueError, "kv_caches: must be one cache for each of the 2 layers, got 1"),
        ({"kv_caches": [CACHES[0], zeros(4, 8, 24)]}, ValueError, "kv_caches: dimension 0 must equal num_blocks = 3"),
        ({"kv_caches": [CACHES[0], zeros(3, 8, 30)[..., :24]]}, ValueError, "kv_caches: must all have one dtype and"),
        ({"kv_caches": [zeros(3, 8, 25)] * 2}, ValueError, r"kv_caches: dimension 2 must equal kv_lora_rank"),
        ({"kv_caches": [zeros(3, 8, 24, dtype=np.uint8)] * 2}, TypeError, "kv_caches: dtype must be that of the data"),
        ({"kv_cache_dtype": "fp8", "kv_caches": [zeros(3, 8, 24, dtype=np.uint8)] * 2, **OF_SCALES[0]}, *OF_SCALES[1:]),
    ],
)  # fmt: skip
def test_errors_of_layers(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {
        "kv_c": zeros(2, 4, 16),
        "k_pe": zeros(2, 4, 8),
        "kv_caches": CACHES,
        "slot_mapping": np.zeros((2, 4), int),
    }
    with pytest.raises(error, match=f"^concat_and_cache_mla_layers: {message}"):
        pykv.concat_and_cache_mla_layers(**{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        *COMMON,
        ({"kv_cache_ptrs": np.zeros(3, np.int64)}, ValueError, "kv_cache_ptrs: dimension 0 must equal num_layers = 2"),
        ({"kv_cache_ptrs": np.zeros(2, np.int32)}, TypeError, "kv_cache_ptrs: dtype must be int64, got int32"),
        ({"block_size": 0}, ValueError, "block_size: must be at least one token = 1, got 0"),
        ({"block_stride": 23}, ValueError, r"block_stride: must be at least kv_lora_rank \+ rope_size = 24, got 23"),
        ({"entry_stride": -1}, ValueError, r"entry_stride: must be at least kv_lora_rank \+ rope_size = 24, got -1"),
        ({"kv_cache_dtype": "fp8", **OF_SCALES[0]}, *OF_SCALES[1:]),
    ],
)  # fmt: skip
def test_errors_of_grouped(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {
        "kv_c": zeros(2, 4, 16), "k_pe": zeros(2, 4, 8), "kv_cache_ptrs": np.zeros(2, np.int64),
        "slot_mapping": np.zeros((2, 4), np.int64), "block_size": 8, "block_stride": 192, "entry_stride": 24,
    }  # fmt: skip
    with pytest.raises(error, match=f"^concat_and_cache_mla_grouped: {message}"):
        pykv.concat_and_cache_mla_grouped(**{**given, **changed})
