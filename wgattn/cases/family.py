"""Families of cases: axes of options, and one function that runs any combination of them. On a device it yields what came out and what should have;
on paper (`gpu.paper`) the same calls list the kernels."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Choice = Mapping[str, Any]
"""A value for each axis of a family, by name."""


@dataclass(frozen=True)
class Result:
    """An array that was computed; what it should be, worked out when asked for; and the error allowed: absolute + relative * |expected|, or the NMSE."""

    what: str
    got: np.ndarray
    expected: Callable[[], np.ndarray]
    absolute: float = 0.0
    relative: float = 0.0
    nmse: float | None = None
    """Instead: squared error over squared expectation."""


def once(compute: Callable[[], Any]) -> Callable[[], Any]:
    """The function, which computes at its first call only."""
    return functools.cache(compute)


@dataclass(frozen=True)
class Family:
    """Cases of one kind.

    Cases that differ in one of `rows` are reported in lines of their own. `run(device, rng, **choice)` raises Unsupported or CapacityError for
    what the device cannot run, before any work. `numbers` are axes that reach kernels as numbers only, and choose no parts of their text.
    """

    name: str
    axes: Mapping[str, Sequence[Any]]
    run: Callable[..., Iterable[Result]]
    rows: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    def cases(self, strength: int = 1) -> list[Choice]:
        """For each row, choices in which all combinations of the values of any `strength` other axes occur."""
        others = {name: values for name, values in self.axes.items() if name not in self.rows}
        rows = [dict(zip(self.rows, values, strict=True)) for values in itertools.product(*(self.axes[r] for r in self.rows))]
        return [row | choice for row in rows for choice in cover(others, strength)]

    def texts(self) -> Iterator[Choice]:
        """All combinations of the axes that choose parts of a kernel's text; the numbers take turns."""
        parts = {name: values for name, values in self.axes.items() if name not in self.numbers}
        for i, values in enumerate(itertools.product(*parts.values())):
            yield dict(zip(parts, values, strict=True)) | {name: self.axes[name][i % len(self.axes[name])] for name in self.numbers}

    def row(self, choice: Choice) -> str:
        """The name of a choice's line."""
        return " ".join([self.name, *(str(choice[r]) for r in self.rows)])


def cover(axes: Mapping[str, Sequence[Any]], strength: int) -> list[dict[str, Any]]:
    """Few choices in which every combination of values of any `strength` axes occurs. Greedy, and always the same."""
    names, sizes = list(axes), [len(values) for values in axes.values()]
    strength = min(strength, len(names))
    if strength == len(names):
        picked: Iterable[Sequence[int]] = itertools.product(*map(range, sizes))
    else:
        picked = _cover(sizes, strength)
    return [{name: axes[name][i] for name, i in zip(names, indices, strict=True)} for indices in picked]


def _cover(sizes: Sequence[int], strength: int) -> Iterator[list[int]]:
    """Indices of `cover`: each choice begins with a combination that is still missing, and goes on with what adds the most that are."""
    groups = list(itertools.combinations(range(len(sizes)), strength))
    missing = {group: set(itertools.product(*(range(sizes[a]) for a in group))) for group in groups}
    uses = [[0] * n for n in sizes]
    while any(missing.values()):
        group = max(groups, key=lambda g: len(missing[g]))
        chosen = dict(zip(group, min(missing[group]), strict=True))
        for axis in sorted(set(range(len(sizes))) - set(group), key=lambda a: -sizes[a]):

            def gain(value: int, axis: int = axis) -> tuple[int, int]:
                with_it = chosen | {axis: value}  # noqa: B023
                known = [g for g in groups if axis in g and all(a in with_it for a in g)]
                return sum(tuple(with_it[a] for a in g) in missing[g] for g in known), -uses[axis][value]

            chosen[axis] = max(range(sizes[axis]), key=gain)
        for g in groups:
            missing[g].discard(tuple(chosen[a] for a in g))
        for axis, value in chosen.items():
            uses[axis][value] += 1
        yield [chosen[a] for a in range(len(sizes))]


@dataclass(frozen=True)
class Difference:
    """The value that is worst by its bound."""

    error: float
    allowed: float
    where: str

    @property
    def share(self) -> float:
        """Of the error in what is allowed; above 1 is wrong."""
        return self.error / self.allowed if self.allowed else math.inf if self.error else 0.0


def compare(result: Result) -> Difference:
    """What was computed against what should have been; equal infinities agree, and NaN never does."""
    got, expected = np.asarray(result.got, np.float64), np.asarray(result.expected(), np.float64)
    if got.shape != expected.shape:
        return Difference(math.inf, result.absolute, f"{result.what} has shape {got.shape}, not {expected.shape}")
    if not got.size:
        return Difference(0.0, result.absolute, result.what)
    if result.nmse is not None:
        with np.errstate(invalid="ignore"):
            found = float(((got - expected) ** 2).sum() / max(float((expected**2).sum()), 1e-30))
        return Difference(found if np.isfinite(found) else math.inf, result.nmse, f"NMSE of {result.what}")
    with np.errstate(invalid="ignore"):
        error = np.where(got == expected, 0.0, np.abs(got - expected))
    error = np.where(np.isfinite(error), error, math.inf)
    allowed = result.absolute + result.relative * np.where(np.isfinite(expected), np.abs(expected), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(error == 0, 0.0, error / allowed)
    at = np.unravel_index(share.argmax(), error.shape)
    place = f"{result.what}{tuple(map(int, at))} is {got[at]:.8g}, should be {expected[at]:.8g}"
    return Difference(float(error[at]), float(allowed[at]), place)
