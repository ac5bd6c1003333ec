"""Faults that are no change of shape, or hardly one."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from veloxquant_mlx.memory.block_pool import Block, BlockPoolAllocator

__all__ = ["NLogN", "TwiceTheWork"]


class TwiceTheWork(BlockPoolAllocator):
    """Each release is done, undone and done again: the shape is right, the constant is not."""

    def free_all(self, owner: int | str) -> None:
        """Release twice, with a registration between as the excuse."""
        super().free_all(owner)
        self.register_owner(owner)
        super().free_all(owner)


class NLogN(BlockPoolAllocator):
    """`free` that sorts its blocks on a heap: 1.1 on the clock, where noise hides it."""

    def free(self, blocks: Iterable[Block], *, owner: int | str | None = None) -> None:
        """Free in the order of ids."""
        heap: list[tuple[int, Block]] = []
        for block in blocks:
            heapq.heappush(heap, (block.block_id, block))
        super().free([heapq.heappop(heap)[1] for _ in range(len(heap))], owner=owner)
