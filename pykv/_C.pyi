from collections.abc import Callable, Mapping
from typing import Any

class Pointer:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    def __init__(
        self,
        address: int,
        shape: list[int],
        dtype: Any,
        device_type: int,
        device_id: int,
        strides: list[int] | None = ...,
        owner: object = ...,
    ) -> None: ...
    def __dlpack__(self, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Function:
    def __call__(self, *args: Any, **kwargs: Any) -> None: ...
    def route(self, to: Callable[..., None] | None, /) -> None: ...

def make_function(
    definition: Callable[..., None],
    entry: Callable[..., None] | None,
    names: tuple[str, ...],
    num_positional: int,
    defaults: dict[str, Any],
    converters: Mapping[str, Callable[[Any], Any]],
) -> Function: ...
def version() -> int: ...
def has_cuda() -> bool: ...
def cuda_architectures() -> str: ...
def cuda_device_count() -> int: ...
def cpu_isa() -> str: ...
def way_in(type: type, /) -> str: ...
def get_num_threads() -> int: ...
def set_num_threads(num_threads: int, /) -> None: ...
def check_errors(device_type: int, device_id: int, /) -> None: ...
def paged_attention_workspace_size(
    num_tokens: int,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    batch_invariant: bool,
    device_id: int,
    /,
) -> int: ...

ops: dict[str, tuple[str, ...]]  # kinds of the parameters, from the C declaration
xla_handlers: dict[str, tuple[Any, Any]]  # for the CPU and for CUDA, as pykv.jax registers them

# The operations: positional, typed and documented in the modules above them.
def __getattr__(name: str) -> Any: ...
