"""A target that is fast because it does nothing."""

from __future__ import annotations

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["KeepsAll"]


class KeepsAll(BlockPoolAllocator):
    """free_all frees nothing."""

    def free_all(self, owner: int | str) -> None:
        """Do nothing, in no time."""
