"""The ways to compute attention, by name, behind one interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..gpu import DeviceProfile, Recording
from . import flash, flash_matrix, gemm, split, tune, unfused
from .problem import Operands, Problem


class Path(Protocol):
    """One way to compute attention."""

    def unsupported(self, profile: DeviceProfile, problem: Problem) -> str | None:
        """What is missing, in a sentence, or None when the path can run the problem on such a device."""

    def shape(self, profile: DeviceProfile, problem: Problem) -> object:
        """The shape (tiles, lanes) that the path would use; pure."""

    def record(self, recording: Recording, problem: Problem, operands: Operands, shape: object | None = None) -> None:
        """Append its dispatches; scratch memory is allocated and kept by the recording's bind groups."""


class SplitPath:
    """Decoding: a few queries, the keys split among workgroups."""

    def unsupported(self, profile: DeviceProfile, problem: Problem) -> str | None:
        shape = split.choose_split(profile, problem)
        need = shape.merge_bytes(problem.value_width, 1)
        if need > profile.workgroup_memory:
            return f"merging takes {need} bytes of workgroup memory, there are {profile.workgroup_memory}."
        return None

    def shape(self, profile: DeviceProfile, problem: Problem) -> split.SplitShape:
        return split.choose_split(profile, problem)

    def record(self, recording: Recording, problem: Problem, operands: Operands, shape: split.SplitShape | None = None) -> None:
        shape = shape or split.choose_split(recording.device.profile, problem)
        split.record(recording, problem, operands, shape, split.scratch(recording.device, problem, shape))


class FlashPath:
    """Prefill: tiles of queries, online softmax, no scores in memory."""

    def unsupported(self, profile: DeviceProfile, problem: Problem) -> str | None:
        return flash.unsupported(profile, problem)

    def shape(self, profile: DeviceProfile, problem: Problem) -> flash.FlashShape:
        return flash.choose_flash(profile, problem)

    def record(self, recording: Recording, problem: Problem, operands: Operands, shape: flash.FlashShape | None = None) -> None:
        shape = shape or tune.stored_shape(recording.device, "flash", problem) or flash.choose_flash(recording.device.profile, problem)
        flash.record(recording, problem, operands, shape)


class FlashMatrixPath:
    """Prefill on matrix units, everything rounded to f16."""

    def unsupported(self, profile: DeviceProfile, problem: Problem) -> str | None:
        return flash_matrix.unsupported(profile, problem)

    def shape(self, profile: DeviceProfile, problem: Problem) -> flash_matrix.FlashMatrixShape:
        return flash_matrix.choose_flash_matrix(profile, problem)

    def record(self, recording: Recording, problem: Problem, operands: Operands, shape: flash_matrix.FlashMatrixShape | None = None) -> None:
        flash_matrix.record(recording, problem, operands, shape or flash_matrix.choose_flash_matrix(recording.device.profile, problem))


class UnfusedPath:
    """Short prompts: the original's way, scores in memory, three dispatches."""

    def unsupported(self, profile: DeviceProfile, problem: Problem) -> str | None:
        return unfused.unsupported(profile, problem)

    def shape(self, profile: DeviceProfile, problem: Problem) -> unfused.UnfusedShape:
        return unfused.choose_unfused(profile, problem)

    def record(self, recording: Recording, problem: Problem, operands: Operands, shape: unfused.UnfusedShape | None = None) -> None:
        unfused.record(recording, problem, operands, shape or unfused.choose_unfused(recording.device.profile, problem))


class GemmPath:
    """Long prompts: the original's way, two products of padded matrices, seven dispatches."""

    def unsupported(self, profile: DeviceProfile, problem: Problem) -> str | None:
        return gemm.unsupported(profile, problem)

    def shape(self, profile: DeviceProfile, problem: Problem) -> gemm.GemmShapes:
        return gemm.choose_gemm(profile, problem)

    def record(self, recording: Recording, problem: Problem, operands: Operands, shape: gemm.GemmShapes | None = None) -> None:
        shape = shape or tune.stored_shape(recording.device, "gemm", problem) or gemm.choose_gemm(recording.device.profile, problem)
        gemm.record(recording, problem, operands, shape)


PATHS: Mapping[str, Path] = {
    "flash": FlashPath(),
    "split": SplitPath(),
    "unfused": UnfusedPath(),
    "gemm": GemmPath(),
    "flash_matrix": FlashMatrixPath(),
}

PORTABLE_PATHS = ("flash", "split", "unfused", "gemm")
"""Those that need nothing but WebGPU, and compute f32 in f32."""
