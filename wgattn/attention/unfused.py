"""Path "unfused": scores in memory, three dispatches: `attention/qk_div_mask.wgsl`, `softmax.wgsl`, `qkv.wgsl`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..gpu import DeviceProfile, Recording, grid
from ..gpu.shader import Option
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
    return too_large(profile, matrices(problem))


def matrices(problem: Problem) -> Matrices:
    """The sizes of its scores."""
    return Matrices(problem.queries, padded(problem.keys, 4))


def add_scores(recording: Recording, problem: Problem, operands: Operands, scratch: Mapping[str, Any], planes: int, shape: UnfusedShape) -> None:
    """Append a round's `scores`, scaled and masked."""
    device = recording.device
    kernel = device.kernel(
        "attention/qk_div_mask",
        *common.base_parts(problem),
        "attention/parts/matrices",
        *(common.rows_part(problem, name) for name in ("query", "keys")),
        *common.score_parts(problem),
        **_options(problem, shape),
    )
    blocks = grid(planes * math.ceil(problem.queries / shape.rows), device.profile.max_workgroups)
    groups = (*blocks, math.ceil(problem.keys / (4 * shape.workgroup)))
    work = operations(problem, matrices(problem), planes, problem.head_dim)
    common.add(recording, kernel, groups, problem, operands, scratch, label="attention scores", operations=work)


def _options(problem: Problem, shape: UnfusedShape) -> dict[str, Option]:
    return {**common.options(problem), "ROWS": shape.rows, "WORKGROUP": shape.workgroup}


def record(recording: Recording, problem: Problem, operands: Operands, shape: UnfusedShape) -> None:
    """Append the path's three dispatches, for each round of heads that fits a binding."""
    device, sizes = recording.device, matrices(problem)
    store, *_ = common.finish_parts(problem)
    values = common.rows_part(problem, "values")
    qkv = device.kernel("attention/qkv", *common.base_parts(problem), "attention/parts/matrices", values, store, **_options(problem, shape))
    blocks = math.ceil(problem.queries / shape.rows)
    parts = rounds(device.profile, problem, sizes)
    scores = device.empty((max(n for _, n in parts), sizes.rows, sizes.columns))
    for first, planes in parts:
        scratch = {"scores": scores, "matrices": sizes.uniform(device, first, planes)}
        add_scores(recording, problem, operands, scratch, planes, shape)
        add_softmax(recording, problem, operands, scratch, planes, shape.lanes)
        groups = grid(math.ceil(planes * blocks * problem.value_width / shape.workgroup), device.profile.max_workgroups)
        work = operations(problem, sizes, planes, problem.value_dim)
        common.add(recording, qkv, groups, problem, operands, scratch, label="attention outputs", operations=work)
