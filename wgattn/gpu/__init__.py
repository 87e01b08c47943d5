"""Compute on a WebGPU device: devices, tensors, shaders as text, kernels, recordings. Nothing here knows of attention."""

from .device import Device, default_device
from .kernel import Kernel
from .profile import DeviceProfile
from .recording import Readback, Recording, StepState
from .tensor import Slice, Tensor
from .webgpu import list_adapters

__all__ = ["Device", "DeviceProfile", "Kernel", "Readback", "Recording", "Slice", "StepState", "Tensor", "default_device", "list_adapters"]
