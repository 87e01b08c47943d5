"""Path "flash": attention of many queries without a buffer of scores, `attention/flash_tile.wgsl`; on a CPU `attention/flash_lane.wgsl`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..gpu import DeviceProfile, Kernel, Part, Recording, power_of_two
from . import problem as common
from .kv_format import kv_format
from .problem import Operands, Problem

_TILES = ((2, 2, 256), (1, 2, 256), (1, 2, 128), (1, 1, 64))
"""Row quads, key quads and invocations of tiles, the quickest for large problems first; each has half of the rows of the one before it."""
_OTHER_TILES = ((2, 2, 128), (1, 1, 128), (1, 1, 32))
"""The same of those that only tuning tries."""
_SLICES = ((8, 8), (4, 8), (4, 4), (2, 4), (2, 2), (1, 2), (1, 1))
"""slice and p_quads, the quickest first; what fits the workgroup memory is taken."""
_UNROLL = 4
"""vec4s of a row that the text takes at once; all of 8 are too much text for a GPU's instruction cache."""
_SUMS = {"DiscreteGPU": 128}
"""Scores and outputs that an invocation may keep in registers, by kind of device: those of 255 registers take 128."""
_FEW_SUMS = 64
"""The same for other kinds."""
_MANY_SUMS = 96
"""From here on there are no registers left to fetch queries ahead: on an H200 that costs 4 % there, and saves 6 % where there are fewer sums."""
_GPU_WORKGROUPS = 70
"""Workgroups as long as the longest that keep a large GPU busy: fewer are made smaller."""


@dataclass(frozen=True)
class FlashLaneShape:
    """`attention/flash_lane.wgsl`: an invocation computes `rows` rows, `keys` keys at a time."""

    rows: int
    keys: int
    workgroup: int


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
        """vec4s of an output row that an invocation computes."""
        return math.ceil(problem.value_width / self.lanes)

    def sums(self, problem: Problem) -> int:
        """Scores and outputs that an invocation keeps in registers."""
        return 16 * self.row_quads * (self.key_quads + self.value_quads(problem))

    def full_workgroups(self, problem: Problem) -> float:
        """How many workgroups there would be if all took as long as the longest: the first queries of a causal prompt see few keys."""
        groups = -(-problem.queries * problem.ratio // self.tile_rows) * problem.num_kv_heads * problem.batch
        return groups * (1 - min(problem.queries, problem.keys) / max(1, 2 * problem.keys) if problem.right == 0 else 1)

    def workgroup_bytes(self, profile: DeviceProfile, problem: Problem) -> int:
        """Slices of queries, and of keys or values; probabilities; what the team part has."""
        values = max(self.key_quads, self.value_quads(problem)) * self.slice * self.lanes
        team = {"team_workgroup": self.workgroup, "team_subgroups": self.workgroup // max(1, profile.subgroup_size)}
        own = 64 * (self.row_quads * self.slice * self.down + values + self.row_quads * self.p_quads * self.down)
        return own + 16 * team.get(profile.team_part(self.lanes), 0)

    def fits(self, profile: DeviceProfile, problem: Problem) -> bool:
        return self.workgroup <= profile.max_invocations and self.workgroup_bytes(profile, problem) <= profile.workgroup_memory


FlashShape = FlashLaneShape | FlashTileShape


def unsupported(profile: DeviceProfile, problem: Problem) -> str | None:
    """What is missing, in a sentence, or None."""
    if beyond := common.beyond_limits(profile, problem):
        return beyond
    shape = choose_flash(profile, problem)
    if isinstance(shape, FlashTileShape) and not shape.fits(profile, problem):
        need = shape.workgroup_bytes(profile, problem)
        return f"tiles of values of {problem.value_dim} take {need} bytes of workgroup memory, there are {profile.workgroup_memory}."
    return None


def choose_flash(profile: DeviceProfile, problem: Problem) -> FlashShape:
    """The shape for a problem on a device; pure. Where no tile fits, the smallest."""
    if profile.software:
        keys, most = (8, 8) if problem.value_width <= 16 else (4, 4) if problem.value_width <= 32 else (4, 2)  # more text takes seconds to compile
        if profile.subgroup_size <= 4:  # vectors of 4 lanes: few registers, and SwiftShader compiles 8 rows by 4 keys for minutes
            keys, most = 4, min(most, 4)
        rows = power_of_two(min(most, problem.queries * problem.ratio // 16))  # and not fewer lanes than a CPU has
        return FlashLaneShape(rows, keys, 8)
    shapes = tile_shapes(profile, problem)
    if not shapes:
        return FlashTileShape(32, 1, 1, 1, 1, 32)
    usual = [s for s in shapes if s.lanes == shapes[0].lanes and (s.row_quads, s.key_quads, s.workgroup) in _TILES] or shapes[-1:]
    row = problem.operations / max(1, problem.queries * problem.ratio)  # of all heads: what a dispatch has at least, a row of its tiles
    enough = (s for s in usual if s.full_workgroups(problem) >= _GPU_WORKGROUPS and row * s.tile_rows <= profile.most_operations)
    return next(enough, usual[-1])


def tile_shapes(profile: DeviceProfile, problem: Problem) -> list[FlashTileShape]:
    """Tiles that fit a GPU, the usual number of lanes first, and of these the quickest for large problems; pure."""
    width = problem.value_width
    usual = 8 if width <= 8 else 16 if width <= 32 else 32
    most = _SUMS.get(profile.kind, _FEW_SUMS)
    found = []
    for lanes in sorted((8, 16, 32), key=lambda n: n != usual):
        for row_quads, key_quads, workgroup in (*_TILES, *_OTHER_TILES):
            slices = ((slice_, p) for slice_, p in _SLICES if p <= lanes <= workgroup)
            shapes = (FlashTileShape(lanes, row_quads, key_quads, slice_, p, workgroup) for slice_, p in slices)
            found += [s for s in shapes if s.fits(profile, problem) and s.sums(problem) <= max(most, 16 * (1 + s.value_quads(problem)))][:1]
    return found


def record(recording: Recording, problem: Problem, operands: Operands, shape: FlashShape) -> None:
    """Append the path's one dispatch; several where it would run for long."""
    tiles = isinstance(shape, FlashTileShape)
    kernel = (_tile_kernel if tiles else _lane_kernel)(recording, problem, shape)
    groups = -(-problem.queries * problem.ratio // (shape.tile_rows if tiles else shape.workgroup * shape.rows))
    for first, number, operations in common.pieces(recording.device.profile, groups, problem.operations):
        heads = problem.num_kv_heads  # tiles of all heads begin with those that see the most keys, so that no long one is left to the end
        sizes = (heads, number, problem.batch) if tiles else (number, heads, problem.batch)
        common.add(recording, kernel, sizes, problem, operands, label="attention", operations=operations, first_group=first)


def _lane_kernel(recording: Recording, problem: Problem, shape: FlashLaneShape) -> Kernel:
    return recording.device.kernel(
        "attention/flash_lane",
        *common.base_parts(problem),
        *(common.rows_part(problem, name) for name in ("query", "keys", "values")),
        *common.score_parts(problem),
        "attention/parts/flash_rows",
        *common.finish_parts(problem),
        **common.options(problem),
        LANES=1,
        ROWS=shape.rows,
        KEYS=shape.keys,
        VALUE_SLOTS=problem.value_width,
        WORKGROUP=shape.workgroup,
        SUBGROUP=recording.device.profile.subgroup_size,
    )


def _tile_kernel(recording: Recording, problem: Problem, shape: FlashTileShape) -> Kernel:
    profile, values = recording.device.profile, shape.value_quads(problem)
    return recording.device.kernel(
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
        Q_AHEAD=shape.sums(problem) < _MANY_SUMS,
        WORKGROUP=shape.workgroup,
        SUBGROUP=profile.subgroup_size,
    )


def _fetch_part(problem: Problem, name: str) -> Part:
    """What fetches rows of "query", "keys" or "values" as they are stored, and decodes them later; beside `rows_part`."""
    stored = kv_format(problem.dtype if name == "query" else problem.kv_dtype)
    dim = problem.value_dim if name == "values" else problem.head_dim
    if stored.quantised:
        return Part.of(f"parts/fetch_{stored.name}", name=name, scales=f"params.{name[0]}_scales")
    return Part.of("parts/fetch_f16" if stored.name == "f16" and dim % 4 == 0 else "parts/fetch_plain", name=name)
