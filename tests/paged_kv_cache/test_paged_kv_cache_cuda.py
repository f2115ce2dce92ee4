"""What is special on a GPU: where the results live, and that copy-on-write keeps its place on the stream."""

import numpy as np
import pytest
from paged_kv_cache.gpu import new_stream, on, to_host

import pykv


def test_arrays_and_results_live_on_the_device(module):
    kv = pykv.PagedKVCache(2, 8, 4, 3, 32, "bfloat16", "packed", like=module, device="cuda:0")
    slots = kv.append([1, 2], [5, 3])
    arrays = [slots, kv.block_tables([1, 2]), kv.seq_lens([1, 2]), *kv.key_caches, *kv.value_caches]
    assert all(array.__dlpack_device__() == (2, 0) for array in arrays)
    assert to_host(slots).tolist() == [0, 1, 2, 3, 4, 8, 9, 10]
    assert to_host(kv.block_tables([1, 2])).tolist() == [[0, 1], [2, -1]]
    assert to_host(kv.seq_lens([2, 1])).tolist() == [3, 5]
    follower = pykv.PagedKVCache(1, 1, 4, 3, 32, "float16", like=kv.key_caches[0])
    assert follower.key_caches[0].__dlpack_device__() == (2, 0)


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
@pytest.mark.parametrize("how", ["current", "object", "pointer"])
def test_copy_on_write_waits_for_earlier_work_on_its_stream(module, how, layout):
    kv = pykv.PagedKVCache(2, 8, 4, 3, 32, "float16", layout, like=module, device="cuda")
    kv.append([1], 6)
    kv.fork(1, 2)
    source = int(to_host(kv.block_tables([1]))[0, 1])
    stream = new_stream(module)
    big = (
        module.ones(1 << 26, dtype=module.float32) if module.__name__ == "cupy" else module.ones(1 << 26, device="cuda")
    )
    (big.device.synchronize if hasattr(big.device, "synchronize") else module.cuda.synchronize)()
    with on(module, stream):
        for _ in range(200):  # some tens of milliseconds, so that a copy on another stream would come too early
            big = module.sin(big)
        for layer, cache in enumerate([*kv.key_caches, *kv.value_caches]):
            cache[source] = layer + 1
        if how == "current":
            slots = kv.append([2], 1)
    if how != "current":
        pointer = stream.cuda_stream if module.__name__ == "torch" else stream.ptr
        slots = kv.append([2], 1, stream=stream if how == "object" else pointer)
    stream.synchronize()
    copy = int(to_host(slots)[0]) // 4
    assert copy != source
    for layer, cache in enumerate([*kv.key_caches, *kv.value_caches]):
        np.testing.assert_array_equal(to_host(cache[copy]), layer + 1)
