"""Generation that does not wait for the host: the GPU picks each token and feeds it to the next step; the host reads them in blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from ..errors import ArgumentError, DeviceError
from ..gpu import Device, Readback, Recording, StepState, Tensor, power_of_two
from .sample import check_options

_RING = 256
"""Tokens that the device keeps for the host."""
_MOST = 32
"""Steps submitted at once, at most."""
_BLOCK_SECONDS = 0.02
"""Blocks grow until they take about so long: longer ones would make the text stutter."""
_NONE = 0xFFFFFFFF
_UNDERFLOW = 87.0
"""exp(-87) is about the least normal number of float32: tokens of such a weight beside the largest are left out of a draw."""
_SAMPLING = np.dtype([("inverse", "f4"), ("reach", "f4"), ("top_p", "f4"), ("top_k", "u4"), ("seed", "u4", 2), ("_", "u4", 2)])
"""`struct Sampling` of llm/sample.wgsl."""


def pack_options(temperature: float, top_k: int, top_p: float, seed: int | None) -> np.ndarray:
    """The words that llm/sample.wgsl takes its options from, for a temperature above 0. ArgumentError for options that cannot be.

    seed: an integer of at least 0, of any size; None takes fresh entropy.
    """
    check_options(temperature, top_k, top_p)
    try:
        words = np.random.SeedSequence(seed).generate_state(2)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"seed is {seed!r}: it must be an integer of at least 0, or None ({error})") from None
    temperature = min(max(float(temperature), 1e-37), 1e37)  # so that neither it nor its inverse leaves float32
    packed = np.zeros((), _SAMPLING)
    for name, value in (("inverse", 1 / temperature), ("reach", min(_UNDERFLOW * temperature, 3e38)), ("top_p", top_p), ("top_k", min(top_k, 0x7FFFFFFF))):
        packed[name] = value
    packed["seed"] = words
    return packed.reshape(1).view(np.uint32)


class DecodeLoop:
    """Follows each decode step by a dispatch that picks the next token, `llm/argmax.wgsl` or `llm/sample.wgsl`, and runs such steps in blocks, on
    a GPU the next one submitted before the last is read.

    Args:
        recordings: (limit, recording) each: the recording of a step at lengths below the limit.
        logits: (vocab,) float32 that a step leaves, in a buffer padded to a multiple of 4. state: the step buffer that its kernels read.
    """

    def __init__(self, device: Device, recordings: list[tuple[int, Recording]], logits: Tensor, state: StepState):
        self._device, self._recordings = device, recordings
        self._history = device.empty((_RING,), np.uint32)
        self._options = device.buffer(_SAMPLING.itemsize, uniform=True)
        buffers = {"logits": logits, "state": state.buffer, "history": self._history}
        params = {"vocab": logits.size, "ring": _RING}
        profile = device.profile
        workgroup = power_of_two(min(1024, profile.max_invocations))
        self.argmax = Recording(device)
        """The pick of the most likely token."""
        kernel = device.kernel("llm/argmax", "order", WORKGROUP=workgroup, TOKENS_AT=state.tokens_at)
        self.argmax.add(kernel, (1,), buffers, params, label="argmax, next step")
        workgroup = power_of_two(min(64 if profile.software else workgroup, (profile.workgroup_memory - 2048) // 32, max(64, logits.size // 4)))
        slots = -(-logits.size // (4 * workgroup)) * 4 * workgroup
        self._kept = device.empty((slots + 1, 2), np.uint32)
        """What `sample` works on; the last row is the border of the last draw: a candidate's key is above (see parts/order.wgsl), or equal and its id
        no higher."""
        self.sample = Recording(device)
        """The pick of a token that is drawn."""
        kernel = device.kernel("llm/sample", "order", "threefry", WORKGROUP=workgroup, TOKENS_AT=state.tokens_at)
        self.sample.add(kernel, (1,), buffers | {"sampling": self._options, "kept": self._kept}, params | {"slots": slots}, label="sample, next step")
        in_flight = 1 if profile.software else 2  # on a CPU two blocks take cores from one another
        self._readbacks = [Readback(self._history) for _ in range(in_flight)]
        self._block = 1

    def run(self, begin: Recording, length: int, count: int, done: Callable[[int], None], options: np.ndarray | None = None) -> Iterator[int]:
        """Yield `count` tokens (at least 1) that follow `length` positions, the last of which `begin` gives the logits of; each is fed to the next step.

        options: of `pack_options`; None picks the most likely token each time. The draw for a position depends on its logits, the options and the
        position alone, however steps are put together.

        `done(n)` is called when n positions are in the cache, before the token that follows them is yielded. The first token is yielded before any step
        behind it is submitted. Steps that were submitted but not consumed leave rows beyond that length, which no kernel reads.
        """
        pick = self.argmax if options is None else self.sample
        if options is not None:
            self._device.write(self._options, options)
        pending: deque[tuple[int, int, Readback, float]] = deque()
        submitted, ahead = 0, 1
        while submitted < count or pending:
            while len(pending) < ahead and submitted < count:
                picks = min(self._block, count - submitted) if submitted else 1
                readback = self._readbacks[0]
                self._readbacks.append(self._readbacks.pop(0))
                pending.append((length + submitted, picks, readback, time.perf_counter()))
                steps = [self._step(position - 1) for position in range(length + submitted, length + submitted + picks)] if submitted else [begin]
                self._submit(steps, pick, readback)
                submitted += picks
            first, picks, readback, started = pending.popleft()
            history = readback.numpy()
            if first > length and time.perf_counter() - started < _BLOCK_SECONDS:
                self._block = min(2 * self._block, _MOST)
            ahead = len(self._readbacks)
            for position in range(first, first + picks):
                found = int(history[position % _RING])
                if found == _NONE:
                    raise DeviceError("The logits are not numbers; the model file or the GPU's arithmetic is at fault.")
                done(position)
                yield found

    def _step(self, position: int) -> Recording:
        """The decode step of the token at a position."""
        return next(recording for limit, recording in self._recordings if position < limit)

    def _submit(self, steps: list[Recording], pick: Recording, readback: Readback) -> None:
        """Encode and submit steps, each with a pick behind it, in one pass and one submit."""
        with self._device.commands() as encoder:
            compute_pass = encoder.begin_compute_pass()
            for step in steps:
                step.encode(compute_pass)
                pick.encode(compute_pass)
            compute_pass.end()
            readback.encode(encoder)
