"""`wgattn tune`: time tile shapes on this device and keep the fastest."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.progress import TimeRemainingColumn
from rich.table import Table

from ..attention import tune
from ..gpu import Device
from ..gpu.tuning import default_cache
from .console import progress, say


def run(device: Device, *, again: bool, as_json: bool) -> None:
    """Tune all standard problems, with a progress bar on stderr, and print what was found."""
    with progress(Console(stderr=True), TimeRemainingColumn()) as bar:
        task = bar.add_task("tuning", total=None)
        outcomes = tune.run(device, lambda done, total, what: bar.update(task, completed=done, total=total, description=what), again=again)
    path = str(default_cache().path)
    if as_json:
        print(json.dumps({"device": device.name, "cache": path, "tuned": [_entry(o) for o in outcomes]}, indent=2))
        return
    table = Table("path", "problem", "time", "gain over the default", title=f"Tiles on {device.name}", title_justify="left")
    for o in outcomes:
        entry = _entry(o)
        gain = "known before" if o.seconds is None else f"{o.default_seconds / o.seconds:.2f}x" if o.default_seconds else ""
        table.add_row(o.path, entry["problem"], "" if o.seconds is None else f"{o.seconds * 1e3:.2f} ms", gain)
    console = Console()
    console.print(table)
    say(console, f"Kept in {path}")


def _entry(outcome: tune.Outcome) -> dict[str, Any]:
    p = outcome.problem
    return {
        "path": outcome.path,
        "problem": f"{p.num_heads}/{p.num_kv_heads} heads, S {p.queries}, T {p.keys}, D {p.head_dim}, {p.kv_dtype}",
        "shape": str(outcome.shape),
        "seconds": outcome.seconds,
        "default_seconds": outcome.default_seconds,
    }
