"""The comparison with other libraries: peers that are right, wrong, missing, unable, broken or slow, each in a process of its own."""

import json
import shutil
import sys

import numpy as np
import pytest

from tools import compare_peers

PEERS = '''
import os, sys, time
import numpy as np
from child import Cannot, main

def right(p):
    q, k, v = (p[name][0].astype(np.float64) for name in ("query", "key", "value"))
    k, v = (np.repeat(a, len(q) // len(a), 0) for a in (k, v))
    s = np.einsum("hsd,htd->hst", q, k) / q.shape[-1] ** 0.5
    if p["causal"]:
        s = np.where(np.tri(*s.shape[1:], s.shape[2] - s.shape[1]), s, -np.inf)
    w = np.exp(s - s.max(-1, keepdims=True))
    out = (w / w.sum(-1, keepdims=True)) @ v
    print("noise on stdout"); print("{", file=sys.stderr)
    return {"seconds": [3.0, 1.0, 2.0], "result": out[None].astype(np.float32), "device": "NumPy", "version": "right 1"}

def wrong(p):
    answer = right(p)
    answer["result"][0, -1, -1, -1] += 0.01
    return answer | {"seconds": [4.0], "version": "wrong 1"}

def shape(p):
    return right(p) | {"result": np.zeros(3)}

def missing(p):
    import no_such_package_anywhere

def unable(p):
    if p["causal"]:
        raise Cannot("no causal mask")
    return right(p)

def raises(p):
    raise ValueError("as it happens")

def dies(p):
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)

def sleeps(p):
    time.sleep(60)

main({"wgattn": right, "wrong": wrong, "shape": shape, "missing": missing, "unable": unable, "raises": raises, "dies": dies, "sleeps": sleeps})
'''
NAMES = ("wrong", "shape", "missing", "unable", "raises", "dies")
SIZES = ("--heads", "4", "--kv-heads", "2", "--length", "8", "--dim", "8", "--repeat", "1")


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Makes these the peers of attention."""

    def make(*names):
        shutil.copy(compare_peers.HERE / "child.py", tmp_path)
        (tmp_path / "attention.py").write_text(PEERS)
        monkeypatch.setattr(compare_peers, "HERE", tmp_path)
        monkeypatch.setitem(compare_peers.INSTALL, "attention", {name: f"pip install {name}" for name in names})

    return make


def compare(tmp_path, *words):
    """Run it; the attention part of the report, by peer and problem."""
    assert compare_peers.main(["--only", "attention", *SIZES, "--json", str(tmp_path / "report.json"), *words]) == 0
    return json.loads((tmp_path / "report.json").read_text())["attention"]


def test_each_peer_is_a_row(fakes, tmp_path, capsys):
    fakes(*NAMES)
    found = compare(tmp_path)
    assert list(found) == ["wgattn", *NAMES]
    problems = ["full", "causal", "causal, 2 KV heads", "one query, 32 keys"]
    assert all(list(of_peer) == problems for of_peer in found.values())
    for problem in problems:
        ours = found["wgattn"][problem]
        assert ours["right"]
        assert ours["error"] < 1e-6
        assert ours["numbers"] == {"seconds": 2.0}  # the median
        assert found["wrong"][problem]["right"] is False
        assert found["wrong"][problem]["error"] == pytest.approx(0.01, rel=1e-3)
        assert found["shape"][problem]["right"] is False
        assert "no_such_package_anywhere" in found["missing"][problem]["missing"]
        assert found["raises"][problem]["failed"] == "ValueError: as it happens"
        assert found["dies"][problem]["failed"] == "ended with code 3: last words"
        assert found["unable"][problem]["cannot"] == ("no causal mask" if "causal" in problem else None)
    text = capsys.readouterr().out
    assert "4000 ms, 2.00x" in text  # as long as ours, twice
    assert text.count("WRONG: error 0.01") == len(problems)
    assert "not installed: pip install missing" in text
    assert "wrong: wrong 1 on NumPy" in text


def test_a_slow_peer_is_stopped(fakes, tmp_path):
    fakes("sleeps")
    found = compare(tmp_path, "--timeout", "0.5")
    assert all(o["failed"] == "took longer than 0.5 s (--timeout)" for o in found["sleeps"].values())


def test_where_a_peer_is(fakes, tmp_path):
    """A folder of packages, or an interpreter; one that is not there is an error of the row."""
    fakes("missing")
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "no_such_package_anywhere.py").write_text("raise ValueError('found')")
    found = compare(tmp_path, "--python", f"missing={packages}")
    assert {o["failed"] for o in found["missing"].values()} == {"ValueError: found"}
    found = compare(tmp_path, "--python", f"missing={sys.executable}")
    assert all(o["missing"] for o in found["missing"].values())
    found = compare(tmp_path, "--python", f"missing={tmp_path}/nothing")
    assert all("No such file" in o["failed"] for o in found["missing"].values())


@pytest.mark.parametrize("word", ["missing", "nobody=/bin/python", "torch="])
def test_python_wants_a_peer_and_a_path(word, capsys):
    with pytest.raises(SystemExit):
        compare_peers.main(["--python", word])
    assert "PEER=PATH" in capsys.readouterr().err


def test_our_own_side_is_right(tmp_path, monkeypatch):
    """The real scripts, as far as they need no other library."""
    monkeypatch.setitem(compare_peers.INSTALL, "attention", {})
    found = compare(tmp_path)
    assert list(found) == ["wgattn"]
    assert all(o["right"] and o["error"] < 2e-5 and o["numbers"]["seconds"] > 0 for of_peer in found.values() for o in of_peer.values())


def test_chosen_tokens_are_checked(tmp_path, monkeypatch):
    """A model's tokens must be those that the float64 reference ranks first."""
    from tests.llm.make_gguf import write_llama_gguf

    path = tmp_path / "tiny.gguf"
    write_llama_gguf(path, layers=1, dim=64, heads=4, kv_heads=2, ffn=96, vocab=300, tied=False)
    words = ["--only", "model", "--model", str(path), "--prompt", "8", "--decode", "2", "--repeat", "1", "--json", str(tmp_path / "report.json")]
    monkeypatch.setitem(compare_peers.INSTALL, "model", {})

    def run():
        assert compare_peers.main(words) == 0
        (outcome,) = json.loads((tmp_path / "report.json").read_text())["model"]["wgattn"].values()
        return outcome

    good = run()
    assert good["right"]
    assert good["numbers"].keys() == {"prompt_tok_s", "decode_tok_s", "single_step_tok_s"}
    original = compare_peers.ask
    monkeypatch.setattr(compare_peers, "ask", lambda *a: (lambda answer, tokens: (answer, np.roll(tokens, 1)))(*original(*a)))
    bad = run()
    assert bad["right"] is False
    assert bad["error"] > 0.05


def test_rows_and_depths_of_a_model(tmp_path, monkeypatch, capsys):
    """Several of ours, each with a factor in a peer's cell; what nobody checked is called neither right nor wrong."""
    from tests.llm.make_gguf import write_llama_gguf

    write_llama_gguf(tmp_path / "tiny.gguf", layers=1, dim=64, heads=4, kv_heads=2, ffn=96, vocab=300, tied=False)
    asked = []

    def ask(kind, peer, problem, args):
        asked.append((peer, problem["depth"], problem.get("backend"), problem.get("arithmetic")))
        rate = 100.0 if peer == "llama.cpp" else 200.0 if problem["arithmetic"] == "exact" else 300.0
        return {"decode_tok_s": rate, "device": "none", "version": "1"}, np.zeros(8)

    monkeypatch.setattr(compare_peers, "ask", ask)
    words = ["--only", "model", "--model", str(tmp_path / "tiny.gguf"), "--depth", "0", "--depth", "7", "--unchecked", "--json", str(tmp_path / "report.json")]
    assert compare_peers.main([*words, "--ours", "wgpu:exact", "--ours", "dawn:int8"]) == 0
    rows = [("wgattn", "wgpu", "exact"), ("wgattn", "dawn", "int8"), ("llama.cpp", None, None)]
    assert asked == [(peer, depth, *more) for depth in (0, 7) for peer, *more in rows]
    text = capsys.readouterr().out
    assert text.count("decode 100 tok/s, 2.00x, 3.00x") == 2
    assert text.count("not checked") == 6
    found = json.loads((tmp_path / "report.json").read_text())["model"]
    assert [outcome["right"] for outcome in found["wgattn dawn int8"].values()] == [None, None]


@pytest.mark.parametrize("word", ["dawn", "cuda:exact", "wgpu:fp8", ":"])
def test_ours_wants_a_backend_and_an_arithmetic(word, capsys):
    with pytest.raises(SystemExit):
        compare_peers.main(["--ours", word])
    assert "BACKEND:ARITHMETIC" in capsys.readouterr().err
