"""A device: an adapter opened for compute, its buffers, and the kernels compiled for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ..errors import CapacityError, DeviceError
from . import webgpu
from .guard import Guard, Usable
from .kernel import Kernel, Layouts, compile_all
from .limits import lowered, stricter
from .profile import DeviceProfile, describe_limits, measure_subgroup_size
from .shader import Option, Part, Source, assemble
from .staging import Staging
from .tensor import Store, Tensor


class Device(Usable, Store):
    """A WebGPU device. Several threads may use it.

    Args:
        adapter: part of an adapter's name, any case (see `list_adapters`); default: environment variable WGATTN_ADAPTER, else the best there is.
        backend: "wgpu" (default) or "dawn"; default: environment variable WGATTN_BACKEND.
        checked: compile shaders with every check of the compiler, several times slower; default: environment variable WGATTN_CHECKED=1.
        limits: what to lower below what the adapter has, to try out how code behaves on smaller GPUs: WebGPU limits by their WebGPU names, and
            features to go without, as 0 ("shader-f16", "subgroup", "timestamp-query"). Those of the environment variable WGATTN_LIMITS are
            lowered too: "max-storage-buffer-binding-size=1048576 shader-f16=0".

    Raises:
        DeviceError: no adapter, none of that name, or it refuses to open. ArgumentError: an unknown limit.
    """

    def __init__(self, adapter: str | None = None, backend: str | None = None, *, checked: bool | None = None, limits: Mapping[str, int] | None = None):
        self.backend = webgpu.load(backend)
        self.checked = os.environ.get("WGATTN_CHECKED", "") not in ("", "0") if checked is None else checked
        self.api = self.backend.api
        self.adapter = webgpu.pick_adapter(self.backend, adapter)
        self.lowered = lowered({} if limits is None else limits, webgpu.FEATURES, self.adapter.limits)
        """Limits that were asked to be lower than the adapter's; kernels are chosen within them even where the backend grants more."""
        features = webgpu.usable_features(self.backend, self.adapter, without=[name for name, value in self.lowered.items() if not value])
        try:
            self.gpu = self.backend.request_device(self.adapter, features, self._within(self.adapter.limits), self.checked)
        except (self.api.GPUError, RuntimeError) as error:
            raise DeviceError(f"{webgpu.describe(self.adapter)} refuses to open a device: {error}") from error
        self.uses = threading.RLock()
        self._kernels: dict[tuple, Kernel] = {}
        self._layouts: dict[tuple[str, ...], Layouts] = {}
        self._uniforms: WeakValueDictionary[bytes, Any] = WeakValueDictionary()

    @cached_property
    def limits(self) -> dict[str, int]:
        """By their WebGPU names: those of the backend, and what was asked to be lower."""
        return self._within(self.gpu.limits)

    def _within(self, limits: Mapping[str, int]) -> dict[str, int]:
        return {name: stricter(name, value, self.lowered.get(name, value)) for name, value in limits.items()}

    @property
    def name(self) -> str:
        return self.adapter.info["device"] or self.adapter.info["description"]

    @cached_property
    def profile(self) -> DeviceProfile:
        return DeviceProfile(**describe_limits(self), subgroup_size=measure_subgroup_size(self))

    def __repr__(self) -> str:
        return f"Device({self.name!r}, backend={self.backend.name!r})"

    # ---- using the backend

    def guard(self, doing: str, lock: Any = None) -> Guard:
        """What every use of `gpu` happens in: see there."""
        return Guard(self, doing, lock)

    @contextmanager
    def commands(self) -> Iterator[Any]:
        """A command encoder, whose commands are submitted when the block ends, once; not when it raises. The only place that submits."""
        with self.guard("run commands"):
            encoder = self.gpu.create_command_encoder()
            yield encoder
            self.gpu.queue.submit([encoder.finish()])

    # ---- buffers

    def buffer(self, nbytes: int, *, uniform: bool = False) -> Any:
        """A zeroed buffer for storage (or also for use as a uniform); CapacityError when it is larger than the device can make."""
        size = max(16, -(-int(nbytes) // 4) * 4)
        limit = self.limits["max-buffer-size"]
        if size > limit:
            raise CapacityError(f"A buffer of {size} bytes was asked for; {self.name} allows {limit}.")
        usage = self.api.BufferUsage.STORAGE | self.api.BufferUsage.COPY_SRC | self.api.BufferUsage.COPY_DST
        with self.guard(f"make a buffer of {size} bytes"):
            return self.gpu.create_buffer(size=size, usage=usage | (self.api.BufferUsage.UNIFORM if uniform else 0))

    def uniform(self, data: bytes) -> Any:
        """A uniform buffer with fixed contents; equal contents share one buffer, as long as one of them is held."""
        found = self._uniforms.get(data)
        if found is None:
            buffer = self.buffer(len(data), uniform=True)
            with self.guard("write to a buffer"):
                self.gpu.queue.write_buffer(buffer, 0, data)
            found = self._uniforms.setdefault(data, buffer)  # not before it is written: other threads look, too
        return found

    def write(self, buffer: Any, array: np.ndarray, offset: int = 0) -> None:
        """Copy an array to a buffer, at a byte offset (multiple of 4). An odd tail is padded with zeros."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.size % 4:
            data = np.concatenate([data, np.zeros(-data.size % 4, np.uint8)])
        if data.size:
            with self.guard("write to a buffer"):
                self.gpu.queue.write_buffer(buffer, offset, data)

    def read(self, buffer: Any, dtype: Any, count: int, offset: int = 0) -> np.ndarray:
        """Copy `count` elements from a byte offset (multiple of 4) to the host; waits for the work submitted so far."""
        dtype = np.dtype(dtype)
        nbytes = count * dtype.itemsize
        if not nbytes:
            return np.empty(0, dtype)
        staging = Staging(self, nbytes)
        with self.commands() as encoder:
            staging.encode(encoder, buffer, offset)
        return staging.bytes().view(dtype)

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Tensor:
        """A tensor of zeros. ShapeError for a shape that cannot be; CapacityError when it does not fit a binding."""
        shape, dtype, nbytes = self._checked(shape, dtype)
        return Tensor(self, shape, dtype, self.buffer(nbytes))

    # ---- kernels

    def kernel(self, main: str, *parts: str | Part, **options: Option) -> Kernel:
        """The kernel made of a main file and parts with these options (see `shader.assemble`), compiled once a device."""
        key = (main, parts, tuple((k, type(v), v) for k, v in sorted(options.items())))  # 1, 1.0 and True are equal, but not in WGSL
        if key not in self._kernels:
            self._kernels.setdefault(key, self._made_kernel(key, lambda: assemble(main, parts, options, self.backend.directives)))
        return self._kernels[key]

    def take(self, key: tuple, source: Source) -> Kernel:
        """The kernel of that key, made of a source that was assembled without directives if there is none yet."""
        if key not in self._kernels:
            self._kernels.setdefault(key, self._made_kernel(key, lambda: replace(source, text=source.under(self.backend.directives))))
        return self._kernels[key]

    def _made_kernel(self, key: tuple, source: Callable[[], Source]) -> Kernel:
        return Kernel(self, source())

    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Make the pipelines of kernels that have none yet, several at once where the backend can. All are tried, whether or not others compile.

        Raises DeviceError or CapacityError, the first kernel's that cannot be compiled. Ctrl-C ends it between two kernels.
        """
        compile_all(self, [k for k in dict.fromkeys(kernels) if not k.compiled])

    def layouts(self, kinds: tuple[str, ...]) -> Layouts:
        """The layouts of buffers of these binding types, by their binding numbers; kernels share them."""
        found = self._layouts.get(kinds)
        if found is None:
            entries = [{"binding": i, "visibility": self.api.ShaderStage.COMPUTE, "buffer": {"type": kind}} for i, kind in enumerate(kinds)]
            with self.guard(f"make a layout of {len(kinds)} buffers"):
                group = self.gpu.create_bind_group_layout(entries=entries)
                found = self._layouts.setdefault(kinds, Layouts(group, self.gpu.create_pipeline_layout(bind_group_layouts=[group])))
        return found

    def wait(self) -> None:
        """Return when all submitted work is done."""
        self.read(self.uniform(bytes(16)), np.uint32, 1)


_default: Device | None = None
_making_default = threading.Lock()


def default_device() -> Device:
    """The device that calls use when none is given: made on first use, from WGATTN_ADAPTER and WGATTN_BACKEND; made anew when it is lost."""
    global _default
    with _making_default:
        if _default is None or _default.lost:
            _default = Device()
        return _default


def device_or_default(device: Device | None) -> Device:
    """The device, or for None `default_device()`; TypeError for what is no device."""
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"device is a {type(device).__name__}; it must be a Device, or None for the default one.")
    return default_device() if device is None else device


def profile_or_default(profile: DeviceProfile | None) -> DeviceProfile:
    """The profile, or for None that of `default_device()`; TypeError for what is no profile."""
    if profile is not None and not isinstance(profile, DeviceProfile):
        raise TypeError(f"profile is a {type(profile).__name__}; it must be a DeviceProfile, such as device.profile.")
    return default_device().profile if profile is None else profile
