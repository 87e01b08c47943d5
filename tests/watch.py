"""Watching what calls do to a device: what they make and submit, what they leave behind, and whether they write beyond what is theirs."""

import gc
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wgattn
from tests.helpers import assert_untouched, poison
from wgattn.gpu import Device, Readback, Tensor
from wgattn.gpu.tensor import dtype_of

ROOM = 64
"""Poisoned elements behind every guarded tensor."""
_DOING = ("submit", "write_buffer", "write_texture", "read_buffer")


class Calls(Counter):
    """How often the backend was asked to make or do something, by the names of its methods, since it was made."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        for kind in {type(device.gpu), type(device.gpu.queue)}:
            for name in dir(kind):
                if name.startswith("create_") or name in _DOING:
                    monkeypatch.setattr(kind, name, self._counting(name, getattr(kind, name)))

    def _counting(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self[name] += 1
            return original(*args, **kwargs)

        return call

    @property
    def made(self) -> dict[str, int]:
        """Objects made; command encoders do not count, every submit has one."""
        return {name: n for name, n in self.items() if name.startswith("create_") and name != "create_command_encoder"}

    def check_step(self, step: Callable, *args: Any, **case: Any) -> None:
        """A call of a decode step makes no object, writes once, submits once and reads no buffer by a submit of its own."""
        self.clear()
        step(*args)
        assert self.made == {}, case
        assert (self["submit"], self["write_buffer"], self["read_buffer"]) == (1, 1, 0), case


def check_refused(monkeypatch: pytest.MonkeyPatch, error: type[Exception], call: Callable, *devices: Device) -> Calls:
    """The call raises such an error, in words, and submits nothing to the first device; what it asked the backend for."""
    with monkeypatch.context() as watched:
        calls = Calls(devices[0], watched)
        with pytest.raises(error) as raised:
            call(devices)
        assert calls["submit"] == 0
    assert len(str(raised.value)) > 20
    return calls


def live_objects() -> dict[str, int]:
    """Objects of the backend that the process holds, by their kind."""
    gc.collect()
    diagnostics = wgattn.default_device().api.diagnostics
    counts = getattr(diagnostics, "wgpu_native_counts", diagnostics.object_counts)
    return {name: entry["count"] for name, entry in counts.get_dict().items()}


class Held:
    """What the process holds; compared with what it held before."""

    def __init__(self, device: Device):
        self._device = device
        self.objects, self.resident = self._look()

    def _look(self) -> tuple[dict[str, int], int]:
        gc.collect()
        self._device.wait()
        gc.collect()
        statm = Path("/proc/self/statm")
        return live_objects(), int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0

    def check(self, more_bytes: int = 16 << 20, without: tuple[str, ...] = ()) -> None:
        objects, resident = self._look()
        assert {k: n for k, n in objects.items() if k not in without} == {k: n for k, n in self.objects.items() if k not in without}
        assert resident - self.resident < more_bytes, f"resident memory grew by {(resident - self.resident) >> 10} KiB"


class Guard:
    """From now on tensors begin as NaN instead of zeros, and stand in buffers with NaN behind them: what is not written, or written beyond the end, is seen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.tensors: list[Tensor] = []
        monkeypatch.setattr(Device, "empty", lambda device, shape, dtype=np.float32: self._empty(device, shape, dtype))

    def _empty(self, device: Device, shape: tuple[int, ...], dtype: Any) -> Tensor:
        filled = poison((math.prod(shape) + ROOM,), dtype_of(dtype))
        buffer = device.buffer(filled.nbytes)
        device.write(buffer, filled)
        self.tensors.append(Tensor(device, tuple(shape), filled.dtype, buffer))
        return self.tensors[-1]

    def check(self, **case: Any) -> None:
        """Nothing was written behind any tensor. (The second half of a last word of f16 belongs to the tensor.)"""
        assert self.tensors, "no tensor was made: nothing was guarded"
        for tensor in self.tensors:
            whole = Tensor(tensor.device, (tensor.size + ROOM,), tensor.dtype, tensor.buffer).numpy()
            assert_untouched(whole[tensor.size + tensor.size % (4 // tensor.dtype.itemsize) :], tensor=tensor, **case)


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, copying anything from a device to the host fails."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("copied to the host")

    monkeypatch.setattr(Device, "read", fail)
    monkeypatch.setattr(Readback, "numpy", fail)
