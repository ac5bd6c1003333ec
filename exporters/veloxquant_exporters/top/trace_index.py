"""TraceIndex: the state of a recorded pool at any moment of its trace, as a snapshot.

What the trace does not tell is taken from the snapshots in it, so that it never runs ahead of the
calls: the newest one before the moment, or the first one there is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from veloxquant_exporters.top.board import Holder
from veloxquant_mlx.telemetry.histogram import DURATION_BUCKETS_NS, HistogramSnapshot
from veloxquant_mlx.telemetry.json_codec import SnapshotFormatError
from veloxquant_mlx.telemetry.snapshot import NO_LIFETIMES, PoolSnapshot, StreamSnapshot
from veloxquant_mlx.telemetry.snapshot_json import pool_from_dict
from veloxquant_mlx.telemetry.trace import OPERATIONS, OUTCOMES, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["TraceIndex"]

_ALLOCATE, _FREE, _FREE_ALL, _SHRINK = range(len(OPERATIONS))
_EXHAUSTED: Final = OUTCOMES.index("exhausted")
_RESUMED: Final = OUTCOMES.index("resumed")
# A snapshot of the trace that is older tells no fill any more.
RECENT_NS: Final = 5 * 10**9
N_HOLDERS: Final = 20
_BOUNDS_S: Final = tuple(bound / 1e9 for bound in DURATION_BUCKETS_NS)


class TraceIndex:
    """Looks up moments of a trace. One thread at a time.

    A lookup takes a time that is linear in the rows before the moment, some 10 ns each.

    Args:
        trace: As loaded.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        allocate = (trace.operation == _ALLOCATE) & (trace.outcome != _EXHAUSTED)
        allocate &= trace.owner >= 0
        free = (trace.operation == _FREE) | (trace.operation == _FREE_ALL)
        # Calls that were lost are made up for: that moves blocks, and is no call.
        real = trace.outcome != _RESUMED
        self._moved: Ints = np.where(allocate, trace.blocks, np.where(free, -trace.blocks, 0))
        self._taken = _sums(np.where(allocate & real, trace.blocks, 0))
        self._freed = _sums(np.where(free & real, trace.blocks, 0))
        self._grown = _sums(trace.growth)
        self._retired = _sums(np.where(trace.operation == _SHRINK, trace.blocks, 0))
        first = np.zeros(trace.n_rows, dtype=bool)
        first[trace.first_row[:-1]] = True
        refused = trace.outcome == _EXHAUSTED
        self._refused = _sums(first & refused)
        done = first & ~refused & real
        self._calls = [_sums(done & (trace.operation == n)) for n in range(len(OPERATIONS))]
        streams = range(len(trace.header.streams))
        self._rows_of = [np.flatnonzero(trace.stream == n) for n in streams]
        asked = (trace.operation == _ALLOCATE) & real
        self._asked = [_sums(asked & (trace.stream == n)) for n in streams]
        # A refused call for keys and values counts once, as in the pool, but for the first stream.
        self._refused_of = [_sums(first & refused & (trace.stream == n)) for n in streams]
        self._opened = trace.header.opening.holdings

    @cached_property
    def snapshots(self) -> list[tuple[int, PoolSnapshot]]:
        """The snapshots in the trace, with their times; those that cannot be read are left out."""
        found = []
        for snapshot in self.trace.snapshots:
            try:
                found.append((snapshot.at_ns, pool_from_dict(snapshot.document)))
            except SnapshotFormatError:
                continue
        return found

    def pool_at(self, at_ns: int) -> PoolSnapshot:
        """The pool after all calls up to `at_ns`; what it counted, since the trace began."""
        trace = self.trace
        end = self._end(at_ns)
        told_ns, told = self._told(at_ns)
        recent = told_ns <= at_ns and at_ns - told_ns <= RECENT_NS
        streams = self._streams(end, told if recent else None, self._end(told_ns))
        held = self.held(end)
        return replace(
            told,
            wall_s=trace.header.began_wall_s + at_ns / 1e9,
            monotonic_ns=trace.header.began_ns + at_ns,
            n_blocks=sum(stream.managed for stream in streams.values()),
            n_allocations=int(self._taken[end]),
            n_frees=int(self._freed[end]),
            n_exhausted=int(self._refused[end]),
            n_grown=int(self._grown[end]),
            n_retired=int(self._retired[end]),
            streams=streams,
            owners_active=len(held),
            oldest_owner_age_s=max(self._ages_s(held, at_ns), default=0.0),
            calls={
                name: int(sums[end]) for name, sums in zip(OPERATIONS, self._calls, strict=True)
            },
            durations=self._durations(at_ns),
            formats=self._formats(end),
            peak_blocks_in_use=max(told.peak_blocks_in_use if recent else 0, int(self._peaks[end])),
            partial_blocks=told.partial_blocks if recent else 0,
            cached_blocks=told.cached_blocks if recent else 0,
            idle_owner_blocks=told.idle_owner_blocks if recent else 0,
        )

    def holders_at(self, at_ns: int) -> tuple[Holder, ...]:
        """The owners that hold most blocks at `at_ns`, the greatest first."""
        held = self.held(self._end(at_ns))
        most = sorted(held.items(), key=lambda item: (-item[1], item[0]))[:N_HOLDERS]
        ages = self._ages_s(dict(most), at_ns)
        return tuple(
            Holder(self._name(owner), blocks, age_s=age_s)
            for (owner, blocks), age_s in zip(most, ages, strict=True)
        )

    def held(self, end: int) -> dict[int, int]:
        """Blocks held by owner number, after the first `end` rows."""
        trace = self.trace
        owners, moved = trace.owner[:end], self._moved[:end]
        known = owners >= 0
        sums = np.bincount(owners[known], weights=moved[known], minlength=trace.n_owners)
        for holding in self._opened:
            sums[holding.owner] += holding.blocks
        return {int(owner): int(sums[owner]) for owner in np.flatnonzero(sums > 0)}

    @cached_property
    def usage(self) -> Ints:
        """Blocks in use and managed after each row; shape (n_rows, 2)."""
        n = self.trace.n_rows
        totals = np.zeros((n, 2), dtype=np.int64)
        for rows, level in zip(self._rows_of, self.trace.header.opening.levels, strict=True):
            last = np.searchsorted(rows, np.arange(n), side="right") - 1
            picked = rows[np.maximum(last, 0)] if len(rows) else last
            for column, values, begin in (
                (0, self.trace.managed_after - self.trace.free_after, level.managed - level.free),
                (1, self.trace.managed_after, level.managed),
            ):
                after = values[picked] if len(rows) else np.full(n, begin)
                totals[:, column] += np.where(last >= 0, after, begin)
        return totals

    def usage_between(self, begin_ns: int, end_ns: int, n: int) -> list[float]:
        """The highest share of the blocks in use in each of `n` equal parts of that time."""
        opening = self.trace.header.opening.levels
        managed = sum(level.managed for level in opening)
        used = managed - sum(level.free for level in opening)
        bounds = np.linspace(begin_ns, end_ns, n + 1)
        ends = np.searchsorted(self.trace.at_ns, bounds, side="right")
        shares = self.usage[:, 0] / np.maximum(self.usage[:, 1], 1)
        found = []
        for low, high in pairwise(ends.tolist()):
            before = shares[low - 1] if low else used / max(managed, 1)
            found.append(float(max(before, shares[low:high].max(initial=0.0))))
        return found

    # -- inside ---------------------------------------------------------------------------------

    def _end(self, at_ns: int) -> int:
        return int(np.searchsorted(self.trace.at_ns, at_ns, side="right"))

    def _told(self, at_ns: int) -> tuple[int, PoolSnapshot]:
        before = [found for found in self.snapshots if found[0] <= at_ns]
        if before:
            return before[-1]
        return self.snapshots[0] if self.snapshots else (0, self._blank())

    def _streams(
        self, end: int, told: PoolSnapshot | None, told_end: int
    ) -> dict[str, StreamSnapshot]:
        """The streams after `end` rows; `told` is of a moment shortly before, after `told_end`."""
        trace = self.trace
        streams = {}
        for n, name in enumerate(trace.header.streams):
            place = int(np.searchsorted(self._rows_of[n], end)) - 1
            level = trace.header.opening.levels[n]
            free, managed = level.free, level.managed
            if place >= 0:
                row = self._rows_of[n][place]
                free, managed = int(trace.free_after[row]), int(trace.managed_after[row])
            room = (managed - free) * trace.header.config.block_size
            known = told.streams.get(name) if told is not None else None
            used = self._filled(end, n)
            if known is not None:
                used = known.slots_used + int(self._fill[n][end] - self._fill[n][told_end])
            streams[name] = StreamSnapshot(
                managed=managed,
                free=free,
                slots_used=min(max(used, 0), room),
                allocate_requests=int(self._asked[n][end]),
                shortfall=0,
                exhausted=self._exhausted(name, int(self._refused_of[n][end]), known),
            )
        return streams

    def _exhausted(self, stream: str, n: int, known: StreamSnapshot | None) -> dict[str, int]:
        """Failures since the trace began, by reason as far as a snapshot tells."""
        if known is None or stream not in self.snapshots[0][1].streams:
            return {"refused": n}
        first = self.snapshots[0][1].streams[stream].exhausted
        reasons = {why: count - first.get(why, 0) for why, count in known.exhausted.items()}
        return {**reasons, "refused": max(0, n - sum(reasons.values()))}

    @cached_property
    def _fill(self) -> list[Ints]:
        """Sums of tokens asked for less those given back, by stream; a release not told is full."""
        trace, size = self.trace, self.trace.header.config.block_size
        told = np.where(trace.tokens >= 0, trace.tokens, trace.blocks * size)
        signed = np.where(self._moved > 0, told, np.where(self._moved < 0, -told, 0))
        return [
            _sums(np.where(trace.stream == n, signed, 0)) for n in range(len(trace.header.streams))
        ]

    def _filled(self, end: int, stream: int) -> int:
        size = self.trace.header.config.block_size
        opened = sum(h.blocks * size - h.slack for h in self._opened if h.stream == stream)
        return int(self._fill[stream][end]) + opened

    def _formats(self, end: int) -> dict[str, int]:
        trace = self.trace
        n = len(trace.formats)
        sums = np.bincount(trace.format[:end], weights=self._moved[:end], minlength=n)
        for holding in self._opened:
            sums[holding.format] += holding.blocks
        return {tag: int(sums[place]) for place, tag in enumerate(trace.formats)}

    @cached_property
    def _first_seen(self) -> Ints:
        """Of each owner when it first took blocks; 0 if it held some when the trace began."""
        trace = self.trace
        first = np.zeros(trace.n_owners, dtype=np.int64)
        takes = np.flatnonzero(self._moved > 0)[::-1]
        first[trace.owner[takes]] = trace.at_ns[takes]  # the earliest is written last
        for holding in self._opened:
            first[holding.owner] = 0
        return first

    def _ages_s(self, held: dict[int, int], at_ns: int) -> list[float]:
        return [(at_ns - int(self._first_seen[owner])) / 1e9 for owner in held]

    def _name(self, owner: int) -> str:
        names = self.trace.owners
        return str(names[owner]) if owner < len(names) else f"#{owner}"

    def _durations(self, at_ns: int) -> dict[str, HistogramSnapshot]:
        timed = self.trace.samples
        end = int(np.searchsorted(timed.at_ns, at_ns, side="right"))
        operation, took_ns = timed.operation[:end], timed.took_ns[:end]
        found = {}
        for n, name in enumerate(OPERATIONS):
            mine = took_ns[operation == n]
            buckets = np.searchsorted(DURATION_BUCKETS_NS, mine, side="left")
            counts = np.bincount(buckets, minlength=len(_BOUNDS_S) + 1)
            found[name] = HistogramSnapshot(
                _BOUNDS_S, tuple(map(int, counts)), float(mine.sum()) / 1e9
            )
        return found

    @cached_property
    def _peaks(self) -> Ints:
        """Most blocks in use up to each row, and before the first; shape (n_rows + 1,)."""
        levels = self.trace.header.opening.levels
        begin = sum(level.managed - level.free for level in levels)
        return np.maximum.accumulate(np.concatenate(([begin], self.usage[:, 0])))

    def _blank(self) -> PoolSnapshot:
        header = self.trace.header
        config = header.config
        return PoolSnapshot(
            name=header.pool, sequence=0, wall_s=header.began_wall_s, monotonic_ns=header.began_ns,
            block_size=config.block_size, separate_kv=config.separate_kv,
            grow_on_exhaustion=config.grow_on_exhaustion, max_blocks=config.max_blocks,
            initial_blocks=config.n_blocks, n_blocks=0, n_allocations=0, n_frees=0, n_reused=0,
            n_exhausted=0, n_grown=0, n_retired=0, peak_blocks_in_use=0, partial_blocks=0,
            streams={}, owners_active=0, oldest_owner_age_s=0.0, cached_blocks=0, formats={},
            calls={}, grow_attempts={}, rejected={}, owner_collisions=0, invariant_violations={},
            durations={}, lock_wait=NO_LIFETIMES, block_lifetime=NO_LIFETIMES,
            block_idle=NO_LIFETIMES, request_blocks=NO_LIFETIMES, occupancy=NO_LIFETIMES,
        )  # fmt: skip


def _sums(values: NDArray[np.int64] | NDArray[np.bool_]) -> Ints:
    """Running sums, with 0 before the first; shape (n + 1,)."""
    return np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
