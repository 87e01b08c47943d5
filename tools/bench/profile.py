"""One decode step of a model, dispatch by dispatch: where its time goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from string import ascii_lowercase
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from wgattn.errors import CapacityError
from wgattn.gpu import Recording
from wgattn.gpu.recording import Dispatch
from wgattn.gpu.timing import ReplayClock, dispatch_times
from wgattn.llm.llama import Llama

from . import ceilings, text
from .measure import measure, row_of
from .model import arrange, greedy_recording, load, step_recording
from .records import Bench, Work

_ROWS = ("x", "y", "h", "query", "out", "hidden", "residual", "tokens")
"""Buffers of one row a token; a model has them for all tokens of a chunk."""
_DRIFT = 64
"""Room behind the depth: the choice of a token moves the position on each time that it is measured."""
_COLOURS = ("#5fafd7", "#5faf5f", "#af87d7", "#d7af5f", "#d7775f", "#5fc7c7", "#d787af", "#a7a75f")
"""Of kinds of dispatches. Not those of the terminal: black can be read on these, and they can be seen on dark and on light."""
_GREY = "#b2b2b2"


@dataclass(frozen=True)
class Part:
    """One dispatch of the step."""

    label: str
    kernel: str
    variant: str
    """Parts and options of its text."""
    groups: tuple[int, int, int]
    seconds: float
    nbytes: int
    """Bytes that it has to read and write."""
    share: float | None
    """Of the copy bandwidth, as measured in the same run."""
    in_layer: bool


@dataclass(frozen=True)
class StepProfile:
    """The dispatches of one step. `overhead` is what each was measured too long, taken off already; `whole` is the step in one pass."""

    model: str
    depth: int
    clock: str
    parts: tuple[Part, ...]
    whole: float
    host: float
    overhead: float
    bandwidth: float
    layers: int

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def total(self) -> float:
        return sum(part.seconds for part in self.parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        names = self._names()
        yield Text(f"\nA decode step of {self.model} at depth {self.depth}, {len(self.parts)} dispatches", style="bold")
        yield self._table(width, names)
        yield self._kinds(width)
        yield from self._flame(width)
        yield from self._notes()
        yield Text("\nVariants", style="bold")
        for (kernel, variant), name in names.items():
            yield Text.assemble((f"{name}  ", "bold"), f"{kernel}: ", (variant, "dim"))

    def _names(self) -> dict[tuple[str, str], str]:
        """A short name for each kernel in each variant: its file's name, and a letter where there are several."""
        found: dict[tuple[str, str], str] = {}
        for part in self.parts:
            if (part.kernel, part.variant) not in found:
                count = sum(kernel == part.kernel for kernel, _ in found)
                found[part.kernel, part.variant] = f"{part.kernel.split('/')[-1]} {ascii_lowercase[count % 26]}"
        return found

    def _table(self, width: int, names: dict[tuple[str, str], str]) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        bar = max(0, min(40, width - 81))
        columns = (("", 3, "right"), ("dispatch", 27, "left"), ("kernel", 15, "left"), ("grid", 8, "left"), ("time", 7, "right"), ("bytes", 9, "right"))
        for header, across, justify in (*columns, ("copy", 5, "right"), *([("", bar, "left")] if bar > 4 else [])):
            table.add_column(header, width=across, justify=justify, no_wrap=True, overflow="ellipsis")
        longest = max(part.seconds for part in self.parts)
        for i, part in enumerate(self.parts):
            grid = "x".join(map(str, part.groups)).removesuffix("x1").removesuffix("x1")
            cells = [str(i + 1), part.label, names[part.kernel, part.variant], grid]
            cells += [text.seconds(part.seconds), text.nbytes(part.nbytes), text.share(part.share)]
            table.add_row(*map(Text, cells), *([Text(text.bar(part.seconds / longest, bar), style=self._colour(part.label))] if bar > 4 else []))
        return table

    def _kinds(self, width: int) -> Table:
        """All dispatches of one kind together."""
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", title="\nBy kind", title_justify="left", title_style="bold")
        bar = max(8, min(40, width - 68))
        table.add_column("dispatch", width=29, no_wrap=True, overflow="ellipsis")
        for header, across in (("count", 5), ("all", 7), ("each", 7), ("share", 5), ("copy", 5)):
            table.add_column(header, width=across, justify="right", no_wrap=True)
        table.add_column("", width=bar, no_wrap=True)
        for label, parts in self._by_label().items():
            took = sum(p.seconds for p in parts)
            rate = sum(p.nbytes for p in parts) / took / self.bandwidth if took else None
            cells = [label, str(len(parts)), text.seconds(took), text.seconds(took / len(parts)), text.share(took / self.total), text.share(rate)]
            table.add_row(*map(Text, cells), Text(text.bar(took / self.total, bar), style=self._colour(label)))
        return table

    def _by_label(self) -> dict[str, list[Part]]:
        found: dict[str, list[Part]] = {}
        for part in self.parts:
            found.setdefault(part.label, []).append(part)
        return found

    def _colour(self, label: str) -> str:
        return _COLOURS[list(self._by_label()).index(label) % len(_COLOURS)]

    def _flame(self, width: int) -> Iterator[RenderableType]:
        """The step above, what it consists of below: widths are shares of the time."""
        kinds = self._by_label()
        layered = {label: parts for label, parts in kinds.items() if parts[0].in_layer}
        before = [(label, parts) for label, parts in kinds.items() if not parts[0].in_layer]
        first, last = before[:1], before[1:]
        rows = [
            [(f"step {text.seconds(self.total)}", self.total, _GREY)],
            [
                *((label, _time(parts), self._colour(label)) for label, parts in first),
                (f"{self.layers} layers", sum(map(_time, layered.values())), _GREY),
                *((label, _time(parts), self._colour(label)) for label, parts in last),
            ],
            [
                *(("", _time(parts), None) for _, parts in first),
                *((label, _time(parts), self._colour(label)) for label, parts in layered.items()),
            ],
        ]
        yield Text("\nWhere the time goes", style="bold")
        for row in rows:
            yield _segments(row, self.total, width)

    def _notes(self) -> Iterator[RenderableType]:
        how = "pass" if self.clock == "timestamps" else "submit, by the wall clock (the device has no timestamps)"
        yield Text(
            f"\nEach dispatch was timed in a {how} of its own, less the {text.seconds(self.overhead)} that one takes which does nothing. Together "
            f"{text.seconds(self.total)}; the step in one pass takes {text.seconds(self.whole)}, and {text.seconds(self.host)} of the host. "
            f"Copy bandwidth here: {text.rate(self.bandwidth, 'B/s')}."
        )


def _time(parts: Sequence[Part]) -> float:
    return sum(part.seconds for part in parts)


def _segments(row: Sequence[tuple[str, float, str | None]], total: float, width: int) -> Text:
    """Names on coloured ground, as wide as their share; a name that does not fit is cut, and one of less than three columns left out."""
    line, end, at = Text(no_wrap=True), 0.0, 0
    for name, seconds, colour in row:
        end += seconds
        until = round(width * end / total) if total else 0
        across, at = until - at, until
        shown = name if len(name) < across else name[: max(0, across - 2)] + "…" if across > 3 else ""  # a column is left free behind it
        line.append(shown.center(across - 1) if across > 1 else "", style=f"#000000 on {colour}" if colour else "")
        line.append("|" if across else "", style="dim")
    return line


# ---- measuring


def profile_step(bench: Bench, depth: int) -> StepProfile:
    """Time every dispatch of one decode step of the model behind `depth` positions."""
    loaded = load(bench, max(512, -(-(depth + _DRIFT) // 256) * 256))
    model = loaded.model
    bandwidth = row_of(bench, ceilings.cases(bench)[0]).rate
    if not bandwidth:
        raise CapacityError(f"{bench.device.name} could not copy: without its bandwidth there is nothing to compare with.")
    arrange(model, depth, 1)
    host = measure(bench, Work([step_recording(model, depth)])).host  # and the device is awake now
    recording, clock = greedy_recording(model, depth), ReplayClock(bench.device)
    whole = []
    for _ in range(_repeats(bench)):
        arrange(model, depth, 1)
        whole.append(clock([recording]))
    empty = Recording(bench.device, list(ceilings.counting(bench, 16)[0]))
    overhead = float(np.median(_each(bench, empty)))
    arrange(model, depth, 1)
    times = [max(0.0, t - overhead) for t in _each(bench, recording)]
    labels = [d.label for d in recording]
    parts = []
    for d, seconds in zip(recording, times, strict=True):
        moved = _moved(d, model, depth)
        share = moved / seconds / bandwidth if seconds else None
        repeated = labels.count(d.label) >= model.config.layers > 1
        parts.append(Part(d.label, d.kernel.source.name, variant(d), d.groups, seconds, moved, share, repeated))
    named = {"model": loaded.name, "depth": depth, "clock": "timestamps" if clock.by_timestamps else "wall", "layers": model.config.layers}
    return StepProfile(parts=tuple(parts), whole=float(np.median(whole)), host=host, overhead=overhead, bandwidth=bandwidth, **named)


def _repeats(bench: Bench) -> int:
    return 5 if bench.quick else 15


def _each(bench: Bench, recording: Recording) -> list[float]:
    """Seconds of each dispatch by itself."""
    repeat = _repeats(bench)
    if bench.device.profile.timestamps:
        return [t.seconds for t in dispatch_times(recording, repeat)]
    clock = ReplayClock(bench.device)
    alone = [[Recording(bench.device, [d])] for d in recording]
    return [float(np.median([clock(one, 4) for _ in range(repeat)])) for one in alone]


def variant(d: Dispatch) -> str:
    """Parts and options that a kernel's text is made of, the plain ones left out."""
    source = d.kernel.source
    parts = [part.split("/")[-1] for part in source.parts if not part.partition(" as ")[0].endswith(("_none", "_plain", "step", "problem"))]
    return " ".join([*parts, *(f"{name}={value}" for name, value in source.options.items())])


def _moved(d: Dispatch, model: Llama, depth: int) -> int:
    """Bytes that a dispatch of a decode step has to read and write: of caches the positions in use, of tables and of buffers for many tokens one row."""
    total = 0
    for name, kind in d.kernel.source.buffers:
        size = d.nbytes[name]
        if kind == "uniform":
            continue
        if name in ("keys", "values"):
            size = size // model.capacity * (1 if kind == "storage" else depth + 1)
        elif name == "rope":
            size //= model.capacity
        elif d.kernel.source.name == "block/embed" and name.startswith("weights"):
            size //= model.config.vocab_size
        elif name in _ROWS and size != model.logits.nbytes:
            size //= model.chunk
        total += size
    return total
