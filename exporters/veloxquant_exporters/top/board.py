"""Board: all that `vqmon top` shows at one moment, as frozen values.

What is not known is None, never 0: a rate without an earlier reading, a latency without a call, a
byte count the platform does not tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "AlertView",
    "Board",
    "Holder",
    "Latency",
    "MemoryView",
    "OperationView",
    "PoolView",
    "ProcessView",
    "Rates",
    "StreamView",
]


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles of a histogram, interpolated in its buckets as Prometheus does.

    Attributes:
        p50_s, p99_s: Seconds; None without an observation.
        lately: True if of the last minute, False if of everything since the pool began.
    """

    p50_s: float | None = None
    p99_s: float | None = None
    lately: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, between two readings `over_s` seconds apart.

    Attributes:
        over_s: Seconds between the two snapshots.
        allocations, frees, grown, retired: Blocks a second.
        requests: Allocation calls a second, failed ones too.
        exhaustions: Failed allocation calls a second.
    """

    over_s: float
    allocations: float
    frees: float
    requests: float
    exhaustions: float
    grown: float
    retired: float


@dataclass(frozen=True, slots=True)
class OperationView:
    """Calls of one operation: how many so far, how many a second, how long they take."""

    operation: str
    calls: int
    calls_per_s: float | None
    latency: Latency


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stream of a pool.

    Attributes:
        name: "k", "v" or "kv".
        managed, in_use, free: Blocks.
        slots_held, slots_used: Token slots in held blocks, and those that hold a token.
        exhausted: Failed allocation calls so far, by reason.
    """

    name: str
    managed: int
    in_use: int
    free: int
    slots_held: int
    slots_used: int
    exhausted: dict[str, int]

    @property
    def waste(self) -> float | None:
        """Share of the held token slots without a token; None if none is held."""
        return 1 - self.slots_used / self.slots_held if self.slots_held else None


@dataclass(frozen=True, slots=True)
class Holder:
    """An owner that holds blocks, where the source tells.

    Attributes:
        owner: Its id, or its number in a trace that leaves ids out.
        blocks: Blocks it holds.
        age_s: Seconds since it began to hold; None if not told.
    """

    owner: str
    blocks: int
    age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One pool of one process.

    Attributes:
        process: Label of its process, "" of a page that has only one.
        name: The pool.
        n_pools: Pools behind the name: 1, or those summed as "other".
        block_size: Token slots a block; 0 where pools of several sizes are summed.
        may_grow: Whether it grows when exhausted.
        n_blocks, in_use, peak, partial: Blocks: managed, held, most held ever, partly filled.
        limit: Most blocks it can come to; None if its growth is unbounded.
        slots_held, slots_used: Token slots in held blocks, and those that hold a token.
        streams: By name.
        owners: Owners that hold blocks or are registered.
        oldest_owner_s: Age in seconds of the owner that holds longest; 0 without one.
        cached_blocks: Blocks that a prompt cache keeps on purpose.
        idle_blocks: Blocks of owners that took and filled nothing for five minutes.
        formats: Held blocks by format tag; those with none are left out.
        storage_bytes: Bytes of its MLX buffers; None without a storage.
        exhausted, rejected, violations: Counted since it began: failed calls, refused blocks,
            broken invariants.
        rates: None until there are two readings.
        operations: By operation.
        lock_wait: Wait of calls for the pool's lock.
        lifetime: How long owners hold blocks.
        past: Share of the blocks in use at earlier readings, oldest first.
        holders: The owners with most blocks; empty where the source does not tell.
        age_s: Seconds since the figures changed or were taken.
    """

    process: str
    name: str
    n_pools: int
    block_size: int
    may_grow: bool
    n_blocks: int
    in_use: int
    peak: int
    partial: int
    limit: int | None
    slots_held: int
    slots_used: int
    streams: tuple[StreamView, ...]
    owners: int
    oldest_owner_s: float
    cached_blocks: int
    idle_blocks: int
    formats: dict[str, int]
    storage_bytes: int | None
    exhausted: int
    rejected: int
    violations: int
    rates: Rates | None
    operations: tuple[OperationView, ...]
    lock_wait: Latency
    lifetime: Latency
    past: tuple[float, ...] = ()
    holders: tuple[Holder, ...] = ()
    age_s: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from every other pool of the board."""
        return self.process, self.name

    @property
    def usage(self) -> float:
        """Blocks held over blocks managed, 0 to 1."""
        return self.in_use / self.n_blocks if self.n_blocks else 0.0

    @property
    def waste(self) -> float | None:
        """Share of the held token slots without a token; None if none is held."""
        return 1 - self.slots_used / self.slots_held if self.slots_held else None

    def latency(self, operation: str) -> Latency:
        """Of an operation; without figures if it is not known."""
        found = (view.latency for view in self.operations if view.operation == operation)
        return next(found, Latency())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """The memory account of a process, in bytes; None where nobody tells.

    Active memory is what lives in MLX arrays: the pools' buffers and the rest, which is weights,
    activations, and caches outside the pools.

    Attributes:
        active, cache, peak, limit: As MLX tells.
        pools: Buffers of all pools of the process.
        caches: KV caches of a program that `vqmon run` watches, outside the pools' buffers.
        weights: Of its models.
        footprint, resident: Of the process, as the system tells.
    """

    active: int | None
    cache: int | None
    peak: int | None
    limit: int | None
    pools: int | None
    caches: int | None
    weights: int | None
    footprint: int | None
    resident: int | None

    @property
    def rest(self) -> int | None:
        """Active bytes that neither pools, caches nor weights account for; not below 0."""
        if self.active is None:
            return None
        # MLX is lazy: a buffer counts for the pool before it is memory.
        return max(0, self.active - sum(filter(None, (self.pools, self.caches, self.weights))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """One process.

    Attributes:
        name: Its label; "" of a page that has only one.
        up: False if its snapshot cannot be had: it died, or its file is broken.
        age_s: Seconds since its figures changed or were taken; None if it is not up.
        versions: Of this package, Python and MLX, as far as told.
        memory: None if it is not up, or nothing is told of it.
        program: What the serving program says of itself, a line of text each.
    """

    name: str
    up: bool
    age_s: float | None
    versions: tuple[str, ...]
    memory: MemoryView | None
    program: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertView:
    """An alert whose condition holds now.

    Attributes:
        name: As in the alert rules.
        severity: "critical", "warning" or "info".
        state: "firing" once the condition has held for as long as the rule asks, else "pending".
        process, pool: What it is about; "" where it is about less.
        detail: The figures behind it, in a few words.
        held_s: Seconds for which the condition has been seen to hold.
        for_s: Seconds for which the rule asks.
        runbook: File name of the runbook, as in docs/runbooks.
    """

    name: str
    severity: Literal["critical", "warning", "info"]
    state: Literal["firing", "pending"]
    process: str
    pool: str
    detail: str
    held_s: float
    for_s: float
    runbook: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Everything at one moment.

    Attributes:
        source: What was read, as a title.
        wall_s: When, in seconds since the epoch.
        watched_s: Seconds since the first reading: alerts know nothing from before.
        processes: By name.
        pools: By process and name.
        alerts: The gravest first.
        errors: What could not be read, by reason; those with a count only.
    """

    source: str
    wall_s: float
    watched_s: float
    processes: tuple[ProcessView, ...]
    pools: tuple[PoolView, ...]
    alerts: tuple[AlertView, ...] = ()
    errors: dict[str, int] = field(default_factory=dict)

    def pool(self, key: tuple[str, str]) -> PoolView | None:
        """The pool of that process and name, None if it is gone."""
        return next((pool for pool in self.pools if pool.key == key), None)

    def process(self, name: str) -> ProcessView | None:
        """The process of that name, None if it is gone."""
        return next((process for process in self.processes if process.name == name), None)
