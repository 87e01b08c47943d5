"""Cases that together use every kernel in every variant: run on a device they are `wgattn selftest`, on paper they list the shaders for the lint."""

from . import attention, block, llm
from .family import Family

FAMILIES: tuple[Family, ...] = (*attention.FAMILIES, *block.FAMILIES, *llm.FAMILIES)
"""What the self-test runs."""
TUNED: tuple[Family, ...] = (attention.TILES,)
"""Shapes that only `wgattn tune` tries."""
