"""How a report looks: the device and its ceilings, then a table for each section. The same picture live, at the end, and as SVG.

Colours carry meaning and are never alone in it: green a good share of the ceiling or faster, cyan a middling share, red wrong, failed or slower.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme
from rich.text import Text

from . import text
from .records import CEILINGS, SECTIONS, Row
from .report import Report

_ABOUT = {
    "ceilings": "the best of the samples of kernels that do nothing else",
    "gemm": "y = x . W^T: tokens x rows x columns, and the kind of W",
    "prefill": "causal; heads / KV heads x head dim, cache, positions",
    "decode": "one query; heads / KV heads x head dim, cache @ positions",
    "block": "decode steps of layers shaped as Qwen2-0.5B's @ positions",
    "model": "",
}
_SHORT = {"matrix": "mat"}
_IN_CACHE = "°"


@dataclass(frozen=True)
class Layout:
    """Widths that all tables share, so that their columns stand under one another."""

    bar: int
    error_digits: int
    host: bool = True
    change: bool = False

    @classmethod
    def of(cls, width: int, change: bool) -> Layout:
        """From 80 columns on everything fits; what is beyond goes to the bars."""
        if width < 100:
            return cls(0, 0, host=not change, change=change)
        taken = 83 + (7 if change else 0)
        return cls(min(40, width - taken - 1), 1, change=change)


class Dashboard:
    """A report, or some sections of it, as rich renderables."""

    def __init__(self, report: Report):
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.header()
        for name in SECTIONS:
            if any(row.section == name for row in self.report.rows):
                yield self.section(name, options.max_width, plain=is_plain(console))
        yield from self.verdict()

    def header(self) -> Iterator[RenderableType]:
        """The device, and how it is measured."""
        about = self.report.about
        clock = "timestamps" if about["clock"] == "timestamps" else "wall time of batches (the device has no timestamps)"
        yield Text(f"wgattn {about['versions']['wgattn']} bench", style="bold")
        lines = [("adapter", f"{about['adapter']}"), ("driver", f"{about['driver']}; {about['backend']}" + ("; checked" if about["checked"] else ""))]
        for name, value in [*lines, ("times", f"{clock}; median ± half the distance of the quartiles"), ("error", _ERROR)]:
            yield Text.assemble((f"{name:8}", "dim"), value, no_wrap=True, overflow="ellipsis")

    # ---- sections

    def section(self, name: str, width: int, waiting: Row | None = None, plain: bool = False) -> RenderableType:
        """The table of a section as far as it is there. `waiting` is measured right now."""
        rows = [row for row in self.report.rows if row.section == name]
        layout = Layout.of(width, self.report.baseline is not None)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
        models = {row.facts["model"] for row in rows if "model" in row.facts}
        about = ", ".join(sorted(models)) if name == "model" else _ABOUT[name]
        table.title = Text.assemble((SECTIONS[name], "bold"), ("  " + about if about else "", "dim"), no_wrap=True, overflow="ellipsis")
        table.title_justify = "left"
        _columns(table, layout, "time over depth" if name == "decode" else "share of the ceiling")
        longest = max((row.seconds or 0 for row in rows), default=0)
        for row in rows:
            of = (row.seconds or 0) / (longest or 1) if name == "decode" else row.share or 0
            table.add_row(*_cells(row, layout, of, plain))
        if waiting is not None:
            table.add_row(Text(waiting.problem, style="dim"), Text(waiting.variant, style="dim"), Text("...", style="dim"))
        feet = Table.grid(padding=0)
        for line in _feet(name, rows):
            feet.add_row(Padding(Text(line, style="dim"), (0, 0, 0, 2)))
        whole = Table.grid(padding=0)
        for part in ("", table, *([feet] if feet.row_count else [])):
            whole.add_row(part)
        return whole

    # ---- the end

    def verdict(self) -> Iterator[RenderableType]:
        """What to know about the whole."""
        report = self.report
        if report.state == "interrupted":
            yield Text("\nLeft early: this is what was measured so far.", style="bold")
        for row in report.wrong:
            why = row.missing or f"error {text.error(row.error)}, right would be at most {text.error(row.error_bound)}"
            yield Text(f"\n{'FAILED' if row.failed else 'WRONG'} {row.key}: {why}", style="bold red")
        compared = [row for row in report.rows if row.change]
        if report.baseline is not None:
            kinds = {kind: sum(row.change["verdict"] == kind for row in compared) for kind in ("slower", "faster", "same")}
            style = "bold red" if kinds["slower"] else "bold"
            yield Text(f"\nAgainst the baseline: {kinds['slower']} slower, {kinds['faster']} faster, {kinds['same']} the same within the noise.", style=style)
            for row in (r for r in compared if r.change["verdict"] != "same"):
                c = row.change
                yield Text(f"  {c['verdict']:7} {row.key}: {c['ratio']:.2f} times as long, noise {100 * c['noise']:.0f}%", style=_CHANGE[c["verdict"]])


_ERROR = "relative to the float64 reference, |result - reference| / |reference|"
_CHANGE = {"slower": "red", "faster": "green", "same": "dim"}


def _columns(table: Table, layout: Layout, shape: str) -> None:
    def add(header: str, width: int, justify: str = "right") -> None:
        table.add_column(header, width=width, justify=justify, no_wrap=True, overflow="ellipsis")

    add("problem", 21, "left")
    add("variant", 7, "left")
    add("time", 7)
    add("±", 5)
    if layout.host:
        add("host", 7)
    add("rate", 12)
    add("ceiling", 9, "left")
    add("error", 5 if layout.error_digits == 0 else 7)
    if layout.change:
        add("change", 6)
    if layout.bar:
        add(shape if len(shape) <= layout.bar else shape.split()[0], layout.bar, "left")


def _cells(row: Row, layout: Layout, part: float, plain: bool) -> list[Text]:
    style = "green" if (row.share or 0) >= 0.5 else "cyan" if (row.share or 0) >= 0.2 else ""
    if row.missing is not None:
        return [Text(row.problem), Text(row.variant), Text("failed" if row.failed else "none", style="red" if row.failed else "dim")]
    cells = [Text(row.problem + (_IN_CACHE if row.in_cache else "")), Text(row.variant)]
    cells += [Text(text.seconds(row.seconds), style="bold"), Text(text.spread(row.spread), style="dim")]
    if layout.host:
        cells.append(Text(text.seconds(row.host_seconds)))
    cells.append(Text(text.rate(row.rate, row.unit), style="bold" if row.section == "ceilings" else ""))
    cells.append(Text("" if row.share is None else f"{text.share(row.share)} {_SHORT.get(row.ceiling, row.ceiling)}", style=style))
    cells.append(Text(text.error(row.error, layout.error_digits), style="bold red" if row.wrong else ""))
    if layout.change:
        c = row.change
        cells.append(Text("new" if c is None else f"{100 * (c['ratio'] - 1):+.0f}%", style="dim" if c is None else _CHANGE[c["verdict"]]))
    if layout.bar:
        cells.append(Text(text.bar(part, layout.bar, plain), style=style if row.section != "decode" else ""))
    return cells


def is_plain(console: Console) -> bool:
    """Whether bars must do without Unicode."""
    return not console.encoding.lower().startswith("utf")


# ---- below the tables


def _feet(name: str, rows: Sequence[Row]) -> list[str]:
    """What digits in columns do not say."""
    lines = [f"{row.variant}: {row.missing}" for row in rows if row.missing is not None]
    there = [row for row in rows if row.missing is None]
    if name == "ceilings":
        lines += [f"{row.problem}: {row.note}" for row in there if row.note]
    if name == "decode":
        lines += list(_depths(there))
    if name == "block":
        lines += list(_fusion(there))
    if name == "model":
        lines += [_tokens(row) for row in there]
    if name != "ceilings" and any(row.error is None for row in there):
        lines.append("- not compared: kinds of weights need the package gguf, models at most 400 MiB")
    if any(row.in_cache for row in there):
        lines.append(f"{_IN_CACHE} all copies together may fit the caches")
    return lines


def _depths(rows: Sequence[Row]) -> Iterator[str]:
    for shape, group in groupby(rows, key=lambda row: row.problem.split(" @")[0]):
        found = list(group)
        if len(found) > 1:
            times = [row.seconds for row in found]
            yield f"{shape}: time over depth {text.sparkline(times)}, from {text.seconds(times[0])} to {text.seconds(times[-1])}"


def _fusion(rows: Sequence[Row]) -> Iterator[str]:
    for problem, group in groupby(rows, key=lambda row: row.problem):
        found = {row.variant: row for row in group}
        for row in found.values():
            yield f"{problem} {row.variant}: {row.facts['dispatches']} dispatches, {text.nbytes(row.facts['scratch_bytes'])} of intermediates"
        if len(found) == 2:
            fused, unfused = found["fused"], found["unfused"]
            memory = unfused.facts["scratch_bytes"] / fused.facts["scratch_bytes"]
            host = unfused.host_seconds / fused.host_seconds
            yield f"{problem}, unfused / fused: time {unfused.seconds / fused.seconds:.2f}x, host {host:.2f}x, memory {memory:.1f}x"


def _tokens(row: Row) -> str:
    tokens, dispatches = row.facts["tokens"], row.facts["dispatches"]
    note = f"; {row.note}" if row.note else ""
    return f"{row.problem}, {row.variant}: {text.three_digits(tokens / row.seconds)} tokens a second, {dispatches} dispatches{note}"


# ---- as a line, and as a picture


def line(row: Row) -> str:
    """A row where there is no terminal."""
    start = f"{row.section}: {row.problem}: {row.variant}: "
    if row.missing is not None:
        return start + ("failed: " if row.failed else "none: ") + row.missing
    parts = [f"{text.seconds(row.seconds)} {text.spread(row.spread)}"]
    parts += [f"host {text.seconds(row.host_seconds)}"] if row.host_seconds is not None else []
    parts += [text.rate(row.rate, row.unit)] if row.rate else []
    parts += [f"{text.share(row.share)} of {CEILINGS[row.ceiling]}"] if row.share is not None else []
    parts += [f"error {text.error(row.error)}" + (" WRONG" if row.wrong else "")] if row.error is not None else ["not compared"]
    parts += [f"{row.facts['tokens'] / row.seconds:.4g} tokens/s"] if "tokens" in row.facts else []
    parts += [f"{row.facts['dispatches']} dispatches"] if "dispatches" in row.facts else []
    parts += ["may fit caches"] if row.in_cache else []
    parts += [row.note] if row.note else []
    parts += [f"{row.change['verdict']} ({row.change['ratio']:.2f} of the baseline)"] if row.change else []
    return start + ", ".join(parts)


def svg(picture: RenderableType, width: int, title: str, theme: TerminalTheme = SVG_EXPORT_THEME) -> str:
    """The picture as SVG, so many columns wide; it refers to nothing outside itself."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", legacy_windows=False)
    console.print(picture)
    drawn = re.sub(r"\s*@font-face \{.*?\}", "", console.export_svg(title=title, theme=theme), flags=re.S)
    drawn = re.sub(r'( *)<text class="(\S+)" x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"([^>]*)>([^<]*)</text>\n?', _trimmed, drawn)
    return drawn.replace("Fira Code", "Menlo, Consolas, DejaVu Sans Mono")


_BLANK = "\u00a0 \n"


def _trimmed(match: re.Match[str]) -> str:
    """A piece of text without the spaces around it, which some programs that show SVG leave out as they like; nothing where it is all spaces."""
    indent, style, x, y, length, rest, words = match.groups()
    words = words.replace("&#160;", "\u00a0")
    count, kept = len(html.unescape(words)), words.strip(_BLANK)
    if not kept:
        return ""
    column, lead = float(length) / count, len(words) - len(words.lstrip(_BLANK))
    x, length = f"{float(x) + lead * column:g}", f"{len(html.unescape(kept)) * column:g}"
    return f'{indent}<text class="{style}" x="{x}" y="{y}" textLength="{length}"{rest}>{kept.replace(chr(0xA0), "&#160;")}</text>\n'
