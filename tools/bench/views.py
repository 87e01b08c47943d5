"""Showing a run while it goes on: live on a terminal, else line by line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

from . import text
from .dashboard import Dashboard, is_plain, line
from .records import SECTIONS, Case, Row
from .report import Report


class View(Protocol):
    """What a run tells whoever watches."""

    def __enter__(self) -> View: ...
    def __exit__(self, *error: object) -> None: ...

    def begin(self, case: Case) -> None:
        """The case is being measured now."""

    def add(self, row: Row) -> None:
        """The row is in the report."""


def view_of(console: Console, report: Report, cases: Sequence[Case], q_leaves: bool) -> View:
    """The view that suits the console."""
    return LiveView(console, report, cases, q_leaves) if console.is_terminal else PlainView(console, report, cases)


class Progress:
    """How much of the work is done, and how long the rest will take if it goes on like this."""

    def __init__(self, cases: Sequence[Case], clock: Callable[[], float] = time.monotonic):
        self._costs = {case.key: case.cost for case in cases}
        self._total, self._done, self.count, self.finished = sum(self._costs.values()), 0.0, len(cases), 0
        self._clock, self._begin = clock, clock()

    def finish(self, key: str) -> None:
        self.finished += 1
        self._done += self._costs[key]

    @property
    def part(self) -> float:
        return self._done / self._total if self._total else 1.0

    @property
    def elapsed(self) -> float:
        return self._clock() - self._begin

    @property
    def left(self) -> float | None:
        """Seconds; None while too little is done to tell."""
        return self.elapsed * (1 - self.part) / self.part if self.part > 0.03 else None


class LiveView:
    """The section that is being measured and a line of progress; finished sections stand above, as they stay."""

    def __init__(self, console: Console, report: Report, cases: Sequence[Case], q_leaves: bool):
        self._console, self._report, self._dashboard = console, report, Dashboard(report)
        self._progress, self._case = Progress(cases), cases[0]
        self._keys = "q leaves" if q_leaves else "Ctrl-C leaves"
        self._last = {case.section: case.key for case in cases}
        self._live = Live(self, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveView:
        for part in self._dashboard.header():
            self._console.print(part)
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """What is measured of an unfinished section stays as well."""
        self._live.__exit__(None, None, None)
        section = self._case.section
        if self._report.rows and self._report.rows[-1].key != self._last[section] and self._report.rows[-1].section == section:
            self._print_section(section)
        for part in self._dashboard.verdict():
            self._console.print(part)

    def begin(self, case: Case) -> None:
        self._case = case

    def add(self, row: Row) -> None:
        self._progress.finish(row.key)
        if row.key == self._last[row.section]:
            self._print_section(row.section)

    def _print_section(self, name: str) -> None:
        self._console.print(self._dashboard.section(name, self._console.width, plain=is_plain(self._console)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = is_plain(console)
        section, finished = self._case.section, self._report.rows and self._report.rows[-1].key == self._last[self._case.section]
        if not finished:
            waiting = Row(section, self._case.problem, self._case.variant)
            yield self._dashboard.section(section, options.max_width, waiting, plain)
        yield Group("", self._line(options.max_width, plain))

    def _line(self, width: int, plain: bool) -> Text:
        p = self._progress
        left = "" if p.left is None else f", {clock(p.left)} left"
        where = f"{SECTIONS[self._case.section]}: {p.finished} of {p.count} rows, {clock(p.elapsed)}{left}; {self._keys}"
        across = 12 if width < 100 else 30
        return Text.assemble((text.bar(p.part, across, plain).ljust(across), "green"), "  ", where, no_wrap=True, overflow="ellipsis")


class PlainView:
    """A line for each row as it comes, as wide as it is."""

    def __init__(self, console: Console, report: Report, cases: Sequence[Case]):
        self._console, self._report, self._dashboard, self._cases = console, report, Dashboard(report), cases

    def __enter__(self) -> PlainView:
        for part in self._dashboard.header():
            self._print(str(part))
        self._print(f"{len(self._cases)} rows")
        return self

    def __exit__(self, *error: object) -> None:
        for part in self._dashboard.verdict():
            self._print(str(part).strip("\n"))

    def begin(self, case: Case) -> None:
        pass

    def add(self, row: Row) -> None:
        self._print(line(row))

    def _print(self, words: str) -> None:
        self._console.file.write(words + "\n")
        self._console.file.flush()


def clock(seconds: float) -> str:
    """14 s, 2:05 min."""
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{int(seconds + 0.5) // 60}:{int(seconds + 0.5) % 60:02d} min"
