"""Numbers as they are typed: converters for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def number(kind: type, fits: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """A converter: a `kind` for which `fits` holds; `wanted` says what that is."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {text!r}")
        return value

    return convert


count = number(int, lambda n: n >= 1, "a whole number from 1 on")
natural = number(int, lambda n: n >= 0, "a whole number from 0 on")
