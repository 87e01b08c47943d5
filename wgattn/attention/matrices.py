"""Scores as matrices in memory: sizes, rounds over planes that fit a binding, and the softmax. Shared by the paths "unfused" and "gemm"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CapacityError
from ..gpu import Device, DeviceProfile, Recording, grid, power_of_two
from ..gpu.shader import Option
from . import problem as common
from .problem import Operands, Problem

_BUDGET = 1 << 28
"""Bytes of scores that are worth keeping at a time: enough work for any device."""
_SUBGROUP_KEYS = 1024
"""Keys up to which the lanes of one subgroup are enough for a row of scores."""


@dataclass(frozen=True)
class Matrices:
    """Padded sizes of the matrices of one head: `attention/parts/matrices.wgsl`."""

    rows: int
    columns: int
    depth: int = 0
    channels: int = 0
    mask_share: int = 1
    """Neighbouring planes that share a mask."""

    @property
    def plane_bytes(self) -> int:
        """Bytes of the largest matrix."""
        r, c = self.rows, self.columns
        return 4 * max(r * c, *(n * m for n in (r, c) for m in (self.depth, self.channels)))

    def mask_planes(self, first: int, planes: int) -> int:
        """Masks that a round needs."""
        return (first + planes - 1) // self.mask_share - first // self.mask_share + 1

    def uniform(self, device: Device, first: int, planes: int) -> Any:
        """The buffer `matrices` of a round."""
        sizes = (first, planes, self.rows, self.columns, self.depth, self.channels, self.mask_planes(first, planes), self.mask_share)
        return device.uniform(np.array(sizes, np.uint32).tobytes())


def operations(problem: Problem, matrices: Matrices, planes: int, depth: int) -> float:
    """Multiplications and additions of a product that makes or takes a round's scores; 0 as in `Problem.operations`."""
    return 0.0 if problem.queries == 1 else 2.0 * planes * matrices.rows * matrices.columns * depth


def mask_share(problem: Problem, operands: Operands) -> int:
    """Neighbouring planes (heads of sequences) that have one mask in common."""
    batch, head, _, _ = operands.mask_strides
    if head:
        return 1
    return problem.num_heads if batch else problem.batch * problem.num_heads


def too_large(profile: DeviceProfile, matrices: Matrices) -> str | None:
    """What `unsupported` says when not even one plane fits."""
    need, limit = matrices.plane_bytes, profile.max_tensor
    if need > limit:
        return f"one head's matrix of {matrices.rows} x {matrices.columns} scores or its operands take {need} bytes; a binding holds {limit}."
    return None


def rounds(profile: DeviceProfile, problem: Problem, matrices: Matrices) -> list[tuple[int, int]]:
    """(first, number) of the planes that are computed at a time, in the same scratch memory. A round has whole KV heads, or a part of one."""
    total = problem.batch * problem.num_heads
    most = min(profile.max_tensor // matrices.plane_bytes, profile.max_workgroups)
    if not most:
        raise CapacityError(too_large(profile, matrices))
    most = max(1, min(most, _BUDGET // matrices.plane_bytes))
    ratio = problem.ratio
    each = most - most % ratio if most >= ratio else max(n for n in range(1, most + 1) if ratio % n == 0)
    return [(first, min(each, total - first)) for first in range(0, total, each)]


def softmax_lanes(profile: DeviceProfile, keys: int) -> int:
    """Invocations for a row of scores; pure."""
    if profile.software:
        return max(1, profile.subgroup_size)
    most = min(256, profile.max_invocations, keys // 4)
    if profile.subgroup_size and keys <= _SUBGROUP_KEYS:
        most = min(most, profile.subgroup_size)
    return power_of_two(most)


def neutral_options(problem: Problem) -> dict[str, Option]:
    """For kernels that read no rows of queries, keys or values: one kernel for all head dims."""
    return {**common.options(problem), "HEAD_DIM": 0, "VALUE_DIM": 0}


def add_softmax(recording: Recording, problem: Problem, operands: Operands, scratch: Mapping[str, Any], planes: int, lanes: int) -> None:
    """Append the softmax of a round's `scores`."""
    _, *finish = common.finish_parts(problem)
    profile = recording.device.profile
    kernel = recording.device.kernel(
        "attention/softmax",
        *common.base_parts(problem),
        "attention/parts/matrices",
        profile.team_part(lanes),
        *finish,
        **neutral_options(problem),
        LANES=lanes,
        WORKGROUP=lanes,
        SUBGROUP=profile.subgroup_size,
    )
    common.add(recording, kernel, grid(planes * problem.queries, profile.max_workgroups), problem, operands, scratch, label="attention softmax")


def padded(n: int, multiple: int) -> int:
    """n rounded up to a multiple, at least one."""
    return max(1, math.ceil(n / multiple)) * multiple
