"""Compute on a WebGPU device: devices, tensors, shaders as text, kernels, recordings. Nothing here knows of attention."""

from .arena import Arena
from .device import Device, default_device, device_or_default, profile_or_default
from .guard import Turn, in_turn, let_interrupt_in
from .kernel import Kernel
from .profile import DeviceProfile, power_of_two
from .recording import Readback, Recording, StepState, grid
from .shader import AnyPart, Named, Part
from .step_input import StepInput
from .tensor import Slice, Store, Tensor
from .webgpu import list_adapters

__all__ = [
    "AnyPart",
    "Arena",
    "Device",
    "DeviceProfile",
    "Kernel",
    "Named",
    "Part",
    "Readback",
    "Recording",
    "Slice",
    "StepInput",
    "StepState",
    "Store",
    "Tensor",
    "Turn",
    "default_device",
    "device_or_default",
    "grid",
    "in_turn",
    "let_interrupt_in",
    "list_adapters",
    "power_of_two",
    "profile_or_default",
]
