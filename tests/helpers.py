"""What tests of kernels share: poisoned memory, comparison with the reference, and what a device may lack."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.report import NOT_AVAILABLE
from wgattn.gpu import Device, DeviceProfile, Kernel, Recording, Tensor
from wgattn.gpu.shader import Source

POISON = {2: np.uint16(0x7EAD), 4: np.uint32(0x7FC0DEAD)}  # NaNs of f16 and f32 that no arithmetic gives


def poison(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """NaN everywhere, of a kind that can be told from a computed one."""
    dtype = np.dtype(dtype)
    word = POISON[dtype.itemsize]
    return np.full(shape, word, word.dtype).view(dtype)


def untouched(array: np.ndarray) -> np.ndarray:
    """Where an array still holds the poison."""
    word = POISON[array.dtype.itemsize]
    return np.ascontiguousarray(array).view(word.dtype) == word


def nmse(actual: np.ndarray, expected: np.ndarray) -> float:
    """Squared error over squared expectation."""
    expected = np.asarray(expected, np.float64)
    power = float((expected**2).sum())
    error = float(((actual.astype(np.float64) - expected) ** 2).sum())
    return error / power if power else error


def assert_close(actual: np.ndarray, expected: np.ndarray, *, max_error: float | np.ndarray, max_nmse: float | None = None, **parameters: Any) -> None:
    """`actual` agrees with `expected` within an absolute error (a number, or one for each value), and by the NMSE; the message tells the parameters."""
    case = ", ".join(f"{k}={v!r}" for k, v in parameters.items())
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape} ({case})"
    if not actual.size:
        return
    wrong = ~np.isfinite(actual)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} values not finite, first at {tuple(np.argwhere(wrong)[0].tolist())} ({case})"
    error = np.abs(actual.astype(np.float64) - expected)
    bound = np.broadcast_to(max_error, error.shape)
    at = np.unravel_index((error - bound).argmax(), error.shape)
    place = f"at {tuple(map(int, at))}: {actual[at]!r}, expected {np.asarray(expected)[at]!r}"
    assert error[at] <= bound[at], f"{(error > bound).sum()} of {error.size} values wrong; error {error[at]:.3g} > {bound[at]:.3g} {place} ({case})"
    if max_nmse is not None:
        assert nmse(actual, expected) <= max_nmse, f"NMSE {nmse(actual, expected):.3g} > {max_nmse:.3g} ({case})"


def assert_untouched(array: np.ndarray, **parameters: Any) -> None:
    """Nothing was written here."""
    written = ~untouched(array)
    case = ", ".join(f"{k}={v!r}" for k, v in parameters.items())
    assert not written.any(), f"{written.sum()} of {written.size} values written that must not be, first at {tuple(np.argwhere(written)[0].tolist())} ({case})"


def with_canary(device: Device, array: np.ndarray, room: int = 64) -> Tensor:
    """A 1-D tensor of an array's values and `room` poisoned values beyond its end: a kernel that writes too far is seen, not bounds-checked away."""
    return device.tensor(np.concatenate([np.ascontiguousarray(array).reshape(-1), poison((room,), array.dtype)]))


def split_canary(tensor: Tensor, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(the array, the canary) of a tensor made by `with_canary`."""
    values = tensor.numpy()
    size = int(np.prod(shape))
    return values[:size].reshape(shape), values[size:]


def text_kernel(device: Device, text: str, buffers: Mapping[str, str], *, name: str = "test", workgroup_size: int = 64) -> Kernel:
    """A kernel of finished WGSL; buffers by name, "storage" or "read-only-storage", in the order of their binding numbers."""
    return Kernel(device, Source(name, text, tuple(buffers.items()), {}, None, workgroup_size, 0))


@cache
def _dirt(device: Device) -> Kernel:
    words = min(device.profile.workgroup_memory, 32768) // 4
    text = f"""
@group(0) @binding(0) var<storage, read_write> seen: array<u32>;
var<workgroup> dirt: array<u32, {words}>;
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) index: u32, @builtin(workgroup_id) group: vec3<u32>) {{
  for (var i = index; i < {words}u; i += 64u) {{ dirt[i] = 0x7fc0deadu; }}
  workgroupBarrier();
  seen[index] = dirt[(index * 7u + group.x) % {words}u];
}}
"""
    return text_kernel(device, text, {"seen": "storage"})


def dirty_workgroup_memory(device: Device) -> None:
    """Leave NaN in the workgroup memory of all processors: nobody promises that a kernel finds zeros there."""
    recording = Recording(device)
    recording.add(_dirt(device), (min(256, device.profile.max_workgroups),), {"seen": device.empty((64,), np.uint32)})
    recording.replay()


class WideProfile(DeviceProfile):
    """Teams of many lanes where subgroups are too small for them: through workgroup memory."""

    def team_part(self, lanes: int) -> str:
        return "team_one" if lanes == 1 else "team_workgroup"


# ---- what a device lacks


@cache
def exp2_of_nan(device: Device) -> float:
    """NaN, as a rule; WGSL does not promise it, and SwiftShader says infinity."""
    text = """
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(1)
fn main() { x[0] = exp2(x[0]); }
"""
    recording, x = Recording(device), device.tensor(np.full(4, np.nan, np.float32))
    recording.add(text_kernel(device, text, {"x": "storage"}, workgroup_size=1), (1,), {"x": x})
    recording.replay()
    return float(x.numpy()[0])


def not_available(reason: str) -> NoReturn:
    """End the test: it cannot be run on this device, for a reason that the report of stacks shows."""
    pytest.skip(NOT_AVAILABLE + reason)


_NAMES = {
    "max-storage-buffer-binding-size": "bind|bytes",
    "max-compute-workgroup-storage-size": "workgroup memory",
    "max-compute-invocations-per-workgroup": "workgroups? of|invocations",
    "max-storage-buffers-per-shader-stage": "storage buffers",
    "max-compute-workgroups-per-dimension": "workgroups",
    "shader-f16": "needs f16 operations",
    "subgroup": "needs subgroup operations",
}
"""How errors call a limit, as a pattern."""


def named_limit(error: Exception, device: Device) -> str | None:
    """Which of the limits that a device was asked to lower an error's message names: in words, and for a number by its value."""
    message = str(error).replace(device.name, "").replace(",", "")
    for name, value in device.lowered.items():
        words = _NAMES.get(name)
        if words and re.search(words, message) and (value == 0 or re.search(rf"(?<!\d){value}(?!\d)", message)):
            return name
    return None
