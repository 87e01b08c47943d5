"""Failures on purpose: any one use of the backend can be made to raise instead of being done."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from wgattn.errors import CapacityError, DeviceError, WgattnError
from wgattn.gpu import Device

T = TypeVar("T")

_USES = {
    "gpu": ("create_buffer", "create_bind_group", "create_bind_group_layout", "create_pipeline_layout", "create_shader_module", "create_compute_pipeline"),
    "queue": ("write_buffer", "submit"),
    "buffer": ("map_async", "read_mapped", "unmap"),
    "encoder": ("begin_compute_pass", "copy_buffer_to_buffer", "finish"),
    "pass": ("end",),
    "backend": ("encode",),  # all dispatches of a submit
}


class Faults:
    """Counts the uses of a device's backend, and makes one of them raise."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch):
        self.uses: list[str] = []
        self._at: int | None = None
        self._act: Callable[[], Any] = lambda: None
        api, encoder = device.api, device.gpu.create_command_encoder()
        kinds = {"gpu": device.gpu, "queue": device.gpu.queue, "buffer": device.buffer(16), "backend": device.backend}
        kinds |= {"encoder": encoder, "pass": encoder.begin_compute_pass()}
        for kind, names in _USES.items():
            for name in names:
                owner = type(kinds[kind])
                monkeypatch.setattr(owner, name, self._failing(f"{kind}.{name}", getattr(owner, name)))
        self.errors: list[Callable[[], Exception]] = [
            lambda: api.GPUValidationError("injected: invalid"),
            lambda: api.GPUOutOfMemoryError("injected: memory"),
            lambda: api.GPUValidationError("injected: Not enough memory left."),
            lambda: RuntimeError("injected: could not map"),
        ]
        """What a backend raises."""

    def _failing(self, name: str, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.uses.append(name)
            if self._at is not None and len(self.uses) > self._at:
                self._at, act = None, self._act
                act()
            return original(*args, **kwargs)

        return call

    def arm(self, number: int, act: Callable[[], Any]) -> None:
        """Before use number `number` from now on, the first being 0, something happens."""
        self.uses.clear()
        self._at, self._act = number, act

    def fail(self, number: int, error: Callable[[], Exception], call: Callable[[], T]) -> T | None:
        """Make the call while its use number `number` of the backend, the first being 0, raises; it must raise what that means to us.

        None when it did; the call's result when it is through before that use.
        """
        raised, result = None, None
        self.arm(number, lambda: _raise(error()))
        try:
            result = call()
        except WgattnError as caught:
            raised = caught
        fired, self._at = self._at is None, None
        assert fired == (raised is not None), f"failed: {fired}; raised: {raised!r}; uses: {self.uses}"
        if raised is not None:
            assert type(raised) is (CapacityError if "emory" in str(error()) else DeviceError), f"{error()!r} in {self.uses[-1]} came out as {raised!r}"
            assert "injected" in str(raised)
        return result

    def each(self, prepare: Callable[[], T], call: Callable[[T], Any], check: Callable[[T], None], *, first: int = 0, step: int = 1) -> int:
        """Fail every use (or every `step`-th) that `call` of a prepared thing makes, one after another with errors in turn, and `check` each time.

        The call must not return None. Returns how many failures there were.
        """
        number = first
        while True:
            thing = prepare()
            if self.fail(number, self.errors[(number // step) % len(self.errors)], lambda thing=thing: call(thing)) is not None:
                return (number - first) // step
            check(thing)
            number += step


def _raise(error: Exception) -> None:
    raise error
