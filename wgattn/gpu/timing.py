"""Time on the device: of compute passes and runs of replays, by timestamps where there are any, and of a recording dispatch by dispatch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Unsupported
from .recording import Recording

if TYPE_CHECKING:
    from .device import Device

_BATCH = 1024
"""Passes timed in one submit: a query set holds at most 4096 timestamps."""

Body = Callable[[Any], None]
"""Encodes into an open compute pass."""


class PassClock:
    """Device seconds of compute passes, from timestamps at their beginning and end; up to `passes` in one submit.

    Raises Unsupported on a device without timestamps.
    """

    def __init__(self, device: Device, passes: int = 1):
        if not device.profile.timestamps:
            raise Unsupported(f"{device.name} has no timestamps.")
        self.device, self._passes = device, min(passes, _BATCH)
        usage = device.api.BufferUsage
        with device.guard("make a query set"):
            self._queries = device.gpu.create_query_set(type="timestamp", count=2 * self._passes)
            self._ticks = device.gpu.create_buffer(size=16 * self._passes, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
        self._period = device.backend.timestamp_period(device.gpu) * 1e-9

    def __call__(self, bodies: Sequence[Body]) -> np.ndarray:
        """Run them in order, each in a pass of its own; (bodies,) float64 seconds."""
        return np.concatenate([self._run(bodies[first : first + self._passes]) for first in range(0, len(bodies), self._passes)])

    def _run(self, bodies: Sequence[Body]) -> np.ndarray:
        count = 2 * len(bodies)
        with self.device.commands() as encoder:
            for i, body in enumerate(bodies):
                writes = {"query_set": self._queries, "beginning_of_pass_write_index": 2 * i, "end_of_pass_write_index": 2 * i + 1}
                compute_pass = encoder.begin_compute_pass(timestamp_writes=writes)
                body(compute_pass)
                compute_pass.end()
            encoder.resolve_query_set(self._queries, 0, count, self._ticks, 0)
        ticks = self.device.read(self._ticks, np.uint64, count).astype(np.int64).reshape(-1, 2)
        return (ticks[:, 1] - ticks[:, 0]) * self._period


class ReplayClock:
    """Seconds a replay in a run of replays, one pass and one submit: by timestamps where the device has them, else by the wall clock, the wait included.

    Several recordings are replayed in turn, and the next run goes on where the last one stopped.
    """

    def __init__(self, device: Device):
        self.device, self._turn = device, 0
        self._passes = PassClock(device) if device.profile.timestamps else None

    @property
    def by_timestamps(self) -> bool:
        return self._passes is not None

    def __call__(self, recordings: Sequence[Recording], times: int = 1) -> float:
        run = [recordings[(self._turn + i) % len(recordings)] for i in range(times)]
        self._turn += times

        def body(compute_pass: Any) -> None:
            for recording in run:
                recording.encode(compute_pass)

        seconds = self._passes([body])[0] if self._passes else 0.0
        return (seconds if seconds > 0 else self._by_the_wall(body)) / times

    def _by_the_wall(self, body: Body) -> float:
        begin = time.perf_counter()
        with self.device.commands() as encoder:
            compute_pass = encoder.begin_compute_pass()
            body(compute_pass)
            compute_pass.end()
        self.device.wait()
        return time.perf_counter() - begin


class Stopwatch:
    """Seconds that a replay of a recording takes: the median of several, after a warm-up.

    By a `ReplayClock`. A recording that takes more than `hopeless` times the shortest seen so far is measured only once.
    """

    def __init__(self, device: Device, *, samples: int = 5, warm_up: float = 0.1, sample: float = 1e-3, hopeless: float = 2.0):
        self.device, self._samples, self._sample, self._hopeless = device, samples, sample, hopeless
        self._warm_up = 0.0 if device.profile.software else warm_up  # an idle GPU's clock is low
        self._shortest = math.inf
        self._clock = ReplayClock(device)

    def __call__(self, recording: Recording) -> float:
        rough = self._warm(recording)
        times = max(1, min(50, math.ceil(self._sample / rough)))
        samples = [self._measure(recording, times)]
        if samples[0] <= self._hopeless * self._shortest:
            samples += (self._measure(recording, times) for _ in range(self._samples - 1))
        seconds = statistics.median(samples)
        self._shortest = min(self._shortest, seconds)
        return seconds

    def _warm(self, recording: Recording) -> float:
        """Replay until the device is awake; the first replay also pays for first touches of memory. Seconds of the last one."""
        start = time.perf_counter()
        while True:
            before = time.perf_counter()
            recording.replay()
            self.device.wait()
            now = time.perf_counter()
            if now - start >= self._warm_up:
                self._warm_up = 0.0
                return now - before

    def _measure(self, recording: Recording, times: int) -> float:
        return self._clock([recording], times)


@dataclass(frozen=True)
class DispatchTime:
    """Seconds that one dispatch takes on the device, a median."""

    label: str
    kernel: str
    groups: tuple[int, int, int]
    seconds: float


def dispatch_times(recording: Recording, repeat: int = 5) -> list[DispatchTime]:
    """Median device time of each dispatch, each in a pass of its own. Unsupported on a device without timestamps."""
    dispatches = list(recording)
    clock = PassClock(recording.device, max(1, len(dispatches)))
    bodies = [Recording(recording.device, [d]).encode for d in dispatches]
    times = np.array([clock(bodies) for _ in range(repeat + 1)][1:])  # the first warms up
    return [DispatchTime(d.label, d.kernel.source.name, d.groups, float(t)) for d, t in zip(dispatches, np.median(times, axis=0), strict=True)]
