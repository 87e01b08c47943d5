"""How `wgattn bench` looks: at 80, 120 and 200 columns, on dark and light, live and as SVG."""

import io
import itertools
import re
import xml.etree.ElementTree

import pytest
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME

from wgattn.bench import text
from wgattn.bench.dashboard import Dashboard, svg
from wgattn.bench.profile import Part, StepProfile
from wgattn.bench.records import SECTIONS, Bench, Case, Row
from wgattn.bench.report import Report
from wgattn.bench.views import LiveView, Progress, clock, view_of

WIDTHS = (80, 120, 200)


def longest(section, problem, variant, ceiling="dot4", **more):
    """A row whose every cell is as wide as it can be."""
    numbers = {"seconds": 0.0123, "spread": 9.9, "host_seconds": 12.3e-6, "rate": 73.3e12, "unit": "FLOP/s", "ceiling": ceiling, "share": 1.0}
    return Row(section, problem, variant, **(numbers | {"error": 2.1e-7, "in_cache": True} | more))


@pytest.fixture
def report(device):
    """Rows of all kinds."""
    made = Report.of(Bench(device), {})
    made.state = "complete"
    step = {"model": "SmolLM2-135M-Instruct.Q4_1", "tokens": 64, "dispatches": 152}
    for row in (
        longest("ceilings", "dot4I8Packed chain", "dot4", ceiling=None, share=None, in_cache=False),
        Row("ceilings", "matrix units", "matrix", missing="wgpu can use none here"),
        longest("gemm", "2048x8192x2048 Q8_0", "exact"),
        longest("prefill", "32/8x128 q8_0 S4096", "unfused", ceiling="matrix"),
        Row("prefill", "32/8x128 q8_0 S4096", "gemm", missing="scores take 2147483648 bytes, and a binding can have 134217728.", failed=True),
        *(longest("decode", f"32/8x128 q8_0 @{256 * 4**i}", "auto", seconds=10.0 ** (i - 4), share=0.1 * i, ceiling="copy") for i in range(5)),
        longest("block", "24 layers @512", "fused", facts={"dispatches": 120, "scratch_bytes": 23040}),
        longest("block", "24 layers @512", "unfused", facts={"dispatches": 312, "scratch_bytes": 73728}, seconds=0.02),
        longest("model", "prompt of one chunk", "prompt", facts=step, note="64 tokens"),
        longest("model", "decode from @1", "greedy", facts=step, host_seconds=None, error=None),
    ):
        made.rows.append(row)
    return made


def shown(renderable, width, **how):
    console = Console(width=width, file=io.StringIO(), legacy_windows=False, **how)
    console.print(renderable)
    return console.file.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("compared", [False, True])
def test_nothing_is_cut_or_wrapped(report, width, compared):
    if compared:
        report.baseline = {}
        for row in report.rows:
            row.change = {"verdict": "slower", "ratio": 10.99, "noise": 0.1, "against_ceiling": 2.0}
    out = shown(Dashboard(report), width)
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out
    for row in report.rows:
        (line,) = [found for found in lines if found.startswith(row.problem) and f" {row.variant} " in found + " " and "tokens" not in found]
        if row.missing is None:
            words = [text.seconds(row.seconds), text.spread(row.spread), text.rate(row.rate, row.unit), text.error(row.error), *(["+999%"] if compared else [])]
            words += [] if compared and width < 100 else [text.seconds(row.host_seconds)]
            assert [word for word in words if word not in line and word.replace(".1e", "e") not in line] == []
    assert all(name in out for name in SECTIONS.values())


def test_columns_stand_under_one_another(report):
    for width in WIDTHS:
        heads = [line for line in shown(Dashboard(report), width).splitlines() if line.startswith("problem")]
        assert len(heads) == len(SECTIONS)
        assert len({line[: line.index("error") + 5] for line in heads}) == 1


def test_wide_terminals_have_bars(report):
    out = {width: shown(Dashboard(report), width) for width in WIDTHS}
    assert "█" * 8 not in out[80]
    assert out[80].count("█") < out[120].count("█") < out[200].count("█")
    (row,) = [line for line in out[120].splitlines() if line.startswith("2048x8192x2048")]
    assert row.count("█") == 120 - 84, "a share of 1 is the whole width"


def test_consoles_without_unicode(report):
    console = Console(width=120, file=io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace"))
    console.print(Dashboard(report))
    console.file.flush()
    assert b"#" * 20 in console.file.buffer.getvalue()


def test_what_is_below_the_tables(report):
    out = shown(Dashboard(report), 80)
    for words in (
        "matrix: wgpu can use none here",
        "gemm: scores take 2147483648 bytes",
        "time over depth ▁▁▁▁█",
        "120 dispatches, 22.5 KiB of intermediates",
        "unfused / fused: time 1.63x, host 1.00x, memory 3.2x",
        "prompt of one chunk, prompt: 5203 tokens a second, 152 dispatches; 64 tokens",
        "° all copies together may fit the caches",
        "- not compared: kinds of weights need the package gguf, models at most 400 MiB",
    ):
        assert words in out
    assert "FAILED prefill: 32/8x128 q8_0 S4096: gemm: scores take" in " ".join(out.split())


def styles(report, words):
    """Of the text that holds these words."""
    console = Console(width=120, file=io.StringIO(), force_terminal=True, color_system="truecolor", legacy_windows=False)
    lines = console.render_lines(Dashboard(report))
    return {str(segment.style) for line in lines for segment in line if words in segment.text}


def test_colours_carry_meaning(report):
    rows = report.rows
    rows[2].wrong, rows[2].error = True, 1e-3
    assert "red" in "".join(styles(report, "1.0e-03"))
    assert "green" in "".join(styles(report, "100% dot4"))
    assert "cyan" in "".join(styles(report, "40% copy"))
    assert "red" in "".join(styles(report, "failed"))
    console = Console(width=120, file=io.StringIO(), force_terminal=True, color_system="truecolor", legacy_windows=False)
    used = {str(segment.style) for line in console.render_lines(Dashboard(report)) for segment in line}
    assert not any(re.search(r"\b(black|white|yellow)\b", style) for style in used), "these vanish on one ground or the other"


@pytest.mark.parametrize("theme", [SVG_EXPORT_THEME, DEFAULT_TERMINAL_THEME], ids=["dark", "light"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_picture(report, width, theme):
    drawn = svg(Dashboard(report), width, "a title", theme)
    root = xml.etree.ElementTree.fromstring(drawn)
    assert not re.search(r"url\((?!#)|@font-face|https?://(?!www\.w3\.org/2000/svg|www\.textualize\.io)", drawn), "nothing from outside"
    texts = [t for t in root.iter("{http://www.w3.org/2000/svg}text") if t.get("x") and t.get("textLength")]
    assert len(texts) > 100
    column = 12.2
    lines: dict[str, list[tuple[float, float]]] = {}
    for t in texts:
        assert t.text == t.text.strip("\u00a0 "), "spaces at the ends are left out by some programs"
        assert float(t.get("textLength")) == pytest.approx(column * len(t.text), abs=0.1)
        lines.setdefault(t.get("y"), []).append((float(t.get("x")), float(t.get("x")) + float(t.get("textLength"))))
    for spans in lines.values():
        spans.sort()
        assert all(end <= begin + 0.1 for (_, end), (begin, _) in itertools.pairwise(spans)), "pieces overlap"
        assert spans[-1][1] <= column * width + 0.1


# ---- live


def case(row):
    return Case(row.section, row.problem, row.variant, lambda b: None)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_live_view_shows_rows_as_they_come_and_leaves_all_of_them(report, width):
    rows, report.rows = report.rows, []
    console = Console(width=width, height=30, file=io.StringIO(), force_terminal=True, color_system=None, legacy_windows=False)
    cases = [case(row) for row in rows]
    with view_of(console, report, cases, True) as view:
        assert isinstance(view, LiveView)
        for row, one in zip(rows, cases, strict=True):
            view.begin(one)
            now = shown(view, width)
            assert max(map(len, now.splitlines())) <= width
            assert f"{row.problem}" in now
            assert "..." in now
            assert "q leaves" in now
            assert f"{len(report.rows)} of {len(rows)} rows" in now
            report.rows.append(row)
            view.add(row)
    left = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    for row in rows:
        assert row.problem in left


def test_an_unfinished_section_stays(report):
    rows, report.rows = report.rows, []
    cases = [case(row) for row in rows]
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None, legacy_windows=False)
    with view_of(console, report, cases, False) as view:
        for row, one in zip(rows[:4], cases, strict=False):
            view.begin(one)
            report.rows.append(row)
            view.add(row)
        view.begin(cases[4])
        report.state = "interrupted"
    last = console.file.getvalue().rsplit("Attention prefill", 1)[1]
    assert "unfused" in last
    assert "Left early" in last


def test_time_left():
    now = [100.0]
    progress = Progress([Case("gemm", str(i), "", None, cost) for i, cost in enumerate((1, 2, 7))], lambda: now[0])
    assert progress.left is None
    now[0] = 101.0
    progress.finish("gemm: 0: ")
    assert (progress.part, progress.left) == (0.1, pytest.approx(9.0))
    now[0] = 106.0
    progress.finish("gemm: 1: ")
    assert (progress.finished, progress.left) == (2, pytest.approx(14.0))
    assert [clock(s) for s in (0, 14.4, 99.4, 99.6, 125)] == ["0 s", "14 s", "99 s", "1:40 min", "2:05 min"]


# ---- one step


def profile(**more):
    part = lambda label, seconds, layer: Part(label, "block/linear", f"codes {label}", (96, 3, 1), seconds, 345 << 10, 0.5, layer)  # noqa: E731
    layer = [part("norm, QKV, RoPE, KV append", 3e-4, True), part("attention", 1e-4, True), part("down projection, residual", 2e-4, True)]
    parts = (part("embedding", 1e-5, False), *layer, *layer, part("norm, logits", 8e-4, False))
    return StepProfile(**({"model": "m", "depth": 128, "clock": "timestamps", "parts": parts, "layers": 2} | _WHOLE | more))


_WHOLE = {"whole": 2e-3, "host": 1e-3, "overhead": 5e-6, "bandwidth": 1e9}


@pytest.mark.parametrize("width", WIDTHS)
def test_a_profile_shows_every_dispatch(width):
    found = profile()
    out = shown(found, width)
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if re.match(r" *\d+ .*linear", line)]
    assert len(rows) == len(found.parts)
    for row, part in zip(rows, found.parts, strict=True):
        for word in (part.label, "linear", "96x3", text.seconds(part.seconds), "345 KiB", "50%"):
            assert word in row
    assert "codes attention" in out
    assert "Each dispatch was timed in a pass of its own" in " ".join(out.split())
    wall = " ".join(shown(profile(clock="wall"), width).split())
    assert "the device has no timestamps" in wall


@pytest.mark.parametrize("width", WIDTHS)
def test_widths_in_the_flame_are_shares_of_the_time(width):
    lines = shown(profile(), width).splitlines()
    at = lines.index("Where the time goes")
    step, parts, kinds = lines[at + 1 : at + 4]
    assert len(step.rstrip("|")) + 1 == width
    layers, logits = (parts.index(word) for word in ("2 layers", "norm, logits"))
    assert layers < 0.6 * width < logits
    ends = [i for i, letter in enumerate(kinds) if letter == "|"]
    total = profile().total
    assert abs(ends[-1] - ends[-2] - width * 4e-4 / total) <= 1.5, "the down projections"


# ---- numbers


@pytest.mark.parametrize(
    ("number", "words"),
    [
        *((None, "-"), (0, "0 us"), (1.5e-9, "1.50 ns"), (9.996e-7, "1.00 us"), (9.99e-4, "999 us")),
        *((1.23e-3, "1.23 ms"), (0.0999, "99.9 ms"), (0.09996, "100 ms"), (2, "2.00 s")),
    ],
)
def test_seconds(number, words):
    assert text.seconds(number) == words


def test_other_numbers():
    assert [text.rate(n, "B/s") for n in (None, 5, 999.6e6, 4e12)] == ["-", "5.00 B/s", "1.00 GB/s", "4.00 TB/s"]
    assert [text.share(n) for n in (None, 0.004, 0.0096, 0.41, 1.2)] == ["-", "0.4%", "1%", "41%", "120%"]
    assert [text.spread(n) for n in (None, 0.034, 9.9, 40)] == ["-", "±3%", "±990%", "±10x+"]
    assert [text.error(n) for n in (None, 0, 2.14e-7)] == ["-", "0", "2.1e-07"]
    assert [text.nbytes(n) for n in (10, 3584, 5 << 30)] == ["10 B", "3.5 KiB", "5 GiB"]
    assert [text.bar(n, 4) for n in (0, 0.001, 0.5, 1, 7)] == ["", "▏", "██", "████", "████"]
    assert text.bar(0.5, 4, plain=True) == "##"
    assert text.sparkline([1, 4, 8]) == "▂▅█"
    assert text.sparkline([]) == ""
