"""How projections of one token divide their work on a GPU: the shape of `block/linear_vector.wgsl`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from ..gpu import DeviceProfile, grid, power_of_two
from .quant import CHUNK, Format

_CORES = 132
"""Of the GPU that the choices here were measured on (H200)."""
_REGISTERS = 65536
"""Words that the invocations of a workgroup may hold in all; what is above goes to memory and back, and takes twice as long."""


@dataclass(frozen=True)
class VectorShape:
    """`teams` of `lanes` invocations a workgroup, each `batches` times `batch` rows of one token."""

    lanes: int
    teams: int
    batch: int
    batches: int
    columns: int
    """Padded to whole chunks."""
    subgroup: int
    """Lanes whose sums subgroup operations add up; 1 where there are none."""
    digits: int
    """Digits of 8 bits that x is rounded to, where the matrix is quantised; 0: floats."""
    main: ClassVar[str] = "block/linear_vector"

    @property
    def workgroup(self) -> int:
        return self.lanes * self.teams

    @property
    def chunks(self) -> int:
        """Chunks of columns a lane."""
        return -(-self.columns // CHUNK // self.lanes)

    @property
    def rows(self) -> int:
        """Rows of a workgroup."""
        return self.teams * self.batch * self.batches

    @property
    def workgroup_bytes(self) -> int:
        x = [self.digits * self.columns, self.columns // 8, self.columns // 4] if self.digits else [4 * self.columns]
        sums = [4 * self.rows * max(1, self.lanes // self.subgroup), 4 * self.workgroup // self.subgroup, self.rows]
        return sum(-(-size // 16) * 16 for size in x + sums)

    def words(self, form: Format) -> int:
        """About how many registers an invocation needs for x, and for weights: with several batches, the next one's are loaded ahead."""
        return self.chunks * ((4 * self.digits or CHUNK) + self.batch * min(self.batches, 2) * form.chunk_words)

    def parts(self, profile: DeviceProfile) -> tuple[str, ...]:
        sharers = "none" if self.subgroup == 1 else "subgroup"
        return (f"block/parts/products_{'codes' if self.digits else 'floats'}", f"block/parts/sharers_{sharers}")

    def options(self, profile: DeviceProfile) -> dict[str, int]:
        division = {"COLUMNS": self.columns, "LANES": self.lanes, "TEAMS": self.teams, "BATCH": self.batch, "BATCHES": self.batches}
        group = {"WORKGROUP": self.workgroup, "SUBGROUP": self.subgroup} | ({"DIGITS": self.digits} if self.digits else {})
        return {**division, "CHUNKS": self.chunks, "ROWS": 4, "PAIRS": 2, "QUADS": 1, **group}

    def groups(self, rows: int, tokens: int, limit: int) -> tuple[int, int, int]:
        return (*grid(-(-rows // self.rows), limit), 1)


def digits_of(form: Format, arithmetic: str) -> int:
    """Digits of 8 bits that x is rounded to for one token; 0 for matrices of floats, whose products are of floats."""
    return 0 if not form.quantised else 1 if arithmetic == "int8" else 3


def choose_vector(profile: DeviceProfile, rows: int, columns: int, form: Format, digits: int, group_rows: int = 0) -> VectorShape | None:
    """The shape for `rows` rows of `columns` (padded) in a format; pure. With `group_rows`, a workgroup computes so many.

    None where there is not enough workgroup memory for x, or no subgroups of 8, which digits need.

    A lane takes one to four chunks, so that what a team has besides its products, adding up and writing, is small; where rows are few they get more
    lanes. A team takes the rows that leave 65,536 invocations, whose loads keep a large GPU's memory busy; with few rows, 131,072 where each has
    registers enough. Workgroups are large, since each reads all of x; with many rows, and more workgroups than cores, smaller ones balance better.
    """
    chunks = columns // CHUNK
    fewest = power_of_two(-(-chunks // 4) * 2 - 1)
    lanes = min(max(16, fewest if rows >= 16384 else fewest * (2 if digits else 4)), power_of_two(2 * chunks - 1))
    lanes = max(fewest, min(lanes, 128))
    most = power_of_two(profile.max_invocations)
    subgroup = profile.subgroup_size if profile.team_part(2).startswith("team_subgroup") else 1
    if lanes > most or most < subgroup or (digits and subgroup < 8):
        return None
    base = VectorShape(lanes, most // lanes, 4, 1, columns, subgroup, digits)
    if group_rows:
        teams = math.gcd(base.teams, group_rows // 4)
        shape = replace(base, teams=teams, batches=group_rows // 4 // teams)
    else:
        shape = _row_shape(base, rows, form, most)
        while shape.workgroup_bytes > profile.workgroup_memory and shape.batches > 1:
            shape = replace(shape, batches=shape.batches // 2)
    if shape.workgroup % subgroup or shape.rows % 4 or shape.rows // 4 > shape.workgroup:
        return None
    return shape if shape.workgroup_bytes + 4 * group_rows <= profile.workgroup_memory else None  # cache_store_blocks keeps a head


def _row_shape(base: VectorShape, rows: int, form: Format, most: int) -> VectorShape:
    """`base` with the teams and batches that suit so many rows."""
    for invocations, workgroup in ((131072, 1024), (65536, 512))[rows > 2048 :]:
        workgroup = max(base.lanes, min(workgroup, most))
        each = min(16, power_of_two(int(rows * base.lanes / invocations * 2**0.5)))  # rows of a team, to the nearest power of two
        batches = [(b, each // b) for b in (4, 2, 1) if b <= each] + [(b, 1) for b in (4, 2, 1) if b <= each]
        shapes = [replace(base, teams=workgroup // base.lanes, batch=b, batches=n) for b, n in batches]
        fit = [s for s in shapes if s.words(form) * workgroup <= _REGISTERS and s.batch * s.chunks <= 12]
        if fit:
            break
    shape = (fit or shapes[-1:])[0]
    smallest = max(64, base.subgroup, 4 * base.lanes)
    if rows > 2048 and shape.workgroup > smallest and -(-rows // shape.rows) > _CORES:
        shape = replace(shape, teams=shape.teams // 2)
    while shape.workgroup > smallest and -(-rows // shape.rows) < _CORES // 2:
        shape = replace(shape, teams=shape.teams // 2)
    return shape
