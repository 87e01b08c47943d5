"""The kernel of GPUs for path "flash", `attention/flash_tile.wgsl`, in shapes small enough for a CPU: all features, all storages, what it leaves alone."""

from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest

from tests.attention.test_paths import FEATURES, HARD, PLAIN, Case, Inputs, check, problem_of, rows
from tests.helpers import assert_close, assert_untouched, dirty_workgroup_memory, poison
from wgattn import reference
from wgattn.attention import flash
from wgattn.attention.flash import FlashTileShape
from wgattn.attention.kv_cache import KVCache
from wgattn.attention.paths import PATHS
from wgattn.attention.problem import Operands, Problem, Rows
from wgattn.gpu import Device, DeviceProfile, Recording, StepState
from wgattn.gpu.paper import PROFILES
from wgattn.gpu.shader import assemble

TINY = FlashTileShape(lanes=4, row_quads=1, key_quads=1, slice=2, p_quads=4, workgroup=16)
PARTS = FlashTileShape(lanes=8, row_quads=1, key_quads=2, slice=4, p_quads=4, workgroup=32)
"""Probabilities of a quarter of a tile at a time."""
WIDE = FlashTileShape(lanes=16, row_quads=2, key_quads=1, slice=8, p_quads=16, workgroup=32)
"""More lanes than a small subgroup has; a slice is more than the text takes at once."""
SHAPES = (TINY, PARTS, WIDE)

SIZES = ((37, 61, 40, 0), (70, 129, 20, 24), (9, 255, 64, 0), (33, 33, 7, 5), (5, 256, 96, 6), (130, 100, 8, 80))
"""Queries, keys, dims: multiples of nothing, more queries than keys, rows of many tiles and parts of one."""
FEATURE_CASES = [
    Case(*SIZES[n % len(SIZES)], B=1 + n % 2, Hkv=1 + n // 2 % 2, ratio=(1, 3, 4)[n % 3], dtype=("f32", "f16")[n // 3 % 2], **features)
    for n, features in enumerate(FEATURES)
]


def shape_name(shape: object) -> str:
    return "-".join(map(str, astuple(shape))) if isinstance(shape, FlashTileShape) else str(shape)


@pytest.mark.conformance(case=lambda case: case in FEATURE_CASES[1::4])
@pytest.mark.parametrize("case", FEATURE_CASES, ids=str)
def test_features(device: Device, rng, case: Case):
    check(device, "flash", case, Inputs.of(case, rng), SHAPES[FEATURE_CASES.index(case) % len(SHAPES)])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
@pytest.mark.parametrize("case", [*FEATURE_CASES, HARD, PLAIN], ids=str)
def test_features_in_every_shape(devices, rng, case: Case, shape: FlashTileShape):
    for name in ("gpu_shape", "gpu_shape_no_subgroup", "checked"):
        check(devices[name], "flash", case, Inputs.of(case, rng), shape, variant=name)


@pytest.mark.conformance(variant=["gpu_shape_no_subgroup"], shape=[WIDE])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
@pytest.mark.parametrize("variant", ["gpu_shape_no_subgroup", "gpu_shape_32_lanes", "checked"])
def test_kinds_of_devices(devices, rng, variant: str, shape: FlashTileShape):
    case = replace(HARD, S=21, D=12)
    check(devices[variant], "flash", case, Inputs.of(case, rng), shape, variant=variant)


def test_large_scores_and_a_maximum_that_grows_in_every_tile(device: Device, rng):
    """Each tile's scores are far above those before it, and the last tile's far below."""
    case = Case(20, 100, 16)
    inputs = Inputs.of(case, rng)
    inputs.query[:] = 1 + 0.1 * inputs.query
    inputs.key[:] = 0.1 * inputs.key + np.where(np.arange(100) < 90, 3 * np.arange(100), -900)[:, None]
    check(device, "flash", case, inputs, PARTS)


def test_tiles_that_some_rows_see_in_part(device: Device, rng):
    """A window wider than a tile, and nothing else: tiles at its begin and at its end are masked, those between are not."""
    for options in ({"window_size": (70, 30)}, {"window_size": (50, 0), "ratio": 3}, {"is_causal": True, "causal_alignment": "top_left"}):
        case = Case(40, 200, 8, **options)
        check(device, "flash", case, Inputs.of(case, rng), TINY)


@pytest.mark.conformance
def test_hidden_keys_may_hold_nan(device: Device, rng):
    """Before what the window of any row shows, and behind each sequence's length: in tiles that are skipped, and in a part of one."""
    case = Case(6, 64, 8, ratio=2, is_causal=True, window_size=(9, 0))
    inputs = Inputs.of(case, rng)
    inputs.key[:, :, :49] = inputs.value[:, :, :49] = np.nan  # query 0 stands at key 58 and sees 49 .. 58
    check(device, "flash", case, inputs, PARTS)
    case = Case(3, 40, 8, B=5, Hkv=2, ratio=2, lengths=True, is_causal=True)
    inputs = Inputs.of(case, rng)
    inputs.options["key_lengths"] = np.array([0, 1, 2, 17, 40])
    check(device, "flash", case, inputs, PARTS)


def test_no_keys_at_all(device: Device, rng):
    case = Case(3, 0, 8, Hkv=2)
    check(device, "flash", case, Inputs.of(case, rng), TINY)


@pytest.mark.conformance(kind=["q8_0"])
@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("D", [64, 20, 5])
def test_steps_over_caches(device: Device, rng, kind: str, D: int):
    """A recording of 7 tokens over each kind of cache, replayed with 4: the others' rows are not written; what lies behind the length is NaN."""
    S, count, length, H, Hkv = 7, 4, 45, 6, 2
    cache, state = KVCache(device, Hkv, D, 64, kind), StepState(device, 64)
    k, v = (rng.standard_normal((1, 64, Hkv, D)).astype(np.float32) for _ in range(2))
    k[:, length:] = v[:, length:] = np.nan
    appending = Recording(device)
    cache.record_append(appending, step=state.step, keys=device.tensor(k), values=device.tensor(v), rows=64, dtype="f32")
    state.write(0, range(64))
    appending.replay()
    q = rng.standard_normal((1, H, S, D)).astype(np.float32)
    q[:, :, count:] = np.nan
    out = device.tensor(poison(q.shape))
    problem = Problem(1, H, Hkv, S, 64, D, D, D**-0.5, kv_dtype=kind, right=0, lengths="step")
    operands = Operands(*(rows(device, q, "bhsd"), cache.rows(cache.keys), cache.rows(cache.values)), Rows.of(out, "bhsd"), step=state.step)
    recording = Recording(device)
    PATHS["flash"].record(recording, problem, operands, PARTS)
    state.write(length - count, range(count))
    dirty_workgroup_memory(device)
    recording.replay()
    expected, _ = reference.attention(q[:, :, :count], cache.k(length)[None], cache.v(length)[None], is_causal=True)
    assert_close(out.numpy()[:, :, :count], expected, max_error=2e-5, kind=kind, D=D)
    assert_untouched(out.numpy()[:, :, count:], kind=kind, D=D)


@pytest.mark.conformance
def test_outputs_may_replace_the_queries(device: Device, rng):
    """Each workgroup reads its queries again for every tile of keys, and writes when it has seen all."""
    case = Case(70, 100, 16, Hkv=2, ratio=2, is_causal=True)
    inputs = Inputs.of(case, rng)
    both = rows(device, inputs.query, "bhsd")
    problem = replace(problem_of(case), in_place=True, lse=False)
    recording = Recording(device)
    PATHS["flash"].record(recording, problem, Operands(both, rows(device, inputs.key, "bhsd"), rows(device, inputs.value, "bhsd"), both), PARTS)
    recording.replay()
    assert_close(both.tensor.numpy(), inputs.expected()[0], max_error=2e-5)


def test_pieces_of_a_long_prompt_are_the_whole(device: Device, rng, monkeypatch):
    """Cut into dispatches of some rows each, the bits are the same."""
    case = Case(75, 80, 8, B=2, Hkv=2, ratio=3, is_causal=True)
    inputs = Inputs.of(case, rng)
    check(device, "flash", case, inputs, TINY)
    monkeypatch.setattr(DeviceProfile, "most_operations", problem_of(case).operations / 6)
    check(device, "flash", case, inputs, TINY)


# ---- shapes


class Assembled(Exception):
    pass


class Paper:
    """Assembles a kernel and goes no further."""

    def __init__(self, profile: DeviceProfile):
        self.profile = profile

    def kernel(self, main: str, *parts: Any, **options: Any) -> None:
        self.source = assemble(main, parts, options)
        raise Assembled


GPUS = [p for p in PROFILES.values() if not p.software]


@pytest.mark.parametrize("profile", GPUS, ids=lambda p: p.name)
def test_shapes_say_how_much_memory_they_take_and_it_fits(profile: DeviceProfile):
    for D, Dv in ((64, 64), (128, 128), (37, 5), (80, 96), (256, 256), (8, 512)):
        for queries, ratio in ((2048, 1), (512, 4), (9, 1), (1, 1)):
            problem = problem_of(Case(queries, 2048, D, Dv, Hkv=8, ratio=ratio))
            shapes = flash.tile_shapes(profile, problem)
            assert flash.choose_flash(profile, problem) in shapes, (D, Dv, queries)
            for shape in (flash.choose_flash(profile, problem), *shapes[:: max(1, len(shapes) // 3)]):
                device = Paper(profile)
                with pytest.raises(Assembled):
                    flash.record(Recording(device), problem, None, shape)
                assert device.source.workgroup_bytes == shape.workgroup_bytes(profile, problem) <= profile.workgroup_memory, shape
                assert device.source.workgroup_size == shape.workgroup <= profile.max_invocations
                assert 1 <= min(4, shape.slice) <= shape.slice <= shape.p_quads <= shape.lanes <= shape.workgroup
                assert all(n & (n - 1) == 0 for n in (shape.slice, shape.p_quads, shape.lanes, shape.workgroup))


def test_few_rows_get_small_tiles_and_many_get_large_ones():
    profile = PROFILES["GPU, 32 lanes"]

    def tile_rows(queries: int, heads: int, ratio: int = 1, D: int = 128) -> int:
        return flash.choose_flash(profile, problem_of(Case(queries, 2048, D, Hkv=heads, ratio=ratio))).tile_rows

    assert tile_rows(2048, 32) > tile_rows(512, 8) >= tile_rows(64, 8) >= tile_rows(9, 1)
    assert tile_rows(9, 1) <= 16
    assert tile_rows(512, 8, 4) == tile_rows(2048, 8), "heads of a KV head share tiles"
