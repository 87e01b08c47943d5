"""Which arithmetic a projection uses: exact (dequantise, f32), int8 (activations rounded to int8 too), half (both rounded to f16, on matrix units)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from ..errors import ArgumentError
from ..gpu import Device, Recording, StepState
from ..gpu.timing import Stopwatch
from .linear import Matrix, half_fits, padded, record_linear

ARITHMETICS = ("exact", "int8", "half", "auto")
_measured: dict[tuple, str] = {}
"""The quickest, by profile of the device, kind, shape and tokens; for the life of the process."""
_WORTH = 0.98
"""What is less precise has to be quicker than exact by so much."""
_ROUNDS = 5


def checked(arithmetic: str) -> str:
    """The name, or ArgumentError."""
    if not isinstance(arithmetic, str) or arithmetic not in ARITHMETICS:
        raise ArgumentError(f"There is no arithmetic {arithmetic!r}; choose one of {', '.join(ARITHMETICS)}.")
    return arithmetic


def resolve(device: Device, matrix: Matrix, tokens: int, arithmetic: str) -> str:
    """ "exact", "int8" or "half" for a projection of up to `tokens` tokens.

    Where there are no matrix units, or few tokens, "half" is exact; for matrices of floats "int8" is.
    """
    checked(arithmetic)
    possible = ["exact"] + ["int8"] * matrix.format.quantised + ["half"] * half_fits(device.profile, tokens)
    if arithmetic != "auto":
        return arithmetic if arithmetic in possible else "exact"
    if len(possible) == 1:
        return "exact"
    timed = min(tokens, 64 if device.profile.software else 512)
    key = (device.profile, matrix.format.name, matrix.rows, matrix.columns, timed)
    if key not in _measured:
        seconds = measure(device, matrix, timed, possible)
        seconds["exact"] *= _WORTH
        _measured[key] = min(seconds, key=seconds.__getitem__)
    return _measured[key]


def measure(device: Device, matrix: Matrix, tokens: int, arithmetics: Sequence[str]) -> dict[str, float]:
    """Seconds that the projection of so many random tokens takes in each arithmetic: medians of runs that take turns, since clocks change."""
    recordings = {name: _projection(device, matrix, tokens, name) for name in arithmetics}
    stopwatch = Stopwatch(device, samples=1, sample=2e-3)
    rounds = [{name: stopwatch(recording) for name, recording in recordings.items()} for _ in range(_ROUNDS)]
    return {name: statistics.median(seconds[name] for seconds in rounds) for name in recordings}


def _projection(device: Device, matrix: Matrix, tokens: int, arithmetic: str) -> Recording:
    rng = np.random.default_rng(0)
    x = np.zeros((tokens, padded(matrix.columns)), np.float32)
    x[:, : matrix.columns] = rng.standard_normal((tokens, matrix.columns))
    state, recording = StepState(device), Recording(device)
    state.place(0, tokens)
    outputs = {"y": device.empty((tokens, matrix.rows))}
    record_linear(
        recording,
        matrix,
        step=state.step,
        x=device.tensor(x),
        output="store",
        outputs=outputs,
        tokens=tokens,
        y_stride=matrix.rows,
        arithmetic=arithmetic,
    )
    return recording
