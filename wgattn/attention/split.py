"""Path "split": attention of a few queries over many keys, `attention/split.wgsl`, the keys split among workgroups where that fills the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..gpu import Device, DeviceProfile, Named, Part, Recording, Tensor, grid, power_of_two
from . import problem as common
from .problem import Operands, Problem

_TINY, _SHORT, _MIDDLE = 256, 1024, 4096
"""Keys up to which one workgroup a head, small or large, is quicker than splitting and combining; and up to which small workgroups then are."""
_FEW, _MANY = 2**14, 2**16
"""Invocations that keys are split among up to `_MIDDLE`, and beyond: on a large GPU some four and sixteen subgroups a core."""
_WORKGROUPS = 128
"""Enough for a large GPU: with more, heads share what they read even where sequences are short."""
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
        return _merge_bytes(heads * (self.workgroup // self.folded), value_width)

    def heads_at_once(self, value_width: int, memory: int) -> int:
        """All heads of the workgroup where that fits, else one."""
        return self.group if self.merge_bytes(value_width, self.group) <= memory else 1


def _merge_bytes(results: int, columns: int) -> int:
    """So many outputs, and their maxima and sums, each of the three padded to 16 bytes."""
    return 16 * results * columns + 2 * 16 * math.ceil(results / 4)


def regimes(profile: DeviceProfile, capacity: int = 2**32) -> list[int]:
    """Lengths up to which the same shape serves, for sequences of up to `capacity` keys; a recording is made for each, so that a step only picks one.

    The last is no limit.
    """
    return [limit for limit in (_TINY, _SHORT, _MIDDLE) if limit < capacity and not profile.software] + [2**32]


def choose_split(profile: DeviceProfile, problem: Problem) -> SplitShape:
    """The shape for a problem on a device; pure. `problem.keys` is the most keys there can be.

    Fewer lanes a key take fewer steps to add up a score, more keys at a time have more loads in flight; both take registers. A short sequence
    has a workgroup for each head, since a second dispatch would cost more than reading keys again.
    """
    width = max(problem.width, problem.value_width)
    subgroups = profile.team_part(2) == "team_subgroup" and not profile.software
    short = problem.keys <= _SHORT and not profile.software
    if subgroups:
        lanes = power_of_two(min(profile.subgroup_size, max(1, width // 2)))
        keys, registers, workgroup = min(4, lanes), 16, min(_workgroup(problem.keys), power_of_two(profile.max_invocations))
    else:
        lanes, keys, registers, workgroup = 1, 1, 64, 8 if profile.software else 64
    folded = profile.subgroup_size if subgroups and workgroup % profile.subgroup_size == 0 else lanes
    slots = math.ceil(width / lanes)
    groups = [g for g in range(1, min(problem.ratio, _MOST_HEADS) + 1) if problem.ratio % g == 0 and (g == 1 or g * slots <= registers)]
    group = max(g for g in groups if g == 1 or not short or problem.rows // g >= _WORKGROUPS)
    if 2 * group * slots > registers:  # many registers a lane, of which there must be enough
        workgroup = min(workgroup, 256)
    while workgroup > folded and _merge_bytes(workgroup // folded * (group if workgroup > 256 else 1), problem.value_width) > profile.workgroup_memory:
        workgroup //= 2
    splits = 1 if profile.software or short else (_FEW if problem.keys <= _MIDDLE else _MANY) // (workgroup * (problem.rows // group))
    if problem.storage_buffers > profile.max_storage_buffers:
        splits = max(2, splits)  # the dispatch that combines binds some of them
    return SplitShape(group, lanes, keys, workgroup, max(1, min(_MOST_SPLITS, splits)), folded)


def _workgroup(keys: int) -> int:
    """Invocations of a workgroup by the number of keys, on a large GPU."""
    if keys <= _TINY:
        return 256
    return 128 if _SHORT < keys <= _MIDDLE else 512


def scratch(device: Device, problem: Problem, shape: SplitShape) -> dict[str, Tensor]:
    """Partial results of the splits; none for a single one."""
    if shape.splits == 1:
        return {}
    rows = (problem.batch, problem.queries, problem.num_heads, shape.splits)
    return {"partial_out": device.empty((*rows, 4 * problem.value_width)), "partial_stat": device.empty((*rows, 2))}


@dataclass(frozen=True)
class Onward:
    """What a workgroup goes on with, in the same dispatch, instead of writing its outputs to memory: parts, options and buffers for its kernel."""

    label: str
    """Of the dispatch."""
    part: Named
    options: Mapping[str, int]
    buffers: Mapping[str, Any]


def record(
    recording: Recording, problem: Problem, operands: Operands, shape: SplitShape, partial: Mapping[str, Any], onward: Onward | None = None
) -> None:
    """Append the path's one dispatch, or two where the keys are split. `partial` is `scratch` of the same problem and shape.

    onward: what follows where nothing is split; its part is `block/parts/slice` as "slice".
    """
    device = recording.device
    limit = device.profile.max_workgroups
    many = shape.splits > 1
    wide = 2 if all(common.by_eights(problem, operands, name) for name in ("keys", "values")) else 1
    kernel = device.kernel(
        "attention/split",
        *common.base_parts(problem),
        common.rows_part(problem, "query"),
        *(part for name in ("keys", "values") for part in _rows_parts(problem, name, wide)),
        *common.score_parts(problem),
        f"attention/parts/split_team_{'subgroup' if shape.folded > 1 else 'one'}",
        *_end_parts(problem, many, onward),
        **common.options(problem),
        **(onward.options if onward else {}),
        GROUP=shape.group,
        SHARERS=problem.ratio // shape.group,
        ONE_QUERY=problem.batch == problem.queries == 1,
        HEADS_AT_ONCE=shape.heads_at_once(problem.value_width, device.profile.workgroup_memory),
        LANES=shape.lanes,
        KEYS=shape.keys,
        WIDE=wide,
        UNITS=math.ceil(problem.width // wide / shape.lanes),
        VALUE_UNITS=math.ceil(problem.value_width // wide / shape.lanes),
        MERGED=shape.workgroup // shape.folded,
        WORKGROUP=shape.workgroup,
    )
    label, left = (onward.label, onward.buffers) if onward else ("attention", partial)
    for first, number, operations in common.pieces(device.profile, problem.rows // shape.group, problem.operations):
        groups = (*grid(number, limit), shape.splits)
        common.add(recording, kernel, groups, problem, operands, left, shape.splits, label, operations, first)
    if many:
        columns = min(problem.value_width, power_of_two(device.profile.max_invocations))
        parts = 1 if device.profile.software else power_of_two(min(shape.splits, max(1, min(256, device.profile.max_invocations) // columns)))
        kernel = device.kernel(
            "attention/combine",
            *common.base_parts(problem),
            *common.finish_parts(problem),
            **common.options(problem),
            ONE_QUERY=problem.batch == problem.queries == 1,
            COLUMNS=columns,
            PARTS=parts,
            EACH=math.ceil(shape.splits / parts),
        )
        common.add(recording, kernel, grid(problem.rows, limit), problem, operands, partial, shape.splits, label="attention combine")


def _end_parts(problem: Problem, many: bool, onward: Onward | None) -> list[str | Part | Named]:
    if many:
        return ["attention/parts/split_many"]
    store, *finish = common.finish_parts(problem)
    return ["attention/parts/split_slice", *finish, onward.part] if onward else ["attention/parts/split_one", store, *finish]


def _rows_parts(problem: Problem, name: str, wide: int) -> tuple[Part, ...]:
    if wide == 2:
        return (Part.of("attention/parts/split_rows_f16", name=name, width="VALUE_DIM" if name == "values" else "HEAD_DIM"),)
    return common.rows_part(problem, name), Part.of("attention/parts/split_rows_any", name=name)
