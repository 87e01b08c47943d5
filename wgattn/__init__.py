"""Transformer attention on any GPU from plain Python, through WebGPU."""

from .attention.explain import explain
from .attention.functional import scaled_dot_product_attention, sdpa
from .attention.merge import merge_state
from .attention.pipeline import AttentionPipeline
from .block.functional import apply_rope, rms_norm
from .block.fused import FusedAttention, FusedMLP
from .block.quant import QuantizedTensor, quantize
from .block.rope import Rope
from .errors import ArgumentError, CapacityError, DeviceError, FormatError, ModelNotFound, ShapeError, Unsupported, WgattnError
from .gpu import Device, Tensor, default_device, list_adapters
from .llm.llama import Llama

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "AttentionPipeline",
    "CapacityError",
    "Device",
    "DeviceError",
    "FormatError",
    "FusedAttention",
    "FusedMLP",
    "Llama",
    "ModelNotFound",
    "QuantizedTensor",
    "Rope",
    "ShapeError",
    "Tensor",
    "Unsupported",
    "WgattnError",
    "__version__",
    "apply_rope",
    "default_device",
    "explain",
    "list_adapters",
    "merge_state",
    "quantize",
    "rms_norm",
    "scaled_dot_product_attention",
    "sdpa",
]
