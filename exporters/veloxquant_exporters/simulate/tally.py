"""Tally: drives one configuration through a trace, and adds up what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

from veloxquant_exporters.replay.driver import Driver, Moved, Share
from veloxquant_exporters.simulate.result import Result
from veloxquant_mlx.telemetry.trace.schema import ALLOCATE_OP

if TYPE_CHECKING:
    from veloxquant_mlx.memory.pool_config import PoolConfig
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["SPANS", "simulate"]

# Points of a picture's line.
SPANS: Final = 480
# Calls between two reports of progress.
REPORTED: Final = 4096


def simulate(
    trace: Trace, config: PoolConfig, progress: Callable[[int], object] = lambda _: None
) -> Result:
    """What `config` would have done; on a real allocator, a call of the trace at a time.

    A request that finds no room is taken to be rejected: what it holds is freed and the rest of
    its calls is left out.

    Args:
        trace: The recording.
        config: What to try.
        progress: Called now and then with the number of calls done.

    Raises:
        TraceError: The trace needs more blocks than can be simulated.
    """
    began = time.perf_counter()
    driver = Driver(trace, config)
    tally = _Tally(trace, config)
    tally.add(driver.opening, 0)
    tally.reject(driver.rejected)
    most_blocks = driver.pool.stats.n_blocks
    times = trace.at_ns[trace.first_row[:-1]].tolist()
    for call, (at_ns, moved) in enumerate(zip(times, driver.run(), strict=True)):
        tally.add(moved, at_ns)
        if moved.taken or moved.outcome == "admitted":
            most_blocks = max(most_blocks, driver.pool.stats.n_blocks)
        if not call % REPORTED:
            progress(call)
    progress(driver.n_calls)
    stats = driver.pool.stats.snapshot()
    return Result(
        config=config,
        n_calls=driver.n_calls,
        peak_blocks=stats.peak_blocks_in_use,
        final_blocks=stats.n_blocks,
        grown_blocks=stats.n_grown,
        most_blocks=most_blocks,
        n_exhausted=tally.n_exhausted,
        n_stranded=_n_stranded(driver),
        n_admitted=tally.n_admitted,
        first_exhausted_ns=tally.first_exhausted_ns,
        n_rejected=len(tally.refused | driver.rejected),
        n_owners=trace.n_owners,
        rounding=tally.rounding(),
        unfilled=tally.unfilled(),
        occupancy=tally.occupancy(),
        seconds=time.perf_counter() - began,
    )


def _n_stranded(driver: Driver) -> int:
    by_reason = driver.pool._incidents.exhausted  # noqa: SLF001 - counted by the pool itself
    return sum(n for (_, reason), n in by_reason.items() if reason == "stranded")


class _Tally:
    """Sums over time, and the slots held in each span of it."""

    def __init__(self, trace: Trace, config: PoolConfig) -> None:
        self._size = config.block_size
        self._recorded_size = trace.header.config.block_size
        self._operation: list[int] = trace.operation.tolist()
        self._tokens: list[int] = trace.tokens.tolist()
        self._first_row: list[int] = trace.first_row.tolist()
        self._span_ns = trace.duration_ns // SPANS + 1
        self._spans = [0] * SPANS
        self._span = 0
        self._slots: dict[int, int] = {}  # held, by owner
        self._asked: dict[int, int] = {}  # tokens asked for and not given back, by owner
        self._n_slots = self._n_asked = 0
        self._at_ns = 0
        # Slots times nanoseconds.
        self._held_ns = self._asked_ns = 0
        self._freed_slots = self._freed_filled = 0
        self._owner: list[int] = trace.owner.tolist()
        self.n_exhausted = self.n_admitted = 0
        self.first_exhausted_ns: int | None = None
        self.refused: set[int] = set()  # owners, also those that the recorded pool refused

    def add(self, moved: Moved, at_ns: int) -> None:
        """Count what a call came to."""
        since_ns = at_ns - self._at_ns
        if since_ns > 0:
            self._held_ns += self._n_slots * since_ns
            self._asked_ns += self._n_asked * since_ns
            self._at_ns = at_ns
            self._move_to(at_ns)
        if moved.outcome == "exhausted":
            self.n_exhausted += 1
            if self.first_exhausted_ns is None:
                self.first_exhausted_ns = at_ns
            self.refused.add(self._owner[self._first_row[moved.call]])
        self.n_admitted += moved.outcome == "admitted"
        if moved.taken:
            for n, share in enumerate(moved.taken):
                self._take(share, self._asked_by(moved.call, n, share))
            self._spans[self._span] = max(self._spans[self._span], self._n_slots)
        for n, share in enumerate(moved.freed):
            self._give(share, self._filled_by(moved, n))

    def reject(self, owners: AbstractSet[int]) -> None:
        """Count the owners whose blocks at the beginning of the trace find no room."""
        self.n_exhausted += len(owners)
        if owners:
            self.first_exhausted_ns = 0

    def _move_to(self, at_ns: int) -> None:
        """Begin the span of `at_ns`; what is held is held in those between, too."""
        span = min(at_ns // self._span_ns, SPANS - 1)
        if span > self._span:
            n = self._n_slots
            self._spans[self._span + 1 : span + 1] = [n] * (span - self._span)
            self._span = span

    def _asked_by(self, call: int, n: int, share: Share) -> int:
        """Tokens that the `n`-th row of an allocation asked for."""
        if call >= 0:
            row = self._first_row[call] + n
            if row < self._first_row[call + 1] and self._operation[row] == ALLOCATE_OP:
                tokens = self._tokens[row]
                if tokens > 0:
                    return tokens
        return len(share.blocks) * self._size

    def _filled_by(self, moved: Moved, n: int) -> int:
        """Tokens that the `n`-th row of a release had filled; -1 where that is not known."""
        row = self._first_row[moved.call] + n if moved.call >= 0 else -1
        if moved.outcome != "ok" or row < 0 or row >= self._first_row[moved.call + 1]:
            return -1
        return self._tokens[row]

    def _take(self, share: Share, tokens: int) -> None:
        slots = len(share.blocks) * self._size
        owner = share.owner
        self._slots[owner] = self._slots.get(owner, 0) + slots
        self._asked[owner] = self._asked.get(owner, 0) + tokens
        self._n_slots += slots
        self._n_asked += tokens

    def _give(self, share: Share, filled: int) -> None:
        owner, slots = share.owner, len(share.blocks) * self._size
        left = self._slots.get(owner, 0) - slots
        asked = self._asked.get(owner, 0)
        still = min(asked, left)
        if left > 0:
            self._slots[owner], self._asked[owner] = left, still
        else:
            self._slots.pop(owner, None)
            self._asked.pop(owner, None)
        self._n_slots -= slots
        self._n_asked -= asked - still
        if filled >= 0:
            self._freed_slots += slots
            self._freed_filled += min(filled, slots)

    def rounding(self) -> float:
        """See `Result`."""
        return 1 - self._asked_ns / self._held_ns if self._held_ns else 0.0

    def unfilled(self) -> float | None:
        """See `Result`."""
        return 1 - self._freed_filled / self._freed_slots if self._freed_slots else None

    def occupancy(self) -> tuple[int, ...]:
        """See `Result`; to the last span."""
        self._spans[self._span + 1 :] = [self._n_slots] * (SPANS - 1 - self._span)
        return tuple(self._spans)
