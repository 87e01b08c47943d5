"""The heart of the conformance suite: the cases that together use every kernel in every variant, one of each kind, against the reference.

Other tests are marked `conformance` too: those of edges and of what kernels leave alone, with few of their parameters (see the mark in conftest.py).
"""


import itertools
from typing import Any

import numpy as np
import pytest

from tests.helpers import named_limit, not_available
from wgattn.cases import FAMILIES
from wgattn.cases.family import Choice, Family, compare
from wgattn.errors import CapacityError, Unsupported
from wgattn.gpu import Device

MANY = 24
"""Rows of a family of which every other is enough."""


def few(family: Family) -> list[Choice]:
    """Of a family's cases, as few as still show each of its rows and each value of each axis; where rows are many, as the fields of one colour."""
    rows = list(dict.fromkeys(family.row(choice) for choice in family.cases()))
    fields = list(itertools.product(*(range(len(family.axes[name])) for name in family.rows)))
    wanted = {row for row, field in zip(rows, fields, strict=True) if len(rows) <= MANY or sum(field) % 2 == 0}
    seen: set[tuple[str, Any]] = set()
    found = []
    for choice in family.cases():
        shown = {("row", family.row(choice)), *choice.items()}
        if family.row(choice) in wanted and not shown <= seen:
            seen |= shown
            found.append(choice)
    return found


def test_few_cases_show_each_value():
    for family in FAMILIES:
        for name, values in family.axes.items():
            assert {choice[name] for choice in few(family)} == set(values), (family.name, name)


CASES = [pytest.param(family, choice, id=f"{family.row(choice)}-{i}") for family in FAMILIES for i, choice in enumerate(few(family))]


def check(device: Device, rng: np.random.Generator, family: Family, choice: Choice) -> None:
    """A case agrees with the reference; the message tells its parameters."""
    compared = 0
    for result in family.run(device, rng, **choice):
        difference = compare(result)
        assert difference.error <= difference.allowed, f"error {difference.error:.3g} > {difference.allowed:.3g}: {difference.where}; {dict(choice)}"
        compared += 1
    assert compared, f"nothing came out of {dict(choice)}"


@pytest.mark.conformance
@pytest.mark.parametrize(("family", "choice"), CASES)
def test_case(device, rng, record_property, family, choice):
    record_property("family", family.name)
    try:
        check(device, rng, family, choice)
    except (Unsupported, CapacityError) as error:
        if named_limit(error, device):
            raise
        not_available(str(error))
