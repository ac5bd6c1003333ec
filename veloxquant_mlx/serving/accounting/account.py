"""Account: one owner in the charged pool, what its caches take up and what it was charged for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block import Block, Lease
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["Account"]


class Account:
    """An owner. What it takes up changes at once, what it is charged when it is settled.

    Attributes:
        owner: Its id in the pool.
        n_wanted: Blocks in each of the two streams that its caches take up.
        n_filled: Token slots in each stream that hold tokens.
        format: Tag of the blocks.
        is_cached: A prompt cache keeps it on purpose.
        is_claimed: A request has it; another one of the same caches gets an account of its own.
    """

    __slots__ = (
        "_cached_told", "_filled_told", "_k", "_leases", "_v",
        "format", "is_cached", "is_claimed", "n_filled", "n_wanted", "owner",
    )  # fmt: skip

    def __init__(self, owner: str, *, is_claimed: bool = False) -> None:
        self.owner = owner
        self.n_wanted = self.n_filled = 0
        self.format = "fp16"
        self.is_cached = False
        self.is_claimed = is_claimed
        self._forget()

    def _forget(self) -> None:
        self._k: list[Block] = []
        self._v: list[Block] = []
        self._leases: tuple[Lease, ...] = ()
        self._filled_told = 0
        self._cached_told = False

    @property
    def n_held(self) -> int:
        """Blocks in each stream that it is charged."""
        return len(self._k)

    @property
    def n_short(self) -> int:
        """Blocks in each stream that it takes up and is not charged."""
        return self.n_wanted - len(self._k)

    def give_back(self, pool: BlockPoolAllocator) -> None:
        """Free what is charged beyond what it takes up."""
        surplus = len(self._k) - self.n_wanted
        if surplus <= 0:
            return
        if not self.n_wanted:
            self._forget()
            pool.free_all(self.owner)  # constant time
            return
        size = pool.config.block_size
        # Told first: inside of a pool call (a signal handler) this raises, and nothing has changed.
        self._tell_filled(pool, self.n_wanted * size)
        # A freed block takes its slots from the fill: those that were told empty, as full.
        pool.add_filled(surplus * size, *self._leases)
        pool.free_held(self._k[self.n_wanted :] + self._v[self.n_wanted :], *self._leases)
        del self._k[self.n_wanted :], self._v[self.n_wanted :]

    def take(self, pool: BlockPoolAllocator, n: int) -> bool:
        """Charge `n` more blocks in each stream, of which the caller knows that they are free.

        Returns:
            False if they were not after all; nothing was changed.
        """
        try:
            k, v = pool.allocate_kv(n * pool.config.block_size, self.owner, self.format, n_filled=0)
        except BlockPoolExhaustedError:
            return False
        self._leases = (k[0].lease, v[0].lease)
        self._k += k
        self._v += v
        return True

    def tell(self, pool: BlockPoolAllocator) -> None:
        """Let the pool know the fill, and whether a prompt cache keeps it, if that changed."""
        if self._k:
            self._tell_filled(pool, len(self._k) * pool.config.block_size)
            if self._cached_told != self.is_cached:
                pool.mark_cached(self.owner, cached=self.is_cached)
                self._cached_told = self.is_cached

    def _tell_filled(self, pool: BlockPoolAllocator, most: int) -> None:
        filled = min(self.n_filled, most)
        if filled != self._filled_told:
            pool.add_filled(filled - self._filled_told, *self._leases)
            self._filled_told = filled

    def __repr__(self) -> str:
        kept = ", cached" if self.is_cached else ""
        return f"<Account {self.owner!r} holds 2x{self.n_held} of 2x{self.n_wanted} blocks{kept}>"
