"""The run: all cases in their order, each row shown and saved as it comes."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from wgattn.files import replace_file
from wgattn.gpu import Device
from wgattn.llm.gguf import ModelFile, find_model

from . import attention, block, ceilings, gemm, model
from .dashboard import Dashboard, svg
from .keys import q_interrupts
from .measure import row_of
from .profile import profile_step
from .records import BadRequest, Bench, Case, Row
from .report import Report, check_baseline
from .views import view_of

__all__ = ["BadRequest", "plan", "profile", "run"]

_AGAIN = 3
_CASES = {
    "ceilings": ceilings.cases,
    "gemm": gemm.cases,
    "prefill": attention.prefill_cases,
    "decode": attention.decode_cases,
    "block": block.cases,
    "model": model.cases,
}


def plan(bench: Bench, only: Sequence[str] | None = None) -> list[Case]:
    """All that will be measured: the ceilings, and the sections asked for (default: all)."""
    return [case for name, cases in _CASES.items() if name == "ceilings" or not only or name in only for case in cases(bench)]


def run(
    device: Device,
    *,
    quick: bool = False,
    only: Sequence[str] | None = None,
    model: str = "auto",
    json_file: Path | None = None,
    svg_file: Path | None = None,
    baseline: dict[str, Any] | None = None,
    gate: bool = False,
) -> int:
    """Measure and show; the exit code: 0, 1 when results are wrong (or, with `gate`, slower than the baseline), 130 when the user left early.

    Raises BadRequest, before any work: a baseline that has nothing to do with this run. ModelNotFound, FormatError: the model's file.
    """
    bench = Bench(device, quick=quick, model=model)
    _check_model(model)
    cases = plan(bench, only)
    report = Report.of(bench, {"quick": quick, "only": only and list(only), "model": model}, baseline)
    if baseline is not None:
        check_baseline(baseline, report, {case.key for case in cases if case.section != "ceilings"})
    if json_file:
        report.save(json_file)
    console = _console()
    try:
        with q_interrupts(console.is_terminal) as q_leaves, view_of(console, report, cases, q_leaves) as view:
            try:
                _measure(bench, cases, report, view, json_file)
                report.state = "complete"
            except KeyboardInterrupt:
                report.state = "interrupted"
    finally:
        report.close(json_file)
    if svg_file:
        _draw(console, Dashboard(report), svg_file, "wgattn bench" + (" --quick" if quick else ""))
    if report.state == "interrupted":
        return 130
    return int(bool(report.wrong) or (gate and bool(report.slower)))


def _measure(bench: Bench, cases: Sequence[Case], report: Report, view: Any, json_file: Path | None) -> None:
    for case in cases:
        view.begin(case)
        row = _row(bench, case, report)
        if row.section == "ceilings" and row.rate:
            bench.ceilings[row.variant] = row.rate
        report.rows.append(row)
        if json_file:
            report.save(json_file)
        view.add(row)


def _row(bench: Bench, case: Case, report: Report) -> Row:
    """Measured once; again where it is slower than the baseline, because what else the machine does can make it so, and then the quickest counts."""
    row = row_of(bench, case)
    for _ in range(_AGAIN):
        if report.compare(row) != "slower":
            break
        again = row_of(bench, case)
        row = min(row, again, key=lambda r: r.seconds or math.inf)
    report.compare(row)
    return row


def profile(
    device: Device, *, depth: int, quick: bool = False, model: str = "auto", json_file: Path | None = None, svg_file: Path | None = None
) -> int:
    """One decode step dispatch by dispatch, shown and written; the exit code."""
    bench = Bench(device, quick=quick, model=model)
    _check_model(model)
    report = Report.of(bench, {"quick": quick, "profile": "generate", "depth": depth, "model": model})
    console = _console()
    try:
        if json_file:
            report.save(json_file)
        with contextlib.ExitStack() as stack:
            if console.is_terminal:
                stack.enter_context(q_interrupts(True))
                stack.enter_context(console.status("Timing the dispatches of a decode step; q or Ctrl-C leaves"))
            found = profile_step(bench, depth)
        report.profile, report.state = found.json(), "complete"
    except KeyboardInterrupt:
        report.state = "interrupted"
        return 130
    finally:
        report.close(json_file)
    for part in (*Dashboard(report).header(), found):
        console.print(part)
    if svg_file:
        _draw(console, found, svg_file, "wgattn bench --profile generate")
    return 0


def _check_model(name: str) -> None:
    """Raises what loading the file would raise, before anything is measured."""
    if name not in ("auto", "random"):
        ModelFile(find_model(name))


def _console() -> Console:
    """Names are shown as they are, without markup. Where no terminal sets the width, and no COLUMNS, there are 120 columns."""
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = 120
    return console


def _draw(console: Console, picture: RenderableType, path: Path, title: str) -> None:
    replace_file(path, svg(picture, max(80, min(200, console.width)), title), 0o644)
