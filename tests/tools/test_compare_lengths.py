"""The tool that looks for steps in time between neighbouring lengths."""

import json

import pytest

from tools import compare_lengths
from wgattn.attention.split import regimes

SIZES = ("--heads", "2", "--kv-heads", "1", "--dim", "8", "--rounds", "1")


def test_lengths_are_powers_of_two_and_where_recordings_change(devices):
    assert compare_lengths.lengths(devices["software"], 300) == [64, 128, 256]
    changes = [limit for limit in regimes(devices["gpu_shape"].profile) if limit < 2**32]
    assert set(changes) <= set(compare_lengths.lengths(devices["gpu_shape"], 2**15))


def test_a_step_replays_the_recording_of_its_length(devices, monkeypatch):
    device = devices["gpu_shape"]
    args = type("Args", (), {"heads": 2, "kv_heads": 1, "dim": 8, "kv_dtype": "f32"})
    decode = compare_lengths.Attention(device, args, 1, 5000)
    limit = regimes(device.profile, 5000)[0]
    assert decode.at(limit, 1) is not decode.at(limit + 1, 1)
    assert decode.at(limit - 1, 1) is decode.at(limit, 1)


def test_the_report(tmp_path, monkeypatch, capsys):
    seconds = iter([9.0, 9.0, 1.0, 1.25, 9.0, 9.0, 2.0, 1.0])
    monkeypatch.setattr(compare_lengths.Stopwatch, "__call__", lambda self, recording: next(seconds))
    path = tmp_path / "report.json"
    assert compare_lengths.main(["--most", "64", "--prompts", "64", *SIZES, "--json", str(path)]) == 0
    found = json.loads(path.read_text())["lengths"]
    assert [(f["what"], f["T"], f["step"]) for f in found] == [("decode", 64, pytest.approx(0.25)), ("prompt", 64, pytest.approx(-0.5))]
    assert "The largest step: +25.0%, decode at 64." in capsys.readouterr().out
