"""Capture: what a pool holds at a moment, and what it held before the calls in its journal.

A ring begins in the middle of a pool's life. What was held then is what is held now, less what the
calls since have taken, plus what they gave back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from veloxquant_mlx.memory.journal import ALLOCATE, EXHAUSTED, FREE_ALL, SHRINK
from veloxquant_mlx.telemetry.trace.schema import Level

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.memory.journal import Entry, Part
    from veloxquant_mlx.memory.lease import Lease

__all__ = ["Books", "Held", "books_of", "rewind"]

# A lease, the blocks it holds, and how many of their token slots are not filled.
Held = tuple["Lease", int, int]


@dataclass(frozen=True, slots=True)
class Books:
    """Who holds what.

    Attributes:
        held: One an owner, stream and format, in the order in which the owners came.
        levels: Of each stream.
        n_grown: Blocks that the pool had grown by.
        at_ns: On the pool's clock.
        newborn: Whether no block was ever handed out, added or retired.
    """

    held: tuple[Held, ...]
    levels: tuple[Level, ...]
    n_grown: int
    at_ns: int
    newborn: bool


def books_of(pool: BlockPoolAllocator) -> Books:
    """The books now; the pool's lock is held. 0.3 us an owner."""
    held: list[Held] = []
    for first in pool._owners.values():
        leases = [first] if first._group is None else first._group.leases
        held += [(lease, len(lease._blocks), lease._slack) for lease in leases]
    gave, born, _, _, era = pool._counts
    return Books(
        held=tuple(held),
        levels=tuple(Level(stream.n_free, stream.managed) for stream in pool._streams),
        n_grown=era.n_grown,
        at_ns=pool._clock(),
        newborn=not (pool._taken or gave or born or era.n_grown or era.n_retired),
    )


def rewind(
    books: Books,
    entries: Sequence[Entry],
    splits: Mapping[int, tuple[int, ...]],
    streams: Sequence[str],
    block_size: int,
) -> tuple[Books, Sequence[Entry]]:
    """The books before `entries`, the newest of which led to `books`, and the entries to go by.

    The first entry is left out, as it alone says what the counters were before the second, unless
    it is the first of the pool's life.

    Args:
        books: After the newest entry.
        entries: Oldest first.
        splits: By `id` of an entry that grew several streams at once, by how much each.
        streams: Their names.
        block_size: Token slots a block.
    """
    if not entries:
        return books, entries
    newborn = _is_first(entries[0])
    n_grown = 0 if newborn else entries[0][6][4].n_grown
    kept = entries if newborn else entries[1:]
    began_ns = entries[0][0]
    back = _Rewinding(books, streams, block_size)
    for index in range(len(kept) - 1, -1, -1):
        before = kept[index - 1][6][4].n_grown if index else n_grown
        entry = kept[index]
        back.undo(entry, entry[6][4].n_grown - before, splits.get(id(entry)))
    held = tuple((lease, n, back.slack[key]) for key, (lease, n) in back.held.items() if n > 0)
    levels = tuple(Level(free, managed) for free, managed in back.levels)
    return Books(held, levels, n_grown, began_ns, newborn and not held), kept


def _is_first(entry: Entry) -> bool:
    """Whether nothing had ever happened to the pool before."""
    _, operation, _, n, _, taken, (gave, _, _, _, era) = entry
    if operation == ALLOCATE:
        return not (taken - n or gave or era.n_retired)
    return not (taken or gave or era.n_grown or era.n_retired - (operation == SHRINK and n))


class _Rewinding:
    """Books going backward."""

    def __init__(self, books: Books, streams: Sequence[str], block_size: int) -> None:
        self.held = {id(lease): (lease, n) for lease, n, _ in books.held}
        self.slack = {id(lease): slack for lease, _, slack in books.held}
        self.levels = [[level.free, level.managed] for level in books.levels]
        self._index = {name: index for index, name in enumerate(streams)}
        self._size = block_size

    def undo(self, entry: Entry, grown: int, split: tuple[int, ...] | None) -> None:
        _, operation, what, n, n_tokens, _, _ = entry
        if operation == EXHAUSTED:
            return
        parts: tuple[Part, ...] = what if isinstance(what, tuple) else ((what, n, None),)
        if operation == ALLOCATE and grown > 0:
            self._undo_growth(parts, grown, split)
        for lease, n_part, _ in parts:
            level = self.levels[self._index[lease._stream.name]]
            if operation == ALLOCATE:
                level[0] += n_part
                self._take(lease, -n_part, n_tokens - n_part * self._size)
            elif operation == SHRINK:
                level[0] += n_part
                level[1] += n_part
            else:
                level[0] -= n_part
                self._take(lease, n_part, lease._slack if operation == FREE_ALL else 0)

    def _undo_growth(
        self, parts: tuple[Part, ...], grown: int, split: tuple[int, ...] | None
    ) -> None:
        if split is None:
            first = self._index[parts[0][0]._stream.name]
            split = tuple(grown if index == first else 0 for index in range(len(self.levels)))
        for level, by in zip(self.levels, split, strict=True):
            level[0] -= by
            level[1] -= by

    def _take(self, lease: Lease, n: int, slack: int) -> None:
        key = id(lease)
        _, held = self.held.get(key, (lease, 0))
        self.held[key] = (lease, held + n)
        self.slack[key] = self.slack.get(key, 0) + slack
