"""What stands around the uses of a device: Ctrl-C waits for the end of a use, the backend's errors become ours, and threads take turns."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import CapacityError, DeviceError, WgattnError

if TYPE_CHECKING:
    from .device import Device

F = TypeVar("F", bound=Callable[..., Any])


class Guard:
    """Around one use of the backend, `doing` something: no KeyboardInterrupt inside, and the errors of the backend come out as ours. May be nested.

    Raises:
        CapacityError: memory ran out. DeviceError: the backend failed, the device is lost, or this process was forked after it was made.
    """

    def __init__(self, device: Device, doing: str):
        self._device, self._doing = device, doing

    def __enter__(self) -> None:
        self._device.check_usable()
        self._holds = _hold_interrupt()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if error is not None:
                self._translate(error)
        finally:
            if self._holds:
                _release_interrupt()

    def _translate(self, error: BaseException) -> None:
        device = self._device
        if isinstance(error, WgattnError) or not isinstance(error, Exception):
            return
        reason = " ".join(str(error).split())
        if device.look_if_lost():
            raise DeviceError(f"{device.name} is lost, and all that was on it ({reason}). {_AFRESH}") from error
        if isinstance(error, MemoryError) or device.backend.is_out_of_memory(error):
            raise CapacityError(f"{device.name} has not the memory to {self._doing} ({reason}). Free some, or ask for less.") from error
        if isinstance(error, device.api.GPUError | RuntimeError):
            raise DeviceError(f"{device.name} could not {self._doing}: {error}") from error


_AFRESH = "Make a new Device, and what was on it anew."


class Usable:
    """The part of a device that knows whether it can still be used: it is not lost, and this is not a fork of the process that opened it."""

    _lost = False

    @property
    def lost(self) -> bool:
        """Whether the adapter is known to have gone, with all that was on it. Calls then raise DeviceError; a new Device may work."""
        return self._lost

    def look_if_lost(self) -> bool:
        """Ask the backend whether the device is lost, and remember it."""
        self._lost = self._lost or self.backend.is_lost(self.gpu)
        return self._lost

    def check_usable(self) -> None:
        """DeviceError when the device is lost, or when this process is a fork of the one that opened it."""
        if self._lost:
            raise DeviceError(f"{self.name} is lost, and all that was on it. {_AFRESH}")
        self.backend.check_process()


# ---- Ctrl-C

_kept: tuple[int, FrameType | None] | None = None
_handler: Callable[[int, FrameType | None], Any] | None = None


def _keep(number: int, frame: FrameType | None) -> None:
    """Remember a Ctrl-C. A second one does not wait: whoever gives it wants out of something that hangs."""
    global _kept
    if _kept is None:
        _kept = number, frame
        return
    _kept = None
    signal.signal(signal.SIGINT, _handler)
    _handler(number, frame)


def _hold_interrupt() -> bool:
    """From now on SIGINT is kept; False where that is impossible (other threads never see it), needless, or done already."""
    global _handler
    if threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    if handler is _keep or not callable(handler):
        return False
    _handler = handler
    signal.signal(signal.SIGINT, _keep)
    return True


def _release_interrupt() -> None:
    """What was kept is handled now."""
    global _kept
    if signal.getsignal(signal.SIGINT) is _keep:
        signal.signal(signal.SIGINT, _handler)
    kept, _kept = _kept, None
    if kept is not None:
        _handler(*kept)


# ---- threads


def in_turn(method: F) -> F:
    """A method of an object on a device, of which one thread at a time runs any: others wait. The object has `device` and a lock `turn`."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.device.check_usable()
        with self.turn:
            return method(self, *args, **kwargs)

    return call
