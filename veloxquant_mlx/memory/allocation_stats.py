"""AllocationStats: the counters of a pool, as a frozen value and as the pool's live view."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["AllocationStats", "LiveStats"]

# Prometheus data model: metric names.
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass(frozen=True)
class AllocationStats:
    """Counters of a `BlockPoolAllocator`, in blocks unless noted, cumulative since construction.

    Attributes:
        n_blocks: Blocks managed now.
        n_allocations: Blocks handed out.
        n_frees: Blocks given back.
        n_reused: Blocks handed out that had been handed out before.
        n_exhausted: Allocation calls that failed for want of free blocks.
        n_grown: Blocks added by growth.
        n_retired: Blocks removed by `shrink`.
        peak_blocks_in_use: Most blocks held at one time.
        monotonic_ns: `time.monotonic_ns()` of the state; 0 in a value built by hand.
    """

    n_blocks: int
    n_allocations: int = 0
    n_frees: int = 0
    n_reused: int = 0
    n_exhausted: int = 0
    n_grown: int = 0
    n_retired: int = 0
    peak_blocks_in_use: int = 0
    _fragmented_count: int = 0
    monotonic_ns: int = field(default=0, compare=False, kw_only=True)

    def blocks_in_use(self) -> int:
        """Blocks held now."""
        return self.n_allocations - self.n_frees

    def fragmentation(self) -> float:
        """Blocks with 0 < n_used < block_size over blocks managed; 0.0 of an empty pool."""
        return self._fragmented_count / self.n_blocks if self.n_blocks else 0.0

    def snapshot(self) -> AllocationStats:
        """An independent copy."""
        return replace(self)

    def to_prometheus(self, prefix: str = "veloxquant_block_pool") -> str:
        """These stats in the Prometheus text format 0.0.4, without labels.

        The names are the contract of the package whose API this is: `<prefix>_blocks_total` is a
        gauge, which OpenMetrics refuses, so serve this text alone and as
        `text/plain; version=0.0.4` only. `veloxquant_exporters.prometheus` makes the labelled,
        lint-clean page.

        Raises:
            ValueError: `prefix` is no metric name.
        """
        if not isinstance(prefix, str) or not _METRIC_NAME.fullmatch(prefix):
            raise ValueError(
                f"prefix must be a Prometheus metric name ([a-zA-Z_:][a-zA-Z0-9_:]*), got {prefix!r}"
            )
        now = self.snapshot()
        rows: tuple[tuple[str, str, float], ...] = (
            ("blocks_in_use", "gauge", now.blocks_in_use()),
            ("blocks_total", "gauge", now.n_blocks),
            ("fragmentation", "gauge", now.fragmentation()),
            ("peak_blocks_in_use", "gauge", now.peak_blocks_in_use),
            ("allocations_total", "counter", now.n_allocations),
            ("frees_total", "counter", now.n_frees),
            ("reused_total", "counter", now.n_reused),
            ("exhausted_total", "counter", now.n_exhausted),
            ("grown_total", "counter", now.n_grown),
            ("retired_total", "counter", now.n_retired),
        )
        return "".join(
            f"# TYPE {prefix}_{name} {kind}\n{prefix}_{name} {value!r}\n"
            for name, kind, value in rows
        )


class LiveStats(AllocationStats):
    """The pool's own numbers, read as they are at each access; `snapshot()` freezes them.

    A single field may be read at any time, from any thread or signal handler, without the lock.
    Fields that belong together come from `snapshot()`, which takes the pool's lock.
    """

    def __new__(cls, *_pool: Any, **values: Any) -> Any:
        """The view of a pool; of fields, as `dataclasses.replace` gives them, a frozen value."""
        return AllocationStats(**values) if values else super().__new__(cls)

    def __init__(self, pool: BlockPoolAllocator) -> None:
        object.__setattr__(self, "_pool", pool)

    if not TYPE_CHECKING:  # mypy knows dataclass fields as attributes, not as properties
        n_blocks = property(lambda self: self._pool._counts[4].n_blocks)
        n_allocations = property(lambda self: self._pool._taken)
        n_frees = property(lambda self: self._pool._counts[0])
        n_reused = property(lambda self: self._pool._taken - self._pool._counts[1])
        n_exhausted = property(lambda self: self._pool._counts[4].n_exhausted)
        n_grown = property(lambda self: self._pool._counts[4].n_grown)
        n_retired = property(lambda self: self._pool._counts[4].n_retired)
        peak_blocks_in_use = property(
            lambda self: max(self._pool._counts[3], self._pool._taken - self._pool._counts[0])
        )
        _fragmented_count = property(lambda self: self._pool._counts[2])
        monotonic_ns = property(lambda self: self._pool._clock())

    def snapshot(self) -> AllocationStats:
        """All fields at one moment, taken under the pool's lock."""
        return self._pool._frozen_stats()  # type: ignore[attr-defined, no-any-return]

    def blocks_in_use(self) -> int:
        """See `AllocationStats.blocks_in_use`; both numbers from one moment, never below zero."""
        return self.snapshot().blocks_in_use()

    def fragmentation(self) -> float:
        """See `AllocationStats.fragmentation`; both numbers from one moment."""
        return self.snapshot().fragmentation()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AllocationStats):
            return NotImplemented
        return self.snapshot() == other.snapshot()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.snapshot())

    def __reduce__(self) -> tuple[object, ...]:
        frozen = self.snapshot()
        values = {f.name: getattr(frozen, f.name) for f in fields(frozen)}
        return _thaw, (values,)


def _thaw(values: dict[str, int]) -> AllocationStats:
    return AllocationStats(**values)
