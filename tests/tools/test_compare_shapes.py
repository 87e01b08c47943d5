"""tools/compare_shapes.py: each family at a small size, what it writes, and that it tells a wrong result and a device that cannot."""

import json

import pytest

from tools import compare_shapes

SMALL = {
    "gemm": "--rows 70 --columns 96 --tokens 40 --most 2",
    "tiles": "--rows 70 --columns 96 --tokens 40 --kind Q4_0 --most 2",
    "int8": "--rows 70 --columns 96 --tokens 40 --kind Q8_0 --most 2",
    "gemv": "--rows 100 --columns 256 --kind Q4_0 --most 3",
    "flash_matrix": "--heads 2 --kv-heads 1 --dim 16 --queries 33 --keys 50 --most 2",
    "split": "--heads 2 --kv-heads 1 --dim 16 --keys 600 --most 3",
}


@pytest.mark.parametrize("family", SMALL)
def test_each_family(devices, emulated_units, tmp_path, capsys, family):
    device = emulated_units if family in ("gemm", "flash_matrix") else devices["gpu_shape"]
    path = tmp_path / "found.json"
    assert compare_shapes.main([family, *SMALL[family].split(), "--rounds", "1", "--json", str(path)], device) == 0
    found = json.loads(path.read_text())
    assert len(found["shapes"]) >= 2
    assert found["family"] == family
    seconds = [row["seconds"] for row in found["shapes"]]
    assert seconds == sorted(seconds)
    assert min(seconds) > 0
    assert all(row["right"] and 0 < row["error"] < 1e-3 for row in found["shapes"])
    out = capsys.readouterr().out
    assert family in out
    assert device.name.split()[0] in out


@pytest.mark.parametrize("family", ["gemm", "flash_matrix"])
def test_a_device_without_matrix_units(devices, capsys, family):
    assert compare_shapes.main([family, *SMALL[family].split()], devices["software"]) == 2
    assert "matrix units" in capsys.readouterr().err


def test_int8_is_for_quantised_weights(devices, capsys):
    assert compare_shapes.main(["int8", "--kind", "F16"], devices["software"]) == 2
    assert "not quantised" in capsys.readouterr().err


def test_a_wrong_result_is_told(devices, monkeypatch, capsys):
    monkeypatch.setattr(compare_shapes.reference, "linear", lambda x, w: 1.01 * (x @ w.T))
    assert compare_shapes.main(["tiles", *SMALL["tiles"].split(), "--rounds", "1"], devices["gpu_shape"]) == 1
    assert "wrong" in capsys.readouterr().out
