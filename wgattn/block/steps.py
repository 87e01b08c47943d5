"""Feeding rows of activations to the recordings of a block: one token in one replay, many in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..attention.arguments import device_of, floating
from ..errors import CapacityError, ShapeError
from ..gpu import Device, DeviceProfile, Readback, Recording, StepInput, StepState, Tensor, let_interrupt_in
from ..gpu.recording import Copy
from .linear import padded

Array = Any
Record = Callable[[Recording, Mapping[str, Any], int, int], None]
"""(recording, state, tokens, keys at most): appends a block's dispatches. The state has step, h, y and residual, rows of the last two equally long."""


def chunk_tokens(profile: DeviceProfile, width: int, most: int = 256) -> int:
    """Tokens that one replay computes, where a row of the widest buffer has `width` floats; pure.

    A CPU gains nothing from more than 64, a GPU needs up to `most` to be busy; a small binding limit may allow fewer.
    """
    fits = profile.max_binding // (4 * width)
    if not fits:
        raise CapacityError(f"One token takes {4 * width} bytes of activations; {profile.name} can bind {profile.max_binding}.")
    return min(64 if profile.software else most, fits)


class Steps:
    """The recordings of a block of `width` channels in and out, and the buffers around them.

    Decoding is recorded for each of `limits` (positions below which a recording serves) by `prepare_decode`; prefill when it is first called.
    takes_residual: the block adds a residual that it is given; else its own input.
    """

    def __init__(self, device: Device, width: int, chunk: int, record: Record, *, limits: Sequence[int] = (2**32,), takes_residual: bool = True):
        self.device, self.width, self.chunk, self._limits = device, width, chunk, limits
        self._record, self._takes_residual = record, takes_residual
        self._decode: list[tuple[int, Recording]] = []
        self._chunk: tuple[StepState, dict[str, Any], Recording] | None = None

    def prepare_decode(self) -> Steps:
        """Make every object that a decode step needs; returns the steps."""
        self._input = StepInput(self.device, {"x": padded(self.width)} | ({"residual": padded(self.width)} if self._takes_residual else {}))
        y = self.device.empty((1, padded(self.width)))
        self._out = Tensor(self.device, (1, self.width), y.dtype, y.buffer)
        self._readback = Readback(self._out)
        state = self._state(self._input.step, self._input["x"], self._input["residual"] if self._takes_residual else None, y)
        self._decode = [(limit, self._recorded(state, 1, limit)) for limit in self._limits]
        self.device.compile(dispatch.kernel for _, recording in self._decode for dispatch in recording)
        return self

    def _state(self, step: Any, x: Any, residual: Any, y: Tensor) -> dict[str, Any]:
        return {"step": step, "h": x, "residual": x if residual is None else residual, "y": y}

    def _recorded(self, state: Mapping[str, Any], tokens: int, limit: int) -> Recording:
        recording = Recording(self.device)
        self._record(recording, state, tokens, limit)
        return recording

    def recording(self, position: int) -> Recording:
        """What a decode step at this position replays."""
        return next(recording for limit, recording in self._decode if position < limit)

    # ---- what comes in

    def checked(self, name: str, array: Array, tokens: int | None = None) -> Array:
        """(T, width) floating, on the host or a float32 tensor of this device; ShapeError, TypeError, ArgumentError for anything else."""
        device_of({name: array}, self.device)
        if isinstance(array, Tensor) and array.dtype != np.float32:
            raise TypeError(f"{name} is a tensor of {array.dtype}; it must be float32.")
        array = floating(name, array)
        if array.ndim != 2 or array.shape[1] != self.width or not array.shape[0] or (tokens is not None and array.shape[0] != tokens):
            rows = "T" if tokens is None else tokens
            raise ShapeError(f"{name} has shape {tuple(array.shape)}; it must be ({rows}, {self.width}){'' if tokens else ' with T of at least 1'}.")
        return array

    # ---- one token, and many

    def decode(self, position: int, x: Array, residual: Array | None) -> Array:
        """(1, width): one write, one replay. A tensor in gives the tensor that every step's result goes to."""
        recording = self.recording(position)
        self._input.write(position, {"x": x} | ({"residual": residual} if self._takes_residual else {}))
        if isinstance(x, Tensor):
            recording.replay(copies=self._input.copies)
            return self._out
        recording.replay(copies=self._input.copies, readback=self._readback)
        return self._readback.numpy().astype(_result_dtype(x), copy=False)

    def prefill(self, position: int, x: Array, residual: Array | None) -> Array:
        """(T, width) in chunks, the first token at `position`; a tensor of its own, or an array."""
        step, state, recording = self._chunks()
        T = x.shape[0]
        out = self.device.empty((T, self.width)) if isinstance(x, Tensor) else np.empty((T, self.width), np.float32)
        for first in range(0, T, self.chunk):
            let_interrupt_in()
            count = min(self.chunk, T - first)
            step.place(position + first, count)
            copies = self._bring(state["h"], x, first, count)
            if self._takes_residual:
                copies += self._bring(state["residual"], residual, first, count)
            recording.replay(copies=copies)
            if isinstance(out, Tensor):
                with self.device.commands() as encoder:
                    for move in _moves(state["y"], 0, out, first, count, self.width):
                        encoder.copy_buffer_to_buffer(*move)
            else:
                read = self.device.read(state["y"].buffer, np.float32, count * padded(self.width))
                out[first : first + count] = read.reshape(count, -1)[:, : self.width]
        return out if isinstance(out, Tensor) else out.astype(_result_dtype(x), copy=False)

    def _chunks(self) -> tuple[StepState, dict[str, Any], Recording]:
        if self._chunk is None:
            device, step = self.device, StepState(self.device)
            x, y, residual = (device.empty((self.chunk, padded(self.width))) if wanted else None for wanted in (True, True, self._takes_residual))
            state = self._state(step.step, x, residual, y)
            self._chunk = step, state, self._recorded(state, self.chunk, 2**32).compile()
        return self._chunk

    def _bring(self, target: Tensor, source: Array | None, first: int, count: int) -> list[Copy]:
        """Rows of the source into the first rows of the target: written, or as copies that the replay has to begin with."""
        if isinstance(source, Tensor):
            return _moves(source, first, target, 0, count, self.width)
        rows = np.zeros((count, target.shape[1]), np.float32)
        if source is not None:
            rows[:, : self.width] = source[first : first + count]
        self.device.write(target.buffer, rows)
        return []


def _moves(source: Tensor, first: int, target: Tensor, place: int, count: int, width: int) -> list[Copy]:
    """Copies of rows, `width` channels of each, from row `first` to row `place` on; one copy where rows have no padding."""
    whole = source.shape[1] == target.shape[1] == width
    begin, end = source.offset + 4 * first * source.shape[1], target.offset + 4 * place * target.shape[1]
    if whole:
        return [(source.buffer, begin, target.buffer, end, 4 * count * width)]
    return [(source.buffer, begin + 4 * t * source.shape[1], target.buffer, end + 4 * t * target.shape[1], 4 * width) for t in range(count)]


def _result_dtype(x: np.ndarray) -> type:
    return np.float16 if x.dtype == np.float16 else np.float32
