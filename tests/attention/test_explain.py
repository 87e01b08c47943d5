"""choose, over devices that are not here, and explain, which tells what it chose."""

import itertools
import math
import re
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import wgattn
from tests.helpers import assert_close
from tests.watch import Calls
from wgattn import reference
from wgattn.attention import flash_matrix, tune
from wgattn.attention.choose import Choice, choose
from wgattn.attention.explain import FEATURES
from wgattn.attention.paths import PATHS, PORTABLE_PATHS, Path
from wgattn.attention.problem import OPEN, Operands, Problem, Rows, packs_output
from wgattn.errors import ArgumentError, ShapeError, Unsupported
from wgattn.gpu import Device, DeviceProfile, Kernel, Recording
from wgattn.gpu.shader import assemble
from wgattn.gpu.tuning import default_cache

SMALL = DeviceProfile(
    name="Smallest",
    backend="wgpu",
    kind="IntegratedGPU",
    driver="",
    subgroup_size=0,
    f16=False,
    timestamps=False,
    workgroup_memory=16384,
    max_invocations=256,
    max_storage_buffers=8,
    max_binding=1 << 27,
    max_buffer=1 << 28,
    max_workgroups=65535,
    storage_alignment=256,
)
"""WebGPU's default limits, which every device has at least."""

PROFILES = {
    f"{kind}, subgroups of {subgroup}, {memory >> 10} KiB, f16 {f16}": replace(
        SMALL, kind=kind, subgroup_size=subgroup, workgroup_memory=memory, max_invocations=invocations, f16=f16
    )
    for kind, subgroup, (memory, invocations, f16) in itertools.product(
        ("DiscreteGPU", "CPU"), (0, 4, 8, 16, 32, 64, 128), ((16384, 256, False), (49152, 1024, True))
    )
}

PLAIN = Problem(1, 8, 2, 64, 64, 64, 64, 0.125)
SIZES = {
    "plain": PLAIN,
    "decode": replace(PLAIN, queries=1, keys=5000),
    "step": replace(PLAIN, queries=1, keys=5000, lengths="step", right=0),
    "long": replace(PLAIN, queries=600, keys=5000, right=0),
    "wide": replace(PLAIN, head_dim=256, value_dim=256, queries=9),
    "wide decode": replace(PLAIN, head_dim=256, value_dim=256, queries=1, num_heads=71, num_kv_heads=1),
    "odd": replace(PLAIN, head_dim=37, value_dim=5, dtype="f16", kv_dtype="f16"),
    "one": Problem(1, 1, 1, 1, 1, 1, 1, 1.0),
}


def stand_in(profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch, device: Device) -> tuple[Device, list[Kernel]]:
    """A device that says it is another; kernels are written and held against its limits, but neither compiled nor bound. And the kernels."""
    made: list[Kernel] = []

    def add(self: Recording, kernel: Kernel, groups: tuple[int, ...], buffers: dict[str, Any], *others: Any) -> None:
        assert max(groups) <= profile.max_workgroups, f"{kernel.source.name}: grid {groups}"
        assert {name for name, _ in kernel.source.buffers} - {"params"} == set(buffers)
        made.append(kernel)

    monkeypatch.setattr(Recording, "add", add)
    monkeypatch.setattr(device, "profile", profile)
    monkeypatch.setattr(device, "_kernels", {})
    return device, made


def operands(device: Device, problem: Problem) -> Operands:
    nothing = device.buffer(16)
    rows = Rows(nothing, 0, 0, 0)
    wanted = {
        "mask": problem.mask != "none",
        "sinks": problem.sinks,
        "alibi_slopes": problem.alibi,
        "key_lengths": problem.lengths == "each",
        "lse": problem.lse,
        "step": problem.lengths == "step",
    }
    return Operands(rows, rows, rows, rows, **{name: nothing if used else None for name, used in wanted.items()})


# ---- choose


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_auto_never_refuses_and_few_queries_go_to_split(profile):
    for name, problem in SIZES.items():
        choice = choose(profile, problem)
        assert choice.path == ("split" if problem.queries <= 8 else "flash"), name
        assert str(problem.queries) in choice.reason


@pytest.fixture(scope="module")
def own_device() -> Device:
    """One that a test may change."""
    made = Device()
    assert made.profile
    return made


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
@pytest.mark.parametrize("path", PORTABLE_PATHS)
def test_what_a_path_says_it_can_run_fits_the_device(own_device, monkeypatch, profile, path):
    """Workgroup memory, invocations, storage buffers and grids of the kernels that it would record, for each size and each feature by itself."""
    device, made = stand_in(profile, monkeypatch, own_device)
    problems = SIZES | {feature: replace(PLAIN, **changes) for feature, changes in FEATURES.items()}
    for name, problem in problems.items():
        assert PATHS[path].unsupported(profile, problem) is None, f"{path} refuses {name}"
        made.clear()
        PATHS[path].record(Recording(device), problem, operands(device, problem))
        assert made, name
        for kernel in made:
            assert profile.f16 or "f16" not in kernel.source.features
            assert profile.subgroup_size or "subgroup" not in kernel.source.features
            assert kernel.source.workgroup_storage <= profile.workgroup_memory
        assert packs_output(problem) == (name == "odd")


EVERYTHING = replace(PLAIN, mask="f32", softcap=1.0, alibi=True, sinks=True, lse=True, lengths="each")
"""Nine buffers for a path that does all in one dispatch; a device may have eight."""


@pytest.mark.parametrize("queries", [1, 64])
@pytest.mark.parametrize("keys", [64, 5000])
@pytest.mark.parametrize("path", ["auto", *PORTABLE_PATHS])
def test_all_features_at_once_on_the_smallest_device(own_device, monkeypatch, queries, keys, path):
    """Either a path says that it cannot, or what it records fits; there is one that can."""
    device, made = stand_in(SMALL, monkeypatch, own_device)
    problem = replace(EVERYTHING, queries=queries, keys=keys)
    if path != "auto" and PATHS[path].unsupported(SMALL, problem):
        assert re.search(r"\b9\b.*\b8\b", PATHS[path].unsupported(SMALL, problem))
        return
    PATHS[choose(SMALL, problem, path).path].record(Recording(device), problem, operands(device, problem))
    assert made


def test_all_features_run_where_no_more_than_8_storage_buffers_are_allowed(rng):
    device = Device(limits={"max-storage-buffers-per-shader-stage": 8})
    q, k, v = (rng.standard_normal((2, 4, n, 8)).astype(np.float32) for n in (3, 9, 9))
    options = {
        "attn_mask": rng.standard_normal((3, 9)).astype(np.float32),
        "sinks": rng.standard_normal(4).astype(np.float32),
        "alibi_slopes": rng.random(4).astype(np.float32),
        "key_lengths": np.array([9, 4]),
    }
    for path in ("auto", "split", "unfused", "gemm"):
        out, lse = wgattn.sdpa(q, k, v, **options, path=path, return_lse=True, device=device)
        expected, expected_lse = reference.attention(q, k, v, **options)
        assert_close(out, expected, max_error=2e-5, path=path)
        assert_close(lse, expected_lse, max_error=2e-5, path=path)


def test_choosing_needs_no_device(monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("touched a device")

    monkeypatch.setattr(Device, "__init__", fail)
    monkeypatch.setattr(wgattn.gpu.device, "default_device", fail)
    first = [choose(profile, problem) for profile in PROFILES.values() for problem in SIZES.values()]
    assert first == [choose(profile, problem) for profile in PROFILES.values() for problem in SIZES.values()]


UNITS = replace(SMALL, kind="DiscreteGPU", subgroup_size=32, f16=True, workgroup_memory=49152, matrix_units=(("f16", "f32", 16, 16, 16),))


def test_matrix_units_where_f16_is_precise_enough():
    half = {"dtype": "f16", "kv_dtype": "f16"}
    wanted = [(half, "flash_matrix"), ({"half": True}, "flash_matrix"), ({}, "flash"), ({"kv_dtype": "f16"}, "flash"), ({**half, "queries": 8}, "split")]
    for changes, path in wanted:
        assert choose(UNITS, replace(PLAIN, **{"queries": 64, **changes})).path == path, changes
    for lacking in ({"matrix_units": ()}, {"f16": False}, {"subgroup_size": 0}, {"workgroup_memory": 2048}):
        assert choose(replace(UNITS, **lacking), replace(PLAIN, queries=64, half=True)).path == "flash", lacking


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        ({"matrix_units": (), "backend": "wgpu"}, r"matrix units.*only backend dawn"),
        ({"matrix_units": (), "backend": "dawn"}, r"matrix units.*this device does not"),
        ({"f16": False}, r"f16, which the device lacks"),
        ({"subgroup_size": 8}, r"lanes, not of 8"),
    ],
)
def test_what_is_missing_for_matrix_units(lacking, told):
    assert re.search(told, flash_matrix.unsupported(replace(UNITS, **lacking), PLAIN))


@pytest.mark.parametrize("memory", [16384, 32768, 49152])
@pytest.mark.parametrize("feature", FEATURES)
def test_matrix_units_on_paper(feature, memory):
    """The text takes the memory that the shape says, and it fits; every load of a tile is somebody's."""
    for dims in ((64, 64), (128, 128), (37, 21), (80, 48)):
        features = {name: value for name, value in FEATURES[feature].items() if "dim" not in name}
        profile, problem = replace(UNITS, workgroup_memory=memory), replace(PLAIN, head_dim=dims[0], value_dim=dims[1], **features)
        if flash_matrix.unsupported(profile, problem):
            assert "workgroup memory" in flash_matrix.unsupported(profile, problem)
            continue
        rows = {name: Rows(None, 9600, 4800, dim) for name, dim in zip(("query", "keys", "values", "out"), (*dims[:1] * 2, *dims[1:] * 2), strict=True)}
        for ahead in (False, True):
            shapes, device = flash_matrix.fitting(profile, problem, ahead=ahead), Paper()
            assert shapes or ahead
            for shape in shapes[:1]:
                with pytest.raises(Assembled):
                    flash_matrix.record(Recording(device), problem, Operands(**rows), shape)
                assert device.source.workgroup_bytes == shape.workgroup_bytes(problem) <= memory
                assert device.source.workgroup_size == shape.workgroup <= profile.max_invocations
                assert {"f16", "subgroup", "matrix"} <= device.source.features


class Assembled(Exception):
    pass


class Paper:
    """Assembles a kernel and goes no further."""

    def kernel(self, main: str, *parts: Any, **options: Any) -> None:
        self.source = assemble(main, parts, options)
        raise Assembled


@pytest.mark.parametrize("path", PORTABLE_PATHS)
def test_a_path_can_be_forced(path):
    assert choose(SMALL, PLAIN, path) == Choice(path, "asked for")


def test_a_path_that_does_not_exist():
    with pytest.raises(ArgumentError, match=r"'fused'.*auto, flash, split, unfused, gemm"):
        choose(SMALL, PLAIN, "fused")


IMPOSSIBLE = {
    "flash, batch": ("flash", SMALL, replace(PLAIN, batch=70_000), ("70000", "65535")),
    "flash, KV heads": ("flash", SMALL, replace(PLAIN, num_heads=70_000, num_kv_heads=70_000), ("70000", "65535")),
    "flash, values": ("flash", SMALL, replace(PLAIN, value_dim=8192), ("8192", "16384")),
    "split": ("split", SMALL, replace(PLAIN, value_dim=8192), (str(16 * 2048 + 16 + 16), "16384")),
    "unfused, keys": ("unfused", replace(SMALL, max_workgroups=100), replace(PLAIN, keys=30_000), ("30000", "118", "100")),
    "unfused, scores": ("unfused", SMALL, replace(PLAIN, queries=8192, keys=8192), ("8192 x 8192", str(1 << 28), str(1 << 27))),
    "gemm, scores": ("gemm", SMALL, replace(PLAIN, queries=8192, keys=8192), ("8192 x 8192", str(1 << 28), str(1 << 27))),
    "gemm, grid": ("gemm", replace(SMALL, max_workgroups=100), replace(PLAIN, keys=30_000), ("30000", "100")),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_path_that_cannot_run_it_names_the_numbers(case):
    path, profile, problem, numbers = IMPOSSIBLE[case]
    missing = PATHS[path].unsupported(profile, problem)
    assert missing is not None
    for number in numbers:
        assert re.search(rf"\b{number}\b", missing), f"{number} is not in {missing!r}"
    with pytest.raises(Unsupported, match=rf"'{path}'.*{re.escape(profile.name)}.*{re.escape(missing)}"):
        choose(profile, problem, path)
    assert choose(profile, problem).path != path, "auto takes another"


def test_where_no_path_can_run_it_auto_says_so():
    with pytest.raises(Unsupported, match="No path"):
        choose(replace(SMALL, max_binding=1 << 10, max_workgroups=1), replace(PLAIN, batch=2, value_dim=8192))


# ---- explain


def arrays(S: int = 3, T: int = 6, D: int = 8) -> list[np.ndarray]:
    return [np.zeros(shape, np.float32) for shape in ((2, 4, S, D), (2, 2, T, D), (2, 2, T, D))]


@pytest.mark.parametrize(("S", "path"), [(1, "split"), (8, "split"), (9, "flash"), (200, "flash")])
def test_explain_tells_the_path_and_runs_nothing(device, tmp_path, monkeypatch, S, path):
    monkeypatch.setenv("WGATTN_CACHE_DIR", str(tmp_path))  # nothing is tuned
    assert device.profile
    calls = Calls(device, monkeypatch)
    told = wgattn.explain(*arrays(S, 256), np.zeros((S, 256), bool), is_causal=True, softcap=3.0, return_lse=True)
    assert dict(calls) == {}, "nothing is made, written or submitted"
    assert (told.path, told.device) == (path, device.name)
    assert told.problem == replace(Problem(2, 4, 2, S, 256, 8, 8, 1 / math.sqrt(8)), mask="u8", right=0, softcap=3.0, lse=True)
    assert told.problem.left == OPEN
    assert {name for name, missing in told.missing.items() if missing} == ({"flash_matrix"} if not device.profile.matrix_units else set())
    assert set(told.missing) == set(PATHS)
    assert told.shape == PATHS[path].shape(device.profile, told.problem)
    text = str(told)
    assert f"path {path} on {device.name}" in text
    assert str(S) in told.reason
    assert told.reason in text
    assert str(told.shape) in text


def test_explain_tells_what_the_call_would_run(device, monkeypatch):
    """The same path as the call itself, by any name and on its own."""
    ran = []

    def watched(path: Path) -> Path:
        def append(*args: Any) -> None:
            ran.append(path.name)
            path.append(*args)

        return replace(path, append=append)

    for name, path in list(PATHS.items()):
        monkeypatch.setitem(PATHS, name, watched(path))
    for options in ({}, {"path": "auto"}, *({"path": name} for name in PORTABLE_PATHS)):
        for S in (1, 9):
            ran.clear()
            wgattn.sdpa(*arrays(S), **options)
            assert ran == [wgattn.explain(*arrays(S), **options).path]


def test_explain_tells_a_shape_that_was_tuned(device, tmp_path, monkeypatch):
    """What the paths find in the user's cache."""
    monkeypatch.setenv("WGATTN_CACHE_DIR", str(tmp_path))
    told = wgattn.explain(*arrays(9), path="flash")
    tuned = next(shape for shape in tune.flash_candidates(device.profile, tune.rounded(told.problem)) if shape != told.shape)
    default_cache().put(tune._key(device, "flash", told.problem), asdict(tuned), 1e-3)
    assert wgattn.explain(*arrays(9), path="flash").shape == tuned
    assert wgattn.explain(*arrays(9), path="unfused").shape == PATHS["unfused"].shape(device.profile, told.problem)


def test_explain_tells_what_the_others_lack(devices):
    device = devices["software"]
    D = 4 * (device.profile.workgroup_memory // 16)
    told = wgattn.explain(*arrays(1, 6, D), device=device)
    assert told.path != "split"
    assert set(told.missing) == set(PATHS)
    assert str(device.profile.workgroup_memory) in told.missing["split"]
    assert f"split: cannot run this: {told.missing['split']}" in str(told)
    assert told.missing[told.path] is None
    with pytest.raises(Unsupported, match=re.escape(told.missing["split"])):
        wgattn.explain(*arrays(1, 6, D), path="split", device=device)


def test_explain_raises_as_the_call_does():
    q, k, v = arrays()
    with pytest.raises(ShapeError):
        wgattn.explain(q, k[:, :, :5], v)
    with pytest.raises(ArgumentError):
        wgattn.explain(q, k, v, softcap=-1.0)
    with pytest.raises(ArgumentError):
        wgattn.explain(q, k, v, path="fused")
    with pytest.raises(TypeError):
        wgattn.explain(q.astype(int), k, v)
    with pytest.raises(TypeError):
        wgattn.explain(q, k, v, window=3)


def test_the_table_of_paths_and_features(device):
    """Every path has every feature on a device like this; that of matrix units where there are any."""
    told = wgattn.explain()
    assert (told.path, told.problem) == (None, None)
    lines = str(told).splitlines()
    assert device.name in lines[0]
    (header,) = (line for line in lines if "feature" in line)
    assert re.findall(r"\w+", header) == ["feature", *PATHS]
    for feature in FEATURES:
        (line,) = (line for line in lines if re.search(rf"│ {re.escape(feature)} +│", line))
        assert re.findall(r"│ (yes|-) +", line) == ["yes"] * len(PORTABLE_PATHS) + ["yes" if device.profile.matrix_units else "-"], line
    for path in PATHS.values():
        assert path.about.split()[0].rstrip(":") in str(told)


def test_the_table_shows_what_is_missing(own_device, monkeypatch):
    monkeypatch.setattr(own_device, "profile", replace(SMALL, max_workgroups=1))
    lines = str(wgattn.explain(device=own_device)).splitlines()
    (batch,) = (line for line in lines if re.search(r"│ batch +│", line))
    assert re.findall(r"│ (yes|-) +", batch)[list(PATHS).index("flash")] == "-"


def test_rich_prints_both_forms():
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(wgattn.explain())
        console.print(wgattn.explain(*arrays()))
    assert "feature" in captured.get()
    assert "path split" in captured.get()


def test_the_table_of_another_device(devices):
    told = wgattn.explain(device=devices["gpu_shape"])
    assert told.profile is devices["gpu_shape"].profile
    assert wgattn.explain(*arrays(), device=devices["gpu_shape"]).profile is devices["gpu_shape"].profile
