"""Greedy decoding that does not wait for the host: the GPU picks each token and feeds it to the next step; the host reads them in blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from ..errors import DeviceError
from ..gpu import Device, Readback, Recording, StepState, Tensor, power_of_two

_RING = 256
"""Tokens that the device keeps for the host."""
_MOST = 32
"""Steps submitted at once, at most."""
_BLOCK_SECONDS = 0.02
"""Blocks grow until they take about so long: longer ones would make the text stutter."""
_NONE = 0xFFFFFFFF


class GreedyLoop:
    """Extends decode recordings by `llm/argmax.wgsl` and runs them in blocks, the next one submitted before the last is read.

    Args:
        recordings: (limit, recording) each: the recording of a step at lengths below the limit.
        logits: (vocab,) float32 that a step leaves, in a buffer padded to a multiple of 4. state: the step buffer that its kernels read.
    """

    def __init__(self, device: Device, recordings: list[tuple[int, Recording]], logits: Tensor, state: StepState):
        self._state = state
        self._history = device.empty((_RING,), np.uint32)
        kernel = device.kernel("llm/argmax", WORKGROUP=power_of_two(min(1024, device.profile.max_invocations)), TOKENS_AT=state.tokens_at)
        buffers = {"logits": logits, "state": state.buffer, "history": self._history}
        self._recordings = []
        for limit, step in recordings:
            recording = Recording(device, step)
            recording.add(kernel, (1,), buffers, {"vocab": logits.size, "ring": _RING}, label="argmax, next step")
            self._recordings.append((limit, recording))
        self._readbacks = [Readback(self._history) for _ in range(2)]
        self._device = device
        self._block = 1

    def run(self, token: int, length: int, count: int, done: Callable[[int], None]) -> Iterator[int]:
        """Feed `token` at position `length`, then each most likely token; yield `count` of them.

        `done(n)` is called when n positions are in the cache, before the token that follows them is yielded.
        Steps that were submitted but not consumed leave rows beyond that length, which no kernel reads.
        """
        self._state.write(length, [token])
        pending: deque[tuple[int, int, Readback, float]] = deque()
        submitted = 0
        while submitted < count or pending:
            while len(pending) < len(self._readbacks) and submitted < count:
                steps = min(self._block, count - submitted)
                readback = self._readbacks[0]
                self._readbacks.append(self._readbacks.pop(0))
                pending.append((length + submitted, steps, readback, time.perf_counter()))
                self._submit(length + submitted, steps, readback)
                submitted += steps
            first, steps, readback, begin = pending.popleft()
            history = readback.numpy()
            if time.perf_counter() - begin < _BLOCK_SECONDS:
                self._block = min(2 * self._block, _MOST)
            for position in range(first + 1, first + steps + 1):
                found = int(history[position % _RING])
                if found == _NONE:
                    raise DeviceError("The logits are not numbers; the model file or the GPU's arithmetic is at fault.")
                done(position)
                yield found

    def _submit(self, length: int, steps: int, readback: Readback) -> None:
        """Encode and submit a block of steps, in one pass and one submit."""
        with self._device.commands() as encoder:
            compute_pass = encoder.begin_compute_pass()
            for position in range(length, length + steps):
                next(recording for limit, recording in self._recordings if position < limit).encode(compute_pass)
            compute_pass.end()
            readback.encode(encoder)
