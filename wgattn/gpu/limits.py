"""Limits that a device is asked to keep although its adapter has more, to try out how code behaves on smaller GPUs."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping

from ..errors import ArgumentError

VARIABLE = "WGATTN_LIMITS"


def stricter(name: str, a: int, b: int) -> int:
    """The stricter of two values of a WebGPU limit: the smaller, except that alignments ("min-...") are stricter when larger."""
    return max(a, b) if name.startswith("min-") else min(a, b)


def lowered(given: Mapping[str, int], features: Iterable[str], limits: Iterable[str]) -> dict[str, int]:
    """What was asked for by argument and by the environment variable, the stricter of the two where both name a limit.

    Args:
        given: limits by their WebGPU names; features to go without by theirs, as 0.
        features, limits: the names that there are.

    Raises:
        ArgumentError: a name that there is not, or a number that cannot be. TypeError: what is no number.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"limits is {given!r}; it must be a mapping from names to numbers.")
    features, limits = set(features), set(limits)
    found: dict[str, int] = {}
    for name, value in [*given.items(), *_of_environment()]:
        if name not in features and name not in limits:
            raise ArgumentError(f"There is no WebGPU limit {name!r}, and no feature of that name in use; features are {', '.join(sorted(features))}.")
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} is {value!r}; a limit is a whole number.") from None
        if value < 0 or (name in features and value > 1):
            raise ArgumentError(f"{name} cannot be {value}: limits are positive, features are 0 or 1.")
        found[name] = stricter(name, found.get(name, value), value)
    return found


def _of_environment() -> list[tuple[str, int]]:
    """WGATTN_LIMITS: "name=number" in any number, with spaces between."""
    found = []
    for item in os.environ.get(VARIABLE, "").split():
        name, _, value = item.partition("=")
        if not name or not value.isdecimal():
            raise ArgumentError(f"{VARIABLE} has {item!r} where name=number is wanted, such as max-storage-buffer-binding-size=1048576 or shader-f16=0.")
        found.append((name, int(value)))
    return found
