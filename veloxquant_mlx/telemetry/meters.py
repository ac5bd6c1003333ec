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
    from veloxquant_mlx.memory.block import Block
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["CHECKS", "DROP_REASONS", "ERROR_REASONS", "Meters", "owner_text"]

CHECKS: Final[tuple[str, ...]] = ("managed", "free_list", "owners", "counters")
# Pools summed as "other", and freed blocks that were watched for reuse and given up for others.
DROP_REASONS: Final = ("pools_merged", "idle_samples")
ERROR_REASONS: Final[tuple[str, ...]] = (
    "hook",
    "snapshot",
    "storage",
    "self_check",
    "lock_timeout",
    "process",
)

# Freed blocks watched for their reuse at one time: a sample, so few are enough.
WATCHED: Final = 32
MAX_OWNER_CHARS: Final = 64


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
        "lease_lifetime",
        "lock_wait",
        "n_unwatched",
        "occupancy",
        "request_blocks",
        "violations",
    )

    def __init__(self) -> None:
        self.durations = {name: Histogram(DURATION_BUCKETS_NS, 1e9) for name in OPERATIONS}
        self.lock_wait = Histogram(DURATION_BUCKETS_NS, 1e9)
        self.block_lifetime = Histogram(LIFETIME_BUCKETS_NS, 1e9)
        self.lease_lifetime = Histogram(LIFETIME_BUCKETS_NS, 1e9)
        self.block_idle = Histogram(LIFETIME_BUCKETS_NS, 1e9)
        self.request_blocks = Histogram(BLOCK_BUCKETS)
        self.occupancy = Histogram(RATIO_BUCKETS)
        # Blocks in use by format but for fp16, which is the rest: the common case is not counted.
        self.formats: dict[str, int] = dict.fromkeys(FORMATS, 0)
        self.violations: dict[str, int] = dict.fromkeys(CHECKS, 0)
        self.errors: dict[str, int] = dict.fromkeys(ERROR_REASONS, 0)
        self.last_exhaustion: Exhaustion | None = None
        self._random = random.Random(0x1D1E)  # noqa: S311 - a choice of samples, not a secret
        self._watched: list[tuple[Block, int, int]] = []
        self.n_unwatched = 0  # watched blocks that were given up for others

    def tally(self, fmt: str, n_blocks: int) -> None:
        """Move the blocks in use of a format."""
        self.formats[fmt if fmt in self.formats else "other"] += n_blocks

    def recount_formats(self, pool: BlockPoolAllocator) -> None:
        """Count the formats anew from the leases; linear in owners."""
        formats = dict.fromkeys(FORMATS, 0)
        for first in pool._owners.values():
            for lease in [first] if first._group is None else first._group.leases:
                name = lease._format
                formats[name if name in formats else "other"] += len(lease._blocks)
        self.formats = formats

    def note_exhaustion(self, owner: object) -> None:
        """Remember a failed allocation, with the trace it was part of."""
        self.last_exhaustion = Exhaustion(owner_text(owner), current_trace_id(), time.time())

    def watch_idle(self, block: Block, freed_ns: int) -> None:
        """Watch `block`, which was freed then, for its reuse."""
        lease = block._lease
        if lease._at is not None or lease is lease._stream.retired:
            return  # gone again before this was looked at
        if len(self._watched) >= WATCHED:
            # Cold blocks would fill the list for good, and nothing be observed any more.
            del self._watched[self._random.randrange(WATCHED)]
            self.n_unwatched += 1
        # Not the lease itself, for the reason that `samples` has.
        self._watched.append((block, lease._born_ns, freed_ns))

    def settle_idle(self, now_ns: int) -> None:
        """Observe the watched blocks that were handed out again since."""
        waiting = []
        for block, born_ns, freed_ns in self._watched:
            lease = block._lease
            if lease._at is None and lease._born_ns == born_ns:
                waiting.append((block, born_ns, freed_ns))
            elif lease is not lease._stream.retired:
                # A lease that is older took the block some time between then and now.
                until_ns = lease._born_ns if freed_ns < lease._born_ns < now_ns else now_ns
                self.block_idle.observe(max(0, until_ns - freed_ns))
        self._watched = waiting

    def let_go(self) -> None:
        """Drop what refers to blocks: the pool is gone, or no longer watched."""
        self._watched = []


def owner_text(owner: object) -> str:
    """An owner as text that any exporter can show: at most 64 characters, all of them encodable."""
    try:
        text = str(owner)
    except ValueError:  # an int of more digits than Python writes
        text = "int"
    return text[:MAX_OWNER_CHARS].encode("utf-8", "replace").decode()


def current_trace_id() -> str:
    """The trace id of the current OpenTelemetry span, "" if there is none.

    Looks at OpenTelemetry only if the program imported it.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    try:
        context = trace.get_current_span().get_span_context()
        return f"{context.trace_id:032x}" if context.is_valid else ""
    except Exception:  # noqa: BLE001 - a tracer's fault must not cost the exemplar its owner
        return ""
