"""`wgattn selftest`: that it passes, and that it finds kernels which are wrong, leave something out, or do not compile. And the cases it is made of."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wgattn import cli
from wgattn.cases import FAMILIES
from wgattn.cases.attention import MERGE
from wgattn.cases.block import NORM
from wgattn.cases.family import Family, Result, compare, cover
from wgattn.cases.llm import MODEL, SAMPLING
from wgattn.commands import selftest
from wgattn.errors import DeviceError, Unsupported
from wgattn.gpu import shader
from wgattn.gpu.paper import PROFILES, PaperDevice

QUICK = "MLP Q4_0 1"
ROW = {"name", "status", "kernels", "cases", "worst_error", "allowed_error", "ms", "failures", "not_available"}


@pytest.fixture
def run(capsys):
    """Runs the command in this process: (exit code, stdout)."""

    def call(*words):
        code = cli.main(["selftest", *map(str, words)])
        out, err = capsys.readouterr()
        assert err == ""
        return code, out

    return call


@pytest.fixture
def report(run):
    """`wgattn selftest --json`: (exit code, the object, its rows by name)."""

    def call(*words):
        code, out = run("--json", *words)
        found = json.loads(out)
        return code, found, {row["name"]: row for row in found["rows"]}

    return call


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """broken(path, old, new): from here on, that shader reads otherwise."""
    folder = tmp_path / "shaders"
    shutil.copytree(shader.SHADERS, folder)
    monkeypatch.setattr(shader, "SHADERS", folder)

    def change(path, old, new):
        file = folder / f"{path}.wgsl"
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new), encoding="utf-8")
        shader._read.cache_clear()

    yield change
    shader._read.cache_clear()


# ---- the command


def test_what_passes(report, device):
    code, found, rows = report("--only", QUICK, "--seed", 5)
    assert code == 0
    assert found["passed"] is True
    assert found["seed"] == 5
    assert found["device"] == device.name
    assert list(rows) == ["MLP Q4_0 1 token"]
    (row,) = rows.values()
    assert row.keys() == ROW
    assert row["status"] == "pass"
    assert row["cases"] == 2
    assert 0 < row["worst_error"] < row["allowed_error"] < 1e-3
    assert row["failures"] == []
    assert any(kernel.startswith("block/linear") for kernel in row["kernels"])


def test_numbers_are_fresh_unless_the_seed_is_given(report):
    worst = [report("--only", QUICK, *words)[2]["MLP Q4_0 1 token"]["worst_error"] for words in ((), (), ("--seed", 1), ("--seed", 1))]
    assert worst[0] != worst[1]
    assert worst[2] == worst[3]


def test_a_row_has_the_same_numbers_alone_and_among_others(report):
    alone = report("--only", QUICK, "--seed", 1)[2]["MLP Q4_0 1 token"]
    among = report("--only", "MLP Q4_0", "--seed", 1)[2]["MLP Q4_0 1 token"]
    assert alone["worst_error"] == among["worst_error"]


def test_plain_lines(run):
    code, out = run("--only", QUICK, "--seed", 3)
    assert code == 0
    row, summary = out.splitlines()
    assert re.fullmatch(r"pass +MLP Q4_0 1 token +2 cases +error \S+e-\d+ of \S+e-\d+ +\d+ ms", row)
    assert re.fullmatch(r"1 passed: 2 cases on .+ \(\w+\), [\d.]+ s, seed 3", summary)


def test_a_table_on_a_terminal(broken, monkeypatch, capsys):
    broken("attention/merge", "out_store(row * VALUE_DIM, c, v);", "if (row != 3u) { out_store(row * VALUE_DIM, c, v); }")
    monkeypatch.setattr(selftest, "FAMILIES", (MERGE, NORM))
    monkeypatch.setattr(selftest, "Console", partial(selftest.Console, force_terminal=True, color_system=None, width=120))
    code = cli.main(["selftest", "--seed", "4"])
    out, err = capsys.readouterr()
    assert code == 1
    assert "Self-test of" in out
    for name, status in (("merge_state", "fail"), ("rms_norm", "pass")):
        assert re.search(rf"│ {name} .*│ {status} +│\n", out), out
    assert "is nan, should be" in out
    assert "1 passed, 1 failed: 5 cases" in out
    assert "rms_norm" in err  # the progress bar


def test_nothing_to_test_is_no_success(run):
    code, out = run("--only", "no such row")
    assert code == 1
    assert out.startswith("nothing to test")


def test_help_has_an_example(run):
    code, out = run("--help")
    assert code == 0
    assert "example:\n  wgattn selftest\n" in out


@pytest.mark.slow
def test_all_of_it(report):
    """Every line passes on this device, or says what the device lacks. The driver compiles for minutes when it sees these shaders for the first time."""
    code, _, rows = report()
    assert code == 0, [row for row in rows.values() if row["failures"]]
    assert {row["status"] for row in rows.values()} <= {"pass", "not available"}
    assert len(rows) > 60
    assert all(reason.strip() for row in rows.values() for reason in row["not_available"])


# ---- that it can fail


def test_a_wrong_kernel_fails(broken, report):
    broken("block/parts/scales_d", "-f32(ZERO) * d", "f32(ZERO) * d")
    code, found, rows = report("--only", "0 1 token", "--seed", 9)
    assert code == 1
    assert found["passed"] is False
    assert {name: row["status"] for name, row in rows.items()} == {
        "MLP Q8_0 1 token": "pass",  # its codes have no zero point
        "MLP Q4_0 1 token": "fail",
        "MLP Q5_0 1 token": "fail",
    }
    failure = rows["MLP Q4_0 1 token"]["failures"][0]
    assert failure["parameters"]["weights"] == "Q4_0"
    assert failure["error"] > failure["allowed"]
    assert "should be" in failure["what"]


def test_what_a_failing_case_prints(broken, run):
    broken("block/parts/scales_d", "-f32(ZERO) * d", "f32(ZERO) * d")
    code, out = run("--only", QUICK, "--seed", 9)
    assert code == 1
    assert out.startswith("fail ")
    assert re.search(r"\n    y\(\d+, \d+\) is \S+, should be \S+\n    in weights=Q4_0, tokens=1 token, mixed=False, bias=False\n", out)
    assert "1 failed: 2 cases" in out


def test_an_output_that_is_not_written_fails(broken, report):
    """Memory is full of NaN before."""
    broken("attention/merge", "out_store(row * VALUE_DIM, c, v);", "if (row != 3u) { out_store(row * VALUE_DIM, c, v); }")
    code, _, rows = report("--only", "merge_state")
    assert code == 1
    failures = rows["merge_state"]["failures"]
    assert all("is nan" in f["what"] and f["error"] is None for f in failures)  # JSON has no infinities
    assert len(failures) == rows["merge_state"]["cases"]


def test_a_kernel_that_does_not_compile_fails_and_the_others_go_on(broken, report, monkeypatch):
    broken("attention/merge", "let row", "let let row")
    monkeypatch.setattr(selftest, "FAMILIES", (MERGE, NORM))
    code, _, rows = report()
    assert code == 1
    assert (rows["merge_state"]["status"], rows["rms_norm"]["status"]) == ("fail", "pass")
    assert re.search("DeviceError: .*attention/merge", rows["merge_state"]["failures"][0]["what"])


def test_a_wrong_choice_of_tokens_fails(broken, report, monkeypatch):
    """The search for the largest logit, at the end of a model's step."""
    broken("llm/argmax", "best_id[index] = ", "best_id[index] = 0u * ")
    monkeypatch.setattr(selftest, "FAMILIES", (replace(MODEL, axes={name: values[:1] for name, values in MODEL.axes.items()}),))
    code, _, rows = report()
    assert code == 1
    (failure,) = rows["model"]["failures"]
    assert failure["what"].startswith("best logit less that of the token chosen")


@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ("exponent(key) + noise(id)", "exponent(key)", "how often tokens were drawn"),
        ("goal = sampling.top_p", "goal = 0.999", "how often others than candidates were"),
    ],
)
def test_wrong_draws_fail(broken, report, monkeypatch, right, wrong, what):
    broken("llm/sample", right, wrong)
    monkeypatch.setattr(selftest, "FAMILIES", (replace(SAMPLING, axes={"vocab": (7,), "options": ((1.5, 0, True),)}),))
    code, _, rows = report()
    assert code == 1
    assert any(failure["what"].startswith(what) for failure in rows["sampling"]["failures"])


# ---- what a device cannot do


def test_what_is_not_available_says_why(report, monkeypatch):
    def some(device, rng, *, kind):
        if kind == "no":
            raise Unsupported("this device has no such thing.")
        yield Result("y", np.ones(1), lambda: np.ones(1), 1e-5)

    monkeypatch.setattr(selftest, "FAMILIES", (Family("some", {"kind": ("yes", "no")}, some), Family("none", {"kind": ("no",)}, some)))
    code, _, rows = report()
    assert code == 0
    assert (rows["some"]["status"], rows["some"]["cases"]) == ("pass", 1)
    assert rows["none"]["status"] == "not available"
    assert rows["some"]["not_available"] == rows["none"]["not_available"] == {"this device has no such thing.": 1}
    assert report("--only", "none")[0] == 1  # nothing was tested


def test_without_the_package_gguf(report, monkeypatch):
    """The reference of quantised weights needs it: they are not available then, and floats are not affected."""

    def missing(name, extra="gguf"):
        raise Unsupported("This needs the package gguf; run: pip install 'wgattn[gguf]'.")

    monkeypatch.setattr("wgattn.block.quant.load_extra", missing)
    code, _, rows = report("--only", QUICK)
    assert code == 1
    assert list(rows["MLP Q4_0 1 token"]["not_available"]) == ["This needs the package gguf; run: pip install 'wgattn[gguf]'."]


def test_no_adapter(run, monkeypatch, capsys):
    monkeypatch.setattr("wgattn.gpu.webgpu.pick_adapter", lambda backend, wanted: (_ for _ in ()).throw(DeviceError("No adapter here.")))
    assert cli.main(["selftest"]) == 1
    assert capsys.readouterr().err == "wgattn: No adapter here.\n"


def test_as_a_program():
    done = subprocess.run([sys.executable, "-m", "wgattn", "selftest", "--only", "merge_state"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pass ")


# ---- the cases


def test_memory_is_poisoned():
    device = selftest.PoisonedDevice()
    for dtype in (np.float32, np.float16):
        assert np.isnan(device.empty((7,), dtype).numpy()).all()


def test_rows_have_their_own_names():
    names = [name for family in FAMILIES for name, _ in selftest.rows_of(family)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_every_value_of_every_axis_occurs(family):
    cases = family.cases()
    assert {(name, value) for case in cases for name, value in case.items()} == {(n, v) for n, values in family.axes.items() for v in values}
    assert len(cases) == sum(len(choices) for _, choices in selftest.rows_of(family))
    texts = list(itertools.islice(family.texts(), 2000))
    assert all(case.keys() == family.axes.keys() for case in texts)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 3))
def test_cover_has_every_combination(sizes, strength):
    axes = {str(i): range(n) for i, n in enumerate(sizes)}
    cases = cover(axes, strength)
    for names in itertools.combinations(axes, min(strength, len(axes))):
        assert {tuple(case[n] for n in names) for case in cases} == set(itertools.product(*(axes[n] for n in names)))
    assert len(cases) <= math.prod(sizes)


def result(got, expected, **close):
    return compare(Result("y", np.asarray(got, np.float64), lambda: np.asarray(expected, np.float64), **close))


def test_comparison():
    assert result([1.0, 2.0], [1.0, 2.5], absolute=1.0).share == pytest.approx(0.5)
    assert result([1.0, 2.0], [1.0, 2.5], absolute=0.1, relative=0.2).share == pytest.approx(0.5 / 0.6)
    assert "y(1,) is 2, should be 2.5" in result([1.0, 2.0], [1.0, 2.5], absolute=1.0).where
    assert result([-np.inf, 1], [-np.inf, 1], absolute=0.1).share == 0
    for got, expected in (([np.nan], [0]), ([np.nan], [np.nan]), ([np.inf], [1]), ([1], [-np.inf]), ([np.inf], [-np.inf]), ([0], [np.nan])):
        assert result(got, expected, absolute=9e9, relative=9e9).share == math.inf, (got, expected)
        assert result(got, expected, nmse=9e9).share == math.inf or np.isinf(expected).any(), (got, expected)
    assert result([1.0, 2.0], [1.0], absolute=1.0).share == math.inf
    assert result([], [], absolute=1.0).share == 0
    assert result([1.0, 2.1], [1.0, 2.0], nmse=1e-3).error == pytest.approx(0.01 / 5)
    assert result([1.0], [1.0], absolute=0.0).share == 0
    assert result([1.0], [1.5], absolute=0.0).share == math.inf


# ---- a device on paper


@pytest.mark.parametrize("profile", PROFILES)
def test_paper_lists_what_a_device_would_use(profile):
    device = PaperDevice(PROFILES[profile])
    family = next(f for f in FAMILIES if f.name == "merge_state")
    for case in family.cases():
        list(family.run(device, np.random.default_rng(0), **case))
    assert {source.name for source in device.sources} == {"attention/merge"}
    assert len(device.sources) == len({source.text for source in device.sources}) > 1
    with pytest.raises(Exception, match="buffers missing"):
        device.kernel("parts/pack_f16", WORKGROUP=64).bind({})


def test_paper_and_device_use_the_same_kernels(device):
    """What is recorded on paper with a device's profile is what the device compiles."""
    paper, real = PaperDevice(device.profile), selftest.PoisonedDevice()
    for family in FAMILIES:
        if family.name in ("merge_state", "rms_norm", "MLP"):
            for case in family.cases()[:6]:
                for one in (paper, real):
                    list(family.run(one, np.random.default_rng(0), **case))
    directives = real.backend.directives
    assert {s.under(directives) for s in paper.sources} == {k.source.text for k in real._kernels.values()}
