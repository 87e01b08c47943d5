"""The fused transformer block as plain functions. `wgattn.FusedAttention` and `wgattn.FusedMLP` are the same work recorded once."""

from .header import (
    attention_decode,
    attention_decode_workspace,
    attention_prefill,
    attention_prefill_q8_0,
    attention_q8_0_scratch_size,
    attention_scratch_size,
)
from .header_arguments import slabs_from_wo, wo_from_slabs
from .header_projections import outproj_mlp_prefill, outproj_mlp_scratch_size, rmsnorm_qkv, rmsnorm_qkv_rope
from .memory import memory_report, optimal_tiles

__all__ = [
    "attention_decode",
    "attention_decode_workspace",
    "attention_prefill",
    "attention_prefill_q8_0",
    "attention_q8_0_scratch_size",
    "attention_scratch_size",
    "memory_report",
    "optimal_tiles",
    "outproj_mlp_prefill",
    "outproj_mlp_scratch_size",
    "rmsnorm_qkv",
    "rmsnorm_qkv_rope",
    "slabs_from_wo",
    "wo_from_slabs",
]
