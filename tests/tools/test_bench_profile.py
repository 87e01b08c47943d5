"""`wgattn bench --profile generate`: every dispatch of a decode step, what it is called, how long it takes and what it moves."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.tools.test_bench_measure import MADE, SMALL
from wgattn import cli
from wgattn.bench import model, profile
from wgattn.bench.records import Bench


@pytest.fixture
def bench(device, monkeypatch):
    """Profiles a small model of random weights."""
    monkeypatch.setattr(model, "random_model", lambda: MADE(SMALL, 300))
    monkeypatch.setattr(Bench, "seconds", 0.01)
    monkeypatch.setattr(Bench, "uncached", 1 << 20)
    return Bench(device, quick=True, model="random")


@pytest.mark.parametrize("timestamps", [True, False])
def test_one_step(bench, monkeypatch, timestamps):
    device = bench.device
    monkeypatch.setitem(device.__dict__, "profile", replace(device.profile, timestamps=timestamps and device.profile.timestamps))
    found = profile.profile_step(bench, 20)
    loaded = bench.kept["model"]
    assert [p.label for p in found.parts] == [d.label for d in model.greedy_recording(loaded.model, 20)]
    assert len(found.parts) == loaded.model.dispatches_per_token + 1
    assert found.parts[-1].label == "argmax, next step"
    assert (found.depth, found.layers, found.clock) == (20, 2, "timestamps" if device.profile.timestamps else "wall")
    assert sum(p.in_layer for p in found.parts) == len(found.parts) - 3, "all but embedding, logits and argmax"
    assert all(p.seconds >= 0 and p.nbytes > 0 for p in found.parts)
    assert found.total > 0
    assert min(found.whole, found.host, found.bandwidth) > 0
    for part in found.parts:
        assert part.share is None or part.share == pytest.approx(part.nbytes / part.seconds / found.bandwidth)
    assert json.dumps(found.json())


def test_bytes_of_a_dispatch(bench):
    """Weights once, the cache up to here, one row of everything else."""
    depth = 20
    loaded = model.load(bench, 512)
    m, c, tensors = loaded.model, loaded.model.config, loaded.file.tensors
    moved: dict[str, int] = {}
    for d in model.greedy_recording(m, depth):
        moved.setdefault(d.label, profile._moved(d, m, depth))
    row, hidden, weights = 4 * c.embed_dim, 4 * c.hidden_dim, {name: t.nbytes for name, t in tensors.items()}
    kv = c.num_kv_heads * c.head_dim * 2  # f16
    near = lambda expected: pytest.approx(expected, abs=4 * 16 + 16)  # noqa: E731 - paddings, token, state
    assert moved["embedding"] == near(weights["token_embd.weight"] // c.vocab_size + row)
    qkv = sum(weights[f"blk.0.attn_{m}.weight"] for m in "qkv")
    assert moved["norm, QKV, RoPE, KV append"] == near(qkv + row + row + 2 * kv + 4 * c.head_dim + row)
    assert 2 * kv * (depth + 1) + row <= moved["attention"] <= 2 * kv * (depth + 1) + 2 * row, "outputs may replace the queries"
    assert moved["output projection, residual"] == near(weights["blk.0.attn_output.weight"] + 2 * row)
    assert moved["norm, gate, up, SwiGLU"] == near(2 * weights["blk.0.ffn_gate.weight"] + 2 * row + hidden)
    assert moved["down projection, residual"] == near(weights["blk.0.ffn_down.weight"] + hidden + row)
    assert moved["norm, logits"] == near(weights["token_embd.weight"] + 2 * row + 4 * c.vocab_size)


def test_variants_tell_kernels_apart(bench):
    loaded = model.load(bench, 512)
    found = {d.label: profile.variant(d) for d in model.greedy_recording(loaded.model, 0)}
    assert "codes_nibbles" in found["norm, QKV, RoPE, KV append"]
    assert "output_qkv" in found["norm, QKV, RoPE, KV append"]
    assert "HEAD_DIM=16" in found["attention"]
    assert found.pop("down projection, residual") == found["output projection, residual"], "one kernel"
    assert len(set(found.values())) == len(found)


def test_the_command(bench, capsys, tmp_path):
    path, picture = tmp_path / "x.json", tmp_path / "x.svg"
    code = cli.main(["bench", "--quick", "--profile", "generate", "--model", "random", "--depth", "7", "--json", str(path), "--svg", str(picture)])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert "at depth 7" in out
    assert "Where the time goes" in out
    content = json.loads(path.read_text())
    assert (content["state"], content["options"]["depth"], content["rows"]) == ("complete", 7, [])
    assert len(content["profile"]["parts"]) == 2 * 5 + 3
    assert [str(i + 1) for i in range(13)] == [line.split()[0] for line in out.splitlines() if line[:3].strip().isdecimal()]
    assert picture.read_text().startswith("<svg")


def test_leaving_a_profile(bench, capsys, monkeypatch, tmp_path):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("wgattn.bench.run.profile_step", interrupt)
    path = tmp_path / "x.json"
    assert cli.main(["bench", "--profile", "generate", "--model", "random", "--json", str(path), "--svg", str(tmp_path / "x.svg")]) == 130
    assert json.loads(path.read_text())["state"] == "interrupted"
    assert not (tmp_path / "x.svg").exists()


def test_a_depth_that_does_not_fit_is_told_before_anything_is_measured(bench, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(profile, "row_of", None)
    path = tmp_path / "x.json"
    assert cli.main(["bench", "--profile", "generate", "--model", "random", "--depth", str(10**9), "--json", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("wgattn: ")
    assert err.count("\n") == 1
    assert json.loads(path.read_text())["state"] == "failed"


def test_random_models_are_made_of_their_shape():
    made = MADE(SMALL, 300)
    assert made.tensors["blk.1.ffn_down.weight"].shape == (64, 96)
    assert made.tensors["token_embd.weight"].shape == (300, 64)
    tensor = made.tensors["blk.0.attn_k.weight"]
    assert tensor.shape == (32, 64)
    assert np.isfinite(tensor.dequantize()).all()
    assert sum(name.startswith("blk.") for name in made.tensors) == 2 * 9
