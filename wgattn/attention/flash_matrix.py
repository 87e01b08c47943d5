"""Path "flash_matrix": attention of many queries on matrix units, `attention/flash_matrix.wgsl` or `attention/flash_matrix_ahead.wgsl`.

Everything is rounded to f16, sums are f32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..gpu import DeviceProfile, Part, Recording
from . import problem as common
from .problem import Operands, Problem

_UNIT = ("f16", "f32", 16, 16, 16)
_SUBGROUPS = (16, 32, 64)
_GPU_WORKGROUPS = 264
"""Workgroups that keep a large GPU busy: fewer are made smaller."""


@dataclass(frozen=True)
class FlashMatrixShape:
    """`teams` subgroups compute 16 rows each, `keys` keys at a time."""

    teams: int
    keys: int
    subgroup: int
    ahead: bool = False
    """Scores are made a tile ahead of the outputs: two barriers a tile instead of four, and more workgroup memory."""
    eights: bool = True
    """Rows of f16 that begin at multiples of 16 bytes are loaded by so many."""

    @property
    def workgroup(self) -> int:
        return self.teams * self.subgroup

    def workgroup_bytes(self, problem: Problem) -> int:
        """What the kernel keeps: tiles of keys and values, scores, two numbers a row; at first the queries, at the end a matrix a subgroup."""
        k_row, v_row = (32 * math.ceil(dim / 16) + 16 for dim in (problem.head_dim, problem.value_dim))
        rows, matrices = 16 * self.teams, 1024 * self.teams
        kept = self.keys * (k_row + v_row) + rows * (4 * self.keys + 16 + 4) + 16
        if self.ahead:
            return max(kept + rows * (2 * self.keys + 16), rows * k_row)
        return max(kept + (0 if self.keys * k_row >= matrices else matrices), rows * k_row)


_SHAPES = ((8, 32), (4, 32), (8, 16), (2, 32), (4, 16), (2, 16), (1, 16))
"""Teams and keys: the quickest for large problems first."""


def fitting(profile: DeviceProfile, problem: Problem, **variant: bool) -> list[FlashMatrixShape]:
    """Shapes that fit the device and the problem, the quickest for large ones first. variant: fields of the shapes."""
    shapes = [FlashMatrixShape(teams, keys, profile.subgroup_size, **variant) for teams, keys in _SHAPES]
    fit = [s for s in shapes if s.workgroup_bytes(problem) <= profile.workgroup_memory and s.workgroup <= profile.max_invocations]
    fit = [s for s in fit if s.workgroup % profile.matrix_workgroup == 0]
    return sorted(fit, key=lambda s: s.teams > 4 and s.keys > 16 and problem.head_dim <= 64)


def candidates(profile: DeviceProfile, problem: Problem) -> list[FlashMatrixShape]:
    """All shapes that there are for a problem on a device, those that are chosen from first; for measuring."""
    if _UNIT not in profile.matrix_units or not profile.f16 or profile.subgroup_size not in _SUBGROUPS:
        return []
    eights = (True, False) if problem.kv_dtype == "f16" else (True,)
    return [s for ahead in (False, True) for e in eights for s in fitting(profile, problem, ahead=ahead, eights=e)]


def unsupported(profile: DeviceProfile, problem: Problem) -> str | None:
    """What is missing, in a sentence, or None."""
    if _UNIT not in profile.matrix_units:
        why = "which this device does not offer" if profile.backend == "dawn" else "which only backend dawn uses"
        return f"it needs matrix units of 16 x 16 x 16 from f16 to f32, {why}."
    if not profile.f16 or profile.subgroup_size not in _SUBGROUPS:
        f16 = "has" if profile.f16 else "lacks"
        return f"it needs f16, which the device {f16}, and subgroups of {', '.join(map(str, _SUBGROUPS))} lanes, not of {profile.subgroup_size}."
    if not fitting(profile, problem):
        whole = f" in workgroups of a multiple of {profile.matrix_workgroup}" if profile.matrix_workgroup > profile.subgroup_size else ""
        return f"heads of {problem.head_dim} and {problem.value_dim} do not fit {profile.workgroup_memory} bytes of workgroup memory{whole}."
    return common.beyond_limits(profile, problem)


def choose_flash_matrix(profile: DeviceProfile, problem: Problem) -> FlashMatrixShape:
    """The shape for a problem on a device; pure."""
    fit = fitting(profile, problem)
    rows = problem.queries * problem.ratio
    largest = fit[0]
    few = -(-rows // (16 * largest.teams)) * problem.num_kv_heads * problem.batch < _GPU_WORKGROUPS
    return next((s for s in fit if s.teams <= 4), largest) if few else largest


def record(recording: Recording, problem: Problem, operands: Operands, shape: FlashMatrixShape) -> None:
    """Append the path's one dispatch."""
    dims = {"keys": problem.head_dim, "values": problem.value_dim}
    eights = {name: shape.eights and common.by_eights(problem, operands, name) for name in dims}
    matrices = {name: math.ceil(dim / 16) for name, dim in dims.items()}
    loads = {name: -(-shape.keys * 2 * n // shape.workgroup) for name, n in matrices.items()}
    kernel = recording.device.kernel(
        f"attention/flash_matrix{'_ahead' if shape.ahead else ''}",
        *common.base_parts(problem),
        common.rows_part(problem, "query"),
        *(part for name in dims for part in _rows_parts(problem, name, eights[name])),
        *common.score_parts(problem),
        "attention/parts/flash_rows",
        "attention/parts/flash_units",
        *common.finish_parts(problem),
        **common.options(problem),
        KEYS=shape.keys,
        KEY_MATRICES=shape.keys // 16,
        K_MATRICES=matrices["keys"],
        V_MATRICES=matrices["values"],
        K_LOADS=loads["keys"],
        V_LOADS=loads["values"],
        LANES_ROW=shape.subgroup // 16,
        QUADS=shape.keys * 4 // shape.subgroup,
        PLAIN=problem.plain,
        WORKGROUP=shape.workgroup,
        SUBGROUP=shape.subgroup,
        MEMORY=shape.workgroup_bytes(problem),
    )
    groups = -(-problem.queries * problem.ratio // (16 * shape.teams))
    for first, number, operations in common.pieces(recording.device.profile, groups, problem.operations):
        sizes = (number, problem.num_kv_heads, problem.batch)
        common.add(recording, kernel, sizes, problem, operands, label="attention", operations=operations, first_group=first)


def _rows_parts(problem: Problem, name: str, eights: bool) -> tuple[Part, ...]:
    """What loads eight halves of a row of "keys" or "values"."""
    values = name == "values"
    width, dim = ("VALUE_DIM", problem.value_dim) if values else ("HEAD_DIM", problem.head_dim)
    if eights:
        return (Part.of("parts/row_eights_f16", name=name, width=width),)
    as_stored = problem.kv_dtype == "f16" and dim % 4 == 0
    halves = Part.of(f"parts/row_halves_{'f16' if as_stored else 'any'}", name=name)
    return common.rows_part(problem, name), halves, Part.of("parts/row_eights_any", name=name, width=width)
