"""Elders: who has held blocks longest, and who holds blocks and does nothing with them.

Both are told from the front of the pool's owners, which stand in the order of their beginning.
Owners marked as cached are passed over: what they hold is kept on purpose.
Everything runs under the pool's lock.
"""

from __future__ import annotations

from itertools import filterfalse, islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block import Lease
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["IDLE_S", "Elders"]

# Reading the front of a dict costs a step for every key deleted there since it was last rebuilt:
# 74 us after 99,000 owners left. Knowing the next so many spreads that over as many departures.
KNOWN: Final = 64
# An owner among the WATCHED oldest that took and filled nothing for so long is idle.
IDLE_S: Final = 300
WATCHED: Final = 256


class Elders:
    """The oldest owners of a pool. Constant time, but for what owners that left have paid for."""

    def __init__(self) -> None:
        self._known: list[tuple[Lease, int]] = []  # oldest last, with its beginning
        self._known_marks = 0  # version of the pool's marks by then
        self._still: dict[Lease, tuple[int, int, int]] = {}  # blocks, slack, since when
        self.idle_blocks = 0  # as of the newest `watch`

    def oldest_ns(self, pool: BlockPoolAllocator) -> int | None:
        """When the owner that holds blocks longest began, on the pool's clock; None without one.

        What a prompt cache keeps on purpose is passed over.
        """
        if self._known_marks != pool._cached.version:
            self._known, self._known_marks = [], pool._cached.version
        known = self._known
        while known:
            lease, born_ns = known[-1]
            if lease._at is not None or _lives_on(pool, lease):
                return born_ns
            known.pop()
        self._known = known = [(lease, lease._born_ns) for lease in _front(pool, KNOWN)]
        known.reverse()
        return known[-1][1] if known else None

    def watch(self, pool: BlockPoolAllocator, now_ns: int) -> None:
        """See which of the oldest owners changed since the last time; some 100 us, so now and then."""
        still: dict[Lease, tuple[int, int, int]] = {}
        idle = 0
        for first in _front(pool, WATCHED):
            leases = [first] if first._group is None else first._group.leases
            n = sum(len(lease._blocks) for lease in leases)
            slack = sum(lease._slack for lease in leases)
            was = self._still.get(first)
            since = was[2] if was is not None and was[:2] == (n, slack) else now_ns
            still[first] = (n, slack, since)
            if now_ns - since >= IDLE_S * 1_000_000_000:
                idle += n
        self._still, self.idle_blocks = still, idle

    def let_go(self) -> None:
        """Drop what refers to leases: the pool is gone, or no longer watched."""
        self._known, self._still, self.idle_blocks = [], {}, 0


def _front(pool: BlockPoolAllocator, n: int) -> list[Lease]:
    """The `n` oldest owners that are not marked as cached; marked ones before them cost a step."""
    is_cached = pool._cached.holds
    return list(islice(filterfalse(is_cached, pool._owners.values()), n))


def _lives_on(pool: BlockPoolAllocator, lease: Lease) -> bool:
    """Whether the owner of a dead lease still holds another of the same group."""
    first = pool._owners.get(lease._owner)
    return first is not None and first._group is not None and first._group is lease._group
