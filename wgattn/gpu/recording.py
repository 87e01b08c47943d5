"""Work recorded once and replayed: a list of dispatches whose pipelines, bind groups and grids are all made before the first replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CapacityError
from .kernel import Kernel
from .staging import Staging
from .tensor import OFFSET_ALIGNMENT, Slice, Tensor

if TYPE_CHECKING:
    from .device import Device


Copy = tuple[Any, int, Any, int, int]
"""From a buffer and byte offset to a buffer and byte offset, so many bytes (multiples of 4)."""


@dataclass(frozen=True)
class Dispatch:
    """One dispatch; `label` says what it is for, for profiles."""

    label: str
    kernel: Kernel
    bindings: Any
    groups: tuple[int, int, int]
    nbytes: Mapping[str, int]
    """What is bound, by the buffers' names, whether or not the kernel touches all of it."""
    operations: float = 0.0
    """Multiplications and additions, about; 0 for what is always short."""
    bound: Mapping[str, Any] = field(default_factory=dict)
    """Kept for the uniform buffers among them, which are shared as long as somebody holds them."""

    @property
    def pipeline(self) -> Any:
        return self.kernel.pipeline


class Recording:
    """An ordered list of dispatches. `add` builds, `compile` makes the pipelines, several at once, and `replay` only encodes and submits: one compute
    pass, one submit (more where drivers would end it). A replay of what is not compiled begins with that.

    What changes between replays lives in buffers that the dispatches read, never in the list.
    """

    def __init__(self, device: Device, dispatches: Iterable[Dispatch] = ()):
        self.device = device
        self.dispatches: list[Dispatch] = list(dispatches)
        self._scratch: dict[str, Tensor] = {}
        self._calls: list[Any] = []
        self._called = 0

    def __len__(self) -> int:
        return len(self.dispatches)

    def __iter__(self) -> Iterator[Dispatch]:
        return iter(self.dispatches)

    def add(
        self,
        kernel: Kernel,
        groups: tuple[int, ...],
        buffers: Mapping[str, Any],
        params: Mapping[str, float] | None = None,
        label: str = "",
        operations: float = 0.0,
    ) -> None:
        """Append one dispatch of `groups` workgroups (x[, y[, z]]); `params` fills `struct Params`, bound under the name `params`.

        operations: about how many it does, where they may be so many that a replay has to be several submits.
        """
        x, y, z = (*groups, 1, 1)[:3]
        limit = self.device.profile.max_workgroups
        if max(x, y, z) > limit:
            raise CapacityError(f"{kernel.source.name} needs a grid of {(x, y, z)} workgroups; {self.device.name} allows {limit} in a dimension.")
        bound = dict(buffers)
        if params is not None:
            bound["params"] = self.device.uniform(kernel.pack(params))
        nbytes = {name: _nbytes(b) for name, b in bound.items()}
        self.dispatches.append(Dispatch(label or kernel.source.name, kernel, kernel.bind(bound), (x, y, z), nbytes, operations, bound))

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Tensor:
        """Memory for what one dispatch leaves to a later one: the same for every caller of that name and size, since dispatches run in order."""
        found = self._scratch.get(name)
        if found is None or found.nbytes < int(np.prod(shape)) * np.dtype(dtype).itemsize:
            found = self._scratch[name] = self.device.empty(shape, dtype)
        return found

    def submits(self) -> list[list[Dispatch]]:
        """The dispatches of a replay, by the submit that each goes into: a new one begins where operations would become too many."""
        parts: list[list[Dispatch]] = [[]]
        total = 0.0
        for d in self.dispatches:
            if total and total + d.operations > self.device.profile.most_operations:
                parts.append([])
                total = 0.0
            parts[-1].append(d)
            total += d.operations
        return parts

    def compile(self) -> Recording:
        """Make the pipelines that are not made yet (see `Device.compile`), and what else a replay needs; returns the recording."""
        if self._called != len(self.dispatches):
            self.device.compile(d.kernel for d in self.dispatches)
            self._prepared()
        return self

    def _prepared(self) -> list[Any]:
        """What the backend encodes for each submit, made once."""
        if self._called != len(self.dispatches):
            self._calls = [self.device.backend.prepare(part) for part in self.submits()]
            self._called = len(self.dispatches)
        return self._calls

    def encode(self, compute_pass: Any) -> None:
        """Put all dispatches into an open compute pass."""
        for calls in self._prepared():
            self.device.backend.encode(compute_pass, calls)

    def replay(self, times: int = 1, readback: Readback | None = None, copies: Sequence[Copy] = ()) -> None:
        """Encode and submit everything, `times` over, in one pass and one submit (as many as `submits` says). Returns without waiting.

        `copies` go before, and `readback` then receives its tensor's contents, in the same submits.
        """
        parts = self.compile()._prepared()
        runs = [parts * times] if len(parts) <= 1 else [[part] for part in parts * times]
        for i, run in enumerate(runs):
            with self.device.commands() as encoder:
                for copy in copies if i == 0 else ():
                    encoder.copy_buffer_to_buffer(*copy)
                compute_pass = encoder.begin_compute_pass()
                for calls in run:
                    self.device.backend.encode(compute_pass, calls)
                compute_pass.end()
                if readback is not None and i == len(runs) - 1:
                    readback.encode(encoder)


def _nbytes(bound: Any) -> int:
    return bound.nbytes if isinstance(bound, Tensor) else bound.size


def grid(groups: int, limit: int) -> tuple[int, int]:
    """A linear number of workgroups as (x, y), each within the limit; kernels skip the surplus."""
    y = -(-groups // limit)
    return -(-groups // y), y


class Readback:
    """Memory that the host can map, kept for one tensor: reading it makes no buffer and needs no submit of its own."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self._staging = Staging(tensor.device, tensor.nbytes)

    def encode(self, encoder: Any) -> None:
        """Put the copy from the device into a command encoder."""
        self._staging.encode(encoder, self.tensor.buffer, self.tensor.offset)

    def numpy(self) -> np.ndarray:
        """The contents that the last replay left; waits for it."""
        return self._staging.bytes().view(self.tensor.dtype).reshape(self.tensor.shape)


class StepState:
    """All that changes from one replay to the next, in one buffer that one write renews: `parts/step.wgsl`, then token ids.

    `step` (uniform) and `tokens` (storage, `chunk` u32) are what kernels bind.
    """

    def __init__(self, device: Device, chunk: int = 1):
        self.device, self.chunk = device, chunk
        self.buffer = device.buffer(OFFSET_ALIGNMENT + 4 * chunk, uniform=True)
        self.step = Slice(self.buffer, 0, 16)
        self.tokens = Slice(self.buffer, OFFSET_ALIGNMENT, 4 * chunk)

    @property
    def tokens_at(self) -> int:
        """Word of the buffer where token ids begin."""
        return OFFSET_ALIGNMENT // 4

    def write(self, position: int, token_ids: Sequence[int]) -> None:
        """The next replay computes these tokens (at most `chunk`), the first of them at `position` in the sequence."""
        if len(token_ids) > self.chunk:
            raise CapacityError(f"A step of {len(token_ids)} tokens was asked for; its recording has room for {self.chunk}.")
        words = np.zeros(self.tokens_at + len(token_ids), np.uint32)
        words[:2] = position, len(token_ids)
        words[self.tokens_at :] = token_ids
        self.device.write(self.buffer, words)

    def place(self, position: int, rows: int) -> None:
        """The next replay computes so many rows, the first of them at `position`: for recordings that read no token ids."""
        self.device.write(self.buffer, np.array([position, rows], np.uint32))
