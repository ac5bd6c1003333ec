"""Positions: which of its owner's blocks each `free` gave back, worked out from the recorded ids.

A file holds the ids of blocks that were freed singly, and of no others. Their places among the
owner's blocks follow by doing what the pool did: last in, first out. If the pool was new when the
trace began, that is exact. Otherwise a block shows its id for the first time when it is freed; it is
then taken for the owner's last one that has shown none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from veloxquant_mlx.telemetry.trace.libraries import load_library
from veloxquant_mlx.telemetry.trace.schema import (
    ALLOCATE_OP,
    EXHAUSTED_OUTCOME,
    FREE_ALL_OP,
    FREE_OP,
    TraceError,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from veloxquant_mlx.telemetry.trace.trace import Trace

    Ints = NDArray[np.int64]

__all__ = ["Picks", "find_picks"]

MAX_MANAGED: Final = 1 << 26
MAX_MOVED: Final = 1 << 31

Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Picks:
    """Of each row of a `free`, which of the lease's blocks it gave back.

    Attributes:
        rows: The rows, ascending.
        offsets: Where in `positions` those of each row begin; shape (len(rows) + 1,).
        positions: Places among the blocks that the owner held in that stream and format before the
            call, in the order of their allocation; in the order in which they were freed.
    """

    rows: Ints
    offsets: Ints
    positions: Ints


def find_picks(trace: Trace) -> Picks:
    """The picks of a whole trace. Linear in the blocks that moved until the last `free`."""
    np: Any = load_library("numpy")
    rows = np.flatnonzero(trace.operation == FREE_OP)
    if not len(rows):
        empty = np.empty(0, np.int64)
        return Picks(empty, np.zeros(1, np.int64), empty)
    if not trace.consistent:
        raise TraceError("the books of this trace do not add up, so that its blocks have no places")
    if int(trace.managed_after.max()) > MAX_MANAGED or int(trace.blocks.sum()) > MAX_MOVED:
        raise TraceError("the trace moves too many blocks to be followed block by block")
    found = _Following(trace).follow(int(rows[-1]) + 1)
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(positions) for positions in found], out=offsets[1:])
    return Picks(rows, offsets, np.array([p for some in found for p in some], np.int64))


class _Stack:
    """The free blocks of a stream that were seen, and those that were not, which go out last."""

    def __init__(self, unborn: range | None) -> None:
        self.seen: list[int] = []
        self.unborn = None if unborn is None else deque([unborn])
        self._next_label = -1

    def pop(self, n: int) -> list[int]:
        got = self.seen[-n:][::-1] if n else []
        del self.seen[len(self.seen) - len(got) :]
        while len(got) < n:
            got += self._mint(n - len(got))
        return got

    def _mint(self, n: int) -> range:
        if not self.unborn:
            labels = range(self._next_label, self._next_label - n, -1)
            self._next_label -= n
            return labels
        ids = self.unborn.popleft()
        if len(ids) > n:
            self.unborn.appendleft(ids[n:])
        return ids[:n]

    def retire(self, n: int, n_free: int) -> None:
        """Drop the `n` coldest of `n_free` blocks."""
        n -= min(n, n_free - len(self.seen))
        n_unseen = n_free - len(self.seen)
        while self.unborn and sum(map(len, self.unborn)) > n_unseen - n:
            self.unborn[-1] = self.unborn[-1][:-1]
            if not self.unborn[-1]:
                self.unborn.pop()
        del self.seen[:n]


class _Following:
    """The pool as far as it can be known: labels instead of blocks, ids where they are known."""

    def __init__(self, trace: Trace) -> None:
        header = trace.header
        self._trace = trace
        self._ids_known = header.opening.newborn
        self._free = [level.free for level in header.opening.levels]
        self._next_id = header.config.n_blocks
        first = 0
        self._stacks: list[_Stack] = []
        for level in header.opening.levels:
            self._stacks.append(
                _Stack(range(first, first + level.managed) if self._ids_known else None)
            )
            first += level.managed
        self._held: dict[Key, list[int]] = {}
        for n, h in enumerate(header.opening.holdings):
            base = -1 - (n << 40)
            self._held[(h.owner, h.stream, h.format)] = [
                base - (1 << 39) - i for i in range(h.blocks)
            ]
        self._label_of: dict[int, int] = {}
        self._shown: set[int] = set()

    def follow(self, stop: int) -> list[list[int]]:
        trace, found = self._trace, []
        names = ("operation", "outcome", "stream", "format", "owner", "blocks", "growth")
        columns = [getattr(trace, name)[:stop].tolist() for name in names]
        for row, (op, outcome, stream, fmt, owner, n, growth) in enumerate(
            zip(*columns, strict=True)
        ):
            if outcome == EXHAUSTED_OUTCOME:
                continue
            stack, key = self._stacks[stream], (owner, stream, fmt)
            if op == ALLOCATE_OP:
                self._grow(stack, growth)
                self._free[stream] += growth - n
                self._held.setdefault(key, []).extend(stack.pop(n))
            elif op == FREE_ALL_OP:
                self._free[stream] += n
                stack.seen += self._held.pop(key, [])
            elif op == FREE_OP:
                self._free[stream] += n
                held = self._held.get(key, [])
                positions = self._places(held, n, trace.picked.get(row))
                found.append(positions)
                stack.seen += [held[p] for p in positions]
                _remove(held, positions)
            else:
                stack.retire(n, self._free[stream])
                self._free[stream] -= n
        return found

    def _grow(self, stack: _Stack, n: int) -> None:
        if n and stack.unborn is not None:
            stack.unborn.append(range(self._next_id, self._next_id + n))
            self._next_id += n

    def _places(self, held: list[int], n: int, ids: Ints | None) -> list[int]:
        n_held = len(held)
        if ids is None:
            return list(range(n_held - n, n_held))
        known = self._label_of
        wanted = ids.tolist()
        labels = [known.get(i, i if self._ids_known else None) for i in wanted]
        if held[-n:] == labels:
            return list(range(n_held - n, n_held))
        if n == 1 and labels[0] is not None and labels[0] in held:
            return [held.index(labels[0])]
        place = {label: at for at, label in enumerate(held)}
        places = [place.pop(label, None) if label is not None else None for label in labels]
        lacking = [at for at, found in enumerate(places) if found is None]
        if lacking:
            self._guess(held, wanted, places, lacking, sorted(place.values()))
        return [at for at in places if at is not None]

    def _guess(
        self,
        held: list[int],
        wanted: list[int],
        places: list[int | None],
        lacking: list[int],
        left: list[int],
    ) -> None:
        """Take blocks that showed their id for the first time for the last ones that had not."""
        fresh = [at for at in left if held[at] not in self._shown]
        chosen = (fresh if len(fresh) >= len(lacking) else left)[-len(lacking) :]
        for which, at in zip(lacking, chosen, strict=True):
            places[which] = at
            self._label_of[wanted[which]] = held[at]
            self._shown.add(held[at])


def _remove(held: list[int], positions: list[int]) -> None:
    n = len(positions)
    if positions == list(range(len(held) - n, len(held))):
        del held[len(held) - n :]
        return
    for at in sorted(positions, reverse=True):
        del held[at]
