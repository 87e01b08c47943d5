"""What stands around the uses of a device: Ctrl-C waits for the end of a step, the backend's errors become ours, and threads take turns."""

from __future__ import annotations

import functools
import signal
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import CapacityError, DeviceError, WgattnError

if TYPE_CHECKING:
    from .device import Device

F = TypeVar("F", bound=Callable[..., Any])
_AFRESH = "Make a new Device, and what was on it anew."
PATIENCE = 0.05
"""Seconds after which a thread that waits for others looks for Ctrl-C."""


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

_handler: Callable[[int, FrameType | None], Any] = signal.default_int_handler
_kept: tuple[int, FrameType | None] | None = None


def _keep(number: int, frame: FrameType | None) -> None:
    global _kept
    _kept = number, frame


def let_interrupt_in() -> None:
    """Handle a Ctrl-C that was held back until now, if there is one: for places where stopping is safe. Does nothing in other threads than the main one."""
    global _kept
    if threading.current_thread() is not threading.main_thread():
        return
    kept, _kept = _kept, None
    if kept is not None:
        _handler(*kept)


class Held:
    """`with Held():` SIGINT is handled when the block ends. May be nested; threads other than the main one never see a signal.

    So a KeyboardInterrupt stops nothing half way: no work that was recorded but not counted, no buffer that stays mapped.
    """

    def __enter__(self) -> None:
        global _handler
        handler = signal.getsignal(signal.SIGINT)
        self._holds = handler is not _keep and callable(handler) and threading.current_thread() is threading.main_thread()
        if self._holds:
            _handler = handler
            signal.signal(signal.SIGINT, _keep)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, _handler)
            let_interrupt_in()


class Waiting:
    """`with Waiting():` inside a `Held`: a wait that Ctrl-C may end."""

    def __enter__(self) -> None:
        self._held = signal.getsignal(signal.SIGINT) is _keep and threading.current_thread() is threading.main_thread()
        if self._held:
            let_interrupt_in()
            signal.signal(signal.SIGINT, _handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._held:
            signal.signal(signal.SIGINT, _keep)


# ---- threads


class Locked(Held):
    """`with Locked(lock):` as `Held`, and one thread at a time. While it waits for the others, Ctrl-C comes through."""

    def __init__(self, lock: Any):
        self._lock = lock

    def __enter__(self) -> None:
        super().__enter__()
        try:
            while not self._lock.acquire(timeout=PATIENCE):
                let_interrupt_in()
        except BaseException:
            super().__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()
        super().__exit__(kind, error, trace)


class Turn(Locked):
    """`with Turn(thing):` for what has a `device` and a `turn` (an RLock): its state changes as a whole, or not at all."""

    def __init__(self, thing: Any):
        super().__init__(thing.turn)
        self._device = thing.device

    def __enter__(self) -> None:
        self._device.check_usable()
        super().__enter__()


def in_turn(method: F) -> F:
    """A method that runs in a `Turn` of its object."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Turn(self):
            return method(self, *args, **kwargs)

    return call


# ---- uses of the backend


class Guard(Locked):
    """Around one use of the backend, `doing` something: the errors of the backend come out as ours. May be nested.

    One thread at a time, as Dawn wants it; waits for results are not in here. `lock`: another than the device's, for what the backend can do beside
    all else; whoever holds it must not ask for the device's.

    Raises:
        CapacityError: memory ran out. DeviceError: the backend failed, the device is lost, or this process is a fork.
    """

    def __init__(self, device: Device, doing: str, lock: Any = None):
        super().__init__(device.uses if lock is None else lock)
        self._errors = Errors(device, doing)

    def __enter__(self) -> None:
        self._errors.__enter__()
        super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._errors.__exit__(kind, error, trace)
        finally:
            super().__exit__(kind, error, trace)


class Errors:
    """The part of a `Guard` that makes the backend's errors ours, for waits."""

    def __init__(self, device: Device, doing: str):
        self._device, self._doing = device, doing

    def __enter__(self) -> None:
        self._device.check_usable()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, WgattnError):
            traceback.clear_frames(trace)  # they are in a cycle, and collecting a memoryview that others look into ends Python 3.11
            self._translate(error)

    def _translate(self, error: Exception) -> None:
        device, reason = self._device, " ".join(str(error).split())
        if device.look_if_lost():
            raise DeviceError(f"{device.name} is lost, and all that was on it ({reason}). {_AFRESH}") from error
        if isinstance(error, MemoryError) or device.backend.is_out_of_memory(error):
            raise CapacityError(f"{device.name} has not the memory to {self._doing} ({reason}). Free some, or ask for less.") from error
        if isinstance(error, device.api.GPUError | RuntimeError):
            raise DeviceError(f"{device.name} could not {self._doing}: {error}") from error
