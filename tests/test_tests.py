"""Tests that assert nothing look green whatever the code does: here are none."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
CHECKING = {"raises", "warns", "fail"}
"""Of pytest. Names that begin with assert_ count as well: NumPy's and ours."""


def is_check(node: ast.AST) -> bool:
    """A statement or call that can fail a test by itself."""
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = called(node)
    return name.startswith("assert_") or (name in CHECKING and ast.unparse(node.func).startswith("pytest."))


def called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def functions(tree: ast.AST) -> dict[str, list[ast.AST]]:
    """All functions and methods by name, wherever they are, but no fixtures: what those assert is about the machine. Several may have one name."""
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not any("fixture" in ast.unparse(d) for d in node.decorator_list):
            found.setdefault(node.name, []).append(node)
    return found


def uses(function: ast.AST) -> set[str]:
    """Names of functions that are called, or given to a call."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            given = [*node.args, *(k.value for k in node.keywords)]
            found |= {called(node), *(a.id for a in given if isinstance(a, ast.Name)), *(a.attr for a in given if isinstance(a, ast.Attribute))}
    return found


def checks(function: ast.AST, known: dict[str, list[ast.AST]], seen: frozenset[str] = frozenset()) -> bool:
    """Whether a function has a check, or uses one that has."""
    if any(is_check(node) for node in ast.walk(function)):
        return True
    return any(checks(f, known, seen | {name}) for name in uses(function) - seen if name in known for f in known[name] if f is not function)


TREES = {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in FILES}
HELPERS: dict[str, list[ast.AST]] = {}
"""Functions of all files that are not tests, and classes."""
for _tree in TREES.values():
    for _name, _found in functions(_tree).items():
        if not _name.startswith("test_"):
            HELPERS.setdefault(_name, []).extend(_found)


@pytest.mark.parametrize("path", [p for p in FILES if p.name.startswith("test_")], ids=lambda p: str(p.relative_to(TESTS)))
def test_every_test_checks_something(path):
    idle = [
        f"{path.name}:{f.lineno} {name}"
        for name, found in functions(TREES[path]).items()
        for f in found
        if name.startswith("test_") and not checks(f, HELPERS)
    ]
    assert idle == []


def test_the_check_sees_what_it_should():
    idle = "def test_a(x):\n    y = f(x)\n    print(y)\n"
    busy = ["assert x", "with pytest.raises(ValueError): f()", "np.testing.assert_allclose(x, 1)", "helper(x)", "self.helper(x)", "explore(lambda: helper(1))"]
    known = functions(ast.parse("def helper(x):\n    other(x)\ndef other(x):\n    assert x\n    helper(x)\ndef f(x):\n    return x\ndef g():\n    raises(x)"))
    assert not checks(ast.parse(idle), {})
    assert not checks(ast.parse(idle), {"f": known["g"]})
    assert not functions(ast.parse("@pytest.fixture\ndef device():\n    assert 1"))
    for line in busy:
        assert checks(ast.parse(f"def test_b(x):\n    {line}\n"), known), line


def test_no_test_is_there_twice():
    """The second function of a name would hide the first."""
    for path, tree in TREES.items():
        for scope in [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]:
            names = [n.name for n in scope.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
            assert len(names) == len(set(names)), f"{path}: {sorted({n for n in names if names.count(n) > 1})}"


def test_no_assertion_is_always_true():
    """A tuple is true, and so is a text: `assert (x, "message")`."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                empty = isinstance(node.test, ast.Tuple) or (isinstance(node.test, ast.Constant) and bool(node.test.value))
                assert not empty, f"{path}:{node.lineno}"


def test_skips_say_why_the_machine_cannot():
    """A skip passes for a success: each depends on the system, or on what its package needs, never on luck."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.skip", "pytest.mark.skip", "pytest.mark.xfail", "pytest.xfail"):
                assert ast.unparse(node.func) == "pytest.skip", f"{path}:{node.lineno}: {ast.unparse(node)}"
                assert node.args, f"{path}:{node.lineno}"


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_the_suite_runs_in_the_background_too():
    """A shell starts jobs in the background with SIGINT ignored, and processes inherit that."""
    one = "tests/test_interrupts.py::test_other_threads_hold_nothing_back"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", one], cwd=TESTS.parent, capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert found.returncode == 0, found.stdout
