"""The commands: what they print, where, and with which exit code. And the README's examples."""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import wgattn
from tests.llm.make_gguf import write_llama_gguf
from wgattn import cli
from wgattn.attention.problem import Problem
from wgattn.commands import generate as generate_command
from wgattn.commands import info as info_command
from wgattn.gpu import webgpu
from wgattn.llm.llama import Llama
from wgattn.llm.loop import DecodeLoop

README = Path(__file__).parent.parent / "README.md"
PROMPT = "the quick brown fox"
END = 2  # make_gguf's end token
BYTE = 3  # its token for byte 0
KEYS = {"prompt_ids", "ids", "text", "stop_reason", "timings", "dispatches_per_token", "adapter", "backend", "model", "versions"}
TIMINGS = {"load_s", "warmup_s", "prompt_s", "decode_s", "prompt_tok_s", "decode_tok_s"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model file that loads and runs in no time; what it writes is noise."""
    path = tmp_path_factory.mktemp("cli") / "tiny.gguf"
    write_llama_gguf(path, layers=2, dim=64, heads=4, kv_heads=2, ffn=96, vocab=300, tied=False, seed=5)
    return path


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """A model that repeats one letter for ever: whatever token it is fed, its tied output favours that token."""
    path = tmp_path_factory.mktemp("cli") / "steady.gguf"
    write_llama_gguf(path, layers=1, dim=64, heads=4, kv_heads=2, ffn=96, vocab=300, seed=5)
    return path


@pytest.fixture(scope="module")
def model(tiny):
    return Llama.from_gguf(tiny, capacity=512)


@pytest.fixture
def run(capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def call(*words):
        code = cli.main([str(w) for w in words])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def generate(run, tiny):
    """`wgattn generate --json` on the tiny model: the object."""

    def call(*words, code=0):
        got, out, err = run("generate", "--model", tiny, "--json", *words)
        assert (got, err) == (code, "")
        return json.loads(out)

    return call


def saying(tokens, then=None):
    """In place of `DecodeLoop.run`: yields these tokens, then raises."""

    def run(self, begin, length, count, done, options=None):
        for i, token in zip(range(count), tokens, strict=False):
            done(length + i)
            yield token
        if then is not None:
            raise then

    return run


@pytest.fixture
def forced(monkeypatch):
    """Makes the model say these tokens; the rest of it works as ever."""

    def force(tokens):
        monkeypatch.setattr(DecodeLoop, "run", saying(tokens))

    return force


def spawn(*words, **how):
    env = os.environ | {"TERM": "xterm-256color"}
    return subprocess.Popen([sys.executable, "-m", "wgattn", *map(str, words)], stdin=subprocess.DEVNULL, env=env, **how)


def one_sentence(text):
    return text.endswith("\n") and text.count("\n") == 1 and "Traceback" not in text and len(text) > 20


def parse(command):
    """Parse a command line from a text, as a shell would take it apart."""
    words = shlex.split(command.split(" < ")[0], comments=True)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            return cli._parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{command}: {said.getvalue()}")


# ---- generate


def test_json_holds_what_the_model_says(generate, model, tiny):
    report = generate("--logits", "--tokens", 9, "--ignore-eos", PROMPT)
    ids = model.tokenizer.encode(PROMPT)
    model.reset()
    logits = model.prefill(ids)
    model.reset()
    assert report.keys() == KEYS | {"top5"}
    assert report["prompt_ids"] == ids
    assert report["ids"] == list(model.generate(ids, 9, stop_ids=()))
    assert len(set(report["ids"])) > 3  # a model that says one thing only would prove little
    assert report["text"] == model.tokenizer.decode(report["ids"])
    assert report["stop_reason"] == "length"
    assert report["dispatches_per_token"] == model.dispatches_per_token
    assert report["adapter"] in wgattn.list_adapters()
    assert report["backend"] == model.device.backend.name
    assert report["model"] == str(tiny)
    assert report["versions"]["wgattn"] == wgattn.__version__
    assert [i for i, _, _ in report["top5"]] == np.argsort(-logits)[:5].tolist()
    np.testing.assert_allclose([x for _, x, _ in report["top5"]], np.sort(logits)[:-6:-1], atol=1e-3)
    assert [text for _, _, text in report["top5"]] == [model.tokenizer.decode([i]) for i, _, _ in report["top5"]]


def test_timings_add_up(generate):
    begin = time.perf_counter()
    report = generate("--tokens", 5, "--ignore-eos", PROMPT)
    whole = time.perf_counter() - begin
    t = report["timings"]
    assert t.keys() == TIMINGS
    assert all(value > 0 for value in t.values())
    assert t["load_s"] + t["warmup_s"] + t["prompt_s"] + t["decode_s"] < whole
    assert t["prompt_tok_s"] == pytest.approx(len(report["prompt_ids"]) / t["prompt_s"])
    assert t["decode_tok_s"] == pytest.approx(4 / t["decode_s"])  # the first of 5 tokens comes from the prompt's step


def test_every_kind_of_step_runs_before_the_clock_starts(generate, monkeypatch):
    calls = []
    for name in ("warm_up", "generate"):
        original = getattr(Llama, name)
        monkeypatch.setattr(Llama, name, lambda self, *a, _name=name, _original=original, **k: (calls.append(_name), _original(self, *a, **k))[1])
    generate("--tokens", 2, "--ignore-eos", PROMPT)
    assert calls == ["warm_up", "generate"]


def test_text_goes_to_stdout_and_the_summary_to_stderr(run, generate, tiny):
    report = generate("--tokens", 6, "--ignore-eos", PROMPT)
    code, out, err = run("generate", "--model", tiny, "--tokens", 6, "--ignore-eos", PROMPT)
    assert code == 0
    assert out == report["text"].removesuffix("\n") + "\n"
    assert re.fullmatch(r"prompt \d+ tokens, [\d.]+ tok/s \| decode 6 tokens, [\d.]+ tok/s \| 12 dispatches per token \| .+\n", err)
    assert report["adapter"] in err


def test_text_is_printed_as_it_is_and_characters_only_when_whole(tiny, forced, monkeypatch):
    text = "é€😀 [bold]x[/bold] :smile: \\[" + "long " * 60 + "\n\n end\n"
    forced([BYTE + byte for byte in text.encode()])
    pieces = []

    class Stdout(io.StringIO):
        def write(self, piece):
            pieces.append(piece)
            return super().write(piece)

    monkeypatch.setattr(sys, "stdout", Stdout())
    assert cli.main(["generate", "--model", str(tiny), "--tokens", str(len(text.encode())), PROMPT]) == 0
    assert "".join(pieces) == text  # it ends a line, so nothing is added
    assert pieces == list(text)  # each token is a byte, and each write a character


def test_half_a_character_at_the_end_is_replaced(generate, run, tiny, forced):
    tokens = [BYTE + byte for byte in "a€".encode()[:-1]]
    forced(tokens)
    assert generate("--tokens", 3, PROMPT)["text"] == "a\ufffd"
    forced(tokens)
    assert run("generate", "--model", tiny, "--tokens", 3, PROMPT)[1] == "a\ufffd\n"


def test_sampling_options_reach_the_model(generate, model):
    options = {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "seed": 11}
    words = [w for name, value in options.items() for w in (f"--{name.replace('_', '-')}", value)]
    got = generate(*words, "--tokens", 12, "--ignore-eos", PROMPT)["ids"]
    ids = model.tokenizer.encode(PROMPT)

    def expected(**changed):
        model.reset()
        return list(model.generate(ids, 12, stop_ids=(), **options | changed))

    assert got == expected()
    for changed in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.01}, {"seed": 12}):
        assert got != expected(**changed), changed  # else the line above proves nothing for that option


@pytest.mark.parametrize(
    ("words", "tokens", "count", "reason"),
    [
        (["--tokens", 3], [65, 66, END], 2, "end"),
        (["--tokens", 3], [END], 0, "end"),
        (["--tokens", 2], [65, 66, END], 2, "length"),
        (["--tokens", 9, "--capacity", 6], [65, 66, 67, 68], 3, "capacity"),
        (["--tokens", 9, "--capacity", 6], [65, 66, END], 2, "end"),  # full, but the end came first
        (["--tokens", 9, "--capacity", 4], [65, 66], 1, "capacity"),
        (["--tokens", 3, "--capacity", 6], [65, 66, 67], 3, "length"),
        (["--tokens", 4, "--ignore-eos"], [65, END, END, 66], 4, "length"),
    ],
)
def test_stop_reason(generate, forced, words, tokens, count, reason):
    forced(tokens)
    report = generate(*words, "abcd")
    assert len(report["prompt_ids"]) == 4
    assert (report["ids"], report["stop_reason"]) == (tokens[:count], reason)
    assert (report["timings"]["decode_tok_s"] is None) == (count == 0 or (count == 1 and reason != "end"))


def test_a_full_cache_is_told(run, tiny, forced):
    forced([BYTE + 65] * 4)
    code, out, err = run("generate", "--model", tiny, "--capacity", 4, "abcd")
    assert (code, out) == (0, "A\n")
    assert "--capacity" in err


def test_chat_uses_the_models_template(generate, model):
    wrapped = model.tokenizer.render_chat([{"role": "user", "content": "hi there"}])
    assert "hi there" in wrapped != "hi there"
    assert generate("--chat", "--tokens", 1, "hi there")["prompt_ids"] == model.tokenizer.encode(wrapped)


@pytest.mark.parametrize(("data", "prompt"), [(b"caf\xc3\xa9\n", "café"), (b"two\n\n", "two\n"), (b" no end", " no end"), (b"dos\r\n", "dos")])
def test_prompt_from_stdin_less_its_last_line_end(generate, model, monkeypatch, data, prompt):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert generate("--tokens", 1, "-")["prompt_ids"] == model.tokenizer.encode(prompt)


def test_options_reach_the_model(generate, monkeypatch):
    made = []

    class Spy(Llama):
        def __init__(self, *args, **how):
            made.append((how["kv_dtype"], how["capacity"], how["arithmetic"], how["device"]))
            super().__init__(*args, **how)

    monkeypatch.setattr(generate_command, "Llama", Spy)
    generate("--tokens", 1, PROMPT)
    generate("--tokens", 1, "--kv-dtype", "f32", "--capacity", 77, "--arithmetic", "int8", PROMPT)
    assert [m[:3] for m in made] == [("f16", 512, "exact"), ("f32", 77, "int8")]
    assert made[0][3] is wgattn.default_device()


@pytest.mark.parametrize(("prompt", "tokens", "capacity"), [(5, 64, 512), (500, 12, 512), (500, 13, 768), (1000, 1, 1024)])
def test_default_capacity_has_room_for_all(prompt, tokens, capacity):
    args = cli._parser().parse_args(["generate", "--tokens", str(tokens), "x"])
    assert generate_command.capacity(args, prompt) == capacity


def test_device_options_reach_the_device(run, generate, monkeypatch):
    name = wgattn.list_adapters()[0]
    asked = []
    original = generate_command.Device
    monkeypatch.setattr(generate_command, "Device", lambda *args, **how: (asked.append((args, how)), original(*args, **how))[1])
    generate("--adapter", name, "--backend", "wgpu", "--checked", "--tokens", 1, PROMPT)
    assert asked == [((name, "wgpu"), {"checked": True})]


# ---- errors


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["generate"],
        ["generate", "a", "b"],
        ["generate", "--tokens", "0", "x"],
        ["generate", "--tokens", "many", "x"],
        ["generate", "--tok", "3", "x"],
        ["generate", "--temperature", "-1", "x"],
        ["generate", "--arithmetic", "float", "x"],
        ["generate", "--temperature", "nan", "x"],
        ["generate", "--temperature", "inf", "x"],
        ["generate", "--top-p", "0", "x"],
        ["generate", "--top-p", "1.5", "x"],
        ["generate", "--top-k", "-1", "x"],
        ["generate", "--seed", "-1", "x"],
        ["generate", "--capacity", "0", "x"],
        ["generate", "--kv-dtype", "f64", "x"],
        ["generate", "--backend", "cuda", "x"],
        ["generate", "--logits", "x"],
        ["info", "--tokens", "3"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_exit_code_2_and_one_sentence(run, words):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert one_sentence(err), err
    assert "--help" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "missing.gguf", "x"], "missing.gguf"),
        (["--model", README, "x"], "GGUF"),
        (["--adapter", "no such GPU", "x"], "no such GPU"),
        ([""], "no tokens"),
        (["--capacity", "3", "abcd"], "--capacity is 3"),
        (["\udc80"], "surrogate"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_error_is_exit_code_1_and_one_sentence(run, tiny, words, says, form):
    code, out, err = run("generate", *form, "--model", tiny, *words)
    assert (code, out) == (1, "")
    assert one_sentence(err), err
    assert says in err


def test_stdin_that_is_not_text(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    code, out, err = run("generate", "-")
    assert (code, out) == (1, "")
    assert one_sentence(err), err
    assert "byte 2" in err


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal that Windows does not have")
def test_ctrl_c_ends_with_what_there_is(steady):
    with spawn("generate", "--model", steady, "--tokens", 20000, "--ignore-eos", PROMPT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = process.stdout.read(1)  # it is under way
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first + out) > 1
    assert one_sentence(err.decode()), err
    assert err.endswith(b" | interrupted\n")


@pytest.mark.parametrize("tokens", [[], [70, 71, 72]])
def test_ctrl_c_as_json(generate, monkeypatch, tokens):
    monkeypatch.setattr(Llama, "warm_up", lambda self: None)  # which generates, too
    monkeypatch.setattr(DecodeLoop, "run", saying(tokens, KeyboardInterrupt))
    report = generate("--logits", PROMPT, code=130)
    assert (report["ids"], report["stop_reason"]) == (tokens, "interrupted")
    assert (report["timings"]["prompt_s"] is None) == (report["top5"] is None) == (not tokens)


def test_ctrl_c_while_loading_says_nothing(run, tiny, monkeypatch):
    def interrupted(*args, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "Llama", interrupted)
    assert run("generate", "--model", tiny, PROMPT) == (130, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGPIPE to speak of")
def test_a_reader_that_goes_away_is_no_error(steady):
    with spawn("generate", "--model", steady, "--tokens", 20000, "--ignore-eos", PROMPT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_terminal_only_the_summary_is_styled(tiny, generate):
    import pty

    ours, theirs = pty.openpty()
    with spawn("generate", "--model", tiny, "--tokens", 200, "--ignore-eos", PROMPT, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            seen += piece
        assert process.wait(timeout=60) == 0
    os.close(ours)
    text, _, summary = seen.decode().partition("\x1b[2m")
    expected = generate("--tokens", 200, "--ignore-eos", PROMPT)["text"].removesuffix("\n") + "\n"
    assert text.replace("\r\n", "\n") == expected
    assert summary.startswith("prompt ")


# ---- info and the rest


def test_info_names_what_is_used_and_why(run):
    names = wgattn.list_adapters()
    profile = wgattn.default_device().profile
    code, out, err = run("info")
    assert (code, err) == (0, "")
    assert all(name in out for name in names)
    assert out.count("used: ") == 1
    assert ("adapter is software" in out) == profile.software
    assert f"{profile.subgroup_size} lanes" in out or "no usable subgroups" in out
    for word in (wgattn.__version__, np.__version__, "wgpu", "dawn", profile.driver):
        assert word in out


def test_info_as_json(run, monkeypatch):
    monkeypatch.delenv("WGATTN_ADAPTER", raising=False)
    monkeypatch.delenv("WGATTN_BACKEND", raising=False)
    name = wgattn.list_adapters()[0]
    code, out, err = run("info", "--json", "--adapter", name[:6])
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert (report["chosen"], report["why"]) == (name, f"--adapter {name[:6]}")
    assert report["profile"]["subgroup_size"] == wgattn.default_device().profile.subgroup_size
    assert report["software"] == report["profile"]["software"] == ("software" in name)
    assert report["backends"]["wgpu"]["version"] == report["versions"]["wgpu"]
    assert "wgattn[dawn]" in report["backends"]["dawn"]["install"]
    assert set(report["features"]) == set(wgattn.default_device().gpu.features)
    monkeypatch.setenv("WGATTN_ADAPTER", name)
    assert json.loads(run("info", "--json")[1])["why"] == f"WGATTN_ADAPTER={name}"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_info_without_an_adapter_says_what_to_install(run, monkeypatch, form):
    monkeypatch.setattr(webgpu.Backend, "adapters", lambda self: [])
    code, out, err = run("info", *form)
    assert code == 1
    assert "mesa-vulkan-drivers" in err
    assert err.count("\n") == 1
    assert wgattn.__version__ in out  # what is known is still told
    if form:
        assert json.loads(out)["adapters"] == []


def test_info_with_an_adapter_that_is_not_there(run):
    code, out, err = run("info", "--adapter", "no such GPU")
    assert code == 1
    assert one_sentence(err), err
    assert wgattn.list_adapters()[0] in out
    assert "used: " not in out


@pytest.mark.parametrize(
    ("count", "text"),
    [(32, "32 bytes"), (1023, "1023 bytes"), (32768, "32 KiB"), (2**27, "128 MiB"), (2**31 - 1, "2 GiB"), (2**64 - 1, "16 EiB")],
)
def test_sizes_are_readable(count, text):
    assert info_command._size(count) == text


@pytest.mark.parametrize("words", [["--help"], ["info", "--help"], ["generate", "--help"]], ids=" ".join)
def test_help_has_an_example(run, words):
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    examples = re.findall(r"\bwgattn (.+)$", out.partition("example:")[2], re.M)
    assert examples
    for example in examples:
        parse(example)


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "wgattn", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"wgattn {wgattn.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "wgattn", "info", "--json"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert json.loads(done.stdout)["chosen"] in wgattn.list_adapters()


# ---- README


def test_the_readmes_examples_run(smollm2_path, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 3
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert "' Paris'" in out
    for error in ("DeviceError", "ModelNotFound", "ArgumentError", "CapacityError"):
        assert f"{error}: " in out
    assert f"{names['model'].dispatches_per_token} dispatches for SmolLM2-135M" in README.read_text(encoding="utf-8")


def test_the_readmes_commands_parse():
    commands = re.findall(r"^python -m wgattn (.+)$", README.read_text(encoding="utf-8"), re.M)
    assert len(commands) >= 4
    for command in commands:
        parse(command)


def test_the_files_that_the_readme_names_exist():
    named = set(re.findall(r"`((?:gpu|attention|block|llm)/\w+\.py)`", README.read_text(encoding="utf-8")))
    assert len(named) >= 8
    missing = {name for name in named if not (README.parent / "wgattn" / name).is_file()}
    assert not missing


# ---- tune


def test_tune_keeps_what_it_finds_and_knows_it_the_next_time(run, monkeypatch, tmp_path):
    monkeypatch.setenv("WGATTN_CACHE_DIR", str(tmp_path))
    small = Problem(1, 2, 1, 8, 8, 8, 8, 0.35)
    monkeypatch.setattr("wgattn.attention.tune.standard_problems", lambda profile: [small])
    code, out, _ = run("tune", "--json")
    first = json.loads(out)
    assert code == 0
    assert [t["path"] for t in first["tuned"]] == ["flash", "gemm"]
    assert all(t["seconds"] > 0 for t in first["tuned"])
    assert Path(first["cache"]) == tmp_path / "tuning.json"
    assert Path(first["cache"]).is_file()
    code, out, _ = run("tune")
    assert code == 0
    assert out.count("known before") == 2
    assert str(tmp_path) in out.replace("\n", "")
