"""What the rows of `wgattn bench` say is so: times, shares, errors against the reference, and the ceilings."""

import statistics
import time

import numpy as np
import pytest

from tests.conftest import with_profile
from wgattn.attention.kv_format import KV_FORMATS
from wgattn.bench import attention, block, ceilings, gemm, measure, model, records
from wgattn.bench.records import Bench, Case, Error, Row, Work, arithmetic_of
from wgattn.bench.weights import dense
from wgattn.block.quant import FORMATS
from wgattn.cases.weights import random_matrix
from wgattn.gpu import Recording
from wgattn.gpu.paper import PROFILES, PaperDevice
from wgattn.gpu.shader import SHADERS
from wgattn.gpu.timing import ReplayClock


@pytest.fixture
def bench(device, monkeypatch):
    """Measures next to nothing: what is tested is not how long things take."""
    monkeypatch.setattr(Bench, "seconds", 0.01)
    monkeypatch.setattr(Bench, "copies", lambda self, nbytes: 2)
    return Bench(device, quick=True)


def with_short_samples(made, monkeypatch):
    monkeypatch.setattr(Bench, "seconds", 0.01)
    return Bench(made, quick=True)


# ---- times


class FakeClock:
    """Gives the samples that it is told to."""

    samples = ()

    def __init__(self, device):
        self.by_timestamps, self.left = True, iter(self.samples)

    def __call__(self, recordings, times=1):
        return next(self.left, self.samples[-1])


def test_median_and_spread(bench, monkeypatch):
    monkeypatch.setattr(FakeClock, "samples", (1.0, 2.0, 3.0, 4.0, 100.0))
    monkeypatch.setattr(measure, "ReplayClock", FakeClock)
    monkeypatch.setattr(measure, "_SLOW", 1e9)
    work = Work([ceilings.counting(bench, 1)[0]])
    timing = measure.measure(bench, work, 0)
    assert (timing.seconds, timing.spread, timing.samples, timing.clock) == (3.0, pytest.approx((4 - 2) / 2 / 3), 5, "timestamps")
    assert timing.host > 0
    best = measure.measure(bench, Work(work.recordings, best=True), 0)
    assert best.seconds == 1.0


def test_units_and_rates(bench):
    bench.ceilings |= {"copy": 1e9, "f32": 1e12}
    timing = measure.Timing(0.5, 0.1, 7, "wall", 0.25)
    for work, rate, unit, share in (
        (Work([], flops=1e9, nbytes=1e6, ceiling="f32"), 2e9, "FLOP/s", 2e-3),
        (Work([], flops=1e9, nbytes=1e6, ceiling="copy"), 2e6, "B/s", 2e-3),
        (Work([], flops=1e9, ceiling="matrix"), 2e9, "FLOP/s", None),
        (Work([], nbytes=1e6), 2e6, "B/s", None),
        (Work([]), None, None, None),
    ):
        row = Row("gemm", "a", "b")
        measure._fill(bench, row, work, timing)
        assert (row.rate, row.unit) == (rate, unit)
        assert row.share == (None if share is None else pytest.approx(share))
    row = Row("gemm", "a", "b")
    measure._fill(bench, row, Work([], nbytes=1e6, units=10), timing)
    assert (row.seconds, row.host_seconds, row.rate) == (0.05, 0.025, 2e6)


def test_without_timestamps_it_is_the_wall_clock(monkeypatch):
    bench = with_short_samples(with_profile(timestamps=False), monkeypatch)
    (case,) = (c for c in ceilings.cases(bench) if c.problem == "dispatch in a pass")
    row = measure.row_of(bench, case)
    assert (row.clock, row.missing) == ("wall", None)
    assert row.seconds > 0


def test_recordings_are_replayed_in_turn(bench):
    counted = [ceilings.counting(bench, 1) for _ in range(3)]
    clock = ReplayClock(bench.device)
    for times in (2, 2, 5):
        clock([recording for recording, _ in counted], times)
    assert [int(counter.numpy()[0]) for _, counter in counted] == [3, 3, 3]


def test_all_copies_are_warmed_up(bench):
    counted = [ceilings.counting(bench, 1) for _ in range(3)]
    assert measure._warm_up(bench, Work([recording for recording, _ in counted])) > 0
    assert all(int(counter.numpy()[0]) > 0 for _, counter in counted)


def test_a_gpu_is_kept_busy_until_its_clock_is_up(bench, devices):
    gpu = Bench(devices["gpu_shape"], quick=True)
    recording, _ = ceilings.counting(gpu, 1)
    begin = time.perf_counter()
    measure._warm_up(gpu, Work([recording]))
    assert time.perf_counter() - begin >= 0.2


def test_inputs_are_put_back_after_the_check(bench):
    done = []
    work = Work([ceilings.counting(bench, 1)[0]], check=lambda: done.append("check"), arrange=lambda: done.append("arrange"))
    measure.row_of(bench, Case("gemm", "a", "b", lambda b: work))
    assert done == ["check", "arrange"]


def wall_seconds(work, seconds):
    """Of a replay, by the wall clock over many replays that are submitted one by one."""
    device, times = work.recordings[0].device, 0
    device.wait()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or times < 20:
        for _ in range(10):
            work.recordings[times % len(work.recordings)].replay()
            times += 1
        device.wait()
    return (time.perf_counter() - begin) / times


@pytest.mark.slow
@pytest.mark.parametrize("what", ["projection", "attention"])
def test_times_agree_with_the_wall_clock(device, what):
    """Within 10 %, five times in a row by the median. What else the machine does disturbs, so it is tried for a while."""
    bench = Bench(device, quick=True)
    shape = attention.Shape(8, 8, 64)
    work = gemm.projection(bench, 64, 1536, 576, "Q4_1", "exact") if what == "projection" else attention.attention(bench, shape, 256, 256, "flash")
    ratios = []
    for _ in range(60):
        ratios.append(wall_seconds(work, 0.2) / measure.measure(bench, work, 0.2).seconds)
        last = ratios[-5:]
        if len(last) == 5 and abs(statistics.median(last) - 1) <= 0.1 and max(abs(r - 1) for r in last) <= 0.25:
            return
    pytest.fail(f"wall clock over what rows say: {[round(r, 2) for r in ratios]}")


# ---- ceilings


@pytest.mark.parametrize("variant", ["software", "gpu_shape", "gpu_shape_no_subgroup", "checked"])
def test_ceilings_are_exact_counts(devices, monkeypatch, variant):
    """On a CPU a GPU's number of invocations takes minutes, so there are fewer."""
    monkeypatch.setattr(ceilings, "_workgroups", lambda device: 3)
    monkeypatch.setattr(Bench, "uncached", 1 << 20)
    bench = with_short_samples(devices[variant], monkeypatch)
    rows = {case.variant + case.problem: measure.row_of(bench, case) for case in ceilings.cases(bench)}
    assert [row.problem for row in rows.values() if row.missing] == ["matrix units"]
    assert [(row.problem, row.error) for row in rows.values() if not row.missing and (row.error or row.wrong)] == []


@pytest.mark.parametrize(
    ("shader", "before", "after", "case"),
    [
        ("copy", "source[at$i]", "source[at$i & 0xfffffffeu]", "copy"),
        ("fma", "i < params.rounds", "i + 1u < params.rounds", "f32"),
        ("fma", "x$c = next(x$c, factor, down);", "x$c = x$c + down * 2.0;", "f16"),
        ("dot4", "i < params.rounds", "i + 1u < params.rounds", "dot4"),
        ("count", "+= 1u", "+= 2u", "count"),
    ],
)
def test_a_ceiling_that_does_less_is_wrong(monkeypatch, shader, before, after, case):
    from wgattn.gpu import Device
    from wgattn.gpu import shader as shaders

    text = (shaders.SHADERS / "bench" / f"{shader}.wgsl").read_text(encoding="utf-8")
    assert before in text
    read = shaders._read
    monkeypatch.setattr(shaders, "_read", lambda path: text.replace(before, after) if path == f"bench/{shader}" else read(path))
    monkeypatch.setattr(Bench, "uncached", 1 << 20)
    bench = with_short_samples(Device(), monkeypatch)  # whose kernels are not compiled yet
    for found in (measure.row_of(bench, c) for c in ceilings.cases(bench) if c.variant == case):
        assert found.wrong, found


@pytest.mark.parametrize("profile", PROFILES)
def test_kernels_of_the_ceilings(profile):
    """All shaders of the room, where a device has what they need."""
    device = PaperDevice(PROFILES[profile])
    names = [kernel.source.name for kernel in ceilings.kernels(device)]
    matrix = {"bench/matrix"} if device.profile.matrix_units else set()
    assert set(names) == {f"bench/{p.stem}" for p in (SHADERS / "bench").glob("*.wgsl")} - {"bench/matrix"} | matrix
    assert names.count("bench/fma") == 2 + 2 * device.profile.f16


def test_no_f16_is_said(monkeypatch):
    bench = with_short_samples(with_profile(f16=False), monkeypatch)
    row = measure.row_of(bench, next(c for c in ceilings.cases(bench) if c.variant == "f16"))
    assert "no f16" in row.missing
    assert not row.failed


# ---- errors


def test_error_is_relative_to_the_reference():
    expected = np.array([3.0, 4.0])
    assert Error.of(expected, expected, 0) == Error(0, 0, 0)
    assert Error.of(np.array([3.0, 4.5]), expected, 0.2) == Error(0.1, 0.5, 0.2)
    assert not Error.of(np.array([3.0, 4.5]), expected, 0.2).wrong
    assert Error.of(np.array([3.0, 4.5]), expected, 0.05).wrong
    assert Error.of([np.nan, 4], expected, 1).wrong
    assert Error.of([0.1], [0.0], 0.01).wrong, "a reference of zeros"


def check(row):
    assert row.missing is None, row.missing
    assert 0 < row.error <= row.error_bound
    assert not row.wrong
    assert row.seconds > 0
    assert row.rate > 0


@pytest.mark.parametrize(("tokens", "kind", "arithmetic"), [(5, "F32", "exact"), (1, "F16", "exact"), (1, "Q4_0", "int8"), (3, "Q6_K", "exact")])
def test_projections(bench, tokens, kind, arithmetic):
    bench.ceilings |= {"copy": 1e9, "f32": 1e9, "dot4": 1e9}
    row = measure.row_of(bench, Case("gemm", "a", arithmetic, lambda b: gemm.projection(b, tokens, 24, 512, kind, arithmetic)))
    check(row)
    assert row.unit == ("B/s" if tokens == 1 else "FLOP/s")
    assert row.ceiling == ("copy" if tokens == 1 else "f32")
    assert row.copies == 2
    assert row.in_cache


@pytest.mark.parametrize("path", ["flash", "split", "unfused", "gemm", "auto"])
@pytest.mark.parametrize("queries", [1, 20])
def test_attention(bench, path, queries):
    shape = attention.Shape(4, 2, 16, "f16")
    row = measure.row_of(bench, Case("prefill", "a", path, lambda b: attention.attention(b, shape, queries, 40, path)))
    check(row)
    assert row.facts["path"] == (path if path != "auto" else row.facts["path"])
    seen = sum(40 - queries + i + 1 for i in range(queries))
    if queries > 1:
        assert row.rate * row.seconds == pytest.approx(4 * 4 * 16 * seen)
    else:
        assert row.rate * row.seconds == pytest.approx(2 * 2 * 40 * 16 * 2 + 2 * 4 * 4 * 16)


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_attention_over_every_kind_of_cache(bench, kv_dtype):
    row = measure.row_of(bench, Case("decode", "a", "auto", lambda b: attention.attention(b, attention.Shape(4, 2, 64, kv_dtype), 1, 40, "auto")))
    check(row)
    per_channel = {"f32": 4, "f16": 2, "q8_0": 1 + 2 / 32, "q4_0": 0.5 + 2 / 32}[kv_dtype]
    assert row.rate * row.seconds == pytest.approx(2 * 2 * 40 * 64 * per_channel + 2 * 4 * 4 * 64)


@pytest.mark.parametrize("change", ["keys", "values", "query"])
def test_attention_over_other_numbers_is_wrong(bench, monkeypatch, change):
    error = attention._error
    monkeypatch.setattr(attention, "_error", lambda arrays, out, bound: error(arrays | {change: arrays[change] * np.float32(1.01)}, out, bound))
    row = measure.row_of(bench, Case("prefill", "a", "flash", lambda b: attention.attention(b, attention.Shape(2, 2, 16), 9, 9, "flash")))
    assert row.wrong


@pytest.mark.parametrize("way", ["fused", "unfused"])
def test_layers(bench, monkeypatch, way):
    """At a smaller shape than the real one, which takes a while to make."""
    for name, number in {"E": 256, "H": 4, "KV": 2, "D": 64, "HIDDEN": 512}.items():
        monkeypatch.setattr(block, name, number)
    row = measure.row_of(bench, Case("block", "a", way, lambda b: block.work(b, way == "fused", 3, 20)))
    check(row)
    assert row.facts["dispatches"] == 3 * (5 if way == "fused" else 13)
    step = block.record(bench.device, way == "fused", 1, 20)
    step.layers[0]["past"] = step.layers[0]["past"] * np.float16(1.5)
    assert block.error(step).wrong


def test_kinds_of_arithmetic(bench):
    assert arithmetic_of(ceilings.counting(bench, 1)[0]) == "f32"
    assert arithmetic_of(ceilings.dot4(bench).recordings[0]) == "dot4"
    assert arithmetic_of(Recording(bench.device, [*ceilings.counting(bench, 1)[0], *ceilings.dot4(bench).recordings[0]])) == "dot4"


@pytest.mark.parametrize("kind", FORMATS)
def test_random_weights_have_the_size_of_weights(kind):
    found = dense(random_matrix(np.random.default_rng(), 64, 1024, kind))
    assert found.shape == (64, 1024)
    assert 0.5 < found.std() * 32 < 2
    assert abs(found.mean()) * 32 < 0.5
    assert len(np.unique(found)) > 10


# ---- models


SMALL = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2, "feed_forward_length": 96}


@pytest.fixture
def small_model(monkeypatch):
    monkeypatch.setattr(model, "random_model", lambda: MADE(SMALL, 300))


MADE = model.random_model


def test_a_model_of_random_weights(bench, small_model):
    bench.model = "random"
    rows = [measure.row_of(bench, case) for case in model.cases(bench)]
    for row in rows:
        check(row)
    assert {row.facts["model"] for row in rows} == {"random-135M.Q4_1"}
    assert [row.variant for row in rows] == ["prompt", "step", "step", "greedy"]
    assert rows[0].facts["tokens"] == bench.kept["model"].model.chunk


def test_the_state_of_a_step_is_what_the_row_says(bench, small_model, monkeypatch):
    """The check runs other steps; after it, the prompt's and the depth's state must be back."""
    bench.model = "random"
    seen = []
    monkeypatch.setattr(measure, "measure", lambda b, work, seconds=None: seen.append(state(b)) or measure.Timing(1, 0, 1, "wall"))

    def state(b):
        m = b.kept["model"].model
        return tuple(m.device.read(m._state.buffer, np.uint32, 2).tolist())

    for case in model.cases(bench)[:3]:
        measure.row_of(bench, case)
    assert seen == [(0, bench.kept["model"].model.chunk), (0, 1), (1024, 1)]


def test_a_missing_demo_model_is_said(bench, small_model, monkeypatch):
    from wgattn.errors import ModelNotFound

    def nowhere(name):
        raise ModelNotFound("The demo model is not installed: run pip")

    monkeypatch.setattr(model, "find_model", nowhere)
    row = measure.row_of(bench, model.cases(bench)[0])
    check(row)
    assert "random weights, because the demo model is not installed: run pip" in row.note
    bench.kept.clear()
    bench.model = "other.gguf"
    row = measure.row_of(bench, model.cases(bench)[0])
    assert "not installed" in row.missing
    assert not row.failed


def test_a_model_that_computes_something_else_is_wrong(bench, small_model):
    bench.model = "random"
    loaded = model.load(bench, 2048)
    tensor = loaded.file.tensors["blk.1.ffn_down.weight"]
    tensor.data[:] = np.roll(tensor.data, 20)
    assert model.error(loaded).wrong


def test_large_models_are_not_compared(bench, small_model, monkeypatch):
    monkeypatch.setattr(model, "_MOST_CHECKED", 1000)
    bench.model = "random"
    assert measure.row_of(bench, model.cases(bench)[1]).error is None


# ---- caches


def test_copies_go_beyond_the_caches(device):
    bench = Bench(device)
    assert bench.copies(bench.uncached) == 1
    assert bench.copies(bench.uncached // 2 + 1) == 2
    assert bench.copies(1) == 64
    assert Bench(device, quick=True).copies(1) == 16
    assert records.cpu_cache() >= 1 << 18
