"""Path "flash": attention of many queries without a buffer of scores, `attention/flash_tile.wgsl`; on a CPU `attention/flash_lane.wgsl`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..gpu import DeviceProfile, Part, Recording, power_of_two
from . import problem as common
from .kv_format import kv_format
from .problem import Operands, Problem


@dataclass(frozen=True)
class FlashShape:
    """Teams of `lanes` invocations compute `rows` rows each, `keys` keys a lane at a time; one lane: `attention/flash_lane.wgsl`."""

    lanes: int
    rows: int
    keys: int
    workgroup: int


_UNROLL = 4
"""vec4s of a row that the text takes at once; all of 8 are too much text for a GPU's instruction cache."""


@dataclass(frozen=True)
class FlashTileShape:
    """`attention/flash_tile.wgsl`: `lanes` invocations share a row. Each computes 4 * row_quads rows, of a tile's scores 4 * key_quads columns, and
    of the outputs every `lanes`-th vec4. `slice` vec4s of the rows of queries and keys are in workgroup memory at a time, or 4 * slice values,
    and the probabilities of 4 * p_quads keys."""

    lanes: int
    row_quads: int
    key_quads: int
    slice: int
    p_quads: int
    workgroup: int

    @property
    def down(self) -> int:
        """Invocations that share a column."""
        return self.workgroup // self.lanes

    @property
    def tile_rows(self) -> int:
        return 4 * self.row_quads * self.down

    def value_quads(self, problem: Problem) -> int:
        return math.ceil(problem.value_width / self.lanes)

    def workgroup_bytes(self, profile: DeviceProfile, problem: Problem) -> int:
        """Slices of queries, and of keys or values; probabilities; what the team part has."""
        values = max(self.key_quads, self.value_quads(problem)) * self.slice * self.lanes
        team = {"team_workgroup": self.workgroup, "team_subgroups": self.workgroup // max(1, profile.subgroup_size)}
        own = 64 * (self.row_quads * self.slice * self.down + values + self.row_quads * self.p_quads * self.down)
        return own + 16 * team.get(profile.team_part(self.lanes), 0)

    def fits(self, profile: DeviceProfile, problem: Problem) -> bool:
        return self.workgroup <= profile.max_invocations and self.workgroup_bytes(profile, problem) <= profile.workgroup_memory


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


def record(recording: Recording, problem: Problem, operands: Operands, shape: FlashShape | FlashTileShape) -> None:
    """Append the path's one dispatch."""
    if isinstance(shape, FlashTileShape):
        return _record_tiles(recording, problem, operands, shape)
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


def _fetch_part(problem: Problem, name: str) -> Part:
    """What fetches rows of "query", "keys" or "values" as they are stored, and decodes them later; beside `rows_part`."""
    stored = kv_format(problem.dtype if name == "query" else problem.kv_dtype)
    dim = problem.value_dim if name == "values" else problem.head_dim
    if stored.quantised:
        return Part.of(f"parts/fetch_{stored.name}", name=name, scales=f"params.{name[0]}_scales")
    return Part.of("parts/fetch_f16" if stored.name == "f16" and dim % 4 == 0 else "parts/fetch_plain", name=name)


def _record_tiles(recording: Recording, problem: Problem, operands: Operands, shape: FlashTileShape) -> None:
    profile, values = recording.device.profile, shape.value_quads(problem)
    kernel = recording.device.kernel(
        "attention/flash_tile",
        *common.base_parts(problem),
        *(part for name in ("query", "keys", "values") for part in (common.rows_part(problem, name), _fetch_part(problem, name))),
        *common.score_parts(problem),
        "attention/parts/flash_rows",
        profile.team_part(shape.lanes),
        *common.finish_parts(problem),
        **common.options(problem),
        LANES=shape.lanes,
        ROW_QUADS=shape.row_quads,
        KEY_QUADS=shape.key_quads,
        VALUE_QUADS=values,
        SLICE=shape.slice,
        P_QUADS=shape.p_quads,
        UNROLL=min(_UNROLL, shape.slice),
        Q_LOADS=math.ceil(shape.row_quads * shape.slice / shape.lanes),
        K_LOADS=math.ceil(shape.key_quads * shape.slice / shape.down),
        V_LOADS=math.ceil(4 * values * shape.slice / shape.down),
        PLAIN=problem.plain,
        WORKGROUP=shape.workgroup,
        SUBGROUP=profile.subgroup_size,
    )
    groups = -(-problem.queries * problem.ratio // shape.tile_rows)
    for first, number, operations in common.pieces(profile, groups, problem.operations):
        sizes = (problem.num_kv_heads, number, problem.batch)
        common.add(recording, kernel, sizes, problem, operands, label="attention", operations=operations, first_group=first)
