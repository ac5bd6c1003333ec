"""Check: does today's allocator do what the recorded one did, call by call?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from veloxquant_exporters.replay.driver import Driver, Moved
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.telemetry import check_pool
from veloxquant_mlx.telemetry.trace import OPERATIONS
from veloxquant_mlx.telemetry.trace.schema import (
    ALLOCATE_OP,
    EXHAUSTED_OUTCOME,
    RESUMED,
    SHRINK_OP,
)

if TYPE_CHECKING:
    from veloxquant_mlx.memory.pool_config import PoolConfig
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["disagreement"]

Key = tuple[int, int, int]


def disagreement(
    trace: Trace,
    make: Callable[[PoolConfig], BlockPoolAllocator] = BlockPoolAllocator,
) -> str | None:
    """The first thing in which replaying differs from the recording, in one line; None if nothing.

    Compared are the outcome of each call, how many blocks moved for whom, what each stream has free
    and manages after it, and at the end who holds what, the counters, and the pool's own audit.

    Raises:
        TraceError: The trace cannot be replayed.
    """
    checking = _Checking(trace, make)
    for moved in checking.driver.run():
        fault = checking.fault_of(moved)
        if fault is not None:
            return f"call {moved.call} ({checking.shown(moved.call)}): {fault}"
    fault = checking.final_fault()
    return None if fault is None else f"after the last call: {fault}"


class _Checking:
    """A drive, with what the trace says beside it."""

    def __init__(self, trace: Trace, make: Callable[[PoolConfig], BlockPoolAllocator]) -> None:
        self._trace = trace
        self.driver = Driver(trace, make=make)
        self._starts = trace.first_row.tolist()
        self._streams = trace.header.streams
        names = (
            "operation", "outcome", "stream", "format", "owner", "blocks", "free_after",
            "managed_after",
        )  # fmt: skip
        self._rows = list(zip(*(getattr(trace, name).tolist() for name in names), strict=True))
        self._held: Counter[Key] = Counter()
        for h in trace.header.opening.holdings:
            self._held[(h.owner, h.stream, h.format)] += h.blocks
        pool = self.driver.pool
        self._before = pool.stats.snapshot()
        self._n_refused = self._n_taken = self._n_given = 0

    def shown(self, call: int) -> str:
        """A call in words."""
        op, _, stream, _, owner, blocks, _, _ = self._rows[self._starts[call]]
        return f"{OPERATIONS[op]} of {blocks} blocks, stream {self._streams[stream]}, owner {owner}"

    def fault_of(self, moved: Moved) -> str | None:
        """In what a call differs, or None."""
        rows = self._rows[self._starts[moved.call] : self._starts[moved.call + 1]]
        recorded = "exhausted" if rows[0][1] == EXHAUSTED_OUTCOME else "ok"
        if moved.outcome != recorded:
            return f"recorded as {recorded}, now {moved.outcome}"
        if recorded == "exhausted":
            self._n_refused += 1
        else:
            fault = self._moves_fault(moved, rows)
            if fault is not None:
                return fault
        return self._levels_fault(rows)

    def _moves_fault(self, moved: Moved, rows: list[tuple[int, ...]]) -> str | None:
        expected: Counter[Key] = Counter()
        n_retired = 0
        for op, outcome, stream, fmt, owner, blocks, _, _ in rows:
            if op == SHRINK_OP:
                n_retired += blocks
                continue
            sign = 1 if op == ALLOCATE_OP else -1
            expected[(owner, stream, fmt)] += sign * blocks
            if outcome != RESUMED:
                self._n_taken += blocks if sign > 0 else 0
                self._n_given += blocks if sign < 0 else 0
        found: Counter[Key] = Counter()
        for sign, shares in ((1, moved.taken), (-1, moved.freed)):
            for share in shares:
                found[(share.owner, share.stream, share.format)] += sign * len(share.blocks)
        for key in expected.keys() | found.keys():
            self._held[key] += expected[key]
            if expected[key] != found[key]:
                return f"recorded {expected[key]:+d} blocks for owner {key[0]}, now {found[key]:+d}"
        if n_retired != moved.retired:
            return f"recorded {n_retired} blocks retired, now {moved.retired}"
        return None

    def _levels_fault(self, rows: list[tuple[int, ...]]) -> str | None:
        levels = {stream: (free, managed) for _, _, stream, _, _, _, free, managed in rows}
        pool = self.driver.pool
        for index, level in levels.items():
            stream = pool._streams[index]  # noqa: SLF001 - the books are what is compared
            now = (stream.n_free, stream.managed)
            if now != level:
                return (
                    f"stream {self._streams[index]} had {level[0]} of {level[1]} blocks free after "
                    f"it, now {now[0]} of {now[1]}"
                )
        return None

    def final_fault(self) -> str | None:
        """In what the books differ at the end, or None."""
        pool = self.driver.pool
        for (owner, stream, fmt), n in self._held.items():
            now = len(self.driver.held(owner).get((stream, fmt), []))
            by_books = sum(
                block.stream == self._streams[stream] and block.format == self._trace.formats[fmt]
                for block in pool.blocks_for(owner)
            )
            if not n == now == by_books:
                return f"owner {owner} held {n} blocks in {self._streams[stream]}, now {by_books}"
        n_held = sum(self._held.values())
        if n_held != pool.stats.blocks_in_use():
            return f"{n_held} blocks were in use, now {pool.stats.blocks_in_use()}"
        fault = self._counter_fault()
        faults = check_pool(pool) if isinstance(pool, BlockPoolAllocator) else []
        return fault or (faults[0][1] if faults else None)

    def _counter_fault(self) -> str | None:
        now, before = self.driver.pool.stats.snapshot(), self._before
        if self._trace.gaps:
            return None  # what was lost is made up for, in other calls
        for what, recorded, found in (
            ("blocks allocated", self._n_taken, now.n_allocations - before.n_allocations),
            ("blocks freed", self._n_given, now.n_frees - before.n_frees),
            ("failed allocations", self._n_refused, now.n_exhausted - before.n_exhausted),
            ("blocks grown by", int(self._trace.growth.sum()), now.n_grown - before.n_grown),
        ):
            if recorded != found:
                return f"{recorded} {what} were recorded, now {found}"
        return None
