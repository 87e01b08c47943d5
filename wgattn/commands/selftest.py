"""`wgattn selftest`: every kernel that this device would use, against the float64 reference, on fresh random numbers."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..cases import FAMILIES
from ..cases.family import Choice, Difference, Family, compare
from ..errors import CapacityError, Unsupported, WgattnError
from ..gpu import Device, Kernel
from ..gpu.paper import PaperDevice
from .console import progress, say

_POISON = np.uint32(0x7FC07FC0)
"""NaN as f32, and as two f16."""


class PoisonedDevice(Device):
    """A device whose memory is full of NaN at first: a kernel that leaves out an output, or reads what nobody wrote, is found out."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.used: set[str] = set()
        """Main files of the kernels that were asked for."""
        super().__init__(*args, **kwargs)

    def buffer(self, nbytes: int, *, uniform: bool = False) -> Any:
        made = super().buffer(nbytes, uniform=uniform)
        if not uniform:
            self.write(made, np.full(made.size // 4, _POISON))
        return made

    def kernel(self, main: str, *parts: Any, **options: Any) -> Kernel:
        self.used.add(main)
        return super().kernel(main, *parts, **options)


@dataclass
class Failure:
    """A case that came out wrong, or did not run."""

    parameters: dict[str, str]
    error: float | None
    allowed: float | None
    what: str


@dataclass
class Row:
    """Cases of one kind."""

    name: str
    kernels: list[str] = field(default_factory=list)
    cases: int = 0
    """That ran."""
    worst_error: float = 0.0
    allowed_error: float = 0.0
    """Of the value that is nearest to its bound, or farthest beyond it."""
    ms: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    not_available: dict[str, int] = field(default_factory=dict)
    """Cases that the device cannot run, by the reason."""

    @property
    def status(self) -> str:
        return "fail" if self.failures else "pass" if self.cases else "not available"


def rows_of(family: Family) -> list[tuple[str, list[Choice]]]:
    """(name, choices) of the family's rows, in order."""
    found: dict[str, list[Choice]] = {}
    for choice in family.cases():
        found.setdefault(family.row(choice), []).append(choice)
    return list(found.items())


def compile_ahead(device: PoisonedDevice, jobs: Iterable[tuple[Family, str, list[Choice]]]) -> None:
    """Compile what these rows use, several kernels at once; the rows themselves ask for one after the other. What does not compile fails there."""
    paper = PaperDevice(device.profile)
    rng = np.random.default_rng(0)
    for family, _, choices in jobs:
        for choice in choices:
            with suppress(Exception):  # it will come up in the row
                deque(family.run(paper, rng, **choice), maxlen=0)
    with suppress(WgattnError):
        device.compile(paper.kernels_on(device))


def run_row(device: PoisonedDevice, family: Family, name: str, choices: list[Choice], seed: int) -> Row:
    """Run a row's cases; nothing that goes wrong in one of them is raised."""
    row, worst = Row(name), 0.0
    device.used.clear()
    begin = time.perf_counter()
    for number, choice in enumerate(choices):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
        try:
            differences = [compare(result) for result in family.run(device, rng, **choice)]
        except (Unsupported, CapacityError) as error:
            row.not_available[str(error)] = row.not_available.get(str(error), 0) + 1
            continue
        except Exception as error:  # whatever it is: the other kernels are tested all the same
            row.cases += 1
            row.failures.append(_failure(choice, None, f"{type(error).__name__}: {error}"))
            continue
        row.cases += 1
        for difference in differences:
            if difference.share >= worst:
                worst, row.worst_error, row.allowed_error = difference.share, difference.error, difference.allowed
            if not difference.share <= 1:
                row.failures.append(_failure(choice, difference, difference.where))
    row.ms, row.kernels = (time.perf_counter() - begin) * 1e3, sorted(device.used)
    return row


def _failure(choice: Choice, difference: Difference | None, what: str) -> Failure:
    numbers = (None, None) if difference is None else (difference.error, difference.allowed)
    return Failure({name: str(value) for name, value in choice.items()}, *numbers, what)


def run(device: PoisonedDevice, *, seed: int | None, as_json: bool, only: str | None = None) -> int:
    """Test and print; 0 when all that ran was right, else 1."""
    seed = int(np.random.default_rng().integers(2**32)) if seed is None else seed
    jobs = [(family, *row) for family in FAMILIES for row in rows_of(family) if only is None or only in row[0]]
    console = Console(markup=False, highlight=False, emoji=False)
    live = console.is_terminal and not as_json
    begin = time.perf_counter()
    rows: list[Row] = []
    if not live:
        compile_ahead(device, jobs)
    for row in _with_progress(device, jobs, seed) if live else (run_row(device, *job, seed) for job in jobs):
        rows.append(row)
        if not live and not as_json:
            print(*_lines(row), sep="\n", flush=True)
    seconds = time.perf_counter() - begin
    passed = bool(rows) and not any(r.failures for r in rows) and any(r.cases for r in rows)
    if as_json:
        about = {"device": device.name, "driver": device.profile.driver, "backend": device.backend.name, "seed": seed, "seconds": seconds, "passed": passed}
        print(json.dumps(about | {"rows": [_plain(asdict(r) | {"status": r.status}) for r in rows]}, indent=1, allow_nan=False))
        return 0 if passed else 1
    if live:
        console.print(_table(rows, device))
        for row in rows:
            if row.failures or row.not_available:
                for line in _lines(row):
                    say(console, line)
    say(console, _summary(rows, device, seed, seconds))
    return 0 if passed else 1


def _with_progress(device: PoisonedDevice, jobs: list[tuple], seed: int) -> Iterator[Row]:
    with progress(Console(stderr=True)) as bar:
        task = bar.add_task("compiling", total=len(jobs))
        compile_ahead(device, jobs)
        for job in jobs:
            bar.update(task, description=job[1])
            yield run_row(device, *job, seed)
            bar.advance(task)


def _lines(row: Row) -> list[str]:
    """A row, its failures and what was not available, as text."""
    numbers = f"{row.cases:3} cases  error {row.worst_error:.1e} of {row.allowed_error:.1e}  {row.ms:7.0f} ms" if row.cases else ""
    lines = [f"{row.status:13}  {row.name:22}  {numbers}".rstrip()]
    for f in row.failures:
        lines += [f"    {f.what}", f"    in {', '.join(f'{k}={v}' for k, v in f.parameters.items())}"]
    return lines + [f"    not available, {n} cases: {reason}" for reason, n in row.not_available.items()]


def _table(rows: list[Row], device: Device) -> Table:
    table = Table(title=f"Self-test of {device.name} ({device.backend.name})", title_justify="left")
    for column in ("kernels of", "cases", "worst error", "allowed", "ms", "result"):
        table.add_column(column, justify="left" if column in ("kernels of", "result") else "right")
    colours = {"pass": "green", "fail": "bold red", "not available": "yellow"}
    for r in rows:
        numbers = (str(r.cases), f"{r.worst_error:.1e}", f"{r.allowed_error:.1e}", f"{r.ms:.0f}") if r.cases else ("", "", "", "")
        table.add_row(r.name, *numbers, Text(r.status, colours[r.status]))
    return table


def _summary(rows: list[Row], device: Device, seed: int, seconds: float) -> str:
    count = {status: sum(r.status == status for r in rows) for status in ("pass", "fail", "not available")}
    cases = sum(r.cases for r in rows)
    told = [f"{n} {'passed' if s == 'pass' else 'failed' if s == 'fail' else s}" for s, n in count.items() if n] or ["nothing to test"]
    return f"{', '.join(told)}: {cases} cases on {device.name} ({device.backend.name}), {seconds:.1f} s, seed {seed}"


def _plain(value: Any) -> Any:
    """For JSON, which has no infinities."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
