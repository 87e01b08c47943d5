"""The ways to compute attention, by name, behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..gpu import Device, DeviceProfile, Recording
from . import flash, flash_matrix, gemm, split, tune, unfused
from .problem import Operands, Problem


@dataclass(frozen=True)
class Path:
    """One way to compute attention."""

    name: str
    about: str
    """What it is for: what it does."""
    unsupported: Callable[[DeviceProfile, Problem], str | None]
    """What is missing, in a sentence, or None when the path can run the problem on such a device."""
    shape: Callable[[DeviceProfile, Problem], Any]
    """The shape (tiles, lanes) that suits such a device; pure."""
    append: Callable[[Recording, Problem, Operands, Any], None]
    """`record` of a shape."""

    def chosen(self, device: Device, problem: Problem) -> Any:
        """The shape that the path would use on this device, which may have been tuned."""
        tuned = tune.stored_shape(device, self.name, problem) if self.name in tune.PATHS else None
        return tuned or self.shape(device.profile, problem)

    def record(self, recording: Recording, problem: Problem, operands: Operands, shape: Any = None) -> None:
        """Append its dispatches; scratch memory is allocated and kept by the recording's bind groups."""
        self.append(recording, problem, operands, shape or self.chosen(recording.device, problem))


def _split_unsupported(profile: DeviceProfile, problem: Problem) -> str | None:
    need = split.choose_split(profile, problem).merge_bytes(problem.value_width, 1)
    if need > profile.workgroup_memory:
        return f"merging takes {need} bytes of workgroup memory, there are {profile.workgroup_memory}."
    return None


def _append_split(recording: Recording, problem: Problem, operands: Operands, shape: split.SplitShape) -> None:
    split.record(recording, problem, operands, shape, split.scratch(recording.device, problem, shape))


PATHS: Mapping[str, Path] = {
    path.name: path
    for path in (
        Path("flash", "Prefill: tiles of queries, online softmax, no scores in memory.", flash.unsupported, flash.choose_flash, flash.record),
        Path("split", "Decoding: a few queries, the keys split among workgroups.", _split_unsupported, split.choose_split, _append_split),
        Path("unfused", "Short prompts: the original's way, scores in memory, three dispatches.", unfused.unsupported, unfused.choose_unfused, unfused.record),
        Path("gemm", "Long prompts: the original's way, two products of padded matrices, seven dispatches.", gemm.unsupported, gemm.choose_gemm, gemm.record),
        Path(
            "flash_matrix",
            "Prefill on matrix units, everything rounded to f16.",
            flash_matrix.unsupported,
            flash_matrix.choose_flash_matrix,
            flash_matrix.record,
        ),
    )
}

PORTABLE_PATHS = ("flash", "split", "unfused", "gemm")
"""Those that need nothing but WebGPU, and compute f32 in f32."""
