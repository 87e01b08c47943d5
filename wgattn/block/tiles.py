"""Projections of many tokens in tiles that go through workgroup memory: their shapes, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..gpu import DeviceProfile, grid
from .quant import CHUNK

STEP = 32
"""Columns of a tile of floats; what an invocation loads of W is one chunk, whatever the tile."""


@dataclass(frozen=True)
class TileShape:
    """How `block/linear_tile.wgsl` divides its work: tiles of `rows` x `tokens`, of which an invocation computes `rows_each` x `tokens_each`."""

    rows: int
    tokens: int
    rows_each: int
    tokens_each: int
    main: ClassVar[str] = "block/linear_tile"

    @property
    def workgroup(self) -> int:
        return self.rows // self.rows_each * (self.tokens // self.tokens_each)

    @property
    def work(self) -> float:
        """Of a tile, relative to others: its products, and its loads, each of which costs as much as eight products."""
        return self.rows * self.tokens + 8 * (self.rows + self.tokens)

    @property
    def workgroup_bytes(self) -> int:
        return 4 * STEP * (self.rows + self.tokens)

    def parts(self, profile: DeviceProfile) -> tuple[str, ...]:
        return ()

    def options(self, profile: DeviceProfile) -> dict[str, int]:
        tile = {"TILE_ROWS": self.rows, "TILE_TOKENS": self.tokens, "ROW_QUADS": self.rows_each // 4, "TOKEN_QUADS": self.tokens_each // 4}
        loads = {"STEP": STEP, "W_LOADS": self.rows * STEP // CHUNK // self.workgroup, "X_LOADS": self.tokens * STEP // 4 // self.workgroup}
        return {**tile, **loads, "ROWS": 4, "PAIRS": 2, "QUADS": 1, "WORKGROUP": self.workgroup}

    def groups(self, rows: int, tokens: int, limit: int) -> tuple[int, int, int]:
        return (*grid(-(-rows // self.rows), limit), -(-tokens // self.tokens))


@dataclass(frozen=True)
class Int8TileShape(TileShape):
    """How `block/linear_tile_int8.wgsl` divides its work: as `TileShape`, a step taking `blocks` blocks of 32 columns."""

    blocks: int
    main: ClassVar[str] = "block/linear_tile_int8"

    @property
    def workgroup_bytes(self) -> int:
        """At most: weights with offsets have the most factors."""
        codes, factors = 128 * (self.rows // 4 + self.tokens // 4 + 3), 8 * (self.rows + self.tokens)
        return 2 * self.blocks * (codes + factors)

    def options(self, profile: DeviceProfile) -> dict[str, int]:
        loads = {"W_LOADS": 2 * self.blocks * self.rows // self.workgroup, "X_LOADS": 2 * self.blocks * self.tokens // self.workgroup}
        loads |= {"UNIT_LOADS": -(-self.blocks * self.tokens // self.workgroup), "BLOCKS": self.blocks, "BUFFERS": 2}
        return {name: value for name, value in super().options(profile).items() if name != "STEP"} | loads


_TILES = (TileShape(128, 128, 8, 8), TileShape(64, 64, 8, 4), TileShape(64, 32, 4, 4))
_INT8_TILES = (Int8TileShape(64, 64, 4, 8, 2), Int8TileShape(64, 64, 4, 8, 1), Int8TileShape(64, 32, 4, 4, 2))
"""Tiles for many tokens, the one that needs the fewest loads first."""
_GPU_LANES = 24576
"""Invocations that keep a large GPU busy; where there are fewer, tiles are made smaller."""


def choose_tile(profile: DeviceProfile, rows: int, tokens: int, int8: bool) -> TileShape | None:
    """Of the tiles that fit the device and keep it busy the quickest, else the smallest that fits; None where none fits."""
    fit = [t for t in (_INT8_TILES if int8 else _TILES) if t.workgroup_bytes <= profile.workgroup_memory and t.workgroup <= profile.max_invocations]
    count = {t: -(-rows // t.rows) * -(-tokens // t.tokens) for t in fit}
    enough = [t for t in fit if count[t] * t.workgroup >= _GPU_LANES]
    return min(enough, key=lambda t: count[t] * t.work, default=fit[-1] if fit else None)
