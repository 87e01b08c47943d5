"""Projections whose input is never in memory: each workgroup multiplies the columns that it has computed itself, and what workgroups leave are sums.

Two dispatches become one where a projection follows: attention and the output projection, or gate, up, SwiGLU and down. The sums are added to the
residual stream by whoever reads it next. That is quicker as long as they are few, since every workgroup of the next dispatch reads all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..attention.split import Onward
from ..gpu import DeviceProfile, Named, Recording, Tensor, power_of_two
from .quant import CHUNK, Format, padded

SLICE = 64
"""Hidden channels of a workgroup that goes on with them into the down projection."""
MOST_BYTES = 1 << 16
"""Of the sums that a dispatch leaves at most."""
_AT_ONCE = 8
"""Sums that an invocation loads at once, about."""
_BUFFERS = 15
"""That a kernel binds at most which reads sums and leaves some."""
_REGISTERS = 32
"""Words of weights that an invocation holds at a time."""


@dataclass(frozen=True)
class SliceShape:
    """How a workgroup ends that multiplies `columns` of a matrix's columns: `lanes` invocations a row, `batch` rows of a team at a time."""

    rows: int
    columns: int
    slices: int
    batch: int
    batches: int
    digits: int
    """Digits of 8 bits that the input is rounded to, where the matrix is quantised; 0: floats."""

    @property
    def lanes(self) -> int:
        return _lanes(self.columns)

    @property
    def workgroup_bytes(self) -> int:
        """What the end needs, each variable padded to 16 bytes."""
        sizes = [4 * self.columns] + ([self.digits * self.columns, self.columns // 8, self.columns // 4] if self.digits else [4 * self.columns])
        return sum(-(-size // 16) * 16 for size in sizes)

    @property
    def nbytes(self) -> int:
        """Of the sums."""
        return 4 * self.slices * padded(self.rows)


def choose_slice(
    profile: DeviceProfile, rows: int, columns: int, each: int, form: Format, digits: int, workgroup: int, memory: int
) -> SliceShape | None:
    """The shape for a matrix (rows, columns) of which a workgroup of so many invocations has `each` columns; pure. None where none is, or pays.

    memory: bytes of workgroup memory that the kernel takes without its end.
    """
    lanes = _lanes(each)
    subgroups = profile.team_part(2).startswith("team_subgroup") and profile.subgroup_size >= 8
    if profile.software or not subgroups or columns % each or each % (2 * CHUNK if form.quantised else CHUNK):
        return None
    if lanes > profile.subgroup_size or workgroup % profile.subgroup_size or profile.max_storage_buffers < _BUFFERS:
        return None
    most = -(-rows * lanes // workgroup)  # rows of a team
    batch = min(most, max(1, _REGISTERS // (form.chunk_words + 1)))
    shape = SliceShape(rows, each, columns // each, batch, -(-most // batch), digits)
    fits = memory + shape.workgroup_bytes + 16 <= profile.workgroup_memory  # 16: of source_sums
    return shape if fits and shape.nbytes <= MOST_BYTES else None


def pays(embed_dim: int, hidden_dim: int) -> bool:
    """Whether layers of such a width are so small that sums are worth it: what a dispatch saves by not being one is then more than they cost."""
    return 4 * padded(embed_dim) * hidden_dim // SLICE <= MOST_BYTES


def _lanes(columns: int) -> int:
    return power_of_two(2 * (columns // CHUNK) - 1)


class Stream:
    """The residual stream of a recorded decode step: a tensor (1, padded E), and sums that are still to be added to it.

    Args:
        spare: a second tensor like it, which takes turns with it: what is read by some workgroups of a dispatch must not be written by others.
    """

    def __init__(self, tensor: Tensor, spare: Tensor):
        self.tensor, self._spare = tensor, spare
        self._sums: tuple[Tensor, int] | None = None  # (slices, padded E) at least, and how many

    def leave(self, end: Onward, slices: int) -> None:
        """What so many workgroups leave that ended so is added when the stream is read next."""
        self._sums = end.buffers["slice_sums"], slices

    def take(self, workgroup: int, room: int) -> tuple[str, dict[str, int], dict[str, Tensor]]:
        """(part, options, buffers) of a dispatch that reads the stream as `x`; when it has run, `tensor` is all there is.

        workgroup: its invocations; room: bytes of workgroup memory that it does not use otherwise.
        """
        if self._sums is None:
            return "block/parts/source_plain", {}, {"x": self.tensor}
        sums, slices = self._sums
        buffers = {"x": self.tensor, "sums_pending": sums, "x_settled": self._spare}
        width = self.tensor.shape[1] // 4
        groups = max(1, min(workgroup // width, -(-slices // _AT_ONCE), room // (16 * width))) if slices > 2 * _AT_ONCE else 1
        self.tensor, self._spare, self._sums = self._spare, self.tensor, None
        options = {"SUMS": slices, "SUM_GROUPS": groups, "SUMS_EACH": -(-slices // groups), "SUM_WIDTH": width if groups > 1 else 1}
        return "block/parts/source_sums", options, buffers

    def settle(self, recording: Recording) -> Tensor:
        """The stream as one tensor, by a dispatch of its own if need be."""
        if self._sums is not None:
            sums, slices = self._sums
            width, workgroup = self.tensor.shape[1], 64
            kernel = recording.device.kernel("block/settle", SUMS=slices, WORKGROUP=workgroup)
            buffers = {"sums_pending": sums, "y": self.tensor}
            recording.add(kernel, (-(-width // (4 * workgroup)),), buffers, {"stride": width}, "residual")
            self._sums = None
        return self.tensor


def onward(recording: Recording, matrix: Any, bias: Any, shape: SliceShape, label: str) -> Onward:
    """What a kernel needs to end with a shape; the sums go to scratch memory, one for each label.

    matrix: a `Matrix` in one piece; bias: (rows) float32 or None.
    """
    form, products = matrix.format, "codes" if shape.digits else "floats"
    parts = ("block/parts/slice", *form.parts, f"block/parts/products_{products}", f"block/parts/bias_{'none' if bias is None else 'add'}")
    sizes = {"ROWS": shape.rows, "STRIDE": padded(shape.rows), "COLUMNS": shape.columns, "LANES": shape.lanes}
    division = {"LANE_BITS": shape.lanes.bit_length() - 1, "BATCH": shape.batch, "BATCHES": shape.batches}
    read = {"columns": matrix.columns} | ({} if bias is None else {"first_row": 0})
    digits = {"DIGITS": shape.digits} if shape.digits else {}
    options = {f"slice_{o}": v for o, v in (sizes | division | read | digits | dict(form.options)).items()}
    sums = recording.scratch(f"sums of {label}", (shape.slices, padded(shape.rows)))
    buffers = {f"slice_{n}": plane for n, plane in matrix.pieces[0].planes.items()} | {"slice_sums": sums}
    return Onward(label, Named("slice", parts), options, buffers | ({} if bias is None else {"slice_bias": bias}))
