"""Attention of one or a few queries over a long cache: `attention/split.wgsl`, keys split among workgroups where that fills the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..gpu import Device, DeviceProfile, Recording, Tensor
from .kv_cache import KVCache

_SHORT = 256
"""Keys up to which one workgroup a KV head is quicker than splitting and combining."""
_TARGET_WORKGROUPS = 128
_MOST_SPLITS = 32


@dataclass(frozen=True)
class SplitShape:
    """`group` query heads a workgroup of `workgroup` invocations, `lanes` to a key, keys in `splits` parts."""

    group: int
    lanes: int
    workgroup: int
    splits: int


def regimes(profile: DeviceProfile) -> list[int]:
    """Lengths up to which the same shape serves; a recording is made for each, so that a step only picks one. The last is no limit."""
    return [2**32] if profile.software else [_SHORT, 2**32]


def choose_split(profile: DeviceProfile, num_heads: int, num_kv_heads: int, head_dim: int, tokens: int, length: int) -> SplitShape:
    """The shape for lengths up to `length`; pure."""
    ratio, width = num_heads // num_kv_heads, head_dim // 4
    if profile.software or profile.subgroup_size == 0:
        lanes, workgroup, registers = 1, 8 if profile.software else 64, 64
    else:
        lanes = 1 << (min(profile.subgroup_size, width).bit_length() - 1)
        workgroup, registers = min(256, profile.max_invocations), 16
    while workgroup > lanes and (workgroup // lanes) * (4 * head_dim + 8) > profile.workgroup_memory:
        workgroup //= 2
    slots = math.ceil(width / lanes)
    group = max(g for g in range(1, ratio + 1) if ratio % g == 0 and (g == 1 or g * slots <= registers))
    workgroups = num_heads // group * tokens
    splits = 1 if profile.software or length <= _SHORT else max(1, min(_MOST_SPLITS, _TARGET_WORKGROUPS // workgroups))
    return SplitShape(group, lanes, workgroup, splits)


class SplitAttention:
    """Records attention over caches of one geometry; layers share its scratch memory.

    Args:
        tokens: queries a replay computes at most. length: keys a query can see at most, which decides the shape.
    """

    def __init__(self, device: Device, num_heads: int, num_kv_heads: int, head_dim: int, *, tokens: int, length: int, scale: float | None = None):
        self.device, self.tokens = device, tokens
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.shape = choose_split(device.profile, num_heads, num_kv_heads, head_dim, tokens, length)
        self.scale = (1 / math.sqrt(head_dim) if scale is None else scale) * math.log2(math.e)
        self._partial: tuple[Tensor, Tensor] | None = None
        if self.shape.splits > 1:
            stat = (tokens, num_heads, self.shape.splits, 2)
            self._partial = device.empty((*stat[:3], head_dim)), device.empty(stat)

    def record(self, recording: Recording, *, step: Any, query: Any, cache: KVCache, out: Any) -> None:
        """Append out = attention(query over the cache), causal: token t of the step sees keys 0 .. position + t.

        query and out: (tokens, num_heads, head_dim) float32, rows without padding between tokens.
        """
        shape, profile = self.shape, self.device.profile
        geometry = {"HEADS": self.num_heads, "KV_HEADS": self.num_kv_heads, "HEAD_DIM": self.head_dim}
        kernel = self.device.kernel(
            "attention/split",
            "step",
            cache.load_part,
            profile.team_part(shape.lanes),
            f"attention/parts/split_{'many' if self._partial else 'one'}",
            **geometry,
            GROUP=shape.group,
            LANES=shape.lanes,
            SLOTS=math.ceil(self.head_dim / 4 / shape.lanes),
            WORKGROUP=shape.workgroup,
        )
        buffers = {"step": step, "query": query, "keys": cache.keys, "values": cache.values}
        if self._partial:
            buffers |= {"partial_out": self._partial[0], "partial_stat": self._partial[1]}
        else:
            buffers["y"] = out
        groups = (self.num_heads // shape.group, shape.splits, self.tokens)
        recording.add(kernel, groups, buffers, {"splits": shape.splits, "scale": self.scale}, label="attention")
        if self._partial:
            combine = self.device.kernel("attention/combine", "step", HEADS=self.num_heads, HEAD_DIM=self.head_dim, WORKGROUP=64)
            buffers = {"step": step, "partial_out": self._partial[0], "partial_stat": self._partial[1], "y": out}
            recording.add(combine, (self.num_heads, 1, self.tokens), buffers, {"splits": shape.splits}, label="attention combine")
