"""Trace: what a recorder saw of a pool, as NumPy columns with one row for each part of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from veloxquant_mlx.telemetry.notices import SLOW_NS
from veloxquant_mlx.telemetry.trace.schema import (
    EXHAUSTED_OUTCOME,
    OPERATIONS,
    Header,
    Opening,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from veloxquant_mlx.telemetry.trace.positions import Picks

    Ints = NDArray[np.int64]

__all__ = ["Event", "Gap", "Samples", "Snapshot", "Trace"]


@dataclass(frozen=True, slots=True)
class Samples:
    """The calls that were timed: one in some hundred, and every one of 4096 blocks or more.

    Attributes:
        at_ns: When each ended, since the beginning.
        operation: Index into `OPERATIONS`.
        blocks: Blocks that it moved.
        took_ns: Nanoseconds in the pool, without the wait for its lock.
    """

    at_ns: Ints
    operation: Ints
    blocks: Ints
    took_ns: Ints


@dataclass(frozen=True, slots=True)
class Event:
    """Something worth a mark on a time line.

    Attributes:
        kind: "exhausted", "grown", "shrunk", "slow" or "lost".
        at_ns: Since the beginning.
        call: Number of the call; -1 of a slow one, of which only the sample is known.
        operation: As in `OPERATIONS`.
        stream: Name of the stream; "" where that is unknown.
        blocks: Blocks asked for, grown by, retired or moved; calls, of "lost".
        owner: Number of the owner; -1 where there is none.
        took_ns: How long it took, of a slow call.
    """

    kind: str
    at_ns: int
    call: int
    operation: str
    stream: str
    blocks: int
    owner: int = -1
    took_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool's snapshot at a moment.

    Attributes:
        at_ns: Since the beginning.
        pool: The fields of `PoolSnapshot` as JSON values.
        document: What `snapshot_json.pool_from_dict` takes, with which `pool` came.
    """

    at_ns: int
    pool: Mapping[str, Any]
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gap:
    """Calls that were lost because the ring overflowed before it was drained.

    Attributes:
        call: Number of the first call after them, which begins with the made-up rows.
        n_lost: How many, as counted.
        opening: The books after them.
    """

    call: int
    n_lost: int
    opening: Opening


@dataclass(frozen=True)
class Trace:
    """A loaded trace. Every column is an int64 array of shape (n_rows,).

    A call has a row for each owner, stream and format that it touched: `allocate_kv` has two, a
    `free_all` of an owner with keys and values too.

    Attributes:
        header: What the trace says of itself.
        formats: Format tags by index.
        owners: Owner ids by number, () unless they were recorded. A number is one life of an owner,
            from its first block to its last.
        n_owners: Numbers given.
        call: Number of the call, from 0; rows of one call have one number.
        at_ns: Nanoseconds since the beginning. Calls on the one-block path carry the time that the
            pool last read, at most `TICK_S` of the recorder ago.
        operation: Index into `OPERATIONS`.
        outcome: Index into `OUTCOMES`.
        stream: Index into `header.streams`.
        format: Index into `formats`.
        owner: Number; -1 of a shrink.
        blocks: Blocks that moved; of a refused allocation, asked for.
        tokens: Of an allocation those asked for. Of a release the slots that had been filled, -1
            where that is not known.
        growth: Blocks that the stream grew by for this row.
        free_after: Free blocks of the stream after it.
        managed_after: Blocks of the stream after it, free or not.
        samples: The calls that were timed.
        snapshots: Snapshots of the pool, oldest first; of a continuous trace one a second.
        gaps: Where calls were lost.
        cut: True if the file ends without its end.
        n_lost: Calls lost in all gaps.
        consistent: False if the books do not add up: of a dump after a violation, or where a
            Ctrl-C kept an entry out of the journal. Of any other file it is an error.
        picked: Block ids that each `free` gave back: row, ids.
    """

    header: Header
    formats: tuple[str, ...]
    owners: tuple[int | str, ...]
    n_owners: int
    call: Ints
    at_ns: Ints
    operation: Ints
    outcome: Ints
    stream: Ints
    format: Ints
    owner: Ints
    blocks: Ints
    tokens: Ints
    growth: Ints
    free_after: Ints
    managed_after: Ints
    samples: Samples
    snapshots: tuple[Snapshot, ...]
    gaps: tuple[Gap, ...]
    cut: bool
    n_lost: int
    consistent: bool
    picked: Mapping[int, Ints] = field(repr=False)

    @property
    def n_rows(self) -> int:
        """Rows."""
        return len(self.call)

    @property
    def n_calls(self) -> int:
        """Calls."""
        return int(self.call[-1]) + 1 if self.n_rows else 0

    @property
    def duration_ns(self) -> int:
        """From the beginning to the last row or snapshot."""
        last = int(self.at_ns[-1]) if self.n_rows else 0
        return max([last, *(snapshot.at_ns for snapshot in self.snapshots)])

    @cached_property
    def first_row(self) -> Ints:
        """Of each call its first row, and at the end the number of rows; shape (n_calls + 1,)."""
        import numpy as np

        starts = np.flatnonzero(np.diff(self.call, prepend=-1))
        return np.append(starts, self.n_rows).astype(np.int64)

    @cached_property
    def picks(self) -> Picks:
        """Which of its owner's blocks each `free` gave back, by position. Linear in blocks moved."""
        from veloxquant_mlx.telemetry.trace.positions import find_picks

        return find_picks(self)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Exhaustions, growth, shrinks, slow calls and gaps, in the order of time."""
        return tuple(_events(self))


def _events(trace: Trace) -> list[Event]:
    import numpy as np

    streams = trace.header.streams

    def of(kind: str, row: int, blocks: int) -> Event:
        operation = OPERATIONS[trace.operation[row]]
        stream, owner = streams[trace.stream[row]], int(trace.owner[row])
        at_ns, call = int(trace.at_ns[row]), int(trace.call[row])
        return Event(kind, at_ns, call, operation, stream, blocks, owner)

    refused = np.flatnonzero(trace.outcome == EXHAUSTED_OUTCOME).tolist()
    events = [of("exhausted", row, int(trace.blocks[row])) for row in refused]
    grown = np.flatnonzero(trace.growth > 0).tolist()
    events += [of("grown", row, int(trace.growth[row])) for row in grown]
    shrunk = np.flatnonzero(trace.operation == OPERATIONS.index("shrink")).tolist()
    events += [of("shrunk", row, int(trace.blocks[row])) for row in shrunk]
    timed = trace.samples
    for i in np.flatnonzero(timed.took_ns >= SLOW_NS):
        name, took_ns = OPERATIONS[timed.operation[i]], int(timed.took_ns[i])
        blocks, at_ns = int(timed.blocks[i]), int(timed.at_ns[i])
        events.append(Event("slow", at_ns, -1, name, "", blocks, took_ns=took_ns))
    for gap in trace.gaps:
        row = int(trace.first_row[gap.call]) if gap.call < trace.n_calls else trace.n_rows - 1
        at_ns = int(trace.at_ns[row]) if trace.n_rows else 0
        events.append(Event("lost", at_ns, gap.call, "", "", gap.n_lost))
    return sorted(events, key=lambda event: event.at_ns)
