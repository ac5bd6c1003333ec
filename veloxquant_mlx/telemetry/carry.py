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
)
_STREAM_COUNTERS: Final = ("allocate_requests", "shortfall", "exhausted")
_STREAM_GAUGES: Final = ("managed", "free", "slots_used")


def carry(now: PoolSnapshot, before: PoolSnapshot) -> PoolSnapshot:
    """`now` with the counters that an earlier pool of the name had come to.

    Counters of a name never step down, whatever becomes of its pools.
    """
    streams = {
        name: _plus_stream(stream, before.streams.get(name), _STREAM_COUNTERS)
        for name, stream in now.streams.items()
    }
    return replace(now, streams=streams, **_sums(now, before, _COUNTERS))


def merge(name: str, pools: list[PoolSnapshot]) -> PoolSnapshot:
    """All of `pools` as one. A token slot stays one whatever the block sizes: blocks are added."""
    total = replace(pools[0], name=name)
    for pool in pools[1:]:
        streams = dict(total.streams)
        for stream_name, stream in pool.streams.items():
            streams[stream_name] = _plus_stream(
                stream, streams.get(stream_name), _STREAM_COUNTERS + _STREAM_GAUGES
            )
        total = replace(
            total,
            streams=streams,
            oldest_owner_age_s=max(total.oldest_owner_age_s, pool.oldest_owner_age_s),
            **_sums(total, pool, _COUNTERS + _GAUGES),
        )
    return total


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
