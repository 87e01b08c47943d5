"""Projections on matrix units: the shapes and the text on paper, the rounding of activations on any device, results where there are such units."""

from dataclasses import replace

import numpy as np
import pytest

from tests.block.test_linear import random_matrix
from tests.helpers import assert_untouched, nmse, poison, split_canary, with_canary
from tools.shaders import sources
from wgattn import FusedMLP, reference
from wgattn.attention import flash_matrix
from wgattn.attention.problem import Problem
from wgattn.block.arithmetic import resolve
from wgattn.block.linear import Matrix, MatrixShape, choose_linear, half_fits, pad_vector, padded, record_linear
from wgattn.block.prepared import record_half
from wgattn.block.quant import FORMATS
from wgattn.errors import CapacityError
from wgattn.gpu import Device, DeviceProfile, Kernel, Recording, StepState
from wgattn.gpu.paper import PROFILES, PaperDevice
from wgattn.gpu.shader import assemble

UNITS = (("f16", "f32", 16, 16, 16),)


def with_units(profile: DeviceProfile, **changes) -> DeviceProfile:
    return replace(profile, **{"kind": "DiscreteGPU", "subgroup_size": 32, "f16": True, "matrix_units": UNITS, **changes})


def test_workgroups_are_whole_subgroups_of_the_largest_size(device: Device):
    """Dawn refuses others, where subgroups may be larger than those that kernels are found to run in."""
    profile = with_units(device.profile, workgroup_memory=49152, matrix_workgroup=128)
    problem = Problem(1, 8, 8, 300, 300, 64, 64, 0.125, half=True)
    shapes = [choose_linear(profile, rows, 2048, 512, arithmetic="half") for rows in (64, 16384)] + flash_matrix.fitting(profile, problem)
    assert shapes
    assert all(s.workgroup % 128 == 0 for s in shapes)
    assert any(s.workgroup % 128 for s in flash_matrix.fitting(replace(profile, matrix_workgroup=1), problem))
    assert not half_fits(replace(profile, matrix_workgroup=4096), 512)
    reason = flash_matrix.unsupported(replace(profile, backend="dawn", matrix_workgroup=4096), problem)
    assert "multiple of 4096" in reason
    source = next(s for s in sources(["GPU, matrix units"]).values() if s.name == "block/linear_matrix")
    paper = PaperDevice(replace(PROFILES["GPU, matrix units"], matrix_workgroup=4096))
    with pytest.raises(CapacityError, match="multiples of 4096"):
        Kernel(paper, source)


def test_matrix_units_are_used_only_where_they_are(device: Device):
    assert half_fits(with_units(device.profile), 16)
    assert not half_fits(with_units(device.profile), 15)
    for lacking in ({"matrix_units": ()}, {"f16": False}, {"subgroup_size": 0}, {"workgroup_memory": 8192}, {"matrix_units": (("i8", "i32", 16, 16, 32),)}):
        assert not half_fits(with_units(device.profile, **lacking), 512), lacking


@pytest.mark.parametrize("kind", FORMATS)
def test_shapes_and_memory_on_paper(device: Device, kind):
    """Tiles divide into whole loads and subgroups, the text takes the memory that the shape says, and all of it fits the device."""
    for subgroup in (16, 32, 64):
        for memory in (16384, 32768, 49152):
            profile = with_units(device.profile, subgroup_size=subgroup, workgroup_memory=memory)
            for rows, tokens in ((2, 16), (2048, 512), (16384, 512), (128256, 4096)):
                if not half_fits(profile, tokens):
                    continue
                shape = choose_linear(profile, rows, 2048, tokens, arithmetic="half")
                assert isinstance(shape, MatrixShape)
                assert shape.workgroup <= profile.max_invocations
                form, options = FORMATS[kind], shape.options(profile)
                assert options["W_LOADS"] * shape.workgroup == shape.rows * shape.step // 16, shape
                assert options["X_LOADS"] * shape.workgroup == shape.tokens * shape.step // 8, shape
                parts = ("step", *form.parts, f"block/parts/{form.halves}", "block/parts/bias_none", "block/parts/token_each")
                source = assemble(shape.main, (*parts, "block/parts/heads_plain", "block/parts/output_store"), {**options, **form.options})
                assert source.workgroup_bytes == shape.workgroup_bytes <= memory
                assert source.features == {"f16", "subgroup", "matrix"}
                assert source.workgroup_size == shape.workgroup


@pytest.mark.conformance
@pytest.mark.parametrize("norm", [True, False])
def test_activations_as_f16(devices, rng, norm):
    """Every token by its own scale, columns of each four as 0, 2, 1, 3, zeros up to a multiple of 64; tokens beyond the count stay as they were."""
    for variant in ("software", "gpu_shape", "gpu_shape_no_subgroup"):
        device = devices[variant]
        for tokens, count, columns in ((1, 1, 16), (5, 3, 100), (4, 4, 576), (3, 2, 1030)):
            x = poison((tokens, padded(columns)))
            x[:count] = 0
            x[:count, :columns] = rng.standard_normal((count, columns)) * 10.0 ** rng.uniform(-15, 15, (count, 1))
            if count > 1:
                x[1, :columns] = 0
            gamma = rng.uniform(0.5, 2, columns).astype(np.float32)
            half, scale, recording = recorded_half(device, x, count, columns, gamma if norm else None)
            recording.replay()
            stride = -(-columns // 64) * 64
            got, _ = split_canary(half, (tokens, stride))
            assert np.isnan(got[count:]).all()
            values = got[:count].astype(np.float64).reshape(count, -1, 4)[:, :, [0, 2, 1, 3]].reshape(count, stride) * scale.numpy()[:count, None]
            want = x[:count, :columns].astype(np.float64)
            want = reference.rms_norm(want, gamma, 1e-5) if norm else want
            assert not values[:, columns:].any()
            bound = np.abs(want).max(1, keepdims=True) * 2.0**-11 * 1.01
            assert (np.abs(values[:, :columns] - want) <= bound).all(), (variant, tokens, count, columns)
            assert np.isfinite(values).all()


def recorded_half(device: Device, x: np.ndarray, count: int, columns: int, gamma: np.ndarray | None):
    recording, state = Recording(device), StepState(device, len(x))
    state.write(0, [0] * count)
    stride = -(-columns // 64) * 64
    recording._scratch = {"x as f16": with_canary(device, poison((len(x), stride), np.float16)), "scale of x": device.tensor(poison((len(x),)))}
    weights = None if gamma is None else device.tensor(pad_vector(gamma))
    left = record_half(recording, state.step, device.tensor(x), len(x), columns, weights, 1e-5, "each", "")
    return left["x"], left["x_scale"], recording


def test_half_is_exact_where_there_are_no_units(device: Device, rng, monkeypatch):
    monkeypatch.setattr(device, "profile", replace(device.profile, matrix_units=()))
    matrix = Matrix(device, random_matrix(rng, 8, 64, "Q4_0"))
    assert resolve(device, matrix, 300, "half") == "exact"
    weights = {"norm": np.ones(32, np.float32)} | {n: rng.standard_normal((32, 32)).astype(np.float32) for n in ("gate", "up", "down")}
    x = rng.standard_normal((40, 32)).astype(np.float32)
    exact, half = (FusedMLP(weights, arithmetic=a, device=device)(x) for a in ("exact", "half"))
    np.testing.assert_array_equal(exact, half)


def check_projection(units: Device, rng: np.random.Generator, kind: str, rows: int, columns: int, tokens: int, count: int, output: str, shape: MatrixShape):
    """Ragged in rows, columns and tokens, against float64; the output's other words stay."""
    matrix = random_matrix(rng, rows, columns, kind)
    x = poison((tokens, padded(columns)))
    x[:count] = 0
    x[:count, :columns] = rng.standard_normal((count, columns)) * 10.0 ** rng.uniform(-6, 6, (count, 1))
    gamma, bias = rng.uniform(0.5, 2, columns).astype(np.float32), rng.standard_normal(rows).astype(np.float32)
    stride = rows // 2 if output == "swiglu" else rows
    before = rng.standard_normal((tokens, stride)).astype(np.float32) if output == "add" else poison((tokens, stride))
    y, state, recording = with_canary(units, before), StepState(units, tokens), Recording(units)
    record_linear(
        recording, Matrix(units, matrix, 2), step=state.step, x=units.tensor(x), output=output, outputs={"y": y}, tokens=tokens,
        y_stride=stride, gamma=units.tensor(pad_vector(gamma)), eps=1e-5, bias=units.tensor(bias), arithmetic="half", shape=shape,
    )  # fmt: skip
    assert shape.main in {d.kernel.source.name for d in recording}
    state.write(0, [0] * count)
    recording.replay()
    after, canary = split_canary(y, (tokens, stride))
    case = {"kind": kind, "rows": rows, "columns": columns, "tokens": tokens, "output": output, "shape": shape}
    want = reference.linear(reference.rms_norm(x[:count, :columns], gamma, 1e-5), matrix.dequantize(), bias)
    if output == "swiglu":
        want = reference.silu(want[:, ::2]) * want[:, 1::2]
    if output == "add":
        want = before[:count] + want
    assert nmse(after[:count], want) < 1e-6, case
    np.testing.assert_array_equal(after[count:].view(np.uint32), before[count:].view(np.uint32))
    assert_untouched(canary, **case)


CASES = ((130, 256, 70, 70, "store"), (67, 512, 40, 33, "store"), (256, 768, 200, 129, "swiglu"), (700, 256, 300, 300, "add"))
"""Rows, columns, tokens, those that count, and what ends the kernel."""
SMALL_CASES = ((67, 256, 40, 33, "store"), (70, 512, 24, 20, "swiglu"), (40, 256, 70, 66, "add"))
TILES = ((128, 128, 64, 64, 32), (64, 64, 32, 32, 64), (64, 64, 32, 32, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_results_on_matrix_units(units: Device, rng, kind):
    """Every format, tile and output."""
    for case in CASES:
        for sizes in TILES:
            check_projection(units, rng, kind, *case, MatrixShape(*sizes, units.profile.subgroup_size))


@pytest.mark.parametrize("kind", FORMATS)
def test_results_on_emulated_units(emulated_units: Device, rng, kind):
    """Every format, and by turns every output."""
    case = SMALL_CASES[list(FORMATS).index(kind) % len(SMALL_CASES)]
    check_projection(emulated_units, rng, kind, *case, MatrixShape(*TILES[2], 32))


@pytest.mark.parametrize("columns", [48, 100])
def test_columns_that_are_no_whole_step(emulated_units: Device, rng, columns):
    check_projection(emulated_units, rng, "F16", 67, columns, 40, 33, "store", MatrixShape(*TILES[2], 32))


@pytest.mark.parametrize("fetch", [0, 1, 2])
@pytest.mark.parametrize("buffers", [1, 2])
def test_buffers_and_when_they_are_fetched(emulated_units: Device, rng, buffers, fetch):
    """Both parities of the number of steps."""
    for columns in (64, 96, 160):
        check_projection(emulated_units, rng, "F16", 67, columns, 40, 33, "store", MatrixShape(*TILES[2], 32, buffers, fetch))


@pytest.mark.parametrize("sizes", TILES[:2])
def test_tiles_on_emulated_units(emulated_units: Device, rng, sizes):
    check_projection(emulated_units, rng, "Q4_0", 150, 256, 140, 133, "store", MatrixShape(*sizes, 32))
