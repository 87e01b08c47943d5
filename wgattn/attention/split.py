"""Path "split": attention of a few queries over many keys, `attention/split.wgsl`, the keys split among workgroups where that fills the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..gpu import Device, DeviceProfile, Recording, Tensor, grid
from . import problem as common
from .problem import Operands, Problem

_SHORT = 256
"""Keys up to which one workgroup a KV head is quicker than splitting and combining."""
_TARGET_WORKGROUPS = 128
_MOST_SPLITS = 32
_MOST_HEADS = 16
"""Query heads a workgroup. The kernel has its text once a head, and more of it can take minutes to compile."""


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


def choose_split(profile: DeviceProfile, problem: Problem) -> SplitShape:
    """The shape for a problem on a device; pure. `problem.keys` is the most keys there can be."""
    width = max(problem.width, problem.value_width)
    if profile.software or profile.subgroup_size == 0:
        lanes, workgroup, registers = 1, 8 if profile.software else 64, 64
    else:
        lanes = 1 << (min(profile.subgroup_size, width).bit_length() - 1)
        workgroup, registers = min(256, profile.max_invocations), 16
    while workgroup > lanes and (workgroup // lanes) * (16 * problem.value_width + 8) > profile.workgroup_memory:
        workgroup //= 2
    slots = math.ceil(width / lanes)
    most = min(problem.ratio, _MOST_HEADS)
    group = max(g for g in range(1, most + 1) if problem.ratio % g == 0 and (g == 1 or g * slots <= registers))
    workgroups = problem.rows // group
    splits = 1 if profile.software or problem.keys <= _SHORT else max(1, min(_MOST_SPLITS, _TARGET_WORKGROUPS // workgroups))
    if problem.storage_buffers > profile.max_storage_buffers:
        splits = max(2, splits)  # the dispatch that combines binds some of them
    return SplitShape(group, lanes, workgroup, splits)


def scratch(device: Device, problem: Problem, shape: SplitShape) -> dict[str, Tensor]:
    """Partial results of the splits; none for a single one."""
    if shape.splits == 1:
        return {}
    rows = (problem.batch, problem.queries, problem.num_heads, shape.splits)
    return {"partial_out": device.empty((*rows, 4 * problem.value_width)), "partial_stat": device.empty((*rows, 2))}


def record(recording: Recording, problem: Problem, operands: Operands, shape: SplitShape, partial: Mapping[str, Any]) -> None:
    """Append the path's one dispatch, or two where the keys are split. `partial` is `scratch` of the same problem and shape."""
    device = recording.device
    limit = device.profile.max_workgroups
    many = shape.splits > 1
    kernel = device.kernel(
        "attention/split",
        *common.base_parts(problem),
        *(common.rows_part(problem, name) for name in ("query", "keys", "values")),
        *common.score_parts(problem),
        device.profile.team_part(shape.lanes),
        *(["attention/parts/split_many"] if many else ["attention/parts/split_one", *common.finish_parts(problem)]),
        **common.options(problem),
        GROUP=shape.group,
        LANES=shape.lanes,
        SLOTS=math.ceil(problem.width / shape.lanes),
        VALUE_SLOTS=math.ceil(problem.value_width / shape.lanes),
        WORKGROUP=shape.workgroup,
        SUBGROUP=device.profile.subgroup_size,
    )
    groups = (*grid(problem.rows // shape.group, limit), shape.splits)
    common.add(recording, kernel, groups, problem, operands, partial, shape.splits, label="attention")
    if many:
        kernel = device.kernel(
            "attention/combine", *common.base_parts(problem), *common.finish_parts(problem), **common.options(problem), WORKGROUP=min(64, problem.value_width)
        )
        common.add(recording, kernel, grid(problem.rows, limit), problem, operands, partial, shape.splits, label="attention combine")
