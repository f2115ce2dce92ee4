"""What a user writes, for type checkers; it is never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import pykv
import pykv.dispatch
import pykv.functional
import pykv.rope

Floats = npt.NDArray[np.float32]


def arrays_of_any_library(x: Floats, address: int) -> None:
    """Whatever has ``__dlpack__`` or ``__cuda_array_interface__`` is an array."""

    class OfNumba:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {}

    pointer = pykv.from_pointer(address, (3, 8), "float32", device="cpu")
    array: pykv.Array
    for array in (x, pointer, OfNumba()):
        pykv.rms_norm(array, array, None)
        pykv.rms_norm(array, array, x, 1e-5, stream=0)
    assert_type(pointer.shape, tuple[int, ...])


def scales_are_numbers_or_arrays(x: Floats, codes: npt.NDArray[np.uint8]) -> None:
    scale: pykv.ScalarOrArray
    for scale in (1, 0.5, x):
        pykv.silu_and_mul_quant(codes, x, scale)
    stream: pykv.Stream = object()
    pykv.convert_fp8(codes, x, kv_dtype="fp8_e5m2", stream=stream)


def forms_that_allocate(x: Floats, ids: npt.NDArray[np.int64]) -> Floats:
    attended, lse = pykv.functional.paged_attention(x, x, x, ids, ids, lse=True)
    assert_type(attended, Floats)
    assert_type(pykv.functional.paged_attention(x, x, x, ids, ids, window=16), Floats)
    merged, sums = pykv.functional.merge_attn_states(x, lse, x, lse, output_lse=True)
    assert_type(merged, Floats)
    print(sums)
    assert_type(pykv.functional.silu_and_mul(x), Floats)
    return pykv.functional.rms_norm(x, None)


def cache(path: Path) -> None:
    kv = pykv.PagedKVCache(
        2, 64, 16, num_kv_heads=8, head_size=128, dtype="bfloat16", like=np, prefix_caching=True, num_host_blocks=4
    )
    try:
        slots = kv.append([0, 1], [5, 3])
    except pykv.OutOfBlocks:
        return
    pykv.reshape_and_cache_flash(slots, slots, kv.key_caches[0], kv.value_caches[1], slots, kv.kv_cache_dtype)
    pykv.copy_blocks(kv.key_caches, kv.value_caches, np.array([[0, 1]]))
    kv.fork(0, 2)
    kv.truncate(2, 3)
    kv.swap_out([1])
    kv.swap_in([1])
    assert_type(kv.is_swapped_out(1), bool)
    kv.save(path, [0])
    assert_type(kv.load(path), list[int])
    assert_type(kv.reuse_prefix(7, [1, 2, 3]), int)
    kv.commit_prefix(7, [1, 2, 3], salt="tenant")
    kv.replace_caches(kv.key_caches, kv.value_caches)
    assert_type(kv.layout, str)
    kv.block_tables([0], width=8)
    stats: pykv.PrefixStats = kv.prefix_stats
    print(stats, kv.num_free_blocks, kv.usage, 7 in kv)
    kv.free([0, 1, 2])


def tables(config: dict[str, Any]) -> pykv.Array:
    frequencies = pykv.rope.llama3(128, 5e5, 8.0, 1.0, 4.0, 8192)
    assert_type(frequencies.magnitude, float)
    pykv.rope.cos_sin_cache(frequencies, 4096, dtype="bfloat16", like=np)
    return pykv.rope.cache_of_config(config, 128, 8192)


def another_implementation(x: Floats) -> str:
    @pykv.dispatch.register("rms_norm", "mine", platforms=["cpu"])
    def mine(out: Any, input: Any, weight: Any, epsilon: float = 1e-6, *, stream: pykv.Stream = None) -> None: ...

    mine(x, x, None)  # it stays what it is
    pykv.configure("all,-rms_norm")
    return str(pykv.explain("rms_norm", x, x, None))


def the_rest() -> None:
    assert_type(pykv.has_cuda(), bool)
    pykv.set_num_threads(pykv.get_num_threads())
    pykv.check_errors("cuda:0")
    assert_type(pykv.paged_attention_workspace_size(8, 2, 32, 8, 128), int)
    assert_type(pykv.get_include() + pykv.get_library_dir() + pykv.get_cmake_dir(), str)
