"""What would run, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from ..gpu import Device, DeviceProfile, device_or_default
from .choose import choose
from .functional import prepare
from .paths import PATHS
from .problem import Problem

_PLAIN = Problem(1, 8, 8, 64, 64, 64, 64, 0.125)
# For the table: a problem that uses one feature of each kind, as changes to the plain one.
FEATURES = {
    "batch": {"batch": 3},
    "GQA": {"num_kv_heads": 2},
    "any D": {"head_dim": 37},
    "Dv != D": {"value_dim": 96},
    "causal": {"right": 0},
    "window": {"left": 8, "right": 8},
    "mask": {"mask": "f32"},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": True},
    "ALiBi": {"alibi": True},
    "lse": {"lse": True},
    "key lengths": {"lengths": "each"},
    "f16": {"dtype": "f16", "kv_dtype": "f16"},
    "q8_0, q4_0": {"kv_dtype": "q8_0"},
    "S = 1": {"queries": 1},
}


@dataclass(frozen=True)
class Explanation:
    """`str()` or rich's print shows it; the fields are for programs."""

    device: str
    profile: DeviceProfile
    path: str | None
    """The path chosen, or None where no call was given."""
    reason: str
    shape: Any
    """How the path divides its work."""
    problem: Problem | None
    missing: dict[str, str | None]
    """For each path, why it cannot run this, or None."""

    def _table(self) -> Table:
        table = Table("feature", *PATHS, title=f"Paths of attention on {self.device}", title_justify="left")
        table.add_row("for", *(path.about.split(":")[0] for path in PATHS.values()), end_section=True)
        for feature, changes in FEATURES.items():
            problem = replace(_PLAIN, **changes)
            table.add_row(feature, *("-" if path.unsupported(self.profile, problem) else "yes" for path in PATHS.values()))
        return table

    def _lines(self) -> list[str]:
        if self.problem is None:
            return []
        lines = [f"path {self.path} on {self.device}: {self.reason}", f"shape: {self.shape}"]
        return lines + [f"{name}: cannot run this: {missing}" for name, missing in self.missing.items() if missing]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._lines() if self.problem else [self._table()]

    def __str__(self) -> str:
        if self.problem:
            return "\n".join(self._lines())
        console = Console(width=100, color_system=None)
        with console.capture() as captured:
            console.print(self._table())
        return captured.get()


def explain(*args: Any, device: Device | None = None, **kwargs: Any) -> Explanation:
    """What `scaled_dot_product_attention` with these arguments would run, and why; runs nothing. Without arguments: the paths and their features.

    Raises as `scaled_dot_product_attention` does.
    """
    if not args and not kwargs:
        device = device_or_default(device)
        return Explanation(device.name, device.profile, None, "", None, None, dict.fromkeys(PATHS))
    path = kwargs.pop("path", "auto")
    call = prepare(*args, device=device, **kwargs)
    profile = call.device.profile
    choice = choose(profile, call.problem, path)
    missing = {name: p.unsupported(profile, call.problem) for name, p in PATHS.items()}
    shape = PATHS[choice.path].chosen(call.device, call.problem)
    return Explanation(call.device.name, profile, choice.path, choice.reason, shape, call.problem, missing)
