"""From snapshots to views: pure functions of what was read, now and before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from veloxquant_exporters.top.board import (
    Holder,
    Latency,
    MemoryView,
    OperationView,
    PoolView,
    ProcessView,
    Rates,
    StreamView,
)
from veloxquant_exporters.top.program import program_lines
from veloxquant_exporters.top.quantile import difference, quantile
from veloxquant_exporters.top.track import Track
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.snapshot import OPERATIONS, PoolSnapshot

__all__ = ["latency", "memory_view", "pool_view", "process_view", "rates"]

# Over how long a rate is taken, and a latency.
RATE_S: Final = 10.0
LATENCY_S: Final = 60.0
N_PAST: Final = 240


def pool_view(
    process: str,
    track: Track[PoolSnapshot],
    now_s: float,
    *,
    age_s: float = 0.0,
    holders: tuple[Holder, ...] = (),
) -> PoolView:
    """A pool as its newest snapshot has it, with rates against an earlier one.

    Args:
        process: Label of its process.
        track: Its snapshots.
        now_s: The reader's clock.
        age_s: How old its figures are.
        holders: Its top holders, if known.
    """
    pool = track.now
    minute = track.recent(now_s, LATENCY_S)
    before = minute.points[0].snapshot if len(minute.points) > 1 else None
    lately = track.recent(now_s, RATE_S)
    return PoolView(
        process=process,
        name=pool.name,
        n_pools=pool.n_pools,
        block_size=pool.block_size,
        may_grow=pool.grow_on_exhaustion,
        n_blocks=pool.n_blocks,
        in_use=pool.blocks_in_use,
        peak=pool.peak_blocks_in_use,
        partial=pool.partial_blocks,
        limit=None if math.isinf(pool.blocks_limit) else int(pool.blocks_limit),
        slots_held=sum(pool.slots_held(name) for name in pool.streams),
        slots_used=sum(stream.slots_used for stream in pool.streams.values()),
        streams=_streams(pool),
        owners=pool.owners_active,
        oldest_owner_s=pool.oldest_owner_age_s,
        cached_blocks=pool.cached_blocks,
        idle_blocks=pool.idle_owner_blocks,
        formats={tag: n for tag, n in pool.formats.items() if n},
        storage_bytes=pool.storage.get("resident"),
        exhausted=pool.n_exhausted,
        rejected=sum(pool.rejected.values()),
        violations=sum(pool.invariant_violations.values()),
        rates=rates(lately),
        operations=_operations(pool, before, lately),
        lock_wait=latency(pool.lock_wait, None if before is None else before.lock_wait),
        lifetime=latency(pool.lease_lifetime, None if before is None else before.lease_lifetime),
        past=tuple(_usage(point.snapshot) for point in track.points[-N_PAST:]),
        holders=holders,
        age_s=age_s,
    )


def rates(track: Track[PoolSnapshot]) -> Rates | None:
    """Per second over the track; None from a single snapshot."""
    seconds = track.seconds
    if len(track.points) < 2 or seconds <= 0:
        return None
    return Rates(
        over_s=seconds,
        allocations=track.rise(lambda p: p.n_allocations) / seconds,
        frees=track.rise(lambda p: p.n_frees) / seconds,
        requests=track.rise(_requests) / seconds,
        exhaustions=track.rise(lambda p: p.n_exhausted) / seconds,
        grown=track.rise(lambda p: p.n_grown) / seconds,
        retired=track.rise(lambda p: p.n_retired) / seconds,
    )


def latency(now: HistogramSnapshot, before: HistogramSnapshot | None) -> Latency:
    """Quantiles of what was observed since `before`, or of all if that is nothing."""
    if before is not None:
        lately = difference(now, before)
        if lately.n_observed:
            return Latency(quantile(lately, 0.5), quantile(lately, 0.99), lately=True)
    return Latency(quantile(now, 0.5), quantile(now, 0.99))


def memory_view(process: ProcessSnapshot) -> MemoryView | None:
    """The memory account of a process; None where it says nothing of its memory, as a trace."""
    if process.mlx_active_bytes is None and process.resident_bytes is None:
        return None
    program = process.program
    stored = [pool.storage["resident"] for pool in process.pools if "resident" in pool.storage]
    return MemoryView(
        active=process.mlx_active_bytes,
        cache=process.mlx_cache_bytes,
        peak=process.mlx_peak_bytes,
        limit=process.mlx_limit_bytes,
        pools=sum(stored) if stored else None,
        caches=None if program is None else program.kv_bytes,
        weights=None if program is None else program.weights_bytes,
        footprint=process.footprint_bytes,
        resident=process.resident_bytes,
    )


def process_view(track: Track[ProcessSnapshot], now_s: float, age_s: float) -> ProcessView:
    """A process that is up, as its newest snapshot has it.

    Args:
        track: Its snapshots.
        now_s: The reader's clock.
        age_s: How old its figures are.
    """
    process = track.now
    named = (("", process.version), ("Python ", process.python), ("MLX ", process.mlx))
    return ProcessView(
        name=process.process,
        up=True,
        age_s=age_s,
        versions=tuple(f"{what}{version}" for what, version in named if version),
        memory=memory_view(process),
        program=program_lines(track.recent(now_s, RATE_S)),
    )


def _streams(pool: PoolSnapshot) -> tuple[StreamView, ...]:
    return tuple(
        StreamView(
            name=name,
            managed=stream.managed,
            in_use=stream.in_use,
            free=stream.free,
            slots_held=pool.slots_held(name),
            slots_used=stream.slots_used,
            exhausted=dict(stream.exhausted),
        )
        for name, stream in pool.streams.items()
    )


def _operations(
    pool: PoolSnapshot, before: PoolSnapshot | None, lately: Track[PoolSnapshot]
) -> tuple[OperationView, ...]:
    return tuple(_operation(pool, before, lately, operation) for operation in _names(pool))


def _operation(
    pool: PoolSnapshot, before: PoolSnapshot | None, lately: Track[PoolSnapshot], operation: str
) -> OperationView:
    seconds = lately.seconds
    known = len(lately.points) > 1 and seconds > 0
    timed = pool.durations.get(operation)
    return OperationView(
        operation=operation,
        calls=pool.calls.get(operation, 0),
        calls_per_s=lately.rise(lambda p: p.calls.get(operation, 0)) / seconds if known else None,
        latency=Latency()
        if timed is None
        else latency(timed, None if before is None else before.durations.get(operation)),
    )


def _names(pool: PoolSnapshot) -> Sequence[str]:
    return [name for name in OPERATIONS if name in pool.calls or name in pool.durations]


def _requests(pool: PoolSnapshot) -> int:
    return sum(stream.allocate_requests for stream in pool.streams.values())


def _usage(pool: PoolSnapshot) -> float:
    return pool.blocks_in_use / pool.n_blocks if pool.n_blocks else 0.0
