"""Numbers as people read them, and small pictures of numbers in one line of text."""

from __future__ import annotations

from collections.abc import Sequence

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
NOTHING = "-"


def three_digits(number: float) -> str:
    """1.23, 12.3, 123."""
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def seconds(number: float | None) -> str:
    """12.3 ms; at most seven characters."""
    if number is None:
        return NOTHING
    if number <= 0:
        return "0 us"
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "us")) if number >= 0.9995 * s), (1e-9, "ns"))
    return f"{three_digits(number / scale)} {unit}"


def spread(share: float | None) -> str:
    """How far samples lie apart: ±3%; at most five characters."""
    if share is None:
        return NOTHING
    return f"±{100 * share:.0f}%" if share < 9.995 else "±10x+"


def rate(number: float | None, unit: str | None) -> str:
    """73.3 GFLOP/s, 4.00 TB/s."""
    if number is None:
        return NOTHING
    scale, prefix = next(((s, p) for s, p in _PREFIXES if number >= 0.9995 * s), (1, ""))
    return f"{three_digits(number / scale)} {prefix}{unit}"


def nbytes(count: float) -> str:
    """3.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"


def share(number: float | None) -> str:
    """41%."""
    return NOTHING if number is None else f"{100 * number:.{1 if number < 0.0095 else 0}f}%"


def error(number: float | None, digits: int = 1) -> str:
    """2.1e-07; 0 where results are exact."""
    return NOTHING if number is None else "0" if number == 0 else f"{number:.{digits}e}"


def bar(part: float, width: int, plain: bool = False) -> str:
    """A bar of so much of a width, in eighths of a character; at least one where there is anything."""
    if plain:
        return "#" * max(part > 0, round(min(part, 1) * width))
    eighths = max(int(part > 0), round(min(max(part, 0), 1) * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def sparkline(numbers: Sequence[float]) -> str:
    """A column for each number, the largest full."""
    most = max(numbers, default=0) or 1
    return "".join(_LEVELS[min(7, int(8 * n / most))] for n in numbers)
