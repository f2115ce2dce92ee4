"""Paged attention of other libraries, on the arrays that pykv's calls get: those that are there.

FlashInfer's tensor-core decode (`pip install flashinfer-python`; its plan is made before the timed call), cuDNN's paged
attention (`pip install nvidia-cudnn-frontend`) and FlashAttention 3 as vLLM builds it (vllm_libraries.py), all through
torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from timing import on_cupys_stream
from vllm_libraries import library, load

Call = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """Queries over pages in NHD; CuPy's arrays."""

    out: Any  # [tokens, heads, head_size] bfloat16, as query
    query: Any
    key_cache: Any  # [pages, page_size, kv_heads, head_size] bfloat16 | uint8 with the bits of float8_e4m3fn
    value_cache: Any
    block_tables: Any  # [seqs, most pages] int32
    seq_lens: Any  # [seqs] int32
    lens: tuple[int, ...]  # the same on the host
    queries: tuple[int, ...]  # tokens of each

    @property
    def decode(self) -> bool:
        return max(self.queries) == 1

    @property
    def fp8(self) -> bool:
        return bool(self.key_cache.itemsize == 1)


def installed() -> dict[str, str]:
    """The libraries that `calls` knows and finds, with their versions."""
    wanted = {"flashinfer": "flashinfer-python", "cudnn": "nvidia-cudnn-frontend"}
    if not importlib.util.find_spec("torch"):
        return {}
    found = {name: importlib.metadata.version(of) for name, of in wanted.items() if importlib.util.find_spec(name)}
    return found | ({"fa3": "of vLLM"} if library("_vllm_fa3_C") else {})


def calls(problem: Problem) -> Iterator[tuple[str, Call]]:
    """A call of each library; what it leaves in ``problem.out`` is the same attention."""
    found = installed()
    if "flashinfer" in found and problem.decode:
        yield "flashinfer", _flashinfer(problem)
    if "cudnn" in found and problem.decode and not problem.fp8:
        yield "cudnn", _cudnn(problem)
    if "fa3" in found and not problem.fp8:
        yield "fa3", _fa3(problem)


def _torch(array: Any, dtype: str | None = None) -> Any:
    torch = importlib.import_module("torch")
    tensor = torch.from_dlpack(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


@functools.cache
def _workspace(size: int) -> Any:
    """One for all calls: they run one after the other."""
    return importlib.import_module("torch").zeros(size, dtype=importlib.import_module("torch").uint8, device="cuda")


def _flashinfer(problem: Problem) -> Call:
    torch, flashinfer = importlib.import_module("torch"), importlib.import_module("flashinfer")
    page = problem.key_cache.shape[1]
    pages = [-(-n // page) for n in problem.lens]
    tables = problem.block_tables.get()
    indices = np.concatenate([row[:count] for row, count in zip(tables, pages, strict=True)])
    host = [np.cumsum([0, *pages]), indices, np.array([(n - 1) % page + 1 for n in problem.lens])]
    kv_dtype = torch.float8_e4m3fn if problem.fp8 else torch.bfloat16
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(512 << 20), "NHD", use_tensor_cores=True)
    heads, kv_heads, size = problem.query.shape[1], problem.key_cache.shape[2], problem.query.shape[2]
    wrapper.plan(
        *(torch.from_numpy(a.astype(np.int32)).cuda() for a in host),
        heads,
        kv_heads,
        size,
        page,
        q_data_type=torch.bfloat16,
        kv_data_type=kv_dtype,
    )
    kind = "float8_e4m3fn" if problem.fp8 else None
    query, out = _torch(problem.query), _torch(problem.out)
    caches = _torch(problem.key_cache, kind), _torch(problem.value_cache, kind)
    return on_cupys_stream(lambda: wrapper.run(query, caches, out=out))


def _fa3(problem: Problem) -> Call:
    torch = importlib.import_module("torch")
    forward = load("_vllm_fa3_C").fwd
    starts = torch.from_numpy(np.cumsum([0, *problem.queries]).astype(np.int32)).cuda()
    arrays = [_torch(a) for a in (problem.query, problem.key_cache, problem.value_cache, problem.out)]
    query, key, value, out = arrays
    tables, lens = _torch(problem.block_tables), _torch(problem.seq_lens)
    most, none = (max(problem.queries), max(problem.lens)), [None] * 5
    scale = query.shape[-1] ** -0.5
    arguments = [
        query, key, value, None, None, None, out, starts, None, None, None, lens, *most, tables, *none,
        None, None, None, scale, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None,
    ]  # fmt: skip
    return on_cupys_stream(lambda: forward(*arguments))


@functools.cache
def _cudnn_handle() -> Any:
    return importlib.import_module("cudnn").create_handle()


def _cudnn(problem: Problem) -> Call:
    cudnn, cupy = importlib.import_module("cudnn"), importlib.import_module("cupy")
    seqs, heads, size = problem.query.shape
    handle = _cudnn_handle()
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    # cuDNN wants [seqs, heads, queries, size] and [pages, heads, page, size]: views of the same memory
    given = {
        "query": _torch(problem.query).view(seqs, heads, 1, size),
        "key": _torch(problem.key_cache).permute(0, 2, 1, 3),
        "value": _torch(problem.value_cache).permute(0, 2, 1, 3),
        "table": _torch(problem.block_tables).view(seqs, 1, -1, 1),
        "ones": _torch(cupy.ones((seqs, 1, 1, 1), "int32")),
        "lens": _torch(problem.seq_lens).view(seqs, 1, 1, 1),
    }
    nodes = {name: graph.tensor_like(tensor) for name, tensor in given.items()}
    out = _torch(problem.out).view(seqs, heads, 1, size)
    result, _ = graph.sdpa(
        name="decode",
        q=nodes["query"],
        k=nodes["key"],
        v=nodes["value"],
        generate_stats=False,
        attn_scale=size**-0.5,
        use_padding_mask=True,
        seq_len_q=nodes["ones"],
        seq_len_kv=nodes["lens"],
        paged_attention_k_table=nodes["table"],
        paged_attention_v_table=nodes["table"],
        paged_attention_max_seq_len_kv=max(problem.lens),
    )
    result.set_output(True).set_dim(out.size()).set_stride(out.stride())
    graph.build([cudnn.heur_mode.A])
    arguments = {nodes[name]: tensor for name, tensor in given.items()} | {result: out}
    workspace = _workspace(max(1, graph.get_workspace_size()))

    def run() -> None:
        cudnn.set_stream(handle=handle, stream=cupy.cuda.get_current_stream().ptr)
        graph.execute(arguments, workspace, handle=handle)

    return run
