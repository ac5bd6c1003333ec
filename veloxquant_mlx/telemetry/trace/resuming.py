"""Resuming: rows made up for calls that were lost, so that a trace's books go on after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from veloxquant_mlx.telemetry.trace.libraries import load_library
from veloxquant_mlx.telemetry.trace.schema import (
    ALLOCATE_OP,
    EXHAUSTED_OUTCOME,
    FREE_ALL_OP,
    FREE_OP,
    RESUMED,
    SHRINK_OP,
    Header,
    Opening,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from veloxquant_mlx.telemetry.trace.trace import Gap

    Ints = NDArray[np.int64]
    Columns = dict[str, Ints]

__all__ = ["resume"]

Key = tuple[int, int, int]
# operation, stream, format, owner, blocks, growth
Row = tuple[int, int, int, int, int, int]
FIELDS = ("operation", "stream", "format", "owner", "blocks", "growth")


def resume(
    header: Header, found: Columns, picked: Mapping[int, Ints], gaps: Sequence[tuple[int, Gap]]
) -> tuple[Columns, dict[int, Ints], tuple[Gap, ...]]:
    """The columns with one made-up call at each gap, the picks moved accordingly, and the gaps.

    The rows of such a call free what went, retire and grow what the streams did, and allocate what
    came, in this order, under the outcome "resumed".
    """
    books = _Books(header.opening)
    pieces: list[Columns] = []
    ends: list[int] = []
    numbered: list[Gap] = []
    begin = shift = 0
    for at, gap in gaps:
        piece = {name: values[begin:at] for name, values in found.items()}
        books.follow(piece)
        rows = books.turn_into(gap.opening)
        numbered.append(replace(gap, call=gap.call + shift))
        pieces += [_moved(piece, shift), _made_up(rows, gap.call + shift, found, at)]
        ends.append(len(rows))
        begin, shift = at, shift + bool(rows)
    pieces.append(_moved({name: values[begin:] for name, values in found.items()}, shift))
    numpy = load_library("numpy")
    joined = {name: numpy.concatenate([piece[name] for piece in pieces]) for name in found}
    places = [at for at, _ in gaps]
    moved = {
        row + sum(n for at, n in zip(places, ends, strict=True) if at <= row): ids
        for row, ids in picked.items()
    }
    return joined, moved, tuple(numbered)


class _Books:
    """Who holds how much, and what each stream manages."""

    def __init__(self, opening: Opening) -> None:
        self._held = _held(opening)
        self._managed = [level.managed for level in opening.levels]

    def follow(self, rows: Columns) -> None:
        """Do what the rows tell."""
        names = ("outcome", "operation", "stream", "format", "owner", "blocks", "growth")
        for outcome, operation, stream, fmt, owner, n, growth in zip(
            *(rows[name].tolist() for name in names), strict=True
        ):
            if outcome == EXHAUSTED_OUTCOME:
                continue
            key = (owner, stream, fmt)
            self._managed[stream] += growth
            if operation == ALLOCATE_OP:
                self._held[key] = self._held.get(key, 0) + n
            elif operation in (FREE_OP, FREE_ALL_OP):
                self._held[key] = self._held.get(key, 0) - n
            else:
                self._managed[stream] -= n

    def turn_into(self, opening: Opening) -> list[Row]:
        """What leads to `opening`, which is where the books are then."""
        after = _held(opening)
        before, self._held = self._held, dict(after)
        rows: list[Row] = []
        for key, n in before.items():
            owner, stream, fmt = key
            if n > after.get(key, 0):
                rows.append((FREE_OP, stream, fmt, owner, n - after.get(key, 0), 0))
        growth = [0] * len(self._managed)
        for stream, level in enumerate(opening.levels):
            growth[stream] = level.managed - self._managed[stream]
            self._managed[stream] = level.managed
            if growth[stream] < 0:
                rows.append((SHRINK_OP, stream, 0, -1, -growth[stream], 0))
            elif growth[stream] > 0:
                rows.append((ALLOCATE_OP, stream, 0, -1, 0, growth[stream]))
        for key, n in after.items():
            owner, stream, fmt = key
            if n > before.get(key, 0):
                rows.append((ALLOCATE_OP, stream, fmt, owner, n - before.get(key, 0), 0))
        return rows


def _held(opening: Opening) -> dict[Key, int]:
    return {(h.owner, h.stream, h.format): h.blocks for h in opening.holdings}


def _moved(piece: Columns, shift: int) -> Columns:
    return {**piece, "call": piece["call"] + shift}


def _made_up(rows: list[Row], call: int, found: Columns, at: int) -> Columns:
    np: Any = load_library("numpy")
    n = len(rows)
    made: Columns = {
        name: np.array([row[index] for row in rows], np.int64) for index, name in enumerate(FIELDS)
    }
    times = found["at_ns"]
    # As late as the first call that is known of again.
    now = int(times[at]) if at < len(times) else int(times[-1]) if len(times) else 0
    made["call"] = np.full(n, call, np.int64)
    made["at_ns"] = np.full(n, now, np.int64)
    made["outcome"] = np.full(n, RESUMED, np.int64)
    made["tokens"] = np.full(n, -1, np.int64)
    return made
