"""What a device is and can do, measured where its own word cannot be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import webgpu
from .shader import assemble

if TYPE_CHECKING:
    from .device import Device


def power_of_two(n: int) -> int:
    """The largest power of two that is not above n; 1 for less than 1."""
    return 1 << (max(n, 1).bit_length() - 1)


@dataclass(frozen=True)
class DeviceProfile:
    """Facts that kernels are chosen by. Sizes in bytes."""

    name: str
    backend: str
    """"wgpu" or "dawn"."""
    kind: str
    """WebGPU's adapter type: "DiscreteGPU", "IntegratedGPU", "VirtualGPU", "CPU", "Unknown"."""
    driver: str
    subgroup_size: int
    """Lanes of a subgroup, measured; 0 where subgroup operations are missing or lanes do not follow the invocation index."""
    f16: bool
    timestamps: bool
    workgroup_memory: int
    max_invocations: int
    max_storage_buffers: int
    max_binding: int
    max_buffer: int
    max_workgroups: int
    storage_alignment: int
    matrix_units: tuple[tuple[str, str, int, int, int], ...] = ()
    """(input type, result type, M, N, K) of each matrix-unit shape; empty where the backend cannot use them."""
    matrix_workgroup: int = 1
    """Invocations that workgroups of kernels on matrix units must be a multiple of: the largest subgroup there can be."""

    @property
    def software(self) -> bool:
        """A CPU pretends to be the GPU: loads are per lane and barriers dear, so kernels take other shapes."""
        return self.kind == "CPU"

    @property
    def max_tensor(self) -> int:
        """Bytes of the largest tensor: a buffer that is bound as a whole."""
        return min(self.max_binding, self.max_buffer)

    @property
    def most_operations(self) -> float:
        """Multiplications and additions that may go into one submit: drivers end what runs for some seconds. Half a second of the slowest of their kind."""
        return 2.0**37 if self.kind == "DiscreteGPU" else 2.0**35

    def team_part(self, lanes: int) -> str:
        """Which of the shader parts `team_*` adds up over that many invocations: nothing, subgroup operations, or workgroup memory."""
        if lanes == 1:
            return "team_one"
        if self.subgroup_size == 0:
            return "team_workgroup"
        return "team_subgroup" if lanes <= self.subgroup_size else "team_subgroups"


def describe_limits(device: Device) -> dict:
    """The part of a profile that needs no dispatch, as keyword arguments."""
    info, limits = device.adapter.info, device.limits
    return {
        "name": info["device"] or info["description"],
        "backend": device.backend.name,
        "kind": info["adapter_type"],
        "driver": info["description"],
        "f16": "shader-f16" in device.gpu.features,
        "timestamps": "timestamp-query" in device.gpu.features,
        "workgroup_memory": limits["max-compute-workgroup-storage-size"],
        "max_invocations": min(limits["max-compute-invocations-per-workgroup"], limits["max-compute-workgroup-size-x"]),
        "max_storage_buffers": limits["max-storage-buffers-per-shader-stage"],
        "max_binding": limits["max-storage-buffer-binding-size"],
        "max_buffer": limits["max-buffer-size"],
        "max_workgroups": limits["max-compute-workgroups-per-dimension"],
        "storage_alignment": limits["min-storage-buffer-offset-alignment"],
        "matrix_units": device.backend.matrix_shapes(device.adapter) if webgpu.MATRIX_UNITS in device.gpu.features else (),
        "matrix_workgroup": device.backend.matrix_workgroup(device.adapter),
    }


def measure_subgroup_size(device: Device) -> int:
    """Run one workgroup and look: adapters report a range (4 to 128), not the size they use. 0 when lanes are not in index order."""
    if device.backend.subgroup_feature not in device.gpu.features:
        return 0
    size = min(256, device.limits["max-compute-invocations-per-workgroup"])
    source = assemble("parts/probe_subgroup", options={"WORKGROUP": size}, directives=device.backend.directives)
    with device.guard("compile the probe of subgroups"):
        module = device.backend.create_module(device.gpu, source.text, source.name, device.checked)
        pipeline = device.gpu.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": "main", "constants": dict(source.overrides)})
        seen = device.buffer(size * 8)
        bindings = device.gpu.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=[{"binding": 0, "resource": {"buffer": seen}}])
    with device.commands() as encoder:
        compute_pass = encoder.begin_compute_pass()
        compute_pass.set_pipeline(pipeline)
        compute_pass.set_bind_group(0, bindings)
        compute_pass.dispatch_workgroups(1)
        compute_pass.end()
    lanes, position = device.read(seen, np.uint32, size * 2).reshape(size, 2).T
    in_order = len(set(lanes)) == 1 and lanes[0] > 0 and np.array_equal(position, np.arange(size) % max(1, lanes[0]))
    return int(lanes[0]) if in_order else 0
