"""tests/README.md: its tables of public bug reports name tests that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
REPORTS = {
    "alibaba/MNN": (4498, 4653, 4737, 4046, 4609, 3623, 3511, 3406, 2608, 3370, 3560, 4624, 4898, 4836, 3175, 4802, 2852, 2090),
    "Other engines": (
        *(12776, 4694, 4401, 7805, 29611, 31626, 21652, 27413, 28520, 23040, 23020, 12931, 19965, 209, 27306, 22266, 26064, 31611, 602, 3202, 59, 4966),
        23663,
    ),
}
"""Reports that must be there, one or more a bug, by the headings of their tables."""


@cache
def functions_of(file: str) -> frozenset[str]:
    """Names of the test functions of a file; of none that does not exist."""
    path = TESTS / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def rows(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """(heading, the row's cells but the last, files or tests as file::name) of each row of the tables of reports."""
    heading, file = "", ""
    for line in text[text.index("## Public bug reports") :].splitlines():
        heading = line.lstrip("# ") if line.startswith("#") else heading
        found = re.search(r"[Ww]ithout a file: in `([^`]+)`", line)
        file = found[1] if found else file
        cells = line.strip("|").split("|")
        if not line.startswith("|") or set(line) <= set("|- ") or cells[-1].strip() == "test":
            continue
        names = [name for name in re.findall(r"`([^`]+)`", cells[-1]) if name.startswith("test_") or ".py" in name]
        yield heading, "|".join(cells[:-1]), [name if ".py" in name else f"{file}::{name}" for name in names]


def missing(text: str) -> list[str]:
    """Tests and files that are named and do not exist."""
    named = [name for _, _, names in rows(text) for name in names]
    return [n for n in named if (not (TESTS / n).is_file() if n.endswith(".py") else n.partition("::")[2] not in functions_of(n.partition("::")[0]))]


@pytest.fixture(scope="module")
def text() -> str:
    return (TESTS / "README.md").read_text(encoding="utf-8")


def test_each_test_named_exists(text):
    assert missing(text) == []


def test_each_row_names_a_test(text):
    found = list(rows(text))
    assert len(found) >= 40
    lacking = [row for heading, row, names in found if not names and "marked" not in row]
    assert [row for row in lacking if "4836" not in row] == []  # that one is the whole conformance suite


def test_every_report_has_its_row(text):
    for heading, numbers in REPORTS.items():
        told = " ".join(row for h, row, _ in rows(text) if h.startswith(heading))
        assert [n for n in numbers if not re.search(rf"\b{n}\b", told)] == [], heading


def test_what_does_not_exist_is_told():
    table = "## Public bug reports\nWithout a file: in `test_readme.py`\n| report | test |\n|---|---|\n| 1 | `test_each_row_names_a_test`, `{}` |"
    for name in ("test_nothing", "test_nowhere.py::test_x", "block/test_nothing.py", "block/test_rope.py::rows"):
        assert len(missing(table.format(name))) == 1, name
    assert missing(table.format("test_package.py")) == []
