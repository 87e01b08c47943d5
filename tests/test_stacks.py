"""Stacks: what shaders and tests keep to so that every stack can run them, and the tool that runs them."""

import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tools import stacks
from tools.stacks import Driver, Family, NotAvailable, Outcome, Stack
from wgattn.gpu.shader import SHADERS

ROOT = Path(__file__).parent.parent


def functions(text: str) -> Iterator[tuple[str, str]]:
    """(name, body) of each function of a WGSL text but main."""
    text = re.sub(r"//[^\n]*", "", text)
    for head in re.finditer(r"\bfn (\w+)\(", text):
        depth, begin = 0, text.index("{", head.end())
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                break
        if head[1] != "main":
            yield head[1], text[begin + 1 : end]


@pytest.mark.parametrize("path", ["flash_rows", *sorted(p.stem for p in (SHADERS / "attention/parts").glob("mask_*.wgsl"))])
def test_what_is_called_for_each_score_has_no_branches(path):
    """Kernels call these for each of a tile's scores, and compilers inline them: with a return in the middle, SwiftShader took minutes."""
    for name, body in functions((SHADERS / f"attention/parts/{path}.wgsl").read_text(encoding="utf-8")):
        assert not re.search(r"\bif\b|&&|\|\|", body), f"{path}: {name} branches"


# ---- the tool: what it counts

HERE = Stack(os.environ.get("WGATTN_BACKEND") or "wgpu", "lavapipe", lambda: Driver({}), stacks.STACKS[0].lacks)
"""The stack of this run, whatever it is."""


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    """run_here(text) runs the tests of a text, with this project's conftest.py, as a stack does."""
    monkeypatch.setattr(stacks, "find_adapter", lambda stack, environment: "")

    def run(text: str, timeout_s: float = 120, limits: str = "") -> Outcome:
        path = tmp_path / "test_written.py"
        path.write_text("import os, pytest, time\nfrom tests.helpers import not_available\nfrom wgattn.errors import *\n" + text, encoding="utf-8")
        return stacks.run(HERE, timeout_s, ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "-p", "no:randomly", str(path)], limits)

    return run


MIXED = """
@pytest.mark.conformance(n=[1, 2, 3])
@pytest.mark.parametrize("n", range(5))
def test_numbers(device, n): assert n != 2, "two is wrong"
@pytest.mark.conformance
def test_known(): not_available("cpu0 is a CPU, so this is not here")
@pytest.mark.conformance
def test_unknown(): not_available("of the weather")
@pytest.mark.conformance
def test_untyped(): pytest.skip("just so")
@pytest.mark.conformance
@pytest.mark.slow
def test_slow(): assert False
def test_other(): assert False
"""


def test_what_a_run_found(run_here):
    """Passed, failed, not available for a reason that is known of the stack; any other reason, and any other skip, is a failure."""
    outcome = run_here(MIXED)
    assert not outcome.missing
    assert not outcome.error
    (name,) = outcome.families
    family = outcome.families[name]
    assert (family.passed, family.failed, family.refused, family.not_available) == (2, 3, 0, {"cpu0 is a CPU, so this is not here": 1})
    told = {test.partition("::")[2]: message for test, message in outcome.failures}
    assert set(told) == {"test_numbers[2]", "test_unknown", "test_untyped"}
    assert "two is wrong" in told["test_numbers[2]"]
    assert "not known of wgpu+lavapipe: of the weather" in told["test_unknown"] or HERE.backend != "wgpu"
    assert "without a typed reason: just so" in told["test_untyped"]
    assert outcome.failed
    assert outcome.facts["device"]
    assert outcome.seconds > 0


def test_a_run_in_order(run_here):
    outcome = run_here("@pytest.mark.conformance\ndef test_it(record_property): record_property('family', 'of its own')")
    assert outcome.families == {"of its own": Family(passed=1)}
    assert not outcome.failed


@pytest.mark.parametrize(("body", "told"), [("os.abort()", "signal 6"), ("os._exit(0)", "exit code 0"), ("time.sleep(60)", "more than 20 s")])
def test_a_process_that_dies_or_hangs_is_a_failure_and_says_in_which_test(run_here, body, told):
    text = f"@pytest.mark.conformance\ndef test_first(): pass\n@pytest.mark.conformance\ndef test_bad(): {body}\n"
    outcome = run_here(text, 20)
    assert outcome.failed
    assert told in outcome.error
    assert "test_bad, after 1 of 2 tests" in outcome.error


@pytest.mark.parametrize("text", ["raise ValueError('broken')", "def test_nothing(): pass"])
def test_a_run_without_tests_is_a_failure(run_here, text):
    assert "after 0 of 0 tests" in run_here(text).error


LIMITED = """
@pytest.mark.conformance
def test_refused(device): raise CapacityError(f"That takes 2,000,000 bytes; {device.name} can bind {device.profile.max_binding}.")
@pytest.mark.conformance
def test_by_value(device): raise CapacityError("That takes 2,000,000 bytes; the device can bind 1,048,576.")
@pytest.mark.conformance
def test_feature(device): raise Unsupported("The kernel needs f16 operations.")
@pytest.mark.conformance
def test_other(device): raise CapacityError("That takes 2000000 bytes; the device can bind 10485760.")
@pytest.mark.conformance
def test_by_chance(device): raise CapacityError("There are 1048576 sheep.")
"""


def test_a_lowered_limit_may_be_refused_by_name(run_here):
    """By a typed error that holds the limit; any other is a failure."""
    outcome = run_here(LIMITED, limits="max-storage-buffer-binding-size=1048576 shader-f16=0")
    (family,) = outcome.families.values()
    assert (family.refused, family.failed) == (3, 2)
    assert [test.partition("::")[2] for test, _ in outcome.failures] == ["test_other", "test_by_chance"]
    assert outcome.refusals[2][1] == "shader-f16: The kernel needs f16 operations."
    assert outcome.facts["limits"] == {"max-storage-buffer-binding-size": 1 << 20, "shader-f16": 0}


# ---- the tool: which stacks there are


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\nimport os, pathlib, sys\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


APT = """
here = pathlib.Path(__file__).parent
with (here / "log").open("a") as log: print(sys.argv[1], file=log)
if "update" not in (here / "log").read_text(): sys.exit("E: no lists")
if sys.argv[1] == "download": pathlib.Path("chromium-common_1%3a2.3-4_amd64.deb").write_text("package")
"""
DPKG = """
folder = pathlib.Path(sys.argv[3], "usr/lib/chromium"); folder.mkdir(parents=True)
(folder / "vk_swiftshader_icd.json").write_text("{}")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="scripts of a Unix system")
def test_swiftshader_is_downloaded_once_and_unpacked(tmp_path, monkeypatch):
    bin = tmp_path / "bin"
    bin.mkdir()
    monkeypatch.setenv("PATH", str(bin))
    monkeypatch.setenv("WGATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotAvailable, match="apt-get is not here"):
        stacks.swiftshader()
    executable(bin / "apt-get", APT)
    executable(bin / "dpkg", DPKG)
    with pytest.raises(NotAvailable, match="apt-get download failed: E: no lists"):
        stacks.swiftshader()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with ThreadPoolExecutor(3) as pool:
        driver, *others = [future.result() for future in [pool.submit(stacks.swiftshader) for _ in range(3)]]
    assert others == [driver, driver]
    assert driver.version == "chromium-common 2.3-4"
    assert Path(driver.environment["VK_DRIVER_FILES"]).is_file()
    assert (bin / "log").read_text().split() == ["download", "download", "update", "download"]
    assert stacks.swiftshader() == driver
    assert len((bin / "log").read_text().split()) == 4
    assert [p.name for p in (tmp_path / "cache" / "swiftshader").iterdir()] == ["chromium-common_2.3-4"]


def test_lavapipe_is_found_by_its_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "ICD_FOLDERS", (str(tmp_path / "none"), str(tmp_path)))
    monkeypatch.setenv("VK_DRIVER_FILES", "/somewhere/nvidia_icd.json")
    with pytest.raises(NotAvailable, match="mesa-vulkan-drivers"):
        stacks.lavapipe()
    (tmp_path / "lvp_icd.x86_64.json").write_text("{}")
    (tmp_path / "radeon_icd.json").write_text("{}")
    assert stacks.lavapipe().environment["VK_DRIVER_FILES"] == str(tmp_path / "lvp_icd.x86_64.json")


def test_a_stack_needs_its_backend_and_an_adapter_of_its_kind(monkeypatch, tmp_path):
    environment = dict(os.environ)
    kind = stacks.find_adapter
    software = Stack("wgpu", "lavapipe", lambda: Driver({}))
    nothing = tmp_path / "nothing_icd.json"
    nothing.write_text("{}")
    with pytest.raises(NotAvailable, match="no software adapter was found; there is none"):
        kind(software, {**environment, "WGATTN_BACKEND": "wgpu", "VK_DRIVER_FILES": str(nothing), "VK_ICD_FILENAMES": str(nothing)})
    blocked = tmp_path / "wgpudawn.py"
    blocked.write_text("raise ImportError('blocked')")
    with pytest.raises(NotAvailable, match="wgpudawn is not installed"):
        kind(Stack("dawn", "gpu", lambda: Driver({})), {**environment, "WGATTN_BACKEND": "dawn", "PYTHONPATH": str(tmp_path)})


# ---- the tool: what it prints and keeps


def outcome_of(stack: str, device: str = "Card", **more) -> Outcome:
    families = {"attention": Family(passed=7, failed=1, not_available={"no f16": 2}), "block/linear": Family(passed=5)}
    facts = {"backend": "wgpu 1.0", "device": device, "driver": "driver 3.1"}
    return Outcome(**{"stack": stack, "date": "2030-01-02", "facts": facts, "families": families, "failures": [("test_x", "wrong")], **more})


def test_results_survive_being_saved(tmp_path):
    outcomes = [outcome_of("wgpu+lavapipe"), Outcome("dawn+gpu", "2030-01-02", missing="no GPU")]
    stacks.save(tmp_path / "a.json", outcomes)
    assert stacks.load(tmp_path / "a.json") == outcomes


def test_merging_keeps_the_newer_of_each_stack_and_device():
    gone = Outcome("wgpu+gpu", "2030-01-01", missing="no GPU")
    never = Outcome("dawn+gpu", "2030-01-01", missing="no GPU")
    first, other, again = outcome_of("wgpu+gpu"), outcome_of("wgpu+gpu", "Another"), outcome_of("wgpu+gpu", seconds=3.0)
    lavapipe = outcome_of("wgpu+lavapipe")
    assert stacks.merged([gone, never, first], [other, again, lavapipe]) == [lavapipe, other, again, never]
    assert stacks.merged([first], [gone]) == [first]


def test_the_readmes_rows():
    table = stacks.readme_table([outcome_of("wgpu+lavapipe"), Outcome("dawn+gpu", "2030-01-03", missing="no GPU"), outcome_of("dawn+gpu", error="crash")])
    assert table.splitlines()[2:] == [
        "| wgpu 1.0 + lavapipe | Card, driver 3.1 | 2030-01-02 | 13 | 1 | 2 |",
        "| dawn + gpu | | 2030-01-03 | not run: no GPU | | |",
        "| wgpu 1.0 + gpu | Card, driver 3.1 | 2030-01-02 | not to the end | 1 | 2 |",
    ]
    text = f"a\n{stacks.BEGIN}old\n{stacks.END}b\n"
    assert stacks.with_table(text, "| new |\n") == f"a\n{stacks.BEGIN}\n| new |\n\n{stacks.END}b\n"
    with pytest.raises(SystemExit):
        stacks.with_table("a\nb\n", "")


def test_the_readmes_table_is_that_of_the_results():
    text = stacks.README.read_text(encoding="utf-8")
    assert stacks.with_table(text, stacks.readme_table(stacks.load(stacks.RESULTS))) == text, "run: python tools/stacks.py --merge"


@pytest.mark.parametrize(("outcomes", "options", "code"), [
    ([Family(passed=1)], [], 0),
    ([Family(passed=1, failed=1)], [], 1),
    ([None], [], 0),
    ([None], ["--require"], 1),
])  # fmt: skip
def test_exit_codes_and_json(monkeypatch, tmp_path, capsys, outcomes, options, code):
    def run(stack, timeout_s, pytest_options, limits):
        (family,) = outcomes
        if family is None:
            return Outcome(stack.name, "2030-01-01", missing="no GPU")
        failures = [("test_x", "wrong")] * family.failed
        return outcome_of(stack.name, families={"attention": family}, failures=failures)

    monkeypatch.setattr(stacks, "run", run)
    assert stacks.main(["--stack", "wgpu+gpu", "--json", str(tmp_path / "out.json"), *options]) == code
    printed = capsys.readouterr().out
    assert ("no GPU" if outcomes == [None] else "attention") in printed
    assert [o["stack"] for o in json.loads((tmp_path / "out.json").read_text())["stacks"]] == ["wgpu+gpu"]
    if code and outcomes != [None]:
        assert "test_x" in printed
        assert "wrong" in printed
