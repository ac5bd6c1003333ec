"""Faults that grow with the pool, not with the owner."""

from __future__ import annotations

import threading

from tests.planted.owned import OwnedPool
from veloxquant_mlx.memory.block_pool import Block, BlockPoolAllocator, PoolConfig

__all__ = ["HeldOverScan", "Rescan"]


class Rescan(OwnedPool):
    """free_all that counts what everybody holds: invisible when one owner's size is varied alone."""

    def free_all(self, owner: int | str) -> None:
        """Release, then sum up the others."""
        super().free_all(owner)
        self.n_held = sum(len([0 for _ in ids]) for ids in self.ids.values())


class HeldOverScan(OwnedPool):
    """`mark_used` that looks its block up in a list, with a lock held meanwhile."""

    def __init__(self, config: PoolConfig | None = None) -> None:
        super().__init__(config)
        self.fills_lock = threading.Lock()
        self.known: list[int] = []

    def mark_used(self, block: Block, n_used: int) -> None:
        """Scan under the lock."""
        with self.fills_lock:
            if not self.known:
                self.known = list(range(self.config.n_blocks))
            if block.block_id in self.known:
                BlockPoolAllocator.mark_used(self, block, n_used)
