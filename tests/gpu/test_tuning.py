"""The tuner and its cache: what is timed, what is remembered, and what becomes of a file that is not as it should be."""

import dataclasses
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from wgattn.errors import CapacityError, DeviceError, Unsupported
from wgattn.gpu import Device, Recording, tuning
from wgattn.gpu.tuning import Stopwatch, TuningCache, TuningKey, find, tune, tuning_key

KEY = TuningKey("some GPU | driver 1 | wgpu", "0123456789abcdef", "sum of 1024")
FILL = """// Every invocation counts to `rounds`.
struct Params { rounds: u32 }
var<uniform> params: Params;
var<storage, read_write> total: array<u32>;   // (64) u32
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) index: u32) {
  var sum = 0u;
  for (var i = 0u; i < params.rounds; i++) { sum = sum * 1664525u + i; }
  total[index] = sum;
}
"""


@dataclass(frozen=True)
class Shape:
    """What the tests choose from."""

    size: int
    staged: bool = False


SHAPES = [Shape(1), Shape(2), Shape(4, True)]


class Clock:
    """Tells times by the shape that was built last, and counts."""

    def __init__(self, **seconds: float):
        self.seconds, self.calls, self.built = seconds, 0, None

    def build(self, shape: Shape) -> Shape:
        self.built = shape
        return shape

    def __call__(self, recording: Shape) -> float:
        self.calls += 1
        return self.seconds[f"s{recording.size}"]


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    return TuningCache(tmp_path)


def again(cache: TuningCache) -> TuningCache:
    """The same file, as another process finds it."""
    return TuningCache(cache.path.parent)


# ---- tune


def test_the_fastest_is_chosen_and_stored(device: Device, cache: TuningCache):
    clock = Clock(s1=3.0, s2=1.0, s4=2.0)
    tuned = tune(device, SHAPES, clock.build, cache, KEY, clock)
    assert (tuned.choice, tuned.seconds, tuned.first_seconds) == (Shape(2), 1.0, 3.0)
    assert again(cache).get(KEY) == {"size": 2, "staged": False}


def test_a_second_start_times_nothing(device: Device, cache: TuningCache):
    first = Clock(s1=3.0, s2=2.0, s4=1.0)
    tune(device, SHAPES, first.build, cache, KEY, first)
    second = Clock()
    tuned = tune(device, SHAPES, second.build, again(cache), KEY, second)
    assert (tuned.choice, tuned.seconds) == (Shape(4, True), None)
    assert (first.calls, second.calls, second.built) == (3, 0, None)


def test_asked_to_it_times_again(device: Device, cache: TuningCache):
    tune(device, SHAPES, lambda s: s, cache, KEY, Clock(s1=1.0, s2=2.0, s4=3.0))
    clock = Clock(s1=9.0, s2=2.0, s4=3.0)
    assert tune(device, SHAPES, lambda s: s, cache, KEY, clock, again=True).choice == Shape(2)
    assert clock.calls == 3
    assert again(cache).get(KEY)["size"] == 2


def test_the_first_wins_against_what_is_faster_by_noise_only(device: Device, cache: TuningCache):
    assert tune(device, SHAPES, lambda s: s, cache, KEY, Clock(s1=1.0, s2=0.99, s4=1.5)).choice == Shape(1)


@pytest.mark.parametrize("error", [CapacityError, Unsupported, DeviceError])
def test_candidates_that_cannot_run_are_passed_over(device: Device, cache: TuningCache, error: type):
    def build(shape: Shape) -> Shape:
        if shape.size != 2:
            raise error("no")
        return shape

    done = []
    tuned = tune(device, SHAPES, build, cache, KEY, Clock(s2=1.0), progress=lambda: done.append(1))
    assert tuned.choice == Shape(2)
    assert len(done) == 3


def test_other_errors_of_a_candidate_are_not_hidden(device: Device, cache: TuningCache):
    with pytest.raises(ZeroDivisionError):
        tune(device, SHAPES, lambda s: 1 // 0, cache, KEY, Clock())
    assert cache.get(KEY) is None


@pytest.mark.parametrize("candidates", [SHAPES, []])
def test_no_candidate_at_all(device: Device, cache: TuningCache, candidates: list):
    def build(shape: Shape) -> Shape:
        raise CapacityError("too large")

    with pytest.raises(Unsupported, match="sum of 1024"):
        tune(device, candidates, build, cache, KEY, Clock())
    assert not cache.path.exists()


def test_a_stored_choice_that_is_no_candidate_any_more_is_timed_anew(device: Device, cache: TuningCache):
    tune(device, SHAPES, lambda s: s, cache, KEY, Clock(s1=3.0, s2=1.0, s4=2.0))
    clock = Clock(s1=1.0, s4=2.0)
    assert tune(device, [SHAPES[0], SHAPES[2]], lambda s: s, again(cache), KEY, clock).choice == Shape(1)
    assert clock.calls == 2


def test_find():
    assert find(SHAPES, {"size": 4, "staged": True}) == Shape(4, True)
    for nothing in (None, {}, {"size": 4}, {"size": 4, "staged": True, "more": 1}, [4, True], "4", {"size": "4", "staged": True}):
        assert find(SHAPES, nothing) is None


# ---- what a choice holds for


@pytest.mark.parametrize("field", TuningKey._fields)
def test_another_device_shader_or_problem_finds_nothing(cache: TuningCache, field: str):
    cache.put(KEY, {"size": 2}, 1e-3)
    for fresh in (cache, again(cache)):
        assert fresh.get(KEY) == {"size": 2}
        assert fresh.get(KEY._replace(**{field: "other"})) is None


def test_a_key_tells_devices_drivers_backends_and_shaders_apart(device: Device, write_shader):
    write_shader("wing/one", "// 1")
    write_shader("parts/shared", "// 2")
    write_shader("other/main", "// 3")

    def key() -> TuningKey:
        tuning._digest.cache_clear()
        return tuning_key(device, "wing", "p")

    first = key()
    assert device.profile.name in first.device
    assert device.profile.driver in first.device
    assert device.profile.backend in first.device
    assert key() == first
    write_shader("other/main", "// changed: of another wing")
    assert key() == first
    seen = {first.shaders}
    for name, text in (("wing/one", "// 9"), ("parts/shared", "// 9"), ("wing/parts/new", ""), ("wing/parts/new", "// 9")):
        write_shader(name, text)
        seen.add(key().shaders)
    assert len(seen) == 5


def test_a_changed_shader_replaces_the_old_entry(cache: TuningCache):
    cache.put(KEY, {"size": 1}, 1e-3)
    cache.put(KEY._replace(shaders="f" * 16), {"size": 2}, 1e-3)
    assert cache.get(KEY) is None
    assert cache.get(KEY._replace(shaders="f" * 16)) == {"size": 2}
    assert len(json.loads(cache.path.read_text())["devices"][KEY.device]) == 1


def test_a_cache_of_other_devices_is_noted_once_and_kept(cache: TuningCache, caplog):
    cache.put(KEY, {"size": 1}, 1e-3)
    fresh, mine = again(cache), KEY._replace(device="my GPU | 2 | dawn")
    with caplog.at_level(logging.INFO, logger="wgattn.gpu.tuning"):
        assert fresh.get(mine) is None
        assert fresh.get(mine) is None
    assert [r.getMessage() for r in caplog.records] == [f"The tuning cache {cache.path} knows other devices, not {mine.device}."]
    fresh.put(mine, {"size": 3}, 1e-3)
    assert (again(cache).get(KEY), again(cache).get(mine)) == ({"size": 1}, {"size": 3})


# ---- the file

BAD = {
    "empty": "",
    "text": "not JSON",
    "cut short": '{"format": 1, "devices": {"some',
    "a list": "[1, 2]",
    "foreign": '{"name": "package", "version": 3}',
    "older": '{"format": 0, "devices": {}}',
    "newer": '{"format": 2, "devices": {}}',
    "no devices": '{"format": 1}',
    "device not a table": '{"format": 1, "devices": {"some GPU | driver 1 | wgpu": 3}}',
    "entry not a table": '{"format": 1, "devices": {"some GPU | driver 1 | wgpu": {"sum of 1024": 3}}}',
    "entry without a choice": '{"format": 1, "devices": {"some GPU | driver 1 | wgpu": {"sum of 1024": {"shaders": "0123456789abcdef"}}}}',
    "binary": "\x00\x01\x02",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_ignored_with_one_warning_and_replaced(cache: TuningCache, name: str, recwarn):
    cache.path.write_text(BAD[name])
    assert cache.get(KEY) is None
    assert cache.get(KEY) is None
    cache.put(KEY, {"size": 2}, 1e-3)
    assert [str(cache.path) in str(w.message) for w in recwarn] == [True]
    assert again(cache).get(KEY) == {"size": 2}


def test_bytes_that_are_no_text(cache: TuningCache):
    cache.path.write_bytes(b"\xff\xfe\x00{")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert cache.empty


def test_a_directory_in_the_place_of_the_file(cache: TuningCache):
    cache.path.mkdir()
    with pytest.warns(UserWarning, match="cannot be read"):
        assert cache.get(KEY) is None
    with pytest.warns(UserWarning, match="cannot be written"):
        cache.put(KEY, {"size": 2}, 1e-3)
    assert cache.get(KEY) == {"size": 2}, "what was tuned is known in this process all the same"
    assert [p.name for p in cache.path.parent.iterdir()] == ["tuning.json"], "no temporary file is left"


def test_a_place_that_cannot_be_written(tmp_path: Path, recwarn):
    (tmp_path / "file").write_text("in the way")
    cache = TuningCache(tmp_path / "file" / "deeper")
    for size in (1, 2):
        cache.put(KEY, {"size": size}, 1e-3)
    assert cache.get(KEY) == {"size": 2}
    assert sum("cannot be written" in str(w.message) for w in recwarn) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory(tmp_path: Path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.warns(UserWarning, match="cannot be written"):
        TuningCache(tmp_path).put(KEY, {"size": 1}, 1e-3)
    tmp_path.chmod(stat.S_IRWXU)


def test_a_write_that_fails_half_way_leaves_the_old_file(cache: TuningCache, monkeypatch):
    cache.put(KEY, {"size": 1}, 1e-3)
    before = cache.path.read_bytes()

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(UserWarning, match="No space left"):
        cache.put(KEY, {"size": 2}, 1e-3)
    assert cache.path.read_bytes() == before
    assert [p.name for p in cache.path.parent.iterdir()] == ["tuning.json"]


def test_what_another_process_stores_meanwhile_is_kept(cache: TuningCache):
    assert cache.empty
    other = again(cache)
    other.put(KEY._replace(problem="theirs"), {"size": 1}, 1e-3)
    cache.put(KEY._replace(problem="ours"), {"size": 2}, 1e-3)
    assert [again(cache).get(KEY._replace(problem=p)) for p in ("theirs", "ours")] == [{"size": 1}, {"size": 2}]


def test_the_file_is_read_once(cache: TuningCache, monkeypatch):
    again(cache).put(KEY, {"size": 1}, 1e-3)
    reads = []
    original = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **kw: (reads.append(self), original(self, **kw))[1])
    for _ in range(5):
        assert cache.get(KEY) == {"size": 1}
    assert reads == [cache.path]


def test_where_the_file_is(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WGATTN_CACHE_DIR", str(tmp_path / "here"))
    assert TuningCache().path == tmp_path / "here" / "tuning.json"
    assert tuning.default_cache().path == tmp_path / "here" / "tuning.json"
    assert tuning.default_cache() is tuning.default_cache()
    monkeypatch.delenv("WGATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert TuningCache().path.name == "tuning.json"
    assert "wgattn" in TuningCache().path.parts
    assert TuningCache(tmp_path).path == tmp_path / "tuning.json"


def test_many_processes_write_at_once(cache: TuningCache):
    """Whoever reads meanwhile sees a whole file."""
    text = (
        "import sys; from wgattn.gpu.tuning import TuningCache, TuningKey\n"
        "for i in range(20): TuningCache(sys.argv[1]).put(TuningKey('d', 's', f'{sys.argv[2]} {i}'), {'size': i}, 1.0)"
    )
    processes = [subprocess.Popen([sys.executable, "-W", "error", "-c", text, str(cache.path.parent), str(n)]) for n in range(2)]
    while any(p.poll() is None for p in processes):
        if cache.path.exists():
            json.loads(cache.path.read_text())
    assert [p.returncode for p in processes] == [0, 0]
    assert [p.name for p in cache.path.parent.iterdir()] == ["tuning.json"]


# ---- the clock


@pytest.fixture
def count_to(write_shader, device: Device) -> Callable[..., Recording]:
    """count_to(rounds) is a recording that takes the longer the more rounds; count_to.device is where it runs."""
    write_shader("fill", FILL)
    made = Device()
    made.profile = device.profile  # measuring needs a shader of the house

    def record(rounds: int) -> Recording:
        recording = Recording(made)
        recording.add(made.kernel("fill"), (1,), {"total": made.empty((64,), np.uint32)}, {"rounds": rounds})
        return recording

    record.device = made
    return record


@pytest.mark.parametrize("timestamps", [True, False])
def test_the_stopwatch_tells_long_from_short(count_to, timestamps: bool):
    device = count_to.device
    device.profile = replace(device.profile, timestamps=timestamps and device.profile.timestamps)
    times = [Stopwatch(device, samples=3)(count_to(rounds)) for rounds in (10_000, 3_000_000)]
    for _ in range(9):  # a busy machine may stop the short one for longer than the long one takes
        if times[0] < times[1]:
            break
        times[0] = Stopwatch(device, samples=3)(count_to(10_000))
    assert 0 < times[0] < times[1] < 10


def test_the_stopwatch_measures_what_is_far_slower_only_once(count_to, monkeypatch):
    watch, samples = Stopwatch(count_to.device, samples=5), []
    seconds = iter([1, 1, 1, 1, 1, 1.9, 2, 2, 2, 2, 3, 9, 9])
    monkeypatch.setattr(watch, "_measure", lambda recording, times: samples.append(next(seconds)) or samples[-1])
    assert watch(count_to(10)) == 1
    assert watch(count_to(10)) == 2
    assert watch(count_to(10)) == 3
    assert len(samples) == 11


def test_an_idle_gpu_is_woken_first(count_to, monkeypatch):
    device, replays = count_to.device, []
    recording = count_to(10)
    monkeypatch.setattr(recording, "replay", lambda times=1: replays.append(times))
    for kind, woken in (("CPU", False), ("DiscreteGPU", True)):
        device.profile = replace(device.profile, kind=kind)
        watch = Stopwatch(device, warm_up=0.02)
        replays.clear()
        watch._warm(recording)
        assert (len(replays) > 1) == woken
        replays.clear()
        watch._warm(recording)
        assert len(replays) == 1, "once"


def test_tune_on_the_device(count_to, cache: TuningCache):
    tuned = tune(count_to.device, SHAPES[:2], lambda shape: count_to({1: 3_000_000, 2: 1000}[shape.size]), cache, KEY)
    assert tuned.choice == Shape(2)
    assert tuned.seconds < tuned.first_seconds
    assert dataclasses.asdict(tuned.choice) == again(cache).get(KEY)
