"""Path "split": attention of a few queries over many keys, `attention/split.wgsl`, the keys split among workgroups where that fills the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..gpu import Device, DeviceProfile, Recording, Tensor, grid, power_of_two
from . import problem as common
from .problem import Operands, Problem

_SHORT, _LONG = 1024, 4096
"""Keys up to which one workgroup a head is quicker than splitting and combining; and up to which few splits are."""
_MOST_SPLITS = 64
_MOST_HEADS = 16
"""Query heads a workgroup. The kernel has its text once a head, and more of it can take minutes to compile."""


@dataclass(frozen=True)
class SplitShape:
    """`group` query heads a workgroup of `workgroup` invocations, `lanes` to a key, `keys` at a time for each, keys in `splits` parts."""

    group: int
    lanes: int
    keys: int
    workgroup: int
    splits: int
    folded: int
    """Invocations whose results subgroup operations join: at least `lanes`."""

    def merge_bytes(self, value_width: int, heads: int) -> int:
        """Workgroup memory in which so many heads at once are merged."""
        return heads * (self.workgroup // self.folded) * (16 * value_width + 8)

    def heads_at_once(self, value_width: int, memory: int) -> int:
        """All heads of the workgroup where that fits, else one."""
        return self.group if self.merge_bytes(value_width, self.group) <= min(memory, 16384) else 1


def regimes(profile: DeviceProfile) -> list[int]:
    """Lengths up to which the same shape serves; a recording is made for each, so that a step only picks one. The last is no limit."""
    return [2**32] if profile.software else [_SHORT, _LONG, 2**32]


def choose_split(profile: DeviceProfile, problem: Problem) -> SplitShape:
    """The shape for a problem on a device; pure. `problem.keys` is the most keys there can be.

    Fewer lanes a key take fewer steps to add up a score, more keys at a time have more loads in flight; both take registers. A short sequence
    has a workgroup for each head, since a second dispatch would cost more than reading keys again.
    """
    width = max(problem.width, problem.value_width)
    team = profile.team_part(2)
    if profile.software or team == "team_workgroup":
        lanes, keys, workgroup, registers = 1, 1, 8 if profile.software else 64, 64
    else:
        lanes = power_of_two(min(profile.subgroup_size, max(1, width // 2)))
        keys, workgroup, registers = 4, min(256, power_of_two(profile.max_invocations)), 16
    folded = max(lanes, profile.subgroup_size) if lanes > 1 and workgroup % profile.subgroup_size == 0 else lanes
    while workgroup > folded and workgroup // folded * (16 * problem.value_width + 8) > profile.workgroup_memory:
        workgroup //= 2
    slots = math.ceil(width / lanes)
    most = min(problem.ratio, _MOST_HEADS)
    group = max(g for g in range(1, most + 1) if problem.ratio % g == 0 and (g == 1 or g * slots <= registers))
    short = problem.keys <= _SHORT and not profile.software
    if short:
        group = 1
    elif keys > 1:
        keys = 2
    workgroups, wanted = problem.rows // group, 128 if problem.keys <= _LONG else 512
    if wanted == 512 and workgroup // 2 >= folded:
        workgroup //= 2
    splits = 1 if profile.software or short else max(1, min(_MOST_SPLITS, wanted // workgroups))
    if problem.storage_buffers > profile.max_storage_buffers:
        splits = max(2, splits)  # the dispatch that combines binds some of them
    return SplitShape(group, lanes, keys, workgroup, splits, folded)


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
        f"attention/parts/split_fold_{'subgroup' if shape.folded > shape.lanes else 'none'}",
        *(["attention/parts/split_many"] if many else ["attention/parts/split_one", *common.finish_parts(problem)]),
        **common.options(problem),
        GROUP=shape.group,
        HEADS_AT_ONCE=shape.heads_at_once(problem.value_width, device.profile.workgroup_memory),
        LANES=shape.lanes,
        KEYS=shape.keys,
        SLOTS=math.ceil(problem.width / shape.lanes),
        VALUE_SLOTS=math.ceil(problem.value_width / shape.lanes),
        WORKGROUP=shape.workgroup,
        SUBGROUP=device.profile.subgroup_size,
    )
    for first, number, operations in common.pieces(device.profile, problem.rows // shape.group, problem.operations):
        groups = (*grid(number, limit), shape.splits)
        common.add(recording, kernel, groups, problem, operands, partial, shape.splits, "attention", operations, first)
    if many:
        kernel = device.kernel(
            "attention/combine", *common.base_parts(problem), *common.finish_parts(problem), **common.options(problem), WORKGROUP=min(64, problem.value_width)
        )
        common.add(recording, kernel, grid(problem.rows, limit), problem, operands, partial, shape.splits, label="attention combine")
