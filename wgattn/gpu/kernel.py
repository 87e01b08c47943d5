"""A compiled shader whose buffers are bound by name: the one place that knows binding numbers and parameter layouts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError, CapacityError, Unsupported
from .shader import Source
from .tensor import Slice, Tensor

if TYPE_CHECKING:
    from .device import Device


class Kernel:
    """A compute pipeline made from a `Source`. Compiled on first use; the device keeps it (see `Device.kernel`)."""

    def __init__(self, device: Device, source: Source):
        self.device, self.source = device, source
        self._check_limits()

    def _check_limits(self) -> None:
        profile, source = self.device.profile, self.source
        if source.workgroup_storage > profile.workgroup_memory:  # drivers accept this and then misbehave
            raise CapacityError(f"{source.name} needs {source.workgroup_storage} bytes of workgroup memory; {profile.name} has {profile.workgroup_memory}.")
        if source.workgroup_size > profile.max_invocations:
            raise CapacityError(f"{source.name} needs workgroups of {source.workgroup_size}; {profile.name} allows {profile.max_invocations}.")
        storage = sum(kind != "uniform" for _, kind in source.buffers)
        if storage > profile.max_storage_buffers:
            raise CapacityError(f"{source.name} binds {storage} storage buffers; {profile.name} allows {profile.max_storage_buffers}.")
        for feature, present in (("f16", profile.f16), ("subgroup", profile.subgroup_size > 0), ("matrix", bool(profile.matrix_units))):
            if feature in source.features and not present:
                raise Unsupported(f"{source.name} needs {feature} operations, which {profile.name} does not have.")

    @cached_property
    def _layout(self) -> Any:
        api = self.device.api
        entries = [{"binding": i, "visibility": api.ShaderStage.COMPUTE, "buffer": {"type": kind}} for i, (_, kind) in enumerate(self.source.buffers)]
        with self.device.guard(f"make a layout for {self.source.name}"):
            return self.device.gpu.create_bind_group_layout(entries=entries)

    @cached_property
    def pipeline(self) -> Any:
        """The backend's pipeline; DeviceError when the shader does not compile."""
        device, source = self.device, self.source
        with device.guard(f"compile {source.name}"):
            module = device.backend.create_module(device.gpu, source.text, source.name, device.checked)
            return device.gpu.create_compute_pipeline(
                label=source.name,
                layout=device.gpu.create_pipeline_layout(bind_group_layouts=[self._layout]),
                compute={"module": module, "entry_point": "main", "constants": dict(source.overrides)},
            )

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
            return self.device.gpu.create_bind_group(layout=self._layout, entries=entries)

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
