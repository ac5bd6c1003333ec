"""The journal: one tuple per state change, from which history and traces are built when asked.

The pool pays for a tuple and an append; whatever reads it pays for the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from veloxquant_mlx.memory.allocation_stats import AllocationStats
from veloxquant_mlx.memory.block import Block, Lease

__all__ = ["ALLOCATE", "EXHAUSTED", "FREE", "FREE_ALL", "HISTORY", "SHRINK", "Entry", "Era"]

HISTORY: Final = 256

ALLOCATE: Final = 1
FREE: Final = 2
FREE_ALL: Final = 3
SHRINK: Final = 4
EXHAUSTED: Final = 5


class Era(NamedTuple):
    """The counters that seldom change, shared by all entries between two changes."""

    n_blocks: int
    n_exhausted: int = 0
    n_grown: int = 0
    n_retired: int = 0


# monotonic_ns, operation, lease or parts, blocks, tokens, then the pool's state after it: taken,
# gave, born, partial, peak, era. A plain tuple: a NamedTuple takes three times as long to make.
Part = tuple[Lease, int, "list[Block] | None"]
Entry = tuple[int, int, "Lease | tuple[Part, ...] | None", int, int, int, int, int, int, int, Era]


def thaw(entry: Entry) -> AllocationStats:
    """The stats that `entry` recorded."""
    at_ns, _, _, _, _, taken, gave, born, partial, peak, era = entry
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


def history(entries: Iterable[Entry]) -> deque[AllocationStats]:
    """The newest `HISTORY` entries as stats, oldest first."""
    return deque(map(thaw, list(entries)[-HISTORY:]), maxlen=HISTORY)
