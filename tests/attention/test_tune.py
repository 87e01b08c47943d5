"""Tuned tile shapes: which problems share one, that recordings find them, and that all candidates are right."""

import dataclasses
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.attention.test_paths import Case, Inputs, check, problem_of, rows
from wgattn.attention import flash, gemm, tune
from wgattn.attention.paths import PATHS
from wgattn.attention.problem import Operands, Problem
from wgattn.gpu import Device, Recording, tuning
from wgattn.gpu.tuning import TuningCache

SMALL = problem_of(Case(16, 16, 8, ratio=2, is_causal=True))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningCache:
    """The user's cache, an empty one of this test's own."""
    monkeypatch.setenv("WGATTN_CACHE_DIR", str(tmp_path))
    return tuning.default_cache()


class Fake:
    """A stopwatch that prefers the last of the candidates, and counts."""

    calls = 0

    def __init__(self, device: Device):
        self.seconds = 1000.0

    def __call__(self, recording: Recording) -> float:
        type(self).calls += 1
        self.seconds /= 2
        return self.seconds


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setattr(tuning, "Stopwatch", Fake)
    monkeypatch.setattr(Fake, "calls", 0)
    return Fake


@pytest.fixture
def gpu(devices) -> Device:
    """A device of GPU shapes."""
    return devices["gpu_shape"]


def words(device: Device, path: str, problem: Problem) -> dict[str, int]:
    """Constants and overrides of a path's kernels as recorded, by name."""
    case = Case(problem.queries, problem.keys, problem.head_dim, Hkv=problem.num_kv_heads, ratio=problem.ratio)
    inputs = Inputs.of(case, np.random.default_rng(0))
    tensors = [rows(device, a, "bhsd") for a in (inputs.query, inputs.key, inputs.value, inputs.query)]
    recording = Recording(device)
    PATHS[path].record(recording, replace(problem, lse=False), Operands(*tensors))
    found: dict[str, int] = {}
    for d in recording:
        name = d.label.removeprefix("attention").strip()
        constants = re.findall(r"^const (\w+) = (\d+)u;", d.kernel.source.text, re.M)
        found |= {f"{name} {k}".strip(): int(v) for k, v in [*constants, *d.kernel.source.overrides.items()]}
    return found


# ---- which problems share a shape


def test_problems_alike_share_a_key(device: Device):
    def key(path: str = "flash", **changes: object) -> tuning.TuningKey:
        return tune._key(device, path, replace(problem_of(Case(500, 600, 64, Hkv=2, ratio=4)), **changes))

    same = [{"queries": 512}, {"queries": 257}, {"keys": 1000}, {"softcap": 2.0}, {"right": 0}, {"mask": "u8"}, {"scale": 1.0}, {"lengths": "each"}]
    assert {key(**changes) for changes in same} == {key()}
    other = [{"queries": 513}, {"keys": 1025}, {"head_dim": 72}, {"value_dim": 32}, {"kv_dtype": "f16"}, {"dtype": "f16"}, {"num_kv_heads": 8}, {"batch": 3}]
    assert len({key(**changes) for changes in other} | {key(), key("gemm")}) == len(other) + 2


@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 8, 8), (1, 9, 3), (2, 7, 1), (3, 32, 8), (1, 15, 5)])
def test_a_rounded_problem_is_a_problem_and_rounds_to_itself(batch: int, heads: int, kv_heads: int):
    like = tune.rounded(Problem(batch, heads, kv_heads, 100, 1000, 64, 32, 0.125))
    assert like.num_heads % like.num_kv_heads == 0
    assert like.ratio == heads // kv_heads
    assert (like.queries, like.keys, like.batch) == (128, 1024, 1)
    assert batch * heads <= like.num_heads < 2 * batch * heads
    assert tune.rounded(like) == like


# ---- candidates


def test_the_default_is_the_first_candidate(devices):
    for name in ("software", "gpu_shape", "gpu_shape_no_subgroup"):
        profile = devices[name].profile
        for case in (Case(16, 16, 8), Case(128, 1024, 64, ratio=4), Case(512, 512, 128), Case(1, 64, 5)):
            problem = problem_of(case)
            assert tune.flash_candidates(profile, problem)[0] == flash.choose_flash(profile, problem)
            for product in ("scores", "outputs"):
                shapes = tune.gemm_candidates(profile, problem, product)
                assert shapes[0] == getattr(gemm.choose_gemm(profile, problem), product)
                assert len(set(shapes)) == len(shapes)


def test_candidates_keep_to_the_limits_of_a_device(gpu: Device):
    small = replace(gpu.profile, max_invocations=64, workgroup_memory=8192)
    problem = problem_of(Case(512, 512, 128))
    assert all(s.workgroup <= 64 and s.workgroup % s.lanes == 0 for s in tune.flash_candidates(small, problem))
    for product in ("scores", "outputs"):
        shapes = tune.gemm_candidates(small, problem, product)
        assert len(shapes) > 5
        assert all(s.workgroup <= 64 and s.workgroup_bytes <= 8192 for s in shapes)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_flash_candidates_are_right(devices, rng, every: int):
    case = Case(37, 70, 20, Hkv=1, ratio=2, is_causal=True)
    inputs = Inputs.of(case, rng)
    for name in ("software", "gpu_shape"):
        for shape in tune.flash_candidates(devices[name].profile, problem_of(case))[::every]:
            check(devices[name], "flash", case, inputs, shape, variant=name, tile=shape)


# ---- tuning, and finding what was tuned


@pytest.mark.parametrize("path", tune.PATHS)
def test_the_second_time_nothing_is_timed(device: Device, cache: TuningCache, fake, path: str):
    shape = tune.tuned_shape(device, path, SMALL)
    assert fake.calls > 0
    fake.calls = 0
    assert tune.tuned_shape(device, path, replace(SMALL, queries=13)) == shape
    assert tune.tuned_shape(device, path, SMALL, TuningCache(cache.path.parent)) == shape
    assert fake.calls == 0


@pytest.mark.parametrize("path", tune.PATHS)
def test_looking_up_makes_and_submits_nothing(device: Device, cache: TuningCache, monkeypatch, fake, path: str):
    assert tune.stored_shape(device, path, SMALL) is None, "nothing has been tuned"
    shape = tune.tuned_shape(device, path, SMALL)
    for name in ("create_buffer", "create_compute_pipeline", "create_command_encoder"):
        monkeypatch.setattr(type(device.gpu), name, None)
    assert tune.stored_shape(device, path, SMALL) == shape
    assert tune.stored_shape(device, path, replace(SMALL, keys=1000)) is None


def test_recordings_use_what_was_tuned(gpu: Device, cache: TuningCache):
    default = words(gpu, "flash", SMALL)
    shape = next(s for s in tune.flash_candidates(gpu.profile, tune.rounded(SMALL)) if s.lanes != default["LANES"])
    cache.put(tune._key(gpu, "flash", SMALL), dataclasses.asdict(shape), 1e-3)
    assert words(gpu, "flash", SMALL)["LANES"] == shape.lanes
    assert words(gpu, "flash", replace(SMALL, keys=40))["LANES"] == default["LANES"], "another problem"

    problem = replace(SMALL, queries=64, keys=64, head_dim=64, value_dim=64)
    before = words(gpu, "gemm", problem)
    for product, tile in (("scores", gemm._WIDE[0]), ("outputs", gemm.tile(32, 32, 8, 8, 2, 4, "10"))):
        cache.put(tune._key(gpu, "gemm", problem, product), dataclasses.asdict(tile), 1e-3)
    after = words(gpu, "gemm", problem)
    assert (before["scores MWG"], after["scores MWG"], after["outputs MWG"]) == (64, 16, 32)


_ODD = {"lanes": 4, "row_quads": 1, "key_quads": 1, "slice": 4, "p_quads": 4, "workgroup": 7}


@pytest.mark.parametrize("choice", [{}, {"lanes": 3}, _ODD, [1, 2], "best", 5])
def test_a_stored_shape_that_makes_no_sense_is_not_used(gpu: Device, cache: TuningCache, choice: object):
    default = words(gpu, "flash", SMALL)
    cache.put(tune._key(gpu, "flash", SMALL), choice, 1e-3)
    assert tune.stored_shape(gpu, "flash", SMALL) is None
    assert words(gpu, "flash", SMALL) == default


def test_half_a_gemm_choice_is_none(gpu: Device, cache: TuningCache):
    cache.put(tune._key(gpu, "gemm", SMALL, "scores"), dataclasses.asdict(gemm._WIDE[0]), 1e-3)
    assert tune.stored_shape(gpu, "gemm", SMALL) is None


def test_a_tuned_tile_whose_padding_does_not_fit_is_not_used(gpu: Device, cache: TuningCache):
    problem = replace(SMALL, queries=130, keys=130)
    for product, tile in (("scores", gemm.tile(64, 64, 8, 8, 2, 8, "10")), ("outputs", gemm._WIDE[0])):
        cache.put(tune._key(gpu, "gemm", problem, product), dataclasses.asdict(tile), 1e-3)
    assert tune.stored_shape(gpu, "gemm", problem) is not None
    made = Device()
    made.profile = replace(gpu.profile, max_binding=4 * 192 * 192 - 1)
    assert tune.stored_shape(made, "gemm", problem) is None


@pytest.mark.parametrize("path", tune.PATHS)
def test_tuning_on_the_device_gives_a_shape_that_is_right(device: Device, cache: TuningCache, rng, path: str):
    """With the real clock, on the smallest of problems."""
    case = Case(16, 16, 8, ratio=2, is_causal=True)
    shape = tune.tuned_shape(device, path, problem_of(case))
    assert not cache.empty
    check(device, path, case, Inputs.of(case, rng), shape)


# ---- the command


def test_standard_problems_are_distinct_rounded_and_few(devices):
    for name, most in (("software", 2), ("gpu_shape", 16)):
        device = devices[name]
        problems = tune.standard_problems(device.profile)
        assert 1 <= len(problems) <= most
        assert len({tune._key(device, "flash", p) for p in problems}) == len(problems)
        assert all(p == tune.rounded(p) for p in problems)
        assert all(math.isclose(p.scale, p.head_dim**-0.5) for p in problems)


@pytest.fixture
def two_problems(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    problems = [tune.rounded(SMALL), tune.rounded(replace(SMALL, kv_dtype="f16"))]
    monkeypatch.setattr(tune, "standard_problems", lambda profile: problems)
    return problems


def test_run_tunes_all_and_tells_how_far_it_is(device: Device, cache: TuningCache, fake, two_problems):
    told: list[tuple[int, int, str]] = []
    outcomes = tune.run(device, lambda *step: told.append(step))
    assert [(o.path, o.problem) for o in outcomes] == [(path, p) for p in two_problems for path in ("flash", "gemm")]
    assert all(o.seconds < o.default_seconds for o in outcomes if o.path == "flash")
    done, totals, texts = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert (done[0], done[-1], set(totals)) == (0, totals[0], {totals[0]})
    assert len(set(texts)) == 4
    assert fake.calls <= totals[0]

    fake.calls = 0
    second = tune.run(device, lambda *step: told.append(step))
    assert fake.calls == 0, "the second time, nothing is timed"
    assert [o.shape for o in second] == [o.shape for o in outcomes]
    assert all(o.seconds is None for o in second)
    assert told[-1][0] == told[-1][1]

    tune.run(device, again=True)
    assert fake.calls > 0


def test_run_leaves_out_what_the_device_cannot_hold(device: Device, cache: TuningCache, fake, two_problems):
    made = Device()
    made.profile = replace(device.profile, max_binding=4 * 16 * 16 - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "_operands", lambda *args: None)
        patch.setattr(flash, "record", lambda *args: None)
        outcomes = tune.run(made)
    assert {o.path for o in outcomes} == {"flash"}
