"""The journal: one tuple per state change, from which history and traces are built when asked.

The pool pays for a tuple and an append; whatever reads it pays for the rest.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final, NamedTuple

from veloxquant_mlx.memory.allocation_stats import AllocationStats
from veloxquant_mlx.memory.block import Block, Lease

__all__ = [
    "ALLOCATE",
    "BULK",
    "EXHAUSTED",
    "FREE",
    "FREE_ALL",
    "HISTORY",
    "SHRINK",
    "Counts",
    "Entry",
    "Era",
    "newest",
]

HISTORY: Final = 256
# A call of this many blocks takes long enough to be timed whenever it is watched.
BULK: Final = 4096

ALLOCATE: Final = 1
FREE: Final = 2
FREE_ALL: Final = 3
SHRINK: Final = 4
EXHAUSTED: Final = 5


class Era(NamedTuple):
    """The counters that only rare events move."""

    n_blocks: int
    n_exhausted: int = 0
    n_grown: int = 0
    n_retired: int = 0


# gave, born, partial, peak, era: what a plain one-block allocation leaves alone. One tuple in the
# pool, replaced as a whole, so that an entry of the journal takes it by reference.
Counts = tuple[int, int, int, int, Era]
# A lease, the number of its blocks that moved, and those blocks where the order is not implied.
Part = tuple[Lease, int, "list[Block] | None"]
# monotonic_ns, operation, lease or parts, blocks, tokens, blocks taken so far, counts. A plain
# tuple: a NamedTuple takes three times as long to make.
Entry = tuple[int, int, "Lease | tuple[Part, ...]", int, int, int, Counts]


def thaw(at_ns: int, taken: int, counts: Counts) -> AllocationStats:
    """The stats that these numbers amount to."""
    gave, born, partial, peak, era = counts
    return AllocationStats(
        n_blocks=era.n_blocks,
        n_allocations=taken,
        n_frees=gave,
        n_reused=taken - born,
        n_exhausted=era.n_exhausted,
        n_grown=era.n_grown,
        n_retired=era.n_retired,
        peak_blocks_in_use=max(peak, taken - gave),
        _fragmented_count=partial,
        monotonic_ns=at_ns,
    )


def newest(entries: deque[Entry], n: int) -> list[Entry]:
    """The newest `n` entries, oldest first; a recorder's journal has many more. Needs no lock."""
    while True:
        try:
            found = list(islice(reversed(entries), n))
        except RuntimeError:  # a handler, or another thread, appended to it just now
            continue
        found.reverse()
        return found


def history(entries: deque[Entry]) -> deque[AllocationStats]:
    """The newest `HISTORY` entries as stats, oldest first."""
    return deque(
        (
            thaw(at_ns, taken, counts)
            for at_ns, _, _, _, _, taken, counts in newest(entries, HISTORY)
        ),
        maxlen=HISTORY,
    )
