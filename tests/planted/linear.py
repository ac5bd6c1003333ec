"""free_all that visits every block."""

from __future__ import annotations

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["VisitsEveryBlock"]


class VisitsEveryBlock(BlockPoolAllocator):
    """Linear where constant is promised: the peer's present shape."""

    def free_all(self, owner: int | str) -> None:
        """Look at each block before the release."""
        n_filled = 0
        for block in self.blocks_for(owner):
            n_filled += block.n_used
        super().free_all(owner)
