"""Path "unfused": scores in memory, three dispatches: `attention/qk_div_mask.wgsl`, `softmax.wgsl`, `qkv.wgsl`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..gpu import DeviceProfile, Recording, grid
from . import problem as common
from .matrices import Matrices, add_softmax, operations, padded, rounds, softmax_lanes, too_large
from .problem import Operands, Problem


@dataclass(frozen=True)
class UnfusedShape:
    """Blocks of `rows` queries x 4 keys or channels an invocation, workgroups of `workgroup`; `lanes` invocations for the softmax of a row."""

    rows: int
    workgroup: int
    lanes: int


def choose_unfused(profile: DeviceProfile, problem: Problem) -> UnfusedShape:
    """The shape for a problem on a device; pure."""
    workgroup = 8 if profile.software else min(64, profile.max_invocations)
    return UnfusedShape(max(1, min(4, problem.queries)), workgroup, softmax_lanes(profile, problem.keys))


def unsupported(profile: DeviceProfile, problem: Problem) -> str | None:
    """What is missing on such a device, or None."""
    workgroups = math.ceil(problem.keys / (4 * choose_unfused(profile, problem).workgroup))
    if workgroups > profile.max_workgroups:
        return f"{problem.keys} keys need {workgroups} workgroups, a grid has at most {profile.max_workgroups} in a dimension."
    return too_large(profile, _matrices(problem))


def _matrices(problem: Problem) -> Matrices:
    return Matrices(problem.queries, padded(problem.keys, 4))


def record(recording: Recording, problem: Problem, operands: Operands, shape: UnfusedShape) -> None:
    """Append the path's three dispatches, for each round of heads that fits a binding."""
    device = recording.device
    limit = device.profile.max_workgroups
    store, *_ = common.finish_parts(problem)
    shared = (*common.base_parts(problem), "attention/parts/matrices")
    options = {**common.options(problem), "ROWS": shape.rows, "WORKGROUP": shape.workgroup}
    rows = {name: common.rows_part(problem, name) for name in ("query", "keys", "values")}
    qk = device.kernel("attention/qk_div_mask", *shared, rows["query"], rows["keys"], *common.score_parts(problem), **options)
    qkv = device.kernel("attention/qkv", *shared, rows["values"], store, **options)
    matrices = _matrices(problem)
    blocks = math.ceil(problem.queries / shape.rows)
    parts = rounds(device.profile, problem, matrices)
    scores = device.empty((max(n for _, n in parts), matrices.rows, matrices.columns))
    for first, planes in parts:
        scratch = {"scores": scores, "matrices": matrices.uniform(device, first, planes)}
        groups = (*grid(planes * blocks, limit), math.ceil(problem.keys / (4 * shape.workgroup)))
        work = operations(problem, matrices, planes, problem.head_dim)
        common.add(recording, qk, groups, problem, operands, scratch, label="attention scores", operations=work)
        add_softmax(recording, problem, operands, scratch, planes, shape.lanes)
        groups = grid(math.ceil(planes * blocks * problem.value_width / shape.workgroup), limit)
        work = operations(problem, matrices, planes, problem.value_dim)
        common.add(recording, qkv, groups, problem, operands, scratch, label="attention outputs", operations=work)
