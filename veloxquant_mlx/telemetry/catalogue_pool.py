"""Rows of the catalogue that are read off a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from veloxquant_mlx.telemetry.catalogue_row import Instrument, Metric, Sample, Value
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot, StreamSnapshot

__all__ = ["POOL_ROWS"]

P: Final = "veloxquant_block_pool_"
O: Final = "veloxquant.block_pool."  # noqa: E741 - the table's own abbreviation


# -- how values are read off a pool's snapshot ---------------------------------------------------


def _one(read: Callable[[PoolSnapshot], Value]) -> Callable[[PoolSnapshot], Iterable[Sample]]:
    return lambda pool: [((), read(pool))]


def _streams(
    read: Callable[[PoolSnapshot, StreamSnapshot], Value],
) -> Callable[[PoolSnapshot], Iterable[Sample]]:
    return lambda pool: [((name,), read(pool, s)) for name, s in pool.streams.items()]


def _by(
    read: Callable[[PoolSnapshot], Mapping[str, Value]],
) -> Callable[[PoolSnapshot], Iterable[Sample]]:
    return lambda pool: [((key,), value) for key, value in read(pool).items()]


def _stored(kind: str) -> Callable[[PoolSnapshot], Iterable[Sample]]:
    # A pool without a storage has no such series: 0 would say that it has an empty one.
    return lambda pool: [((), pool.storage[kind])] if kind in pool.storage else []


def _exhaustions(pool: PoolSnapshot) -> Iterable[Sample]:
    return [
        ((name, reason), n)
        for name, stream in pool.streams.items()
        for reason, n in stream.exhausted.items()
    ]


def _config(pool: PoolSnapshot) -> Iterable[Sample]:
    if pool.n_pools > 1:  # several pools have several configurations
        return []
    limit = "none" if pool.max_blocks is None else str(pool.max_blocks)
    values = (
        str(pool.block_size),
        str(pool.separate_kv).lower(),
        str(pool.grow_on_exhaustion).lower(),
        limit,
    )
    return [(values, 1)]


# -- rows ----------------------------------------------------------------------------------------


def _gauge(
    name: str,
    help: str,  # noqa: A002 - as Prometheus calls it
    read: Callable[[PoolSnapshot], Iterable[Sample]],
    *,
    labels: tuple[str, ...] = (),
    otel: str | None = None,
    instrument: Instrument = "updowncounter",
    ucum: str = "{block}",
    attributes: Mapping[str, str] | None = None,
) -> Metric:
    return Metric(
        name=P + name,
        kind="gauge",
        help=help,
        labels=labels,
        otel=None if otel is None else O + otel,
        instrument=None if otel is None else instrument,
        ucum=ucum,
        attributes=attributes or {},
        read_pool=read,
    )


def _counter(
    name: str,
    help: str,  # noqa: A002
    read: Callable[[PoolSnapshot], Iterable[Sample]],
    *,
    labels: tuple[str, ...] = (),
    ucum: str = "{block}",
    otel: str | None = None,
) -> Metric:
    return Metric(
        name=f"{P}{name}_total",
        kind="counter",
        help=help,
        labels=labels,
        otel=O + (otel or name.replace("_", ".", 1)),
        instrument="counter",
        ucum=ucum,
        read_pool=read,
    )


def _histogram(
    name: str,
    help: str,  # noqa: A002
    read: Callable[[PoolSnapshot], Iterable[Sample]],
    *,
    otel: str,
    ucum: str = "s",
    labels: tuple[str, ...] = (),
) -> Metric:
    return Metric(
        name=P + name,
        kind="histogram",
        help=help,
        labels=labels,
        otel=O + otel,
        instrument="histogram",
        ucum=ucum,
        read_pool=read,
    )


POOL_ROWS: Final = (
    # The contract of AllocationStats.to_prometheus.
    _gauge("blocks_in_use", "Blocks held by owners.", _one(lambda p: p.blocks_in_use)),
    _gauge(
        "blocks_total",
        "Blocks managed. A gauge in spite of its name, which the to_prometheus() contract fixes; "
        "prefer veloxquant_block_pool_blocks_managed.",
        _one(lambda p: p.n_blocks),
    ),
    _gauge(
        "fragmentation",
        "Partly filled blocks over managed blocks, 0 to 1. Not waste: see token_slots.",
        _one(lambda p: p.fragmentation),
        otel="fragmentation",
        instrument="gauge",
        ucum="1",
    ),
    _gauge(
        "peak_blocks_in_use",
        "Most blocks held at one time since the pool was made; never reset.",
        _one(lambda p: p.peak_blocks_in_use),
        otel="block.usage_peak",
        instrument="gauge",
    ),
    _counter("allocations", "Blocks handed out (blocks, not calls).",
             _one(lambda p: p.n_allocations)),
    _counter("frees", "Blocks given back (blocks, not calls).", _one(lambda p: p.n_frees)),
    _counter("reused", "Blocks handed out that had been handed out before.",
             _one(lambda p: p.n_reused)),
    _counter("exhausted", "Allocation calls that failed for want of free blocks.",
             _one(lambda p: p.n_exhausted), ucum="{request}"),
    _counter("grown", "Blocks added by growth.", _one(lambda p: p.n_grown)),
    _counter("retired", "Blocks removed by shrink().", _one(lambda p: p.n_retired)),
    # Capacity.
    _gauge("blocks_managed", "Blocks managed: free and in use.", _one(lambda p: p.n_blocks),
           otel="block.committed"),
    _gauge(
        "blocks_limit",
        "Most blocks the pool can come to: max_blocks, or the managed blocks if it may not grow; "
        "+Inf when its growth is unbounded.",
        _one(lambda p: p.blocks_limit),
        otel="block.limit",
    ),
    _gauge("block_size_tokens", "Token slots a block; absent where pools=other differ in it.",
           lambda p: [((), p.block_size)] if p.block_size else [],
           otel="block.size", instrument="gauge", ucum="{token}"),
    _gauge("config_info", "1, with the pool's configuration as labels.", _config, ucum="1",
           labels=("block_size", "separate_kv", "grow", "max_blocks")),
    _gauge("free_blocks", "Free blocks by stream.", _streams(lambda _, s: s.free),
           labels=("stream",), otel="block.usage",
           attributes={"veloxquant.block_pool.block.state": "idle"}),
    _gauge("stream_blocks_in_use", "Blocks held, by stream.", _streams(lambda _, s: s.in_use),
           labels=("stream",), otel="block.usage",
           attributes={"veloxquant.block_pool.block.state": "used"}),
    _gauge("partial_blocks", "Held blocks that are neither empty nor full.",
           _one(lambda p: p.partial_blocks), otel="block.partial"),
    _gauge("cached_blocks", "Blocks that prompt-cache entries keep on purpose; evictable.",
           _one(lambda p: p.cached_blocks), otel="block.cached"),
    _gauge("token_slots_allocated", "Token slots in held blocks, by stream.",
           lambda p: [((name,), p.slots_held(name)) for name in p.streams], labels=("stream",),
           otel="token_slot.committed", ucum="{token}"),
    _gauge(
        "token_slots_used",
        "Token slots that hold a token, by stream; the true fill, kept by the caches.",
        _streams(lambda _, s: s.slots_used),
        labels=("stream",),
        otel="token_slot.usage",
        ucum="{token}",
    ),
    _gauge("format_blocks_in_use", "Held blocks by format tag; unknown tags are 'other'.",
           _by(lambda p: p.formats), labels=("format",), otel="format.block.usage"),
    # Owners.
    _gauge("owners_active", "Owners that hold blocks or are registered.",
           _one(lambda p: p.owners_active), otel="owner.active", ucum="{owner}"),
    _gauge(
        "oldest_active_owner_age_seconds",
        "Seconds since the owner that holds blocks longest began, prompt-cache entries apart; 0 "
        "without one.",
        _one(lambda p: p.oldest_owner_age_s),
        otel="owner.oldest_age",
        instrument="gauge",
        ucum="s",
    ),
    _gauge("idle_owner_blocks",
           "Blocks of owners, among the 256 oldest, that took and filled nothing for five minutes.",
           _one(lambda p: p.idle_owner_blocks), otel="block.idle_owner"),
    _gauge("pools", "Pools behind this label: 1, or how many are summed as pool=other.",
           _one(lambda p: p.n_pools), otel="pool.count", ucum="{pool}"),
    # Pressure.
    _counter("operations", "Calls that changed something, by operation (calls, not blocks).",
             _by(lambda p: p.calls), labels=("operation",), ucum="{call}"),
    _counter("allocate_requests", "Allocation calls by stream, failed ones too.",
             _streams(lambda _, s: s.allocate_requests), labels=("stream",), ucum="{request}"),
    _counter(
        "exhaustions",
        "Failed allocation calls by stream and reason: full (may not grow), stranded (the other "
        "stream has enough free blocks), limit (growth is at max_blocks).",
        _exhaustions,
        labels=("stream", "reason"),
        ucum="{request}",
    ),
    _counter("shortfall_blocks", "Blocks that failed allocations lacked, by stream.",
             _streams(lambda _, s: s.shortfall), labels=("stream",)),
    _counter("grow_attempts", "Attempts to grow, by outcome.", _by(lambda p: p.grow_attempts),
             labels=("outcome",), ucum="{attempt}"),
    # Integrity.
    _counter("rejected_blocks", "Blocks in frees and uses that the books refused, by reason.",
             _by(lambda p: p.rejected), labels=("reason",)),
    _counter("double_frees", "Blocks freed twice: the rejected ones that were repeated or free.",
             _one(lambda p: p.rejected["repeated"] + p.rejected["free"]), otel="double_frees"),
    _counter("owner_collisions", "Registrations of an owner that was active already.",
             _one(lambda p: p.owner_collisions), ucum="{error}"),
    _counter("invariant_violations", "Broken invariants that the self-check found, by check.",
             _by(lambda p: p.invariant_violations), labels=("check",), ucum="{violation}"),
    # Storage.
    _gauge("storage_bytes", "Bytes of the pool's MLX buffers, in use and cached.",
           _stored("resident"), otel="storage.usage", ucum="By"),
    _gauge("storage_fp16_equivalent_bytes", "What the buffers would take as fp16.",
           _stored("fp16_equivalent"), otel="storage.fp16_equivalent", ucum="By"),
    _gauge("storage_in_use_bytes", "Bytes of the buffers of held blocks.", _stored("in_use"),
           otel="storage.in_use", ucum="By"),
    _gauge("storage_free_cached_bytes", "Bytes of the buffers of free blocks, kept for reuse.",
           _stored("free_cached"), otel="storage.free_cached", ucum="By"),
    _gauge("storage_logical_bytes", "What the rows in held blocks would take, packed.",
           _stored("logical"), otel="storage.logical", ucum="By"),
    _gauge("storage_retired_bytes",
           "Bytes of buffers of ids that the pool no longer manages; 0 when all is well.",
           _stored("retired"), otel="storage.retired", ucum="By"),
    _gauge("storage_written_bytes", "Bytes of the buffers that rows were written to.",
           _stored("written"), otel="storage.written", ucum="By"),
    _gauge("storage_evaluated_bytes",
           "Bytes of the buffers that the storage evaluated: memory for sure, MLX being lazy.",
           _stored("evaluated"), otel="storage.evaluated", ucum="By"),
    _gauge("storage_format_bytes", "Bytes of the buffers by format: as stored, a byte a code.",
           _by(lambda p: p.storage_formats), labels=("format",), otel="storage.format.usage",
           ucum="By"),
    # Sampled.
    _histogram("operation_duration_seconds",
               "Seconds in a pool call, without the wait for the lock; sampled and weighted.",
               _by(lambda p: p.durations), otel="operation.duration", labels=("operation",)),
    _histogram("lock_wait_seconds",
               "Seconds a pool call waited for the lock; sampled and weighted.",
               _one(lambda p: p.lock_wait), otel="lock.wait"),
    _histogram("block_lifetime_seconds",
               "Seconds from the first hand-out to an owner to the release, by block: the lifetime "
               "of its lease, which blocks taken later did not see in full; sampled and weighted.",
               _one(lambda p: p.block_lifetime), otel="block.lifetime"),
    _histogram("lease_lifetime_seconds",
               "Seconds an owner held blocks of one stream and format; sampled and weighted.",
               _one(lambda p: p.lease_lifetime), otel="lease.lifetime"),
    _histogram("block_idle_seconds", "Seconds from release to reuse, of some blocks; a sample, not a count.",
               _one(lambda p: p.block_idle), otel="block.idle"),
    _histogram("request_blocks", "Blocks an allocation call took; sampled and weighted.",
               _one(lambda p: p.request_blocks), otel="request.blocks", ucum="{block}"),
    _histogram("occupancy_ratio", "Blocks in use over managed, after each allocation; sampled and weighted.",
               _one(lambda p: p.occupancy), otel="occupancy", ucum="1"),
)  # fmt: skip
