"""Transformer attention on any GPU from plain Python, through WebGPU."""

from .errors import ArgumentError, CapacityError, DeviceError, FormatError, ModelNotFound, ShapeError, Unsupported, WgattnError
from .gpu import Device, Tensor, default_device, list_adapters

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CapacityError",
    "Device",
    "DeviceError",
    "FormatError",
    "ModelNotFound",
    "ShapeError",
    "Tensor",
    "Unsupported",
    "WgattnError",
    "__version__",
    "default_device",
    "list_adapters",
]
