"""The common part: a pool that also keeps its own list of each owner's block ids."""

from __future__ import annotations

from collections.abc import Iterable

from veloxquant_mlx.memory.block_pool import Block, BlockPoolAllocator, PoolConfig

__all__ = ["OwnedPool"]


class OwnedPool(BlockPoolAllocator):
    """Keeps ids by owner, as the allocators with the historical fault do; linear by itself."""

    def __init__(self, config: PoolConfig | None = None) -> None:
        super().__init__(config)
        self.ids: dict[int | str, list[int]] = {}

    def allocate(
        self, stream: str, n_tokens: int, owner: int | str, format: str = "fp16"
    ) -> list[Block]:
        """As the pool's; and notes the ids."""
        blocks = super().allocate(stream, n_tokens, owner, format)
        self.ids.setdefault(owner, []).extend([block.block_id for block in blocks])
        return blocks

    def free(self, blocks: Iterable[Block], *, owner: int | str | None = None) -> None:
        """As the pool's; and forgets the ids of what every owner lost."""
        super().free(blocks, owner=owner)
        for holder in list(self.ids):
            self.ids[holder] = [block.block_id for block in self.blocks_for(holder)]

    def free_all(self, owner: int | str) -> None:
        """As the pool's; and forgets the owner."""
        self.ids.pop(owner, None)
        super().free_all(owner)
