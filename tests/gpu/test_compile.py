"""Several kernels compiled at once: that they are, what fails, Ctrl-C, and threads; by threads of ours, and by promises as with Dawn."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import wgattn
from tests.faults import Faults
from tests.test_interrupts import press
from wgattn import CapacityError, DeviceError
from wgattn.gpu import Device, Kernel, Recording

KERNEL = """// One word of its own.
var<storage, read_write> y: array<u32>;   // (8) u32
@compute @workgroup_size(1)
fn main() { y[PLACE] += VALUE; }
"""


@pytest.fixture
def fresh(write_shader, monkeypatch) -> Device:
    """A device with nothing compiled, on a machine of four cores."""
    write_shader("own", KERNEL)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    made = Device()
    made.profile = wgattn.default_device().profile  # no probe to compile
    return made


@pytest.fixture(params=["threads", "promises"])
def way(request, fresh, monkeypatch) -> Iterator[str]:
    if request.param == "promises":
        monkeypatch.setattr(type(fresh.backend), "compiles_in_threads", False)
    elif not fresh.backend.compiles_in_threads:
        pytest.skip(f"{fresh.backend.name} is not for several threads")
    return request.param


def kernels(device: Device, count: int = 6) -> list[Kernel]:
    return [device.kernel("own", PLACE=place, VALUE=place + 1) for place in range(count)]


def recorded(device: Device, made: list[Kernel]) -> tuple[Recording, Any]:
    recording, y = Recording(device), device.empty((8,), "u32")
    for kernel in made:
        recording.add(kernel, (1,), {"y": y})
    return recording, y


class Compiling:
    """What stands in for the compiler: lets `act(label)` happen first."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch):
        self.attempts: list[int] = []
        self.act = lambda: None
        original = type(device.backend).create_module

        def create(backend: Any, *args: Any) -> Any:
            self.attempts.append(threading.get_ident())
            self.act()
            return original(backend, *args)

        monkeypatch.setattr(type(device.backend), "create_module", create)


def test_each_is_compiled_once_and_works(fresh, way, monkeypatch):
    compiling = Compiling(fresh, monkeypatch)
    made = kernels(fresh)
    made[2].pipeline  # noqa: B018
    fresh.compile([*made, made[0]])
    assert len(compiling.attempts) == 6
    assert all(k.compiled for k in made)
    recording, y = recorded(fresh, made)
    recording.replay()
    fresh.compile(made)
    assert len(compiling.attempts) == 6
    assert y.numpy().tolist() == [1, 2, 3, 4, 5, 6, 0, 0]


def test_threads_compile_at_the_same_time(fresh, monkeypatch):
    """None is through before all four have begun."""
    if not fresh.backend.compiles_in_threads:
        pytest.skip(f"{fresh.backend.name} is not for several threads")
    compiling, meeting = Compiling(fresh, monkeypatch), threading.Barrier(4, timeout=60)
    compiling.act = meeting.wait
    recording, y = recorded(fresh, kernels(fresh, 4))
    recording.replay()
    assert len(set(compiling.attempts)) == 4
    assert y.numpy().tolist() == [1, 2, 3, 4, 0, 0, 0, 0]


def test_what_fails_is_named_the_others_are_compiled_and_it_can_be_tried_again(fresh, way, monkeypatch):
    faults = Faults(fresh, monkeypatch)
    made = kernels(fresh)
    call = faults.each(lambda: [], lambda _: fresh.compile(made) or True, lambda _: None)
    assert call >= 1
    assert all(k.compiled for k in made)
    for error, kind in zip(faults.errors, (DeviceError, CapacityError, CapacityError, DeviceError), strict=True):
        device = Device()
        device.profile = fresh.profile
        compiling, chosen = Compiling(device, monkeypatch), []

        def fail(error=error, chosen=chosen, compiling=compiling) -> None:
            if len(compiling.attempts) == 3 and not chosen:
                chosen.append(True)
                raise error()

        compiling.act = fail
        made = kernels(device)
        recording, y = recorded(device, made)
        with pytest.raises(kind, match=r"compile own.*injected"):
            recording.replay()
        assert sum(k.compiled for k in made) == 5
        assert not y.numpy().any()
        recording.replay()
        assert y.numpy().tolist() == [1, 2, 3, 4, 5, 6, 0, 0]


def test_a_shader_that_is_wrong_among_others(fresh, way, write_shader):
    write_shader("wrong", KERNEL.replace("VALUE;", "undeclared;"))
    made = [*kernels(fresh, 3), fresh.kernel("wrong", PLACE=7), *kernels(fresh, 5)[3:]]
    for _ in range(2):
        with pytest.raises(DeviceError, match="could not compile wrong: "):
            fresh.compile(made)
        assert [k.compiled for k in made] == [True, True, True, False, True, True]


def test_ctrl_c_ends_it_and_the_rest_is_compiled_later(fresh, way, monkeypatch):
    """Also where it is held back, as in a call of a pipeline."""
    compiling = Compiling(fresh, monkeypatch)
    pressed = threading.Event()

    def act() -> None:
        if len(compiling.attempts) == 1:
            os.kill(os.getpid(), 2) if threading.current_thread() is not threading.main_thread() else press()
        elif way == "threads":
            pressed.wait(0.2)  # so that some have not begun when it comes

    compiling.act = act
    made = kernels(fresh, 8)
    recording, y = recorded(fresh, made)
    with pytest.raises(KeyboardInterrupt), wgattn.gpu.guard.Held():
        recording.replay()
    assert 1 <= len(compiling.attempts) < 8
    assert not y.numpy().any()
    compiling.act = lambda: None
    recording.replay()
    assert y.numpy().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_device_may_be_held_meanwhile(fresh, way):
    """By who compiles, and by another thread, which then compiles the same."""
    made = kernels(fresh)
    with fresh.guard("hold it"):
        fresh.compile(made[:3])
    threads = [threading.Thread(target=fresh.compile, args=(made,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording, y = recorded(fresh, made)
    recording.replay()
    np.testing.assert_array_equal(y.numpy(), [1, 2, 3, 4, 5, 6, 0, 0])


def test_kernels_with_buffers_of_the_same_kinds_share_layouts(fresh, monkeypatch):
    faults = Faults(fresh, monkeypatch)
    recording, _ = recorded(fresh, kernels(fresh, 4))
    recording.compile()
    assert [faults.uses.count(f"gpu.create_{name}") for name in ("bind_group_layout", "pipeline_layout")] == [1, 1]
