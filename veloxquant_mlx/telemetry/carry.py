"""Adding snapshots: what a name had counted before its pool, and pools beyond those told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from veloxquant_mlx.telemetry.histogram import HistogramSnapshot
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot, StreamSnapshot

__all__ = ["carry", "merge"]

_COUNTERS: Final = (
    "n_allocations",
    "n_frees",
    "n_reused",
    "n_exhausted",
    "n_grown",
    "n_retired",
    "calls",
    "grow_attempts",
    "rejected",
    "owner_collisions",
    "invariant_violations",
    "durations",
    "lock_wait",
    "block_lifetime",
    "lease_lifetime",
    "block_idle",
    "request_blocks",
    "occupancy",
)
_GAUGES: Final = (
    "initial_blocks",
    "n_blocks",
    "peak_blocks_in_use",
    "partial_blocks",
    "owners_active",
    "cached_blocks",
    "formats",
    "storage",
    "storage_formats",
    "idle_owner_blocks",
    "n_pools",
)
_STREAM_COUNTERS: Final = ("allocate_requests", "shortfall", "exhausted")
_STREAM_GAUGES: Final = ("managed", "free", "slots_used", "slots_held")


def carry(now: PoolSnapshot, before: PoolSnapshot) -> PoolSnapshot:
    """`now` with the counters that earlier pools of the name had come to.

    Counters of a name never step down, whatever becomes of its pools. `initial_blocks` becomes what
    the name would have begun with, so that the blocks managed still add up.
    """
    streams = {
        name: _plus_stream(stream, before.streams.get(name), _STREAM_COUNTERS)
        for name, stream in now.streams.items()
    }
    sums = _sums(now, before, _COUNTERS)
    initial = now.n_blocks - sums["n_grown"] + sums["n_retired"]
    return replace(now, streams=streams, initial_blocks=initial, **sums)


def merge(name: str, pools: list[PoolSnapshot]) -> PoolSnapshot:
    """All of `pools` as one: counts are added, of ages the oldest, of times the earliest counts.

    Where they differ in their configuration it is told as far as it has a meaning: `block_size` is
    0, and the sum has no limit as soon as one of them has none.
    """
    sized = [_with_slots(pool) for pool in pools]
    total = replace(sized[0], name=name)
    for pool in sized[1:]:
        total = _plus_pool(total, pool)
    return total


def _plus_pool(total: PoolSnapshot, pool: PoolSnapshot) -> PoolSnapshot:
    streams = dict(total.streams)
    for name, stream in pool.streams.items():
        streams[name] = _plus_stream(stream, streams.get(name), _STREAM_COUNTERS + _STREAM_GAUGES)
    limit = total.blocks_limit + pool.blocks_limit
    newest = [x for x in (total.last_exhaustion, pool.last_exhaustion) if x is not None]
    return replace(
        total,
        streams=streams,
        block_size=total.block_size if total.block_size == pool.block_size else 0,
        grow_on_exhaustion=True,
        max_blocks=None if limit == float("inf") else int(limit),
        wall_s=min(total.wall_s, pool.wall_s),
        monotonic_ns=min(total.monotonic_ns, pool.monotonic_ns),
        sequence=total.sequence + pool.sequence,
        oldest_owner_age_s=max(total.oldest_owner_age_s, pool.oldest_owner_age_s),
        last_exhaustion=max(newest, key=lambda x: x.wall_s, default=None),
        **_sums(total, pool, _COUNTERS + _GAUGES),
    )


def _with_slots(pool: PoolSnapshot) -> PoolSnapshot:
    """`pool` with its token slots as numbers, for a sum of pools of several block sizes."""
    streams = {
        name: replace(stream, slots_held=pool.slots_held(name))
        for name, stream in pool.streams.items()
    }
    return replace(pool, streams=streams)


def _sums(a: object, b: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _plus(getattr(a, name), getattr(b, name)) for name in names}


def _plus(a: Any, b: Any) -> Any:
    if isinstance(a, HistogramSnapshot):
        return a.plus(b)
    if isinstance(a, Mapping):
        return {key: _plus(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key))
                for key in (*a, *(k for k in b if k not in a))}  # fmt: skip
    return a + b


def _plus_stream(
    stream: StreamSnapshot, other: StreamSnapshot | None, names: tuple[str, ...]
) -> StreamSnapshot:
    return stream if other is None else replace(stream, **_sums(stream, other, names))
