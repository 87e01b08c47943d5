"""x of many tokens, normed and rounded by a dispatch of its own, for projections that multiply it as f16 or int8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..gpu import Recording, grid, power_of_two
from .quant import CHUNK, padded


def half_stride(columns: int) -> int:
    """Halves from one token's x to the next's."""
    return -(-columns // 64) * 64


def record_half(recording: Recording, step: Any, x: Any, tokens: int, columns: int, gamma: Any, eps: float, token: str, label: str) -> dict[str, Any]:
    """Append the dispatch that norms x and rounds it to f16; returns the buffers that it leaves for `MatrixShape`."""
    stride = half_stride(columns)
    left = {"half": recording.scratch("x as f16", (tokens, stride // 2), np.uint32), "scale": recording.scratch("scale of x", (tokens,))}
    given = {"step": step, "x": x} | ({} if gamma is None else {"gamma": gamma})
    params = {"columns": columns, "x_stride": padded(columns), "half_stride": stride, "eps": eps}
    _record(recording, "half", given | left, params, tokens, power_of_two(-(-columns // 8)), token, f"{label}: f16" if label else "f16")
    return {"x": left["half"], "x_scale": left["scale"]}


def record_int8(recording: Recording, step: Any, x: Any, tokens: int, columns: int, gamma: Any, eps: float, token: str, label: str) -> dict[str, Any]:
    """Append the dispatch that rounds x, times gamma where there is one, to int8; returns the buffers that it leaves for `Int8TileShape`."""
    codes = recording.scratch("x as int8", (columns // CHUNK, tokens, 4), np.uint32)
    left = {"codes": codes, "units": recording.scratch("units of x", (columns // 32, tokens, 2)), "scale": recording.scratch("scale of x", (tokens,))}
    given = {"step": step, "x": x} | ({} if gamma is None else {"gamma": gamma})
    params = {"columns": columns, "x_stride": padded(columns), "tokens": tokens, "eps": eps}
    _record(recording, "int8", given | left, params, tokens, power_of_two(2 * (columns // 32) - 1), token, f"{label}: int8" if label else "int8")
    return {"x": codes, "x_units": left["units"], "x_scale": left["scale"]}


def _record(
    recording: Recording, kernel: str, buffers: Mapping[str, Any], params: Mapping[str, float], tokens: int, useful: int, token: str, label: str
) -> None:
    """A workgroup a token; `useful` invocations at most have something to do."""
    profile = recording.device.profile
    lanes = min(256, power_of_two(profile.max_invocations), useful)
    made = recording.device.kernel(
        f"block/{kernel}",
        "step",
        f"block/parts/norm_{'rms' if 'gamma' in buffers else 'none'}",
        f"block/parts/token_{token}",
        profile.team_part(lanes),
        LANES=lanes,
        WORKGROUP=lanes,
        SUBGROUP=profile.subgroup_size,
    )
    recording.add(made, grid(tokens, profile.max_workgroups)[:1], buffers, params, label)
