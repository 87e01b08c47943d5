"""Rotary position embedding: tables of cosines and sines, made on the host in float64.

Su et al. 2021 (RoFormer). Frequencies are base^(-2i / dim), divided by Hugging Face's "linear" factor or by the per-frequency factors of
Llama 3 GGUF files. The GPU never computes a sine: WGSL promises too little accuracy for large angles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ArgumentError, ShapeError, Unsupported


class Rope:
    """Which channels are rotated, and how fast.

    Args:
        base: theta. dim: channels rotated, even; further channels of a head pass through.
        interleaved: True pairs channels (2i, 2i + 1) as Llama's GGUF files do, False pairs i with i + dim / 2 (NeoX).
        scaling: mapping as in Hugging Face configs; "rope_type" (or "type") "default" or "linear" with "factor".
        factors: (dim / 2) numbers that divide the frequencies, such as a GGUF file's rope_freqs.weight.
    """

    def __init__(
        self, base: float = 10000.0, dim: int = 64, interleaved: bool = False, scaling: Mapping[str, Any] | None = None, factors: np.ndarray | None = None
    ):
        if dim <= 0 or dim % 2:
            raise ArgumentError(f"RoPE rotates pairs of channels: dim must be even and positive, not {dim}.")
        self.base, self.dim, self.interleaved = float(base), int(dim), bool(interleaved)
        kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
        if kind not in ("default", "none", "linear"):
            raise Unsupported(f"RoPE scaling {kind!r} is not supported; use none or linear.")
        self.frequencies = self.base ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        if kind == "linear":
            self.frequencies /= float(scaling["factor"])
        if factors is not None:
            if np.shape(factors) != (self.dim // 2,):
                raise ShapeError(f"RoPE over {dim} channels takes {dim // 2} frequency factors; the array has shape {np.shape(factors)}.")
            self.frequencies /= np.asarray(factors, np.float64)

    def table(self, positions: int | np.ndarray) -> np.ndarray:
        """(n, dim / 2, 2) float32 of cos and sin, for positions 0 .. n - 1 or for the positions given."""
        positions = np.arange(positions) if np.ndim(positions) == 0 else np.asarray(positions)
        angles = positions[:, None].astype(np.float64) * self.frequencies
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)

    @property
    def pair_distance(self) -> int:
        """Channels between the two of a pair."""
        return 1 if self.interleaved else self.dim // 2

    def pair_order(self, heads: int, head_dim: int) -> np.ndarray:
        """Row order of a projection with heads * head_dim rows that puts the two channels of each pair next to one another."""
        rotated = np.arange(self.dim) if self.interleaved else np.arange(self.dim).reshape(2, -1).T.reshape(-1)
        head = np.concatenate([rotated, np.arange(self.dim, head_dim)])
        return (np.arange(heads)[:, None] * head_dim + head).reshape(-1)
