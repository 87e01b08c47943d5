"""The wheel: it carries the shaders, and finds them wherever it is unpacked."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import wgattn

ROOT = Path(__file__).parent.parent
CHECK = """
import sys
sys.path[:0] = [{unpacked!r}]
sys.path.append({packages!r})  # for numpy and rich; what .pth files there point to stays out
import wgattn
import wgattn.cli
from wgattn.gpu import shader
assert wgattn.__file__.startswith({unpacked!r}), wgattn.__file__
assert str(shader.SHADERS).startswith({unpacked!r}), shader.SHADERS
source = shader.assemble("parts/probe_subgroup", options={{"WORKGROUP": 64}})
import wgattn.bench.run
assert wgattn.bench.run.__file__.startswith({unpacked!r}), wgattn.bench.run.__file__
assert wgattn.cli._parser().parse_args(["bench", "--quick"]).quick
assert "@binding(0)" in source.text and source.workgroup_size == 64, source
print("found")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built as a user would, except that an installed hatchling saves the download of another."""
    folder = tmp_path_factory.mktemp("wheel")
    alone = [] if importlib.util.find_spec("hatchling") is None else ["--no-isolation"]
    command = [sys.executable, "-m", "build", "--wheel", *alone, "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_all_shaders(wheel):
    assert wheel.name == f"wgattn-{wgattn.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    shaders = {f"wgattn/shaders/{p.relative_to(ROOT / 'shaders').as_posix()}" for p in (ROOT / "shaders").rglob("*.wgsl")}
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "wgattn").rglob("*.py")}
    assert shaders
    bench = {f"wgattn/bench/{p.name}" for p in (ROOT / "tools" / "bench").glob("*.py")}
    assert bench
    assert names >= shaders | modules | bench
    inside = {n.split("/")[0] for n in names}
    assert inside == {"wgattn", f"wgattn-{wgattn.__version__}.dist-info"}


def test_the_wheel_has_the_command_and_the_licence(wheel):
    archive, info = zipfile.ZipFile(wheel), f"wgattn-{wgattn.__version__}.dist-info"
    assert "wgattn = wgattn.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert "License-Expression: Apache-2.0" in archive.read(f"{info}/METADATA").decode()
    assert f"{info}/licenses/LICENSE" in archive.namelist()


def test_unpacked_elsewhere_it_finds_its_shaders(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = CHECK.format(unpacked=str(tmp_path), packages=str(Path(np.__file__).parent.parent))
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


def test_the_readmes_table_of_paths_is_what_explain_prints():
    done = subprocess.run([sys.executable, ROOT / "tools" / "readme.py", "--check", "paths", "parts"], capture_output=True, text=True)
    assert done.returncode == 0, f"run tools/readme.py\n{done.stderr}"
