"""Which way attention goes: a pure function of a device's profile and a problem."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError, Unsupported
from ..gpu import DeviceProfile
from .paths import PATHS, PORTABLE_PATHS
from .problem import Problem

_FEW = 8
"""Queries up to which a workgroup a query beats tiles of queries."""


@dataclass(frozen=True)
class Choice:
    """A path by name, and why."""

    path: str
    reason: str


def choose(profile: DeviceProfile, problem: Problem, path: str = "auto") -> Choice:
    """The path for a problem on a device.

    Raises ArgumentError for a path that does not exist, Unsupported for a forced path that cannot run it, saying what is missing.
    """
    if not isinstance(path, str) or path != "auto":
        if not isinstance(path, str) or path not in PATHS:
            raise ArgumentError(f"There is no path {path!r}; choose one of auto, {', '.join(PATHS)}.")
        missing = PATHS[path].unsupported(profile, problem)
        if missing:
            raise Unsupported(f"Path {path!r} cannot run this on {profile.name}: {missing}")
        return Choice(path, "asked for")
    wanted = ["split", "flash"] if problem.queries <= _FEW else ["flash", "split"]
    if problem.queries > _FEW and (problem.half or problem.dtype == problem.kv_dtype == "f16"):
        wanted.insert(0, "flash_matrix")
    reasons = {
        "split": f"{problem.queries} queries: keys are read once for all heads that share them",
        "flash_matrix": f"{problem.queries} queries, and f16 is precise enough: matrix units",
        "flash": f"{problem.queries} queries: no scores in memory, each key serves many queries",
    }
    for name in (*wanted, *(p for p in PORTABLE_PATHS if p not in wanted)):
        if PATHS[name].unsupported(profile, problem) is None:
            return Choice(name, reasons.get(name, "the only path that can run it"))
    raise Unsupported(f"No path can run this on {profile.name}: {problem}.")
