"""A compiled shader whose buffers are bound by name: the one place that knows binding numbers and parameter layouts."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ArgumentError, CapacityError, Unsupported, WgattnError
from .guard import PATIENCE, Errors, Held, let_interrupt_in
from .shader import Source
from .tensor import Slice, Tensor

if TYPE_CHECKING:
    from .device import Device


_MOST_THREADS = 16
"""That compile at once: each may need some hundred megabytes."""


class Layouts(NamedTuple):
    """What binds to a kernel, as the backend knows it: by its bind group and by its pipeline."""

    group: Any
    pipeline: Any


class Kernel:
    """A compute pipeline made from a `Source`. Compiled on first use, or with others by `Device.compile`; the device keeps it (see `Device.kernel`)."""

    def __init__(self, device: Device, source: Source):
        self.device, self.source = device, source
        self._pipeline: Any = None
        self._compiling = threading.RLock() if device.backend.compiles_in_threads else device.uses
        self._check_limits()

    def _check_limits(self) -> None:
        profile, source = self.device.profile, self.source
        if source.workgroup_storage > profile.workgroup_memory:  # drivers accept this and then misbehave
            raise CapacityError(f"{source.name} needs {source.workgroup_storage} bytes of workgroup memory; {profile.name} has {profile.workgroup_memory}.")
        if source.workgroup_size > profile.max_invocations:
            raise CapacityError(f"{source.name} needs workgroups of {source.workgroup_size}; {profile.name} allows {profile.max_invocations}.")
        if "matrix" in source.features and source.workgroup_size % profile.matrix_workgroup:
            raise CapacityError(f"{source.name} needs workgroups of {source.workgroup_size}; {profile.name} wants multiples of {profile.matrix_workgroup}.")
        storage = sum(kind != "uniform" for _, kind in source.buffers)
        if storage > profile.max_storage_buffers:
            raise CapacityError(f"{source.name} binds {storage} storage buffers; {profile.name} allows {profile.max_storage_buffers}.")
        for feature, present in (("f16", profile.f16), ("subgroup", profile.subgroup_size > 0), ("matrix", bool(profile.matrix_units))):
            if feature in source.features and not present:
                raise Unsupported(f"{source.name} needs {feature} operations, which {profile.name} does not have.")

    @property
    def _layouts(self) -> Layouts:
        return self.device.layouts(tuple(kind for _, kind in self.source.buffers))

    def _described(self, layouts: Layouts) -> dict[str, Any]:
        """What the backend makes a pipeline of; compiles the text."""
        device, source = self.device, self.source
        module = device.backend.create_module(device.gpu, source.text, source.name, device.checked)
        return {"label": source.name, "layout": layouts.pipeline, "compute": {"module": module, "entry_point": "main", "constants": dict(source.overrides)}}

    @property
    def compiled(self) -> bool:
        """Whether the pipeline is made."""
        return self._pipeline is not None

    @property
    def pipeline(self) -> Any:
        """The backend's pipeline; DeviceError when the shader does not compile."""
        if self._pipeline is None:
            layouts = self._layouts
            with self.device.guard(f"compile {self.source.name}", self._compiling):
                if self._pipeline is None:  # no other thread was faster
                    self._pipeline = self.device.gpu.create_compute_pipeline(**self._described(layouts))
        return self._pipeline

    def ask(self) -> Any:
        """A promise of the pipeline, from a backend that compiles in threads of its own; for `receive`."""
        layouts = self._layouts
        with self.device.guard(f"compile {self.source.name}"):
            return self.device.gpu.create_compute_pipeline_async(**self._described(layouts))

    def receive(self, promise: Any) -> None:
        """Wait for what was asked for; raises as `pipeline` does."""
        with Held(), Errors(self.device, f"compile {self.source.name}"):
            self._pipeline = self.device.backend.wait(promise)

    def check_names(self, buffers: Mapping[str, Any]) -> list[str]:
        """The names in the order of their binding numbers; ArgumentError unless the buffers are just these."""
        names = [name for name, _ in self.source.buffers]
        if set(names) != set(buffers):
            missing, unknown = sorted(set(names) - set(buffers)), sorted(set(buffers) - set(names))
            raise ArgumentError(f"{self.source.name}: buffers missing {missing}, unknown {unknown}.")
        return names

    def bind(self, buffers: Mapping[str, Any]) -> Any:
        """A bind group of buffers, slices or tensors by name; every name that the text declares, and no other."""
        names = self.check_names(buffers)
        entries = [{"binding": i, "resource": _resource(buffers[n])} for i, n in enumerate(names)]
        with self.device.guard(f"bind buffers to {self.source.name}"):
            return self.device.gpu.create_bind_group(layout=self._layouts.group, entries=entries)

    def pack(self, params: Mapping[str, float]) -> bytes:
        """The bytes of `struct Params` (uniform layout of scalars, padded to 16)."""
        layout = self.source.params
        if layout is None or set(layout.names) != set(params):
            raise ArgumentError(f"{self.source.name}: parameters {sorted(params)} given, {list(layout.names) if layout else []} wanted.")
        packed = np.zeros((), layout)
        with np.errstate(over="ignore"):  # a scale beyond f32 is infinite there
            for name, value in params.items():
                packed[name] = value
        return packed.tobytes().ljust(-(-layout.itemsize // 16) * 16, b"\0")


def _resource(bound: Any) -> dict[str, Any]:
    if isinstance(bound, Slice):
        return bound._asdict()
    return bound.binding if isinstance(bound, Tensor) else {"buffer": bound}


def compile_all(device: Device, kernels: Sequence[Kernel]) -> None:
    """See `Device.compile`; of kernels that are not compiled."""
    errors: list[Exception] = []
    if len(kernels) > 1 and device.backend.compiles_in_threads:
        _in_threads(kernels, errors)
    elif len(kernels) > 1:
        _by_promises(kernels, errors)
    else:
        for kernel in kernels:
            kernel.pipeline  # noqa: B018
    if errors:
        raise errors[0]


def _in_threads(kernels: Sequence[Kernel], errors: list[Exception]) -> None:
    """For a backend that lets go of Python while it compiles, and that several threads may use."""
    for kernel in kernels:
        kernel._layouts  # noqa: B018  (made here: the threads must not wait for the device, which the caller may hold)
    left, failed = deque(kernels), {}

    def work() -> None:
        while True:
            try:
                kernel = left.popleft()
            except IndexError:
                return
            try:
                kernel.pipeline  # noqa: B018
            except Exception as error:
                failed[kernel] = error

    threads = [threading.Thread(target=work, name="wgattn-compile") for _ in range(min(len(kernels), _MOST_THREADS, os.cpu_count() or 1))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(PATIENCE)
                let_interrupt_in()
    finally:
        left.clear()  # after Ctrl-C: what has begun is finished, and no more is begun
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    errors += [failed[kernel] for kernel in kernels if kernel in failed]


def _by_promises(kernels: Sequence[Kernel], errors: list[Exception]) -> None:
    """For a backend that one thread uses, and that compiles in others."""
    asked: list[tuple[Kernel, Any]] = []
    for kernel in kernels:
        try:
            asked.append((kernel, kernel.ask()))
        except WgattnError as error:
            errors.append(error)
        let_interrupt_in()
    for kernel, promise in asked:
        try:
            kernel.receive(promise)
        except WgattnError as error:
            errors.append(error)
        let_interrupt_in()
