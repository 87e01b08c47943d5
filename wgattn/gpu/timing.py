"""Device time of a recording, dispatch by dispatch, by timestamps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import Unsupported
from .recording import Recording

if TYPE_CHECKING:
    from .device import Device

_BATCH = 1024
"""Dispatches timed in one submit: a query set holds at most 4096 timestamps."""


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
    times = np.array([_once(recording.device, dispatches) for _ in range(repeat + 1)][1:])  # the first warms up
    return [DispatchTime(d.label, d.kernel.source.name, d.groups, float(t)) for d, t in zip(dispatches, np.median(times, axis=0), strict=True)]


def _once(device: Device, dispatches: list) -> np.ndarray:
    """Seconds of each dispatch, run in order once."""
    if not device.profile.timestamps:
        raise Unsupported(f"{device.name} has no timestamps.")
    found = []
    for first in range(0, len(dispatches), _BATCH):
        part = dispatches[first : first + _BATCH]
        queries = device.gpu.create_query_set(type="timestamp", count=2 * len(part))
        usage = device.api.BufferUsage
        resolved = device.gpu.create_buffer(size=16 * len(part), usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
        encoder = device.gpu.create_command_encoder()
        for i, d in enumerate(part):
            writes = {"query_set": queries, "beginning_of_pass_write_index": 2 * i, "end_of_pass_write_index": 2 * i + 1}
            compute_pass = encoder.begin_compute_pass(timestamp_writes=writes)
            compute_pass.set_pipeline(d.pipeline)
            compute_pass.set_bind_group(0, d.bindings)
            compute_pass.dispatch_workgroups(*d.groups)
            compute_pass.end()
        encoder.resolve_query_set(queries, 0, 2 * len(part), resolved, 0)
        device.gpu.queue.submit([encoder.finish()])
        ticks = device.read(resolved, np.uint64, 2 * len(part)).reshape(-1, 2)
        found.append((ticks[:, 1] - ticks[:, 0]).astype(np.float64) * device.backend.timestamp_period(device.gpu) * 1e-9)
    return np.concatenate(found)
