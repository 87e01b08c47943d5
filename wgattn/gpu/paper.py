"""A device on paper: it has a profile and no GPU. What is recorded on it computes nothing and lists the kernels that such a device would run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..errors import CapacityError
from .device import Device
from .kernel import Kernel
from .profile import DeviceProfile
from .shader import Source

_MIB = 1 << 20


def _profile(name: str, kind: str, subgroup: int, f16: bool, workgroup_memory: int, invocations: int, buffers: int, **more: Any) -> DeviceProfile:
    sizes = {"max_binding": 128 * _MIB, "max_buffer": 256 * _MIB, "max_workgroups": 65535, "storage_alignment": 256}
    about = {"name": name, "backend": "wgpu", "kind": kind, "driver": "none", "timestamps": False}
    shape = {"subgroup_size": subgroup, "f16": f16, "workgroup_memory": workgroup_memory, "max_invocations": invocations, "max_storage_buffers": buffers}
    return DeviceProfile(**(about | sizes | shape | more))


_TENSOR_CORES = (("f16", "f16", 16, 16, 16), ("f16", "f32", 16, 16, 16), ("f16", "f32", 16, 8, 16), ("f16", "f32", 16, 8, 8), ("i8", "i32", 16, 16, 32))
PROFILES: Mapping[str, DeviceProfile] = {
    p.name: p
    for p in (
        _profile("CPU, 8 lanes", "CPU", 8, True, 32 << 10, 1024, 32),
        _profile("CPU, 4 lanes", "CPU", 4, False, 16 << 10, 256, 12),
        _profile("GPU, 32 lanes", "DiscreteGPU", 32, True, 48 << 10, 1024, 32),
        _profile("GPU, 64 lanes", "DiscreteGPU", 64, True, 32 << 10, 1024, 32),
        _profile("GPU, 16 lanes", "IntegratedGPU", 16, True, 32 << 10, 512, 16),
        _profile("GPU, the least that WebGPU allows", "IntegratedGPU", 0, False, 16 << 10, 256, 8),
        _profile("GPU, matrix units", "DiscreteGPU", 32, True, 48 << 10, 1024, 32, backend="dawn", matrix_units=_TENSOR_CORES),
    )
}
"""Made-up devices of all the kinds that kernels tell apart, by name."""


class PaperDevice(Device):
    """Takes the calls that a device takes. What is read from it is zeros; it has only the limits of its profile, and raises the same errors.

    `sources` are those of the kernels it was asked for, in order, each once, and without directives.

    Args:
        known: texts that other devices on paper have put together; those that this one does are added.
    """

    def __init__(self, profile: DeviceProfile, known: dict[tuple, Source] | None = None):
        self._known = {} if known is None else known
        self.profile, self.lowered, self.checked = profile, {}, False
        self.gpu = self.api = self.adapter = _Inert()
        self.backend = _Inert()
        self.backend.directives = {}  # no compiler wants any
        self._kernels, self._uniforms = {}, {}

    @property
    def name(self) -> str:
        return self.profile.name

    def __repr__(self) -> str:
        return f"PaperDevice({self.name!r})"

    def guard(self, doing: str, lock: Any = None) -> AbstractContextManager:
        return nullcontext()  # nothing can fail

    def buffer(self, nbytes: int, *, uniform: bool = False) -> Any:
        if nbytes > self.profile.max_buffer:
            raise CapacityError(f"A buffer of {nbytes} bytes was asked for; {self.name} allows {self.profile.max_buffer}.")
        return _Inert()

    def write(self, buffer: Any, array: np.ndarray, offset: int = 0) -> None:
        pass

    def read(self, buffer: Any, dtype: Any, count: int, offset: int = 0) -> np.ndarray:
        return np.zeros(count, dtype)

    def kernels_on(self, device: Device) -> list[Kernel]:
        """The kernels that were asked for here, on a device with this profile; nothing is compiled."""
        return [device.take(key, kernel.source) for key, kernel in self._kernels.items()]

    @property
    def sources(self) -> list[Source]:
        return [kernel.source for kernel in self._kernels.values()]

    def _made_kernel(self, key: tuple, source: Callable[[], Source]) -> Kernel:
        if key not in self._known:
            self._known[key] = source()
        return _PaperKernel(self, self._known[key])


class _PaperKernel(Kernel):
    """A kernel that is checked against the profile and never compiled."""

    pipeline, compiled = None, True

    def bind(self, buffers: Mapping[str, Any]) -> None:
        self.check_names(buffers)


class _Inert:
    """Stands for any object of WebGPU: every call gives another one; what is read from it is bytes of the size that it was made with."""

    def __init__(self, size: int = 0):
        self._size = size

    def __getattr__(self, name: str) -> _Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, size: int = 0, **kwargs: Any) -> _Inert:
        return _Inert(size)

    def __or__(self, other: Any) -> _Inert:
        return self

    def read_mapped(self) -> bytes:
        return bytes(self._size)
