"""Rotary position embedding: tables of cosines and sines, made on the host in float64.

Su et al. 2021 (RoFormer). The GPU never computes a sine: WGSL promises too little accuracy for large angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..attention.arguments import checked_flag, finite, whole
from ..errors import ArgumentError, ShapeError, Unsupported

_MOST_CHANNELS = 1 << 16


class Rope:
    """Which channels are rotated, and how fast.

    Args:
        base: theta; pair i turns by base^(-2i / dim) a position. dim: channels rotated, even; further channels of a head pass through.
        interleaved: True pairs channels (2i, 2i + 1) as Llama's GGUF files do, False pairs i with i + dim / 2 (NeoX).
        scaling: mapping as in Hugging Face configs, by its "rope_type" (or "type"): "default"; "linear": factor; "llama3": factor, low_freq_factor,
            high_freq_factor, original_max_position_embeddings; "yarn" (Peng et al. 2023): factor, original_max_position_embeddings, optional
            beta_fast, beta_slow, attention_factor.
        factors: (dim / 2) numbers that divide the frequencies, such as a GGUF file's rope_freqs.weight.

    Raises:
        ArgumentError, ShapeError, TypeError: numbers that cannot be. Unsupported: another kind of scaling.
    """

    def __init__(
        self, base: float = 10000.0, dim: int = 64, interleaved: bool = False, scaling: Mapping[str, Any] | None = None, factors: np.ndarray | None = None
    ):
        self.base, self.dim = finite("RoPE's base", base), whole("RoPE's dim", dim, 2, _MOST_CHANNELS)
        self.interleaved = checked_flag("interleaved", interleaved)
        if self.dim % 2:
            raise ArgumentError(f"RoPE rotates pairs of channels: dim must be even, not {dim}.")
        if self.base <= 0:
            raise ArgumentError(f"RoPE's base must be positive, not {base}.")
        plain = self.base ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        self.frequencies, self.magnitude = _scaled(plain, self.base, self.dim, scaling)
        if factors is not None:
            self.frequencies = self.frequencies / _factors(factors, self.dim)
        if not np.isfinite(self.frequencies).all() or self.magnitude > float(np.finfo(np.float32).max):
            raise ArgumentError("RoPE's base, scaling and factors give frequencies or a magnitude that are not finite.")

    def table(self, positions: int | np.ndarray) -> np.ndarray:
        """(n, dim / 2, 2) float32 of cos and sin, for positions 0 .. n - 1 or for the positions given."""
        positions = np.arange(positions) if np.ndim(positions) == 0 else np.asarray(positions)
        angles = positions[:, None].astype(np.float64) * self.frequencies
        return (self.magnitude * np.stack([np.cos(angles), np.sin(angles)], axis=-1)).astype(np.float32)

    @property
    def reference(self) -> dict[str, Any]:
        """The rotation as keywords of `wgattn.reference.apply_rope`."""
        return {"dim": self.dim, "interleaved": self.interleaved, "frequencies": self.frequencies, "magnitude": self.magnitude}

    @property
    def pair_distance(self) -> int:
        """Channels between the two of a pair."""
        return 1 if self.interleaved else self.dim // 2

    def pair_order(self, heads: int, head_dim: int) -> np.ndarray:
        """Row order of a projection with heads * head_dim rows that puts the two channels of each pair next to one another.

        ShapeError when more channels are rotated than a head has.
        """
        if self.dim > head_dim:
            raise ShapeError(f"RoPE over {self.dim} channels does not fit heads of {head_dim}.")
        rotated = np.arange(self.dim) if self.interleaved else np.arange(self.dim).reshape(2, -1).T.reshape(-1)
        head = np.concatenate([rotated, np.arange(self.dim, head_dim)])
        return (np.arange(heads)[:, None] * head_dim + head).reshape(-1)


def _factors(factors: Any, dim: int) -> np.ndarray:
    """(dim / 2) positive numbers, or ShapeError, TypeError, ArgumentError."""
    array = np.asarray(factors)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"RoPE's factors have dtype {array.dtype}; they must be numbers.")
    if array.shape != (dim // 2,):
        raise ShapeError(f"RoPE over {dim} channels takes {dim // 2} frequency factors; the array has shape {array.shape}.")
    if not (np.isfinite(array) & (array > 0)).all():
        raise ArgumentError(f"RoPE's factors must be positive and finite; they reach from {array.min()} to {array.max()}.")
    return array.astype(np.float64)


def _scaled(plain: np.ndarray, base: float, dim: int, scaling: Mapping[str, Any] | None) -> tuple[np.ndarray, float]:
    """Frequencies after scaling, and the factor that multiplies cosines and sines."""
    if not isinstance(scaling, Mapping | None):
        raise TypeError(f"RoPE's scaling is {scaling!r}; it must be a mapping such as {{'rope_type': 'linear', 'factor': 2.0}}, or None.")
    if not scaling:
        return plain, 1.0
    kind = scaling.get("rope_type", scaling.get("type"))
    if "rope_type" not in scaling and "type" not in scaling:
        raise ArgumentError(f"RoPE's scaling has {', '.join(map(str, scaling))}, but no 'rope_type' (or 'type').")
    if isinstance(kind, str) and kind in ("default", "none"):
        return plain, 1.0
    if not isinstance(kind, str) or kind not in ("linear", "llama3", "yarn"):
        raise Unsupported(f"RoPE scaling {kind!r} is not supported; use none, linear, llama3 or yarn.")

    def number(key: str, default: float | None = None) -> float:
        value = scaling.get(key, default)
        if value is None or not (found := finite(f"{key} of RoPE scaling {kind!r}", value)) > 0:
            raise ArgumentError(f"RoPE scaling {kind!r} needs a positive {key}, not {value}.")
        return found

    factor = number("factor")
    if kind == "linear":
        return plain / factor, 1.0
    original = number("original_max_position_embeddings")
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise ArgumentError(f"RoPE scaling 'llama3' needs high_freq_factor {high} above low_freq_factor {low}.")
        turns = original * plain / (2 * math.pi)  # over the trained context
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return keep * plain + (1 - keep) * plain / factor, 1.0
    if base <= 1:
        raise ArgumentError(f"RoPE scaling 'yarn' needs a base above 1, not {base}.")
    if unknown := [key for key in ("mscale", "mscale_all_dim") if key in scaling] + ["truncate"] * (scaling.get("truncate", True) is not True):
        raise Unsupported(f"RoPE scaling 'yarn' with {' and '.join(unknown)} is not supported.")
    fast, slow = number("beta_fast", 32), number("beta_slow", 1)
    pair_of = lambda turns: dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))  # noqa: E731
    first, last = max(math.floor(pair_of(fast)), 0), min(math.ceil(pair_of(slow)), dim - 1)
    keep = 1 - np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0, 1)
    return keep * plain + (1 - keep) * plain / factor, number("attention_factor", 0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
