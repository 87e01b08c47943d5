"""The small operations of a transformer block as functions: arrays or device tensors in, the same kind out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..attention.arguments import FLOATS, checked_eps, checked_flag, device_of, floating
from ..attention.functional import record_pack
from ..errors import ArgumentError, ShapeError
from ..gpu import Device, DeviceProfile, Kernel, Part, Recording, Tensor, grid, power_of_two
from .rope import Rope

Array = Any


def rms_norm(x: Array, weight: Array, eps: float = 1e-5, *, device: Device | None = None) -> Array:
    """x * weight / sqrt(mean(x^2) + eps) over the last axis, computed in float32. A row of zeros gives zeros.

    Args:
        x: (..., E) float32, float16 or float64 (computed and returned as float32); weight: (E,). NumPy arrays, or tensors of one device.

    Returns:
        (..., E) in x's dtype and kind.

    Raises:
        ShapeError, TypeError, ArgumentError: what cannot be meant, before any work.
    """
    device, _ = device_of({"x": x, "weight": weight}, device)
    x, weight = floating("x", x), floating("weight", weight)
    eps = checked_eps(eps)
    if not x.ndim or tuple(weight.shape) != (x.shape[-1],):
        raise ShapeError(f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; weight must have x's last axis.")
    width = x.shape[-1]
    call = _Call(device, x, width)
    if not call.size:
        return call.empty()
    rows = call.size // width
    lanes, workgroup = choose_norm(device.profile, width)
    parts = (call.part("weight", FLOATS[weight.dtype.name], "ROW"), device.profile.team_part(lanes))
    kernel = call.kernel("block/rms_norm", *parts, width="ROW", ROW=width, LANES=lanes, WORKGROUP=workgroup)
    groups = grid(-(-rows * lanes // workgroup), device.profile.max_workgroups)
    return call.run(kernel, groups, {"weight": call.on_device(weight)}, {"rows": rows, "eps": eps})


def choose_norm(profile: DeviceProfile, width: int) -> tuple[int, int]:
    """(lanes a row, workgroup size) for `block/rms_norm.wgsl`; pure."""
    if profile.software:
        return 1, 8
    widest = min(profile.subgroup_size or 32, 32, -(-width // 4))
    return power_of_two(widest), min(64, profile.max_invocations)


def apply_rope(x: Array, positions: Array, rope: Rope | tuple[Array, Array], *, interleaved: bool = False, device: Device | None = None) -> Array:
    """Rotate pairs of channels by each token's position (Su et al. 2021).

    Args:
        x: (..., S, H, D) float32, float16 or float64 (computed and returned as float32).
        positions: integers that broadcast to (..., S), of the host; with a table also a uint32 or int32 tensor of (S,) or (..., S).
        rope: a `Rope`; or a table (cos, sin), each (rows, dim / 2), in which positions are row numbers. Channels of a head from `dim` on pass through.
        interleaved: for a table: pairs are channels (2i, 2i + 1), not (i, i + dim / 2). A `Rope` knows its own pairs.

    Returns:
        x's shape, dtype and kind.

    Raises:
        ShapeError, TypeError, ArgumentError: what cannot be meant, before any work. Positions in a tensor beyond the table use its last row.
    """
    table = () if isinstance(rope, Rope) else rope
    if not isinstance(rope, Rope) and (not isinstance(table, tuple | list) or len(table) != 2):
        raise TypeError(f"rope is {rope!r}; it must be a Rope, or a table (cos, sin).")
    interleaved = checked_flag("interleaved", interleaved)
    device, _ = device_of({"x": x, "positions": positions, **dict(zip(("cos", "sin"), table, strict=False))}, device)
    x = floating("x", x)
    if x.ndim < 3:
        raise ShapeError(f"x has shape {tuple(x.shape)}; it must be (..., S, H, D).")
    tokens, heads, head_dim = tuple(x.shape[:-2]), x.shape[-2], x.shape[-1]
    if isinstance(rope, Rope):
        rows, cosines, sines = _rows_of_rope(positions, tokens, rope)
        interleaved = rope.interleaved
    else:
        rows, cosines, sines = _rows_of_table(positions, tokens, table)
    half = cosines.shape[1]
    if not 0 < 2 * half <= head_dim:
        raise ShapeError(f"{2 * half} channels are rotated, but x has shape {tuple(x.shape)}: heads of {head_dim}.")
    call = _Call(device, x, head_dim)
    if not call.size:
        return call.empty()
    kernel = call.kernel("block/rope", width="HEAD_DIM", HEAD_DIM=head_dim, ROTARY=2 * half, INTERLEAVED=interleaved, WORKGROUP=64)
    groups = grid(-(-call.size // head_dim * -(-head_dim // 4) // 64), device.profile.max_workgroups)
    buffers = {"positions": call.on_device(rows), "cosines": call.on_device(cosines), "sines": call.on_device(sines)}
    params = {"tokens": math.prod(tokens), "heads": heads, "positions": rows.size, "table": cosines.shape[0]}
    return call.run(kernel, groups, buffers, params)


def _host_positions(positions: Array, tokens: tuple[int, ...]) -> np.ndarray:
    """Integers in the shape (S,), or (..., S) where they differ from one sequence to another."""
    positions = np.asarray(positions)
    if positions.dtype.kind not in "iu":
        raise TypeError(f"positions have dtype {positions.dtype}; they must be integers.")
    try:
        everywhere = np.broadcast_to(positions, tokens)
    except ValueError:
        raise ShapeError(f"positions have shape {positions.shape}; they must broadcast to x's tokens {tokens}.") from None
    return np.broadcast_to(positions, tokens[-1:]) if positions.ndim < 2 else everywhere


def _rows_of_rope(positions: Array, tokens: tuple[int, ...], rope: Rope) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row of each position, cosines, sines), a row for each position that occurs."""
    if isinstance(positions, Tensor):
        raise TypeError("positions are a tensor; with a Rope they must be of the host, where the angles are computed (or pass a table of cos and sin).")
    distinct, rows = np.unique(_host_positions(positions, tokens), return_inverse=True)
    table = rope.table(distinct)
    return rows.astype(np.uint32).reshape(-1), np.ascontiguousarray(table[..., 0]), np.ascontiguousarray(table[..., 1])


def _rows_of_table(positions: Array, tokens: tuple[int, ...], table: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """(row of each position, cosines, sines), all checked."""
    cosines, sines = (floating(name, a) for name, a in zip(("cos", "sin"), table, strict=True))
    if cosines.ndim != 2 or tuple(cosines.shape) != tuple(sines.shape) or not cosines.shape[0]:
        raise ShapeError(f"cos has shape {tuple(cosines.shape)} and sin {tuple(sines.shape)}; both must be (rows, dim / 2).")
    for name, a in (("cos", cosines), ("sin", sines)):
        if isinstance(a, Tensor) and a.dtype != np.float32:
            raise TypeError(f"{name} is a tensor of {a.dtype}; it must be float32.")
    if isinstance(positions, Tensor):
        if positions.dtype.kind not in "iu":
            raise TypeError(f"positions are a tensor of {positions.dtype}; they must be uint32 or int32.")
        if tuple(positions.shape) not in (tokens, tokens[-1:]):
            raise ShapeError(f"positions have shape {tuple(positions.shape)}; they must be {tokens[-1:]} or {tokens}.")
    else:
        positions = _host_positions(positions, tokens)
        if positions.size and not 0 <= positions.min() <= positions.max() < cosines.shape[0]:
            raise ArgumentError(f"positions reach from {positions.min()} to {positions.max()}; the table has rows 0 to {cosines.shape[0] - 1}.")
        positions = positions.astype(np.uint32).reshape(-1)
    return positions, *(a if isinstance(a, Tensor) else a.astype(np.float32) for a in (cosines, sines))


class _Call:
    """What both have in common: rows of one tensor in, rows of the same shape and dtype out."""

    def __init__(self, device: Device, x: Array, row: int):
        self.device, self.x, self.row = device, x, row
        self.size = math.prod(x.shape)
        self.dtype = FLOATS[x.dtype.name]
        self.packs = self.dtype == "f16" and row % 4 != 0
        """Odd rows of f16 share words, which no two invocations may write: the kernel writes f32, and a second dispatch packs."""

    def on_device(self, array: Array) -> Tensor:
        return array if isinstance(array, Tensor) else self.device.tensor(array)

    def part(self, name: str, dtype: str, width: str) -> Part:
        return Part.of(f"parts/rows_{'any' if self.row % 4 else 'vec4'}_{dtype}", name=name, width=width)

    def kernel(self, main: str, *parts: Part | str, width: str, **options: Any) -> Kernel:
        store = "any_f32" if self.row % 4 else f"vec4_{self.dtype}"
        return self.device.kernel(main, self.part("x", self.dtype, width), Part.of(f"parts/store_{store}", name="out", width=width), *parts, **options)

    def run(self, kernel: Kernel, groups: tuple[int, ...], buffers: dict[str, Any], params: dict[str, float]) -> Array:
        device = self.device
        out = device.empty(tuple(self.x.shape), np.float16 if self.dtype == "f16" else np.float32)
        written = device.empty(out.shape) if self.packs else out
        recording = Recording(device)
        recording.add(kernel, groups, {"x": self.on_device(self.x), "out": written, **buffers}, params)
        if self.packs:
            record_pack(recording, written, out)
        recording.replay()
        return out if isinstance(self.x, Tensor) else out.numpy()

    def empty(self) -> Array:
        out = np.zeros(tuple(self.x.shape), np.float16 if self.dtype == "f16" else np.float32)
        return self.device.tensor(out) if isinstance(self.x, Tensor) else out
