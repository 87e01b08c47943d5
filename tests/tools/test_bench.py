"""The command `wgattn bench`: what it refuses, what it writes and when, how it compares, and how one leaves it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from wgattn import cli
from wgattn.bench import keys
from wgattn.bench import run as run_module
from wgattn.bench.ceilings import counting
from wgattn.bench.records import SECTIONS, Bench, Case, Error, Missing, Row, Work
from wgattn.bench.report import Report, read_baseline
from wgattn.errors import DeviceError


@pytest.fixture
def run(capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def call(*words):
        code = cli.main(["bench", *map(str, words)])
        return code, *capsys.readouterr()

    return call


def one_sentence(text):
    return text.startswith(("wgattn bench: ", "wgattn: ")) and text.endswith("\n") and text.count("\n") == 1 and "Traceback" not in text


def counted(problem, *, count=3, section="gemm", error=1e-7, before=lambda: None, **work):
    """A case that takes no time: some dispatches that count."""

    def build(bench):
        before()
        recording, _ = counting(bench, count)
        return Work([recording], **({"flops": 1e6, "nbytes": 1e6, "ceiling": "copy", "check": lambda: Error(error, error, 1e-5)} | work))

    return Case(section, problem, "exact", build)


@pytest.fixture
def plan(monkeypatch):
    """Puts other cases in place of the real ones: the ceiling, and these."""
    ceiling = Case("ceilings", "copy bandwidth", "copy", lambda b: Work([counting(b, 2)[0]], nbytes=1e9, best=True))

    def use(*cases):
        found = {name: lambda b, n=name: [ceiling] if n == "ceilings" else [c for c in cases if c.section == n] for name in SECTIONS}
        monkeypatch.setattr(run_module, "_CASES", found)
        monkeypatch.setattr(Bench, "seconds", 0.01)

    return use


# ---- what is refused


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--only", "gemm,foo"], ["'foo'", "prefill"]),
        (["--only", ""], ["ceilings"]),
        (["--gate"], ["--baseline"]),
        (["--depth", "5"], ["--profile"]),
        (["--depth", "-1", "--profile", "generate"], ["whole number"]),
        (["--profile", "decode"], ["generate"]),
        (["--profile", "generate", "--only", "gemm"], ["--only"]),
        (["--profile", "generate", "--baseline", "b.json"], ["--baseline"]),
        (["--only", "gemm", "--model", "smollm2"], ["--model", "gemm"]),
        (["--json", "no/such/folder/x.json"], ["no/such/folder"]),
        (["--svg", "."], ["regular file"]),
        (["--json", "x", "--svg", "x"], ["same file"]),
        (["--json", "b.json", "--baseline", "b.json"], ["same file"]),
        (["--baseline", "none.json"], ["none.json"]),
        (["--fast"], ["--fast"]),
        (["--qui"], ["--qui"]),
        (["gemm"], ["gemm"]),
    ],
)
def test_bad_usage_is_one_sentence_before_any_work(run, tmp_path, monkeypatch, words, names):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("wgattn.commands.bench.Device", None)
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert one_sentence(err)
    assert all(name in err for name in names), err
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def test_a_folder_that_cannot_be_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr("wgattn.commands.bench.Device", None)

    def refuse(**how):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("wgattn.commands.bench.tempfile.TemporaryFile", refuse)  # root may write everywhere
    for option in ("--json", "--svg"):
        code, _, err = run(option, tmp_path / "x")
        assert code == 2
        assert one_sentence(err)
        assert "Permission denied" in err


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"rows": []}', '{"format": 99, "rows": []}', "{"])
def test_what_is_no_baseline(run, tmp_path, monkeypatch, content):
    monkeypatch.setattr("wgattn.commands.bench.Device", None)
    path = tmp_path / "b.json"
    path.write_text(content)
    code, _, err = run("--baseline", path)
    assert code == 2
    assert one_sentence(err)
    assert "b.json" in err
    assert path.read_text() == content


def test_a_missing_model_is_told_before_anything_is_measured(run, tmp_path, plan):
    plan(counted("a", section="model", before=lambda: pytest.fail("measured")))
    code, out, err = run("--model", tmp_path / "none.gguf", "--json", tmp_path / "x.json")
    assert (code, out) == (1, "")
    assert "none.gguf" in err
    assert not (tmp_path / "x.json").exists()


def test_help_has_an_example_for_every_option(run):
    code, out, _ = run("--help")
    assert code == 0
    text = " ".join(out.split())
    for option in ("--quick", "--only", "--json", "--svg", "--baseline", "--gate", "--model", "--profile", "--depth"):
        described = text[text.rindex(f" {option} ", 0, text.rindex("example:")) :] if f" {option} " in text else ""
        assert "example:" in described, option


# ---- what is written


def test_rows_are_lines_where_there_is_no_terminal(run, plan):
    plan(counted("first"), counted("second", section="decode"))
    code, out, err = run("--quick")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "\x1b" not in out
    assert "3 rows" in lines
    (first,) = [line for line in lines if line.startswith("gemm: first: exact: ")]
    for what in (" host ", "B/s", "% of copy bandwidth", "error 1.0e-07", "±"):
        assert what in first


def test_the_file_has_all_that_was_measured(run, plan, tmp_path):
    plan(counted("first", facts={"dispatches": 3}), counted("second", section="decode", working_set=1 << 10))
    path, picture = tmp_path / "x.json", tmp_path / "x.svg"
    code, _, _ = run("--quick", "--json", path, "--svg", picture)
    assert code == 0
    found = json.loads(path.read_text())
    assert found["state"] == "complete"
    assert found["options"] == {"quick": True, "only": None, "model": "auto"}
    assert found["clock"] in ("timestamps", "wall")
    assert found["ceilings"].keys() == {"copy"}
    first = found["rows"][1]
    assert (first["section"], first["problem"], first["variant"], first["facts"]) == ("gemm", "first", "exact", {"dispatches": 3})
    assert first["seconds"] > 0
    assert first["share"] == pytest.approx(first["rate"] / found["ceilings"]["copy"])
    assert first["rate"] == pytest.approx(1e6 / first["seconds"])
    assert (first["in_cache"], found["rows"][2]["in_cache"]) == (False, True)
    assert picture.read_text().startswith("<svg")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.json", "x.svg"]


def test_only_some_sections(run, plan):
    plan(counted("first"), counted("second", section="decode", before=lambda: pytest.fail("measured")))
    code, out, _ = run("--only", "gemm")
    assert code == 0
    assert "second" not in out


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("size", ["cpu", "small", "large"])
def test_real_plans_have_each_row_once(device, monkeypatch, size, quick):
    monkeypatch.setattr(Bench, "size", size)
    cases = run_module.plan(Bench(device, quick=quick))
    assert len({case.key for case in cases}) == len(cases)
    assert {case.section for case in cases} == set(SECTIONS)
    assert max(len(case.problem) for case in cases) <= 20, "the table's column has 21, with a mark"


def test_what_the_device_lacks_and_what_fails(run, plan, tmp_path):
    def lacks(bench):
        raise Missing("there are no matrix units")

    def fails(bench):
        raise DeviceError("the device is lost\nand more")

    plan(Case("gemm", "a", "exact", lacks), counted("b"))
    code, out, _ = run("--json", tmp_path / "x.json")
    assert code == 0
    assert "gemm: a: exact: none: there are no matrix units" in out
    plan(Case("gemm", "a", "exact", fails), counted("b"))
    code, out, _ = run("--json", tmp_path / "x.json")
    assert code == 1
    assert "gemm: a: exact: failed: the device is lost" in out
    assert [row["failed"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]] == [False, True, False]


def test_a_wrong_result_is_an_error(run, plan):
    plan(counted("a", error=1e-3), counted("b"))
    code, out, _ = run()
    assert code == 1
    assert "WRONG" in out
    assert "1.0e-03" in out
    plan(counted("a", error=float("nan")))
    assert run()[0] == 1


# ---- against a baseline


def row(seconds, share=None, spread=0.01, **more):
    return Row("gemm", "a", "exact", seconds=seconds, spread=spread, share=share, **more)


def before(device, *rows, **about):
    return json.loads(json.dumps(Report.of(Bench(device), {}).json() | {"rows": [r.json() for r in rows]} | about))


@pytest.mark.parametrize(
    ("now", "then", "verdict"),
    [
        (row(1.0), row(1.0), "same"),
        (row(1.04), row(1.0), "same"),
        (row(1.2), row(1.0), "slower"),
        (row(0.8), row(1.0), "faster"),
        (row(1.2, spread=0.06), row(1.0, spread=0.05), "same"),  # within the noise
        (row(1.2, share=0.5), row(1.0, share=0.5), "same"),  # the machine was slower
        (row(1.2, share=0.4), row(1.0, share=0.5), "slower"),
        (row(1.0, share=0.4), row(1.0, share=0.5), "same"),  # the ceiling was higher
        (row(0.8, share=0.6), row(1.0, share=0.5), "faster"),
    ],
)
def test_a_change_is_told_from_noise(device, now, then, verdict):
    report = Report.of(Bench(device), {}, before(device, then))
    assert report.compare(now) == verdict
    report.rows.append(now)
    assert now.change["verdict"] == verdict
    assert report.slower == ([now] if verdict == "slower" else [])


def test_rows_that_cannot_be_compared(device):
    report = Report.of(Bench(device), {}, before(device, row(1.0, facts={"model": "a"}), Row("gemm", "b", "exact", missing="none")))
    for new in (row(2.0, facts={"model": "b"}), Row("gemm", "b", "exact", seconds=1.0), Row("gemm", "c", "exact", seconds=1.0)):
        assert report.compare(new) is None
        assert new.change is None


def test_the_gate(run, plan, tmp_path, monkeypatch):
    seconds = {"copy bandwidth": 1.0, "a": 2.0, "b": 3.0}

    def row_of(bench, case):
        took = seconds[case.problem]
        return Row(case.section, case.problem, case.variant, seconds=took, spread=0.01, ceiling="copy", share=1 / took)

    monkeypatch.setattr(run_module, "row_of", row_of)
    path = tmp_path / "before.json"
    plan(counted("a"), counted("b"))
    assert run("--json", path)[0] == 0
    assert run("--baseline", path, "--gate")[0] == 0
    seconds |= {"copy bandwidth": 9.0, "a": 2.5, "b": 2.0}
    code, out, err = run("--baseline", path, "--gate", "--json", tmp_path / "after.json")
    assert (code, err) == (1, "")
    assert "1 slower, 1 faster, 0 the same" in out
    assert "slower  gemm: a: exact: 1.25 times as long" in out
    assert [r["change"] and r["change"]["verdict"] for r in json.loads((tmp_path / "after.json").read_text())["rows"]] == [None, "slower", "faster"]
    assert run("--baseline", path)[0] == 0, "without --gate"


def test_what_looks_slower_is_measured_again(run, plan, tmp_path, monkeypatch):
    found = {"copy bandwidth": iter([1.0] * 9), "a": iter([1.0, 3.0, 2.0, 1.01, 9.0]), "b": iter([1.0, 3.0, 2.0, 4.0, 2.5, 1.0])}

    def row_of(bench, case):
        return Row(case.section, case.problem, case.variant, seconds=next(found[case.problem]), spread=0.01)

    monkeypatch.setattr(run_module, "row_of", row_of)
    plan(counted("a"), counted("b"))
    path, after = tmp_path / "before.json", tmp_path / "after.json"
    run("--json", path)
    assert run("--baseline", path, "--gate", "--json", after)[0] == 1
    assert [(r["seconds"], r["change"]["verdict"]) for r in json.loads(after.read_text())["rows"][1:]] == [(1.01, "same"), (2.0, "slower")]
    assert [next(found["a"]), next(found["b"])] == [9.0, 1.0], "three times at most"


def test_baselines_of_something_else(run, plan, device, tmp_path):
    plan(counted("a"))
    path = tmp_path / "b.json"
    other_row = Row("gemm", "z", "exact", seconds=1.0)
    for content, word in ((before(device, row(1.0), adapter="Another GPU"), "Another GPU"), (before(device, other_row), "none of the rows")):
        path.write_text(json.dumps(content))
        code, out, err = run("--baseline", path, "--json", tmp_path / "x.json")
        assert (code, out) == (2, "")
        assert one_sentence(err)
        assert word in err
        assert not (tmp_path / "x.json").exists()


# ---- leaving early


def test_an_interruption_keeps_what_is_done(run, plan, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    path, picture = tmp_path / "x.json", tmp_path / "x.svg"
    plan(counted("a"), counted("b", before=interrupt), counted("c"))
    code, out, _ = run("--json", path, "--svg", picture)
    assert code == 130
    assert "Left early" in out
    found = json.loads(path.read_text())
    assert found["state"] == "interrupted"
    assert [r["problem"] for r in found["rows"]] == ["copy bandwidth", "a"]
    assert "Left" in picture.read_text()


def test_a_run_that_ends_by_a_fault_says_so(run, plan, tmp_path):
    def fault():
        raise ZeroDivisionError

    path = tmp_path / "x.json"
    plan(counted("a"), counted("b", before=fault))
    with pytest.raises(ZeroDivisionError):
        run("--json", path)
    found = json.loads(path.read_text())
    assert (found["state"], len(found["rows"])) == ("failed", 2)


def test_the_file_is_valid_after_each_row_and_before_the_first(run, plan, tmp_path):
    path, seen = tmp_path / "x.json", []
    look = lambda: seen.append([r["problem"] for r in json.loads(path.read_text())["rows"]])  # noqa: E731
    plan(counted("a", before=look), counted("b", before=look))
    run("--json", path)
    assert seen == [["copy bandwidth"], ["copy bandwidth", "a"]]


@pytest.mark.parametrize("where", ["fdopen", "replace"])
def test_an_interruption_while_the_file_is_written(device, tmp_path, monkeypatch, where):
    path, report = tmp_path / "x.json", Report.of(Bench(device), {})
    report.save(path)
    report.rows.append(row(1.0))

    def interrupt(*args, **how):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            report.save(path)
    assert read_baseline(path)["rows"] == []
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def wait_for_rows(process, path, count):
    """Until the file has so many rows; every state of it that is seen is valid."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and len(json.loads(path.read_text())["rows"]) >= count:
            return
        time.sleep(0.02)
    pytest.fail(f"no {count} rows: {process.poll()}")


def start(path):
    command = [sys.executable, "-m", "wgattn", "bench", "--quick", "--only", "decode", "--json", str(path)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c(tmp_path):
    path = tmp_path / "x.json"
    process = start(path)
    wait_for_rows(process, path, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "Left early" in out
    found = json.loads(path.read_text())
    assert found["state"] == "interrupted"
    assert len(found["rows"]) >= 2


@pytest.mark.slow
def test_being_killed_at_any_moment_leaves_a_valid_file(tmp_path):
    rng = np.random.default_rng()
    for i in range(6):
        path = tmp_path / f"{i}.json"
        process = start(path)
        wait_for_rows(process, path, 0)
        time.sleep(rng.uniform(0, 3))
        process.kill()
        process.communicate()
        assert json.loads(path.read_text())["state"] == "running"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no terminals of this kind on Windows")
def test_q_leaves_a_terminal_as_it_was(tmp_path):
    import pty
    import termios

    path = tmp_path / "x.json"
    pid, terminal = pty.fork()
    if not pid:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-m", "wgattn", "bench", "--quick", "--only", "decode", "--json", str(path)])
    before, shown, end, typed = termios.tcgetattr(terminal), b"", time.monotonic() + 120, False
    os.set_blocking(terminal, False)
    while time.monotonic() < end:
        try:
            part = os.read(terminal, 65536)
            if not part:
                break
            shown += part
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # the other side has closed
            break
        if not typed and path.exists() and len(json.loads(path.read_text())["rows"]) >= 2:
            os.write(terminal, b"q")
            typed = True
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    text = shown.decode()
    assert "q leaves" in text
    assert "Left early" in text
    assert "Traceback" not in text
    assert json.loads(path.read_text())["state"] == "interrupted"
    assert before[3] & termios.ICANON
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)


def test_an_interrupt_that_is_lost_is_made_again(monkeypatch):
    made, done = [], threading.Event()
    monkeypatch.setattr(keys._thread, "interrupt_main", lambda: made.append(1) or (len(made) == 3 and done.set()))
    monkeypatch.setattr(keys, "_AGAIN", 0.01)
    reading, writing = os.pipe()
    os.write(writing, b"xQ")
    keys._read(reading, done)
    assert len(made) == 3
    for file in (reading, writing):
        os.close(file)


# ---- where its files are


def test_the_modules_are_those_of_the_checkout():
    root = Path(__file__).parents[2]
    assert Path(run_module.__file__).parent == root / "tools" / "bench"
