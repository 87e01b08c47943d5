"""Path "flash": attention of many queries without a buffer of scores, `attention/flash.wgsl`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..gpu import DeviceProfile, Recording
from . import problem as common
from .problem import Operands, Problem


@dataclass(frozen=True)
class FlashShape:
    """Teams of `lanes` invocations compute `rows` rows each, `keys` keys a lane at a time."""

    lanes: int
    rows: int
    keys: int
    workgroup: int


def choose_flash(profile: DeviceProfile, problem: Problem) -> FlashShape:
    """The shape for a problem on a device; pure."""
    widest = max(4, min(profile.subgroup_size or 16, 32))
    lanes = 1 << (widest.bit_length() - 1)
    slots = math.ceil(problem.value_width / lanes)
    rows = max(1, min(4 if slots <= 8 else 2, problem.queries * problem.ratio))
    rows = 1 << (rows.bit_length() - 1)
    workgroup = lanes if profile.software else max(lanes, min(64, profile.max_invocations))
    return FlashShape(lanes, rows, 4 if profile.software else 2, workgroup)


def record(recording: Recording, problem: Problem, operands: Operands, shape: FlashShape) -> None:
    """Append the path's one dispatch."""
    profile = recording.device.profile
    kernel = recording.device.kernel(
        "attention/flash",
        *common.base_parts(problem),
        *(common.rows_part(problem, name) for name in ("query", "keys", "values")),
        *common.score_parts(problem),
        profile.team_part(shape.lanes),
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
    groups = (-(-problem.queries * problem.ratio // (teams * shape.rows)), problem.num_kv_heads, problem.batch)
    common.add(recording, kernel, groups, problem, operands, label="attention")
