"""TokenCharge: the tokens that one cache is charged for in one stream of a pool. Needs no MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant_mlx.core.exceptions import PoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant_mlx.memory.block import Block, Lease, Owner
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["TokenCharge", "give_back_later", "grow", "held", "shrink"]


class TokenCharge:
    """Blocks of one stream that one cache is charged for, and its tokens in them."""

    __slots__ = ("_size", "blocks", "fmt", "lease", "n_tokens", "owner", "pool", "stream")

    def __init__(self, stream: str, pool: BlockPoolAllocator, owner: Owner, fmt: str) -> None:
        self.stream = stream
        self.pool = pool
        self.owner = owner
        self.fmt = fmt
        self._size = pool.config.block_size
        self.forget()

    def forget(self) -> None:
        """Start anew, charged for nothing."""
        self.blocks: list[Block] = []
        self.lease: Lease | None = None
        self.n_tokens = 0

    def lost(self) -> bool:
        """Whether somebody else freed the blocks; tells by the last one, in constant time."""
        return bool(self.blocks) and not self._holds(self.blocks[-1])

    def n_held(self) -> int:
        """Blocks that are still this charge's."""
        return sum(map(self._holds, self.blocks))

    def n_lacking(self, n_tokens: int) -> int:
        """Tokens of `n_tokens` that need new blocks."""
        return max(0, n_tokens - len(self.blocks) * self._size)

    def grow_to(self, n_tokens: int, taken: list[Block]) -> None:
        """Count `n_tokens`, with blocks just taken for those that were lacking."""
        if taken:
            lease = taken[0].lease
            if self.blocks and lease is not self.lease:
                # The owner was freed since `lost` looked, and these blocks began a new holding.
                raise _lost(self.owner)
            self.lease = lease
            self.blocks += taken
        self._count(n_tokens)

    def shrink_to(self, n_tokens: int) -> None:
        """Undo `grow_to`: back to `n_tokens`, giving back the blocks beyond them."""
        n_kept = -(-n_tokens // self._size)
        gone = self.blocks[n_kept:]
        if gone and self.lease is not None:
            self.pool.free_held(gone, self.lease)
            del self.blocks[n_kept:]
        self._count(n_tokens)

    def _count(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        if self.blocks:
            last = self.blocks[-1]
            fill = n_tokens - (len(self.blocks) - 1) * self._size
            if last.n_used != fill and self._holds(last):
                self.pool.mark_used(last, fill)

    def _holds(self, block: Block) -> bool:
        lease = self.lease
        return lease is not None and block.lease is lease and lease.live


def grow(charges: Sequence[TokenCharge], totals: Sequence[int]) -> None:
    """Charge each up to its total, all or none; by one token, or from nothing.

    Raises:
        BlockPoolExhaustedError: Too few free blocks.
        PoolError: Somebody else freed the blocks.
    """
    if any(charge.lost() for charge in charges):
        raise _lost(charges[0].owner)
    before = [charge.n_tokens for charge in charges]
    lacking = [charge.n_lacking(total) for charge, total in zip(charges, totals, strict=True)]
    taken = _take(charges, lacking)
    try:
        for charge, total, blocks in zip(charges, totals, taken, strict=True):
            charge.grow_to(total, blocks)
    except BaseException:
        _free(charges, taken)
        shrink(charges, before)
        raise


def shrink(charges: Sequence[TokenCharge], totals: Sequence[int]) -> None:
    """Undo `grow`: charge each for no more than its total before."""
    for charge, total in zip(charges, totals, strict=True):
        charge.shrink_to(total)


def _take(charges: Sequence[TokenCharge], lacking: Sequence[int]) -> list[list[Block]]:
    """New blocks for the tokens that each charge lacks room for, all or none."""
    pool, owner, fmt = charges[0].pool, charges[0].owner, charges[0].fmt
    if len(lacking) == 2 and lacking[0] == lacking[1] > 0:
        return list(pool.allocate_kv(lacking[0], owner, fmt))
    taken: list[list[Block]] = []
    try:
        for charge, n_tokens in zip(charges, lacking, strict=True):
            taken.append(pool.allocate(charge.stream, n_tokens, owner, fmt) if n_tokens else [])
    except BaseException:
        _free(charges, taken)
        raise
    return taken


def _free(charges: Sequence[TokenCharge], taken: Sequence[Sequence[Block]]) -> None:
    blocks = [block for part in taken for block in part]
    if blocks:
        charges[0].pool.free_held(blocks, *{block.lease for block in blocks})


def held(charges: Sequence[TokenCharge]) -> tuple[list[Block], list[Lease]]:
    """The blocks of all charges, and the leases that make them theirs."""
    blocks = [block for charge in charges for block in charge.blocks]
    return blocks, [charge.lease for charge in charges if charge.lease is not None]


def give_back_later(pool: BlockPoolAllocator, charges: Sequence[TokenCharge]) -> None:
    """Queue the blocks to be freed at the next call on the pool; for a finalizer."""
    blocks, leases = held(charges)
    if blocks:
        pool.free_held_later(blocks, *leases)


def _lost(owner: Owner) -> PoolError:
    return PoolError(
        f"the blocks of this cache were freed by somebody else, such as free_all({owner!r}); "
        "release() or reset() the cache before using it again"
    )
