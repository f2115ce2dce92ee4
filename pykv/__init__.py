"""pykv: paged KV-cache, attention and other inference kernels for any array, on CPU and CUDA.

Every operation takes arrays of NumPy, CuPy, torch or anything else with ``__dlpack__`` or ``__cuda_array_interface__``,
writes into its output arguments and returns None.  On a GPU it runs on ``stream``, by default the current stream of the
library that made the arrays, and never waits for the device.
"""

try:
    from pykv import _C as _C
except ImportError as error:
    if error.name != __name__:  # it is there, and does not load
        raise
    raise ImportError(
        f"{__path__[0]} is the source folder of pykv and has no compiled part (pykv._C). "
        "Python takes it instead of the installed package where it is started in the clone: start it in another folder"
    ) from None

from pykv._types import Array, ScalarOrArray, Stream
from pykv.activation import (
    fatrelu_and_mul,
    gelu_and_mul,
    gelu_and_mul_sparse,
    gelu_fast,
    gelu_new,
    gelu_quick,
    gelu_tanh_and_mul,
    masked_moe_activation,
    mul_and_silu,
    relu2,
    relu_squared,
    silu_and_mul,
    silu_and_mul_per_block_quant,
    silu_and_mul_quant,
    silu_and_mul_with_clamp,
    situ_and_mul,
    swigluoai_and_mul,
    swiglustep_and_mul,
    xielu,
)
from pykv.attention import (
    merge_attn_states,
    merge_attn_states_n,
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
    paged_attention_workspace_size,
)
from pykv.cache import (
    convert_fp8,
    copy_blocks,
    copy_blocks_mla,
    fused_qknorm_rope_cache,
    reshape_and_cache,
    reshape_and_cache_flash,
    rotary_and_cache,
    swap_blocks,
    swap_blocks_batch,
    swap_blocks_layers,
)
from pykv.indexer import cp_gather_indexer_k_quant_cache, indexer_k_quant_and_cache
from pykv.mla import (
    concat_and_cache_mla,
    concat_and_cache_mla_grouped,
    concat_and_cache_mla_layers,
    concat_and_cache_mla_rope_fused,
    concat_mla_q,
    cp_gather_and_upconvert_fp8_kv_cache,
    cp_gather_and_upconvert_nvfp4_kv_cache,
    cp_gather_cache,
    gather_and_maybe_dequant_cache,
)
from pykv.norm import (
    fused_add_rms_norm,
    fused_add_rms_norm_static_fp8_quant,
    fused_qk_norm_rope,
    gemma_fused_add_rms_norm,
    gemma_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_dynamic_per_token_quant,
    rms_norm_gated,
    rms_norm_per_block_quant,
    rms_norm_static_fp8_quant,
)
from pykv.paged_kv_cache import OutOfBlocks, PagedKVCache, PrefixStats
from pykv.rotary import batched_rotary_embedding, dual_chunk_rotary_embedding, mrope, rotary_embedding
from pykv.runtime import (
    check_errors,
    from_pointer,
    get_cmake_dir,
    get_include,
    get_library_dir,
    get_num_threads,
    get_pkgconfig_dir,
    has_cuda,
    set_num_threads,
)
from pykv.sampling import (
    apply_repetition_penalties_,
    rejection_sample,
    sample,
    softmax,
    token_logprobs,
    top_k_per_row,
    top_k_top_p_mask,
    top_k_top_p_renorm,
)

from pykv.dispatch import configure, explain  # isort: skip  # after all operations: it looks at them
from pykv import _torch_later  # isort: skip  # the same

_torch_later.register()

__version__ = "{}.{}.{}".format(*divmod(_C.version() // 100, 100), _C.version() % 100)

__all__ = [
    "Array",
    "OutOfBlocks",
    "PagedKVCache",
    "PrefixStats",
    "ScalarOrArray",
    "Stream",
    "apply_repetition_penalties_",
    "batched_rotary_embedding",
    "check_errors",
    "concat_and_cache_mla",
    "concat_and_cache_mla_grouped",
    "concat_and_cache_mla_layers",
    "concat_and_cache_mla_rope_fused",
    "concat_mla_q",
    "configure",
    "convert_fp8",
    "copy_blocks",
    "copy_blocks_mla",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_and_upconvert_nvfp4_kv_cache",
    "cp_gather_cache",
    "cp_gather_indexer_k_quant_cache",
    "dual_chunk_rotary_embedding",
    "explain",
    "fatrelu_and_mul",
    "from_pointer",
    "fused_add_rms_norm",
    "fused_add_rms_norm_static_fp8_quant",
    "fused_qk_norm_rope",
    "fused_qknorm_rope_cache",
    "gather_and_maybe_dequant_cache",
    "gelu_and_mul",
    "gelu_and_mul_sparse",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rms_norm",
    "gemma_rms_norm",
    "get_cmake_dir",
    "get_include",
    "get_library_dir",
    "get_num_threads",
    "get_pkgconfig_dir",
    "has_cuda",
    "indexer_k_quant_and_cache",
    "layer_norm",
    "masked_moe_activation",
    "merge_attn_states",
    "merge_attn_states_n",
    "mrope",
    "mul_and_silu",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "paged_attention_workspace_size",
    "rejection_sample",
    "relu2",
    "relu_squared",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "rms_norm",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_gated",
    "rms_norm_per_block_quant",
    "rms_norm_static_fp8_quant",
    "rotary_and_cache",
    "rotary_embedding",
    "sample",
    "set_num_threads",
    "silu_and_mul",
    "silu_and_mul_per_block_quant",
    "silu_and_mul_quant",
    "silu_and_mul_with_clamp",
    "situ_and_mul",
    "softmax",
    "swap_blocks",
    "swap_blocks_batch",
    "swap_blocks_layers",
    "swigluoai_and_mul",
    "swiglustep_and_mul",
    "token_logprobs",
    "top_k_per_row",
    "top_k_top_p_mask",
    "top_k_top_p_renorm",
    "xielu",
]
