"""Path "flash": attention of many queries without a buffer of scores, `attention/flash.wgsl`; on a CPU `attention/flash_lane.wgsl`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..gpu import DeviceProfile, Recording, power_of_two
from . import problem as common
from .problem import Operands, Problem


@dataclass(frozen=True)
class FlashShape:
    """Teams of `lanes` invocations compute `rows` rows each, `keys` keys a lane at a time; one lane: `attention/flash_lane.wgsl`."""

    lanes: int
    rows: int
    keys: int
    workgroup: int


def choose_flash(profile: DeviceProfile, problem: Problem) -> FlashShape:
    """The shape for a problem on a device; pure."""
    if profile.software:
        keys, most = (8, 8) if problem.value_width <= 16 else (4, 4) if problem.value_width <= 32 else (4, 2)  # more text takes seconds to compile
        if profile.subgroup_size <= 4:  # vectors of 4 lanes: few registers, and SwiftShader compiles 8 rows by 4 keys for minutes
            keys, most = 4, min(most, 4)
        rows = power_of_two(min(most, problem.queries * problem.ratio // 16))  # and not fewer lanes than a CPU has
        return FlashShape(1, rows, keys, 8)
    widest = max(4, min(profile.subgroup_size or 16, 32))
    lanes = 1 << (widest.bit_length() - 1)
    slots = math.ceil(problem.value_width / lanes)
    rows = max(1, min(4 if slots <= 8 else 2, problem.queries * problem.ratio))
    rows = 1 << (rows.bit_length() - 1)
    return FlashShape(lanes, rows, 2, max(lanes, min(64, profile.max_invocations)))


def record(recording: Recording, problem: Problem, operands: Operands, shape: FlashShape) -> None:
    """Append the path's one dispatch."""
    profile = recording.device.profile
    kernel = recording.device.kernel(
        "attention/flash_lane" if shape.lanes == 1 else "attention/flash",
        *common.base_parts(problem),
        *(common.rows_part(problem, name) for name in ("query", "keys", "values")),
        *common.score_parts(problem),
        "attention/parts/flash_rows",
        *([] if shape.lanes == 1 else [profile.team_part(shape.lanes)]),
        *common.finish_parts(problem),
        **common.options(problem),
        LANES=shape.lanes,
        ROWS=shape.rows,
        KEYS=shape.keys,
        VALUE_SLOTS=math.ceil(problem.value_width / shape.lanes),
        WORKGROUP=shape.workgroup,
        SUBGROUP=profile.subgroup_size,
    )
    teams = shape.workgroup // shape.lanes
    groups = -(-problem.queries * problem.ratio // (teams * shape.rows))
    for first, number, operations in common.pieces(recording.device.profile, groups, problem.operations):
        sizes = (number, problem.num_kv_heads, problem.batch)
        common.add(recording, kernel, sizes, problem, operands, label="attention", operations=operations, first_group=first)
