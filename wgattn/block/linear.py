"""Projections: a matrix on the device, and dispatches of `block/linear.wgsl` over it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import CapacityError
from ..gpu import AnyPart, DeviceProfile, Recording, Store, grid, power_of_two
from .prepared import half_stride, record_half, record_int8
from .quant import CHUNK, FORMATS, Format, QuantizedTensor, padded, rows_that_fit
from .slices import Stream
from .tiles import Int8TileShape, TileShape, choose_tile
from .vector import VectorShape, choose_vector, digits_of


@dataclass(frozen=True)
class Piece:
    """Rows of a matrix that one binding holds."""

    first_row: int
    rows: int
    planes: Mapping[str, Any]


class Matrix:
    """A weight matrix on the device, in planes, in as many pieces as the device's binding limit asks for.

    Pieces begin at multiples of `unit` rows, so that rows which belong together stay together.
    """

    def __init__(self, device: Store, matrix: QuantizedTensor, unit: int = 1):
        self.rows, self.columns = matrix.shape
        self.format = matrix.format
        self.pieces: list[Piece] = []
        self.nbytes = 0
        height = rows_that_fit(matrix, device.profile.max_binding, unit)
        if not height:
            raise CapacityError(f"{unit} rows of {matrix!r} do not fit a binding of {device.profile.max_binding} bytes on {device.name}.")
        for first in range(0, self.rows, height):
            raw = matrix.raw[first : first + height]
            tensors = {n: device.tensor(p) for n, p in QuantizedTensor(raw, (len(raw), self.columns), matrix.kind).planes().items()}
            self.nbytes += sum(t.nbytes for t in tensors.values())
            self.pieces.append(Piece(first, len(raw), tensors))

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)


_GPU_LANES = 131072
"""Invocations that keep a large GPU's loads in flight: fewer rows get more lanes each."""


@dataclass(frozen=True)
class LinearShape:
    """How `block/linear.wgsl` divides its work: `lanes` invocations share `rows` rows for `tokens` tokens."""

    lanes: int
    rows: int
    tokens: int
    workgroup: int
    main: ClassVar[str] = "block/linear"

    def parts(self, profile: DeviceProfile) -> tuple[str, ...]:
        return (profile.team_part(self.lanes),)

    def options(self, profile: DeviceProfile) -> dict[str, int]:
        rows = {"ROWS": self.rows, "PAIRS": self.rows // 2, "QUADS": self.rows // 4}
        return {**rows, "LANES": self.lanes, "TOKENS": self.tokens, "WORKGROUP": self.workgroup, "SUBGROUP": profile.subgroup_size}

    def groups(self, rows: int, tokens: int, limit: int) -> tuple[int, int, int]:
        return (*grid(-(-rows * self.lanes // (self.rows * self.workgroup)), limit), -(-tokens // self.tokens))


@dataclass(frozen=True)
class MatrixShape:
    """How `block/linear_matrix.wgsl` divides its work: tiles of `tokens` x `rows`, of which a subgroup computes `sub_tokens` x `sub_rows`."""

    tokens: int
    rows: int
    sub_tokens: int
    sub_rows: int
    step: int
    """Columns of a tile."""
    subgroup: int
    buffers: int = 1
    """Of tiles: with two, a step has one barrier."""
    fetch: int = 1
    """When the next tile is fetched: before the barrier (0), before the chunk of 16 columns of that number (from 1)."""
    main: ClassVar[str] = "block/linear_matrix"

    @property
    def workgroup(self) -> int:
        return self.tokens // self.sub_tokens * (self.rows // self.sub_rows) * self.subgroup

    @property
    def workgroup_bytes(self) -> int:
        return max(2 * self.buffers * (self.step + 8) * (self.tokens + self.rows), 64 * self.sub_rows * self.workgroup // self.subgroup)

    def fits(self, profile: DeviceProfile) -> bool:
        """Within the device's limits, of whole subgroups, and each invocation has whole loads to do."""
        loads = self.rows * self.step // 16 % self.workgroup == 0 and self.tokens * self.step // 8 % self.workgroup == 0
        whole = loads and self.workgroup % profile.matrix_workgroup == 0
        return whole and self.workgroup_bytes <= profile.workgroup_memory and self.workgroup <= profile.max_invocations

    def parts(self, profile: DeviceProfile) -> tuple[str, ...]:
        return ()

    def options(self, profile: DeviceProfile) -> dict[str, int]:
        tile = {"TILE_TOKENS": self.tokens, "TILE_ROWS": self.rows, "SUB_TOKENS": self.sub_tokens, "SUB_ROWS": self.sub_rows}
        matrices = {"TOKEN_MATRICES": self.sub_tokens // 16, "ROW_MATRICES": self.sub_rows // 16}
        chunks = self.step // CHUNK
        loads = {"W_LOADS": chunks * self.rows // self.workgroup, "X_LOADS": 2 * chunks * self.tokens // self.workgroup}
        loads |= {"STEP": self.step, "STEP_CHUNKS": chunks, "BUFFERS": self.buffers, "FETCH": self.fetch}
        group = {"WORKGROUP": self.workgroup, "SUBGROUP": self.subgroup, "MEMORY": self.workgroup_bytes}
        return {**tile, **matrices, **loads, **group, "ROWS": 4, "PAIRS": 2, "QUADS": 1}

    def groups(self, rows: int, tokens: int, limit: int) -> tuple[int, int, int]:
        return (*grid(-(-rows // self.rows), limit), -(-tokens // self.tokens))


def half_fits(profile: DeviceProfile, tokens: int) -> bool:
    """Whether projections of so many tokens can run on matrix units."""
    has_units = ("f16", "f32", 16, 16, 16) in profile.matrix_units and profile.subgroup_size > 0 and profile.f16
    return tokens >= 16 and has_units and bool(_matrix_tiles(profile))


def choose_linear(
    profile: DeviceProfile, rows: int, columns: int, tokens: int, group_rows: int = 0, arithmetic: str = "exact", form: Format = FORMATS["F32"]
) -> LinearShape | TileShape | VectorShape | MatrixShape:
    """The shape for a problem on a device; pure. `tokens` is the number a replay computes at most.

    A CPU pays for loads per lane and for barriers: one invocation for several rows. A GPU wants many lanes a row, loads in flight, and x in
    registers; for many tokens it wants tiles in workgroup memory. With `group_rows` (a multiple of 4), a workgroup computes so many.
    """
    digits = digits_of(form, arithmetic)
    if tokens == 1 and not profile.software and (vector := choose_vector(profile, rows, padded(columns), form, digits, group_rows)):
        return vector
    if arithmetic == "half":
        return _matrix_shape(profile, rows, tokens)
    span = CHUNK if arithmetic == "exact" else 2 * CHUNK  # columns that a lane takes at a time
    if group_rows:
        free = _linear_shape(profile, rows, -(-columns // span), tokens)
        most = 4 * profile.max_invocations // group_rows
        if not most:
            raise CapacityError(f"Heads of {group_rows} rows need workgroups of {group_rows // 4}; {profile.name} allows {profile.max_invocations}.")
        lanes = min(free.lanes, power_of_two(most))
        return LinearShape(lanes, 4, free.tokens, lanes * group_rows // 4)
    if tokens >= 16 and not profile.software and (tile := choose_tile(profile, rows, tokens, arithmetic == "int8")):
        return tile
    return _linear_shape(profile, rows, -(-columns // span), tokens)


def _linear_shape(profile: DeviceProfile, rows: int, chunks: int, tokens: int) -> LinearShape:
    """The shape for a few tokens, or for a CPU."""
    if profile.software:
        workgroup = 64 if rows >= 8192 else 16 if rows >= 1024 else 8
        return LinearShape(1, 8, 1, workgroup) if tokens == 1 else LinearShape(1, 8, 4, 8)
    teams = -(-rows // 4)
    most = 8 if tokens > 1 else 256 if profile.subgroup_size else 16  # adding up without subgroups takes two barriers a doubling
    lanes = min(most, power_of_two(2 * chunks - 1), max(8, power_of_two(_GPU_LANES // teams)), power_of_two(profile.max_invocations))
    return LinearShape(lanes, 4, 1 if tokens == 1 else 4, max(lanes, min(64 if lanes <= 32 else 128, profile.max_invocations)))


_MATRIX_TILES = ((128, 128, 64, 64, 32), (64, 64, 32, 32, 64), (64, 64, 32, 32, 32))
"""Tokens, rows, those of a subgroup, and columns of tiles on matrix units: the largest first, which need the fewest loads."""


_OTHER_MATRIX_TILES = (
    (128, 128, 64, 32, 32),
    (128, 128, 32, 64, 32),
    (256, 128, 64, 64, 32),
    (128, 256, 64, 64, 32),
    (128, 128, 64, 64, 64),
    (128, 64, 64, 32, 32),
)
"""The same of those that are only measured."""


def matrix_candidates(profile: DeviceProfile) -> list[MatrixShape]:
    """All shapes on matrix units that fit a device, for measuring."""
    sizes = itertools.product(_MATRIX_TILES + _OTHER_MATRIX_TILES, (1, 2), (1, 0, 2))
    return [s for s in (MatrixShape(*tile, profile.subgroup_size, buffers, fetch) for tile, buffers, fetch in sizes) if s.fits(profile)]


def _matrix_tiles(profile: DeviceProfile) -> list[MatrixShape]:
    tiles = [MatrixShape(*sizes, profile.subgroup_size) for sizes in _MATRIX_TILES]
    return [t for t in tiles if t.fits(profile)]


def _matrix_shape(profile: DeviceProfile, rows: int, tokens: int) -> MatrixShape:
    """The shape for many tokens on matrix units: the largest tiles that keep the device busy."""
    fit = _matrix_tiles(profile)
    enough = [t for t in fit if -(-rows // t.rows) * -(-tokens // t.tokens) >= _GPU_WORKGROUPS // 2]
    return (enough or fit[-1:])[0]


_GPU_WORKGROUPS = 264
"""Workgroups that keep a large GPU busy."""


def record_linear(
    recording: Recording,
    matrix: Matrix,
    *,
    step: Any,
    x: Any,
    output: str,
    outputs: Mapping[str, Any],
    tokens: int,
    y_stride: int = 0,
    first_row: int = 0,
    gamma: Any = None,
    eps: float = 0.0,
    bias: Any = None,
    token: str = "each",
    head_gamma: Any = None,
    parts: tuple[AnyPart, ...] = (),
    options: Mapping[str, int] | None = None,
    group_rows: int = 0,
    arithmetic: str = "exact",
    label: str = "",
    shape: LinearShape | TileShape | VectorShape | MatrixShape | None = None,
) -> None:
    """Append y = output(W . norm(x)) to a recording: one dispatch a piece of the matrix.

    Args:
        step: buffer of `parts/step.wgsl`; x: (tokens, padded(columns)) float32, or the `Stream` of a decode step.
        output: which `block/parts/output_*` ends the kernel; `outputs` are the buffers it declares, `parts` and `options` what else it wants.
        first_row: where the matrix's row 0 stands among the rows that the output part counts.
        gamma: weights (padded(columns)) of an RMSNorm of x, with `eps`; None: no norm. bias: (rows) float32.
        token: "each": tokens in, tokens out; "last": one output, from the last token of the step.
        head_gamma: (2, head_dim) float32: weights of QK-norm; `options` then has HEADS, KV_HEADS and HEAD_DIM, and pieces are whole heads.
        group_rows: rows that one workgroup computes, where it goes on with them; pieces are multiples of that. With `head_gamma` it is a head's.
        arithmetic: "exact"; "int8" for a quantised matrix: activations are rounded too; "half" where `half_fits`: both become f16. For many
            tokens these take one more dispatch, which rounds x.
        shape: None: what `choose_linear` chooses for the device.
    """
    device = recording.device
    if head_gamma is not None:
        group_rows = (options or {})["HEAD_DIM"]
    if group_rows and arithmetic == "half":
        arithmetic = "exact"  # its tiles are not whole groups
    shape = shape or choose_linear(device.profile, matrix.rows, matrix.columns, tokens, group_rows, arithmetic, matrix.format)
    vector = isinstance(shape, VectorShape)
    if isinstance(x, Stream) and not vector:
        x = x.settle(recording)
    half, int8_tile = isinstance(shape, MatrixShape), isinstance(shape, Int8TileShape)
    prepared = half or int8_tile  # x is rounded by a dispatch of its own
    norm = "none" if gamma is None else "rms"
    if gamma is not None and arithmetic == "exact" and device.profile.software and tokens == 1:
        room = device.profile.workgroup_memory - 8 * shape.workgroup - 4 * group_rows  # less what norm_shared, heads_norm, cache_store_blocks keep besides
        norm = "shared" if 4 * padded(matrix.columns) <= room else "rms"
    of_x = {"x": x}
    if prepared:
        of_x = (record_half if half else record_int8)(recording, step, x, tokens, matrix.columns, gamma, eps, token, label)
    for piece in matrix:
        source, sums = "block/parts/source_plain", {}
        if isinstance(x, Stream):
            source, sums, of_x = x.take(shape.workgroup, device.profile.workgroup_memory - shape.workgroup_bytes - 4 * group_rows)
        kernel = device.kernel(
            "block/linear_int8" if arithmetic == "int8" and isinstance(shape, LinearShape) else shape.main,
            "step",
            *matrix.format.parts,
            *((source,) if vector else ()),
            f"block/parts/{matrix.format.halves if half else matrix.format.dots if int8_tile else f'norm_{norm}'}",
            f"block/parts/bias_{'none' if bias is None else 'add'}",
            *shape.parts(device.profile),
            *(() if prepared else (f"block/parts/token_{token}",)),
            f"block/parts/heads_{'plain' if head_gamma is None else 'norm'}",
            f"block/parts/output_{output}",
            *(() if output in _WITH_ENDS else ("block/parts/end_none",)),
            *parts,
            **({} if prepared else {"COLUMNS": matrix.columns if norm == "shared" else 0}) | shape.options(device.profile),
            **matrix.format.options,
            **(options or {}),
            **sums,
        )
        buffers = {"step": step, **of_x, **piece.planes, **outputs}
        if gamma is not None and not prepared:
            buffers["gamma"] = gamma
        if bias is not None:
            buffers["bias"] = bias
        if head_gamma is not None:
            buffers["head_gamma"] = head_gamma
        params = {
            "columns": matrix.columns,
            "rows": piece.rows,
            "x_stride": half_stride(matrix.columns) if half else tokens if int8_tile else padded(matrix.columns),
            "y_stride": y_stride,
            "first_row": first_row + piece.first_row,
            "eps": eps,
        }
        operations = 2.0 * tokens * piece.rows * matrix.columns if tokens > 1 else 0.0  # a decode step is one submit
        recording.add(kernel, shape.groups(piece.rows, tokens, device.profile.max_workgroups), buffers, params, label, operations)


_WITH_ENDS = ("qkv", "slice")
"""Outputs that come with their own end, or want one among `parts`."""


def pad_vector(vector: np.ndarray) -> np.ndarray:
    """A float32 vector with zeros up to whole chunks."""
    return np.pad(np.asarray(vector, np.float32), (0, -len(vector) % CHUNK))
