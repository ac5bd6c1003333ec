"""What a pool-backed cache holds of a pool: the request it belongs to and its own blocks.

No array is touched here: this is the bookkeeping half of `pool_backed_cache`, and needs no MLX.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from veloxquant_mlx.core.exceptions import ArgumentTypeError, PoolReentryError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.memory.checks import check_owner

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block import Block, Lease, Owner

__all__ = ["CacheCharge", "Request"]


class _Member(Protocol):
    """A cache as its request sees it."""

    def _emptied(self) -> None: ...


class Request:
    """Caches that share one owner in one pool, and end together.

    What `release` may free is known by lease, not by owner id: once the owner was freed, by whom
    ever, the id may belong to another request, which a late `release` must leave alone.
    """

    __slots__ = ("__weakref__", "_leases", "_members", "owner", "pool")

    def __init__(self, pool: BlockPoolAllocator, owner: Owner) -> None:
        self.pool = pool
        self.owner = owner
        self._leases: frozenset[Lease] = frozenset()
        self._members: WeakSet[_Member] = WeakSet()

    @classmethod
    def of(cls, pool: BlockPoolAllocator, owner: Owner | None, *, new: bool = False) -> Request:
        """The request that a cache of this owner joins: the owner's latest, or a new one.

        One whose blocks were all freed is over and not joined.

        Args:
            pool: The pool to charge.
            owner: An int or a str; None takes an owner that nobody else has.
            new: True does not join one that was never charged either. Without it, layers that are
                made one by one come together.

        Raises:
            ArgumentTypeError: An argument has another type.
        """
        if not isinstance(pool, BlockPoolAllocator):
            raise ArgumentTypeError(f"pool must be a BlockPoolAllocator, got {pool!r}")
        owner = pool.fresh_owner() if owner is None else check_owner(owner)
        latest = _latest.setdefault(pool, WeakValueDictionary())
        found = latest.get(owner)
        if found is None or not (found.live or (not new and not found._leases)):
            found = latest[owner] = cls(pool, owner)
        return found

    @property
    def live(self) -> bool:
        """True while a cache of this request is charged, and its owner was not freed."""
        return any(lease.live for lease in self._leases)

    def __deepcopy__(self, memo: object) -> Request:
        # copy.deepcopy asks once for all the caches that are copied together.
        return Request.of(self.pool, None)

    def join(self, cache: _Member) -> None:
        """Let `release` empty this cache. Held weakly."""
        self._members.add(cache)

    def charged(self, leases: tuple[Lease, ...]) -> None:
        """Let `release` end these leases, under which a member holds blocks."""
        if not self._leases.issuperset(leases):
            self._leases = self._leases.union(leases)

    def gave_back(self, leases: tuple[Lease, ...]) -> None:
        """Forget those of these leases that ended when a member gave its blocks back."""
        self._leases = self._leases.difference(lease for lease in leases if not lease.live)

    def release(self) -> None:
        """Free all that the owner holds, if it is still this request's, and empty the caches."""
        if self.live:
            self.pool.free_all(self.owner)
        elif not self._leases and _latest[self.pool].get(self.owner) is self:
            # Never charged, or given back already; an explicit registration ends here all the same.
            # Inside a pool call (a signal handler) it has to stay: releases are queued, this not.
            with contextlib.suppress(PoolReentryError):
                self.pool.release_owner(self.owner)
        for cache in list(self._members):
            cache._emptied()


# The latest request of each owner. Neither a pool nor a request lives longer for being listed.
_latest: WeakKeyDictionary[BlockPoolAllocator, WeakValueDictionary[Owner, Request]] = (
    WeakKeyDictionary()
)


class CacheCharge:
    """The blocks that one cache is charged for, and the token fill that the pool was told.

    A charge that is dropped gives its blocks back: its finalizer queues them and never waits for
    the pool's lock.

    Attributes:
        request: The request that the cache belongs to.
        covered: Tokens of each sequence that the charge covers; -1 where nothing is charged.
        leases: What the k and the v blocks are held under; empty where nothing is charged.
    """

    __slots__ = ("_filled", "_k", "_v", "covered", "leases", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.drop()

    def drop(self) -> None:
        """Forget the blocks, which somebody has freed."""
        self._k: list[Block] = []
        self._v: list[Block] = []
        self._filled = 0
        self.covered = -1
        self.leases: tuple[Lease, ...] = ()

    @property
    def live(self) -> bool:
        """False when nothing is charged, or when the owner was freed behind the cache's back."""
        return bool(self.leases) and all(lease.live for lease in self.leases)

    @property
    def n_blocks(self) -> int:
        """Blocks charged in each of the two streams."""
        return len(self._k) if self.live else 0

    def cover(self, batch: int, capacity: int, fmt: str) -> None:
        """Make the charge that of `batch` sequences of `capacity` tokens each.

        Args:
            batch: Sequences; each is charged whole blocks.
            capacity: Token slots of each sequence.
            fmt: Format tag for the blocks, unless some are charged already.

        Raises:
            BlockPoolExhaustedError: Too few free blocks; nothing was changed.
        """
        if not self.live:
            self.give_back()
        block_size = self.request.pool.config.block_size
        n_blocks = batch * -(-capacity // block_size)
        while n_blocks > len(self._k):
            self._grow((n_blocks - len(self._k)) * block_size, fmt)
        if n_blocks < len(self._k):
            self.cut_to(n_blocks)
        self.covered = capacity if self.leases else -1

    def _grow(self, n_tokens: int, fmt: str) -> None:
        request = self.request
        fmt = self.leases[0].format if self.leases else fmt
        k, v = request.pool.allocate_kv(n_tokens, request.owner, fmt, n_filled=0)
        leases = (k[0].lease, v[0].lease)
        if self.leases and self.leases != leases:
            # Another thread has freed the owner since we looked: all of it has to be charged anew.
            self.drop()
            request.pool.free_held([*k, *v], *leases)
            return
        self.leases = leases
        self._k += k
        self._v += v
        request.charged(leases)

    def cut_to(self, n_blocks: int) -> None:
        """Give back all but the first `n_blocks` of each stream."""
        surplus = self._k[n_blocks:] + self._v[n_blocks:]
        del self._k[n_blocks:], self._v[n_blocks:]
        self.covered = -1  # the next update looks again
        if surplus and self._held():
            pool = self.request.pool
            size = pool.config.block_size
            self.fill(min(self._filled, n_blocks * size))
            # A freed block takes its slots from the fill: those that were told empty, as full.
            pool.add_filled(len(surplus) // 2 * size, *self.leases)
            pool.free_held(surplus, *self.leases)

    def _held(self) -> bool:
        """True while some block may still be this charge's."""
        return any(lease.live for lease in self.leases)

    def fill(self, n_tokens: int) -> None:
        """Tell the pool how many token slots of each stream are really filled, if that changed."""
        added = n_tokens - self._filled
        if added:
            self._filled = n_tokens
            self.request.pool.add_filled(added, *self.leases)

    def give_back(self) -> None:
        """Free what is still held; the cache may be charged anew."""
        leases = self.leases if self.live else ()
        self.cut_to(0)
        self.drop()
        self.request.gave_back(leases)

    def __del__(self) -> None:
        # Much may be gone at interpreter shutdown, and nobody is left to be told.
        with contextlib.suppress(Exception):
            if self._held():
                self.request.pool.free_held_later(self._k + self._v, *self.leases)
