"""Projections of many tokens in tiles: shapes and text on paper, x as int8, and every tile, format and output against the reference."""

from dataclasses import replace

import numpy as np
import pytest

from tests.block.layers import QUANTISED
from tests.block.test_linear import Case, random_matrix, run
from tests.helpers import assert_untouched, dirty_workgroup_memory, poison, split_canary, with_canary
from wgattn import reference
from wgattn.block import tiles
from wgattn.block.linear import LinearShape, Matrix, choose_linear, pad_vector, padded, record_linear
from wgattn.block.prepared import record_int8
from wgattn.block.quant import FORMATS, QuantizedTensor
from wgattn.block.tiles import Int8TileShape, TileShape, choose_tile
from wgattn.errors import CapacityError
from wgattn.gpu import Device, Recording, StepState
from wgattn.gpu.shader import assemble

OUTPUTS = ("store", "add", "swiglu", "silu_mul")
FLIPS = 1e-7
"""Mean squared error of int8 against its emulation: values next to a tie may go to either code, as WGSL lets the last bits of a division differ."""


@pytest.fixture
def force(monkeypatch, devices):
    """force(tile) gives a device for which no other tile is chosen."""

    def forced(tile: TileShape) -> Device:
        profile = devices["gpu_shape"].profile
        if tile.workgroup_bytes > profile.workgroup_memory:
            raise CapacityError(f"{tile} needs {tile.workgroup_bytes} bytes of workgroup memory; {profile.name} has {profile.workgroup_memory}.")
        monkeypatch.setattr(tiles, "_INT8_TILES" if isinstance(tile, Int8TileShape) else "_TILES", (tile,))
        assert choose_linear(devices["gpu_shape"].profile, 5, 96, 16, arithmetic="int8" if isinstance(tile, Int8TileShape) else "exact") is tile
        return devices["gpu_shape"]

    return forced


# ---- shapes


@pytest.mark.parametrize("kind", FORMATS)
def test_shapes_and_memory_on_paper(device: Device, kind):
    """Invocations have whole loads to do, subgroups whole blocks of a tile, and the text takes the memory that the shape says."""
    form = FORMATS[kind]
    for tile in tiles._TILES + (tiles._INT8_TILES if form.quantised else ()):
        options, int8 = tile.options(device.profile), isinstance(tile, Int8TileShape)
        chunks = 2 * tile.blocks if int8 else tiles.STEP // 16
        assert options["W_LOADS"] * tile.workgroup == tile.rows * chunks, tile
        assert options["X_LOADS"] * tile.workgroup == tile.tokens * chunks * (1 if int8 else 4), tile
        assert tile.workgroup % 32 == 0
        assert tile.rows // tile.rows_each % 8 == 0
        assert tile.tokens // tile.tokens_each % 4 == 0
        parts = ("step", *form.parts, "block/parts/bias_none", "block/parts/heads_plain", "block/parts/output_store", "block/parts/end_none")
        parts += (f"block/parts/{form.dots}",) if int8 else ("block/parts/norm_none", "block/parts/token_each")
        source = assemble(tile.main, parts, {**options, **form.options})
        assert source.workgroup_size == tile.workgroup
        assert source.workgroup_bytes == tile.workgroup_bytes if form.dots == "dots_offset" or not int8 else source.workgroup_bytes < tile.workgroup_bytes


def test_the_tile_suits_the_device_and_the_work(device: Device):
    for kind in ("DiscreteGPU", "IntegratedGPU"):
        for memory in (16384, 32768, 49152):
            for invocations in (128, 256, 1024):
                profile = replace(device.profile, kind=kind, workgroup_memory=memory, max_invocations=invocations)
                for int8 in (False, True):
                    for rows, tokens in ((2, 16), (2048, 512), (16384, 512), (128256, 4096)):
                        tile = choose_tile(profile, rows, tokens, int8)
                        assert isinstance(tile, Int8TileShape) == int8
                        assert tile.workgroup_bytes <= memory
                        assert tile.workgroup <= invocations
                        assert choose_linear(profile, rows, 2048, tokens, arithmetic="int8" if int8 else "exact") == tile
                    assert choose_tile(profile, 16384, 512, int8).rows >= choose_tile(profile, 16, 16, int8).rows
                    assert isinstance(choose_linear(profile, 16384, 2048, 15, arithmetic="int8" if int8 else "exact"), LinearShape)
    assert choose_tile(replace(device.profile, workgroup_memory=4096), 2048, 512, False) is None


# ---- floats


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("tile", tiles._TILES, ids=str)
def test_each_tile(force, rng, tile, output):
    """Rows and tokens that are no multiple of a tile, several tiles of each, columns that end within a step."""
    device, turn = force(tile), OUTPUTS.index(output) + tiles._TILES.index(tile)
    kind, columns = (("F32", 100), ("Q4_0", 96), ("F16", 17), ("Q8_0", 64))[turn % 4]
    for rows in (2, 2 * tile.rows + 6) if output == "swiglu" else (1, 2 * tile.rows + 7):
        for count in (1, tile.tokens + 3, 2 * tile.tokens):
            run(device, rng, Case(kind, rows, columns, 2 * tile.tokens, count, norm=turn % 2 == 0, bias=turn // 2 % 2 == 0, output=output))


@pytest.mark.conformance(kind=["F32", "BF16", "Q5_1", "Q6_K"])
@pytest.mark.parametrize("kind", FORMATS)
def test_each_format(force, rng, kind):
    tile = tiles._TILES[1 + list(FORMATS).index(kind) % 2]
    columns = 2 * FORMATS[kind].block if FORMATS[kind].quantised else 49
    for norm in (False, True):
        run(force(tile), rng, Case(kind, 71, columns, tile.tokens + 9, tile.tokens + 8, norm=norm, bias=norm))


# ---- int8


def project(device: Device, rng: np.random.Generator, matrix: QuantizedTensor, tokens: int, count: int, output: str, norm: bool, bias: bool) -> float:
    """Mean squared error of a projection of `count` tokens against its emulation in float64, checking that nothing else is written. An error is a
    share of the magnitudes that its sum is made of: what they cancel to may be anything, however right the sum is."""
    rows, columns = matrix.shape
    x = poison((tokens, columns))
    x[:count] = rng.standard_normal((count, columns)) * 10.0 ** rng.uniform(-1, 0.5, (count, 1))
    gamma = rng.uniform(0.5, 2, columns).astype(np.float32) if norm else None
    beta = rng.standard_normal(rows).astype(np.float32) if bias else None
    weight, given = matrix.dequantize(), (beta, gamma)
    want = reference.linear_int8(x[:count], weight, *given)
    size = reference.linear_int8(np.abs(x[:count]), np.abs(weight), *(None if a is None else np.abs(a) for a in given))
    width = rows // 2 if output == "swiglu" else rows
    before = poison((tokens, width + 3))
    before[:count, :width] = rng.standard_normal((count, width))
    old = before[:count, :width].astype(np.float64)
    with np.errstate(over="ignore"):
        if output == "swiglu":
            want, size = reference.silu(want[:, ::2]) * want[:, 1::2], size[:, ::2] * size[:, 1::2]
        want = {"add": old + want, "silu_mul": reference.silu(want) * old}.get(output, want)
        size = {"add": np.abs(old) + size, "silu_mul": size * np.abs(old)}.get(output, size)
    y, state, recording = with_canary(device, before), StepState(device), Recording(device)
    record_linear(
        recording, Matrix(device, matrix, 2), step=state.step, x=device.tensor(x), output=output, outputs={"y": y}, tokens=tokens, y_stride=width + 3,
        gamma=gamma if gamma is None else device.tensor(pad_vector(gamma)), eps=1e-5, bias=None if beta is None else device.tensor(beta), arithmetic="int8",
    )  # fmt: skip
    assert [d.kernel.source.name for d in recording] == ["block/int8", "block/linear_tile_int8"]
    state.place(0, count)
    dirty_workgroup_memory(device)
    recording.replay()
    after, canary = split_canary(y, before.shape)
    assert_untouched(canary)
    assert_untouched(after[count:])
    assert_untouched(after[:count, width:])
    return float((((after[:count, :width] - want) / size) ** 2).mean())


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("tile", tiles._INT8_TILES, ids=str)
def test_each_int8_tile(force, rng, tile, output):
    device, turn = force(tile), OUTPUTS.index(output) + tiles._INT8_TILES.index(tile)
    kind, columns = (("Q4_0", 96), ("Q4_1", 32), ("Q8_0", 160), ("Q5_1", 64))[turn % 4]
    for rows in (2, 2 * tile.rows + 6) if output == "swiglu" else (1, 2 * tile.rows + 7):
        for count in (1, tile.tokens + 3, 2 * tile.tokens):
            error = project(device, rng, random_matrix(rng, rows, columns, kind), 2 * tile.tokens, count, output, turn % 2 == 0, turn // 2 % 2 == 0)
            assert error < FLIPS, (rows, count)


@pytest.mark.conformance(kind=["Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_each_format_in_int8(force, rng, kind):
    for tile in tiles._INT8_TILES[:2] if kind in ("Q4_K", "Q6_K") else tiles._INT8_TILES[2:]:
        assert project(force(tile), rng, random_matrix(rng, 71, 768, kind), tile.tokens + 9, tile.tokens + 8, "store", False, True) < FLIPS


@pytest.mark.conformance
@pytest.mark.parametrize("norm", [False, True])
def test_activations_as_int8(devices, rng, norm):
    """Codes, units, sums and what the norm leaves; tokens beyond the count stay as they were."""
    for variant in ("gpu_shape", "gpu_shape_no_subgroup"):
        device = devices[variant]
        for tokens, count, columns in ((1, 1, 32), (5, 3, 96), (4, 4, 576), (3, 2, 8224)):
            x = poison((tokens, padded(columns)))
            x[:count] = rng.standard_normal((count, columns)) * 10.0 ** rng.uniform(-10, 10, (count, 1))
            x[0, :32] = 0
            gamma = rng.uniform(0.5, 2, columns).astype(np.float32) if norm else None
            state, recording = StepState(device), Recording(device)
            state.place(0, count)
            given = None if gamma is None else device.tensor(gamma)
            left = record_int8(recording, state.step, device.tensor(x), tokens, columns, given, 1e-5, "each", "")
            for name in left:
                left[name].write(np.full(left[name].shape, 0x7FC0DEAD, np.uint32).view(left[name].dtype))
            recording.replay()
            codes, units, scale = (left[name].numpy() for name in ("x", "x_units", "x_scale"))
            for values in (codes[:, count:], units[:, count:], scale[count:]):
                assert (values.view(np.uint32) == 0x7FC0DEAD).all()
            v = x[:count] if gamma is None else x[:count] * gamma
            codes = codes[:, :count].swapaxes(0, 1).reshape(count, -1).view(np.int8).reshape(count, -1, 32)
            unit, total = np.moveaxis(units[:, :count].astype(np.float64), 2, 0).swapaxes(1, 2)
            np.testing.assert_allclose(unit, np.abs(v).reshape(count, -1, 32).max(-1) / 127, rtol=1e-6)
            np.testing.assert_allclose(total, unit * codes.sum(-1, dtype=np.float64), rtol=1e-6)
            blocks = v.reshape(count, -1, 32).astype(np.float64)
            high = np.abs(blocks).max(-1, keepdims=True)
            wanted = 127 * blocks / np.where(high > 0, high, 1)
            assert np.abs(codes - wanted).max() <= 0.501  # what is nearly a tie may go either way
            squares = (x[:count].astype(np.float64) ** 2).mean(1)
            np.testing.assert_allclose(scale[:count], (squares + 1e-5) ** -0.5 if norm else 1, rtol=1e-5)
