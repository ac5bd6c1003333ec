"""Ring: the pool's own journal made longer, and what is kept beside it of the calls that need more.

Recording costs the pool nothing but memory: the entries are those that it makes anyway. An entry keeps
a lease, which once dead keeps no block; that of a `free` keeps the blocks which it gave back, and these
are bounded in all.
"""

from __future__ import annotations

import weakref
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from veloxquant_mlx.memory.journal import FREE
from veloxquant_mlx.telemetry.recorder.capture import Books, books_of
from veloxquant_mlx.telemetry.trace.packer import Sampled
from veloxquant_mlx.telemetry.trace.schema import OPERATIONS

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.memory.journal import Entry
    from veloxquant_mlx.telemetry.hooks import Hooks
    from veloxquant_mlx.telemetry.samples import Sample

__all__ = ["Ring", "Taken"]

MAX_SAMPLES: Final = 8192
# Freed blocks that are remembered, for each entry of the ring.
IDS_PER_ENTRY: Final = 4


class Taken(NamedTuple):
    """What was taken off a ring.

    Attributes:
        entries: Oldest first.
        freed: The entry of each `free`, and of each of its parts the slots that were filled.
        splits: By `id` of the entry, of each call that grew several streams.
        samples: Calls that were timed.
        n_lost: Entries that were overwritten before they were taken.
        books: After the newest entry; None if they were not asked for.
    """

    entries: list[Entry]
    freed: list[tuple[Entry, tuple[int, ...]]]
    splits: dict[int, tuple[int, ...]]
    samples: list[Sampled]
    n_lost: int
    books: Books | None


class Ring:
    """The newest entries of a pool. What changes it runs under the pool's lock.

    Args:
        pool: Held weakly.
        hooks: The pool's.
        capacity: Entries kept.
    """

    def __init__(self, pool: BlockPoolAllocator, hooks: Hooks, capacity: int) -> None:
        self._pool = weakref.ref(pool)
        self._hooks = hooks
        self._capacity = capacity
        self.entries: deque[Entry] = deque(pool._journal, maxlen=capacity)
        self._freed: deque[tuple[Entry, tuple[int, ...]]] = deque()
        self._n_ids = 0
        self._most_ids = capacity * IDS_PER_ENTRY
        self._splits: deque[tuple[Entry, tuple[int, ...]]] = deque(maxlen=capacity)
        self._samples: deque[Sampled] = deque(maxlen=MAX_SAMPLES)
        self._managed = tuple(stream.managed for stream in pool._streams)
        # What was taken last, and how many entries had gone by then.
        self._last: Entry | None = self.entries[-1] if self.entries else None
        self._n_seen = hooks.n_entries()

    # -- told by the hooks ----------------------------------------------------------------------

    def freed(self, entry: Entry) -> None:
        """Note what the blocks of a `free` were filled with, and let go of too many older ones."""
        parts: Any = entry[2]
        # A part's list of blocks is nobody's but the entry's.
        fills = tuple([sum([block._fill for block in run]) for _, _, run in parts])
        self._freed.append((entry, fills))
        self._n_ids += entry[3]
        while self._n_ids > self._most_ids or len(self._freed) > self._capacity:
            old: Any = self._freed.popleft()[0]
            self._n_ids -= old[3]
            for _, _, run in old[2]:
                run.clear()

    def resized(self) -> None:
        """Note by how much each stream grew, of a call that may have grown more than one."""
        pool = self._pool()
        if pool is not None and self.entries:
            managed = tuple(stream.managed for stream in pool._streams)
            grown = tuple(a - b for a, b in zip(managed, self._managed, strict=True))
            self._managed = managed
            if isinstance(self.entries[-1][2], tuple) and max(grown) > 0:
                self._splits.append((self.entries[-1], grown))

    def sampled(self, sample: Sample) -> None:
        """Keep what a timed call took."""
        operation = OPERATIONS.index(sample.slot.operation)
        self._samples.append(
            Sampled(sample.now_ns, operation, sample.n_blocks, max(0, sample.took_ns))
        )

    # -- taken off ------------------------------------------------------------------------------

    def n_waiting(self) -> int:
        """Entries that were not taken yet, about."""
        return self._hooks.n_entries() - self._n_seen

    def copy(self, pool: BlockPoolAllocator) -> Taken:
        """All that is there, which stays; the lock is held."""
        freed = list(self._freed)
        splits = {id(entry): split for entry, split in self._splits}
        books = books_of(pool)
        return Taken(list(self.entries), freed, splits, list(self._samples), 0, books)

    def take(self, pool: BlockPoolAllocator | None) -> Taken:
        """What came since the last time. The lock is held, or the pool is gone.

        The books come with it if entries were lost, and are None if the pool is gone as well.
        """
        total = self._hooks.n_entries()
        n_new, self._n_seen = total - self._n_seen, total
        entries, n_lost = self._newest(n_new)
        if self.entries:
            self._last = self.entries[-1]
        n_freed = sum(entry[1] == FREE for entry in entries)
        freed = list(islice(reversed(self._freed), n_freed))
        samples = list(self._samples)
        self._samples.clear()
        splits = {id(entry): split for entry, split in self._splits} if n_lost else {}
        books = None if pool is None or not n_lost else books_of(pool)
        return Taken(entries, freed, splits, samples, n_lost, books)

    def _newest(self, n: int) -> tuple[list[Entry], int]:
        """The entries after the last one taken, and how many of them are lost."""
        tail = list(islice(reversed(self.entries), n + 1))
        tail.reverse()
        if tail and tail[0] is self._last:
            return tail[1:], 0
        # More came than there is room for, or the count is off by one that a Ctrl-C struck.
        every = list(self.entries)
        for index in range(len(every) - 1, -1, -1):
            if every[index] is self._last:
                return every[index + 1 :], 0
        lost = n - len(every)
        return every, max(lost, 0 if self._last is None else 1)

    def clear(self) -> None:
        """Let go of everything."""
        self._last = None
        self.entries.clear()
        self._freed.clear()
        self._splits.clear()
        self._samples.clear()
