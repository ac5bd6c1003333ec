"""Meters: what the hooks of one pool observe, beside what the pool's own books tell."""

from __future__ import annotations

import random
import sys
import time
from typing import TYPE_CHECKING, Final

from veloxquant_mlx.telemetry.histogram import (
    BLOCK_BUCKETS,
    DURATION_BUCKETS_NS,
    LIFETIME_BUCKETS_NS,
    RATIO_BUCKETS,
    Histogram,
)
from veloxquant_mlx.telemetry.snapshot import FORMATS, OPERATIONS, Exhaustion

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block import Block, Lease
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["CHECKS", "ERROR_REASONS", "Meters"]

CHECKS: Final = ("managed", "free_list", "owners", "counters")
ERROR_REASONS: Final = ("hook", "snapshot", "storage", "self_check")

# Freed blocks watched for their reuse at one time: a sample, so few are enough.
WATCHED: Final = 32


class Meters:
    """Histograms and counters of one pool; filled and copied under the pool's lock."""

    __slots__ = (
        "_random",
        "_watched",
        "block_idle",
        "block_lifetime",
        "durations",
        "errors",
        "formats",
        "last_exhaustion",
        "lock_wait",
        "occupancy",
        "request_blocks",
        "violations",
    )

    def __init__(self) -> None:
        self.durations = {name: Histogram(DURATION_BUCKETS_NS, 1e9) for name in OPERATIONS}
        self.lock_wait = Histogram(DURATION_BUCKETS_NS, 1e9)
        self.block_lifetime = Histogram(LIFETIME_BUCKETS_NS, 1e9)
        self.block_idle = Histogram(LIFETIME_BUCKETS_NS, 1e9)
        self.request_blocks = Histogram(BLOCK_BUCKETS)
        self.occupancy = Histogram(RATIO_BUCKETS)
        # Blocks in use by format but for fp16, which is the rest: the common case is not counted.
        self.formats = dict.fromkeys(FORMATS, 0)
        self.violations = dict.fromkeys(CHECKS, 0)
        self.errors = dict.fromkeys(ERROR_REASONS, 0)
        self.last_exhaustion: Exhaustion | None = None
        self._random = random.Random(0x1D1E)  # noqa: S311 - a choice of samples, not a secret
        self._watched: list[tuple[Block, Lease, int]] = []

    def tally(self, fmt: str, n_blocks: int) -> None:
        """Move the blocks in use of a format."""
        self.formats[fmt if fmt in self.formats else "other"] += n_blocks

    def recount_formats(self, pool: BlockPoolAllocator) -> None:
        """Count the formats anew from the leases; linear in owners."""
        self.formats = dict.fromkeys(FORMATS, 0)
        for first in pool._owners.values():
            for lease in [first] if first._group is None else first._group.leases:
                self.tally(lease._format, len(lease._blocks))

    def count_error(self, reason: str) -> None:
        """Count a failure of the telemetry itself."""
        self.errors[reason] += 1

    def note_exhaustion(self, owner: object) -> None:
        """Remember a failed allocation, with the trace it was part of."""
        self.last_exhaustion = Exhaustion(str(owner)[:64], current_trace_id(), time.time())

    def watch_idle(self, pool: BlockPoolAllocator, lease: Lease) -> None:
        """Watch one block that was just freed with `lease` for its reuse."""
        top = lease._stream.top  # type: ignore[union-attr]
        if len(self._watched) < WATCHED and top:
            block = top[self._random.randrange(max(0, len(top) - 64), len(top))]
            self._watched.append((block, block._lease, pool._now))

    def settle_idle(self, now_ns: int) -> None:
        """Observe the watched blocks that came to a new lease since."""
        waiting = []
        for block, dead, freed_ns in self._watched:
            lease = block._lease
            if lease is dead:
                waiting.append((block, dead, freed_ns))
            elif lease._at is not None:
                self.block_idle.observe(max(0, min(now_ns, lease._born_ns or now_ns) - freed_ns))
        self._watched = waiting


def current_trace_id() -> str:
    """The trace id of the current OpenTelemetry span, "" if there is none.

    Looks at OpenTelemetry only if the program imported it.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""
