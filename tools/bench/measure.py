"""Measuring one case: warm up, sample, and put what came of it into a row."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wgattn.errors import CapacityError, ModelNotFound, Unsupported, WgattnError
from wgattn.gpu.timing import ReplayClock

from .records import Bench, Case, Missing, Row, Work

_FEWEST, _FEW, _MOST = 3, 5, 200
"""Samples: at least `_FEW`, or `_FEWEST` of what takes seconds."""
_SLOW = 0.5
"""Seconds of a replay that is slow."""
_MOST_REPLAYS = 256
"""In a sample."""
_HOST_SECONDS = 0.05
_AWAKE = (0.25, 1.5)
"""Seconds after which a GPU is awake if it no longer becomes faster, and in any case."""
_CANNOT = (Missing, Unsupported, CapacityError, ModelNotFound)
"""Errors that say what is not there or does not fit; any other is a fault."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one replay: the median (or the best), the spread (half the distance between the quartiles, as a share of the median), and the host's part."""

    seconds: float
    spread: float
    samples: int
    clock: str
    host: float | None = None


def measure(bench: Bench, work: Work, seconds: float | None = None) -> Timing:
    """Warm up, then sample for so long (default: the bench's), at least five times."""
    seconds = bench.seconds if seconds is None else seconds
    if work.wall is not None:
        work.wall()
        return _timing(work, _sample(work.wall, seconds), "wall")
    clock = ReplayClock(bench.device)
    rough = _warm_up(bench, work)
    wanted = 2e-3 if clock.by_timestamps else 2e-2  # of the wall clock, what submitting and waiting take is a part
    times = max(1, min(_MOST_REPLAYS, math.ceil(wanted / rough)))
    samples = _sample(lambda: clock(work.recordings, times), seconds)
    return _timing(work, samples, "timestamps" if clock.by_timestamps else "wall", _host(bench, work))


def _timing(work: Work, samples: list[float], clock: str, host: float | None = None) -> Timing:
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75))
    return Timing(min(samples) if work.best else float(middle), float((high - low) / 2 / middle), len(samples), clock, host)


def _sample(once: Callable[[], float], seconds: float) -> list[float]:
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < _FEW or (len(samples) < _MOST and time.perf_counter() - begin < seconds):
        samples.append(once())
        if len(samples) >= _FEWEST and min(samples) * _FEWEST > max(seconds, _SLOW):
            break
    return samples


def _warm_up(bench: Bench, work: Work) -> float:
    """Replay everything once, and on until a GPU's clock is up: it idles low, and rises while there is work. Seconds of a replay, roughly."""
    device = bench.device
    least, most = (0.0, 0.0) if device.profile.software else _AWAKE
    begin = time.perf_counter()
    times, rounds, shortest = 1, 0, math.inf
    while True:
        before = time.perf_counter()
        for recording in work.recordings:
            recording.replay(times)
        device.wait()
        now = time.perf_counter()
        rounds, took = rounds + 1, (now - before) / times / len(work.recordings)
        rising, shortest = took < 0.97 * shortest, min(took, shortest)
        if (rounds > 1 or now - before > _SLOW) and now - begin >= (most if rising else least):
            return took
        if now - before < 0.01:
            times = min(64, 2 * times)


def _host(bench: Bench, work: Work) -> float:
    """Seconds that the host takes to encode and submit one replay while the device is idle."""
    samples: list[float] = []
    begin = time.perf_counter()
    while True:
        bench.device.wait()
        before = time.perf_counter()
        work.recordings[0].replay()
        samples.append(time.perf_counter() - before)
        spent = time.perf_counter() - begin
        if len(samples) == _MOST or spent > _SLOW or (len(samples) >= _FEW and spent > _HOST_SECONDS):
            bench.device.wait()
            return statistics.median(samples)


def row_of(bench: Bench, case: Case) -> Row:
    """Build, check against the reference, measure. What the device cannot do becomes a row that says so."""
    row = Row(case.section, case.problem, case.variant)
    try:
        work = case.build(bench)
        error = work.check()
        work.arrange()
        _fill(bench, row, work, measure(bench, work))
    except WgattnError as reason:
        row.missing = str(reason).strip().splitlines()[0]
        row.failed = not isinstance(reason, _CANNOT)
        return row
    if error is not None:
        row.error, row.largest_error, row.error_bound, row.wrong = error.relative, error.largest, error.bound, error.wrong
    return row


def _fill(bench: Bench, row: Row, work: Work, timing: Timing) -> None:
    row.seconds, row.spread, row.samples, row.clock = timing.seconds / work.units, timing.spread, timing.samples, timing.clock
    row.host_seconds = None if timing.host is None else timing.host / work.units
    row.copies, row.working_set = len(work.recordings), work.working_set
    row.in_cache = 0 < work.working_set < bench.uncached
    row.note, row.facts = work.note, dict(work.facts)
    by_bytes = bool(work.nbytes) and (work.ceiling == "copy" or not work.flops)
    row.unit = "B/s" if by_bytes else "FLOP/s" if work.flops else None
    if row.unit:
        row.rate = (work.nbytes if by_bytes else work.flops) / timing.seconds
        if work.ceiling in bench.ceilings:
            row.ceiling, row.share = work.ceiling, row.rate / bench.ceilings[work.ceiling]
