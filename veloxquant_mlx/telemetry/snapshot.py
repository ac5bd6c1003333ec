"""PoolSnapshot: everything known about one pool at one moment, as a frozen value.

Exporters read snapshots and nothing else, whether they come from a pool in this process or from a
file that another process wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from veloxquant_mlx.telemetry.histogram import LIFETIME_BUCKETS_NS, Histogram, HistogramSnapshot

__all__ = ["FORMATS", "OPERATIONS", "SCHEMA", "Exhaustion", "PoolSnapshot", "StreamSnapshot"]

SCHEMA: Final = 1

OPERATIONS: Final[tuple[str, ...]] = ("allocate", "free", "free_all", "shrink")
# Every other tag is counted as "other": tags are free text, series are not.
FORMATS: Final[tuple[str, ...]] = ("fp32", "fp16", "bf16", "int8", "int4", "int2", "int1", "other")

# Of a snapshot that an earlier version wrote.
NO_LIFETIMES: Final = Histogram(LIFETIME_BUCKETS_NS, 1e9).snapshot()


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """One stream.

    Attributes:
        managed: Blocks, free or in use.
        free: Free blocks.
        slots_used: Token slots that hold a token, by the fill that leases keep.
        allocate_requests: Allocation calls, failed ones too.
        shortfall: Blocks that failed calls lacked, in all.
        exhausted: Failed calls by reason.
        slots_held: Token slots in held blocks; None where all blocks are of the pool's block size.
    """

    managed: int
    free: int
    slots_used: int
    allocate_requests: int
    shortfall: int
    exhausted: Mapping[str, int]
    slots_held: int | None = None

    @property
    def in_use(self) -> int:
        """Blocks held."""
        return self.managed - self.free


@dataclass(frozen=True, slots=True)
class Exhaustion:
    """The newest failed allocation, for an exemplar.

    Attributes:
        owner: Who asked, as text.
        trace_id: 32 hex digits of the span that was current; "" if there was none.
        wall_s: Seconds since the epoch.
    """

    owner: str
    trace_id: str
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """One pool at one moment, all books agreeing. Counters never fall for a name.

    Attributes:
        name: The pool's name, unique among the live pools of a process.
        sequence: Rises with each snapshot of the pool.
        wall_s: Seconds since the epoch.
        monotonic_ns: `time.monotonic_ns()`.
        block_size: Token slots a block; 0 of several pools together that differ in it.
        separate_kv, grow_on_exhaustion, max_blocks, initial_blocks: The configuration.
        n_blocks ... partial_blocks: As in `AllocationStats`, in blocks.
        streams: By name.
        owners_active: Owners that hold blocks or are registered.
        oldest_owner_age_s: Seconds since the owner that holds blocks longest began; 0 without one.
        cached_blocks: Blocks kept on purpose by prompt-cache entries.
        formats: Blocks in use by format tag, every name of `FORMATS`.
        calls: Calls that changed something, by operation.
        grow_attempts: By outcome.
        rejected: Blocks refused by the books, by reason.
        owner_collisions: Registrations refused.
        invariant_violations: Found by the self-check, by check.
        durations: Seconds in the pool by operation, without waiting for the lock; sampled.
        lock_wait, block_lifetime, block_idle: Seconds; sampled.
        request_blocks: Blocks an allocation; sampled.
        occupancy: In use over managed at each allocation; sampled.
        storage: Bytes by kind, empty without a storage.
        last_exhaustion: None until there was one.
        lease_lifetime: Seconds an owner held blocks of one stream and format; sampled.
        idle_owner_blocks: Blocks of owners, among the 256 oldest, that took and filled nothing for
            five minutes; as of the newest self-check.
        storage_formats: Bytes of buffers by format, empty without a storage.
        n_pools: Pools that this stands for: 1, or those beyond the ones told apart.
        schema: Version of this layout.
    """

    name: str
    sequence: int
    wall_s: float
    monotonic_ns: int
    block_size: int
    separate_kv: bool
    grow_on_exhaustion: bool
    max_blocks: int | None
    initial_blocks: int
    n_blocks: int
    n_allocations: int
    n_frees: int
    n_reused: int
    n_exhausted: int
    n_grown: int
    n_retired: int
    peak_blocks_in_use: int
    partial_blocks: int
    streams: Mapping[str, StreamSnapshot]
    owners_active: int
    oldest_owner_age_s: float
    cached_blocks: int
    formats: Mapping[str, int]
    calls: Mapping[str, int]
    grow_attempts: Mapping[str, int]
    rejected: Mapping[str, int]
    owner_collisions: int
    invariant_violations: Mapping[str, int]
    durations: Mapping[str, HistogramSnapshot]
    lock_wait: HistogramSnapshot
    block_lifetime: HistogramSnapshot
    block_idle: HistogramSnapshot
    request_blocks: HistogramSnapshot
    occupancy: HistogramSnapshot
    storage: Mapping[str, int] = field(default_factory=dict)
    last_exhaustion: Exhaustion | None = None
    lease_lifetime: HistogramSnapshot = NO_LIFETIMES
    idle_owner_blocks: int = 0
    storage_formats: Mapping[str, int] = field(default_factory=dict)
    n_pools: int = 1
    schema: int = SCHEMA

    @property
    def blocks_in_use(self) -> int:
        """Blocks held."""
        return sum(stream.in_use for stream in self.streams.values())

    def slots_held(self, stream: str) -> int:
        """Token slots in the held blocks of `stream`."""
        found = self.streams[stream]
        return found.in_use * self.block_size if found.slots_held is None else found.slots_held

    @property
    def blocks_limit(self) -> float:
        """Most blocks the pool can come to; inf when its growth is unbounded."""
        if not self.grow_on_exhaustion:
            return self.n_blocks
        if self.max_blocks is None:
            return float("inf")
        return max(self.max_blocks, self.n_blocks)

    @property
    def fragmentation(self) -> float:
        """Partly filled blocks over managed ones; 0 of an empty pool."""
        return self.partial_blocks / self.n_blocks if self.n_blocks else 0.0
