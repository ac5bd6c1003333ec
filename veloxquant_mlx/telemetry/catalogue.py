"""The catalogue: one table of every metric, from which all else is made.

The Prometheus collector, the OpenTelemetry instruments, docs/metrics.md, and the checks of boards
and rules iterate `CATALOGUE`. A metric is added here and nowhere else.

Names: Prometheus names follow its naming guide; the ten of `AllocationStats.to_prometheus` are
fixed by contract, of which `veloxquant_block_pool_blocks_total` is a gauge against the guide (a
documented waiver; boards use `veloxquant_block_pool_blocks_managed`). OpenTelemetry names are such
that the standard translation of a counter or histogram gives its Prometheus name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from veloxquant_mlx.telemetry.histogram import HistogramSnapshot
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot, StreamSnapshot

__all__ = ["CATALOGUE", "SIDECAR_ROWS", "Instrument", "Kind", "Metric", "Sample", "Value"]

Kind = Literal["gauge", "counter", "histogram"]
Instrument = Literal["counter", "updowncounter", "gauge", "histogram"]
Value = float | HistogramSnapshot
# Label values, without the labels of the scope, and the value.
Sample = tuple[tuple[str, ...], Value]

P: Final = "veloxquant_block_pool_"
O: Final = "veloxquant.block_pool."  # noqa: E741 - the table's own abbreviation


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row.

    Attributes:
        name: Prometheus name; a counter's ends in `_total`.
        kind: Prometheus type.
        help: What it is, and what it is not.
        labels: Labels beside those of the scope ("pool" for a pool metric; "process" comes from
            the source and is not named here).
        otel: OpenTelemetry name, or None where OpenTelemetry has it otherwise.
        instrument: OpenTelemetry instrument; all but histograms are observable.
        ucum: UCUM unit of the OpenTelemetry instrument.
        attributes: OpenTelemetry attributes that are the same for every point.
        read_pool, read_process: How it is read off a snapshot: exactly one is set, or none for
            what the exporter or the benchmarks know themselves.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    otel: str | None = None
    instrument: Instrument | None = None
    ucum: str = "1"
    attributes: Mapping[str, str] = field(default_factory=dict)
    read_pool: Callable[[PoolSnapshot], Iterable[Sample]] | None = None
    read_process: Callable[[ProcessSnapshot], Iterable[Sample]] | None = None

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The scope's labels and the metric's own."""
        return ("pool", *self.labels) if self.read_pool is not None else self.labels


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


_POOL: Final = (
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


# -- the process ---------------------------------------------------------------------------------


def _process(
    read: Callable[[ProcessSnapshot], float | None],
) -> Callable[[ProcessSnapshot], Iterable[Sample]]:
    def samples(process: ProcessSnapshot) -> Iterable[Sample]:
        value = read(process)
        return [] if value is None else [((), value)]

    return samples


_MLX: Final = "veloxquant.mlx.memory."

_PROCESS: Final = (
    Metric(
        name="veloxquant_mlx_memory_active_bytes",
        kind="gauge",
        help="Bytes of live MLX arrays.",
        otel=_MLX + "usage",
        instrument="updowncounter",
        ucum="By",
        attributes={"veloxquant.mlx.memory.state": "active"},
        read_process=_process(lambda p: p.mlx_active_bytes),
    ),
    Metric(
        name="veloxquant_mlx_memory_cache_bytes",
        kind="gauge",
        help="Bytes that MLX keeps for reuse; given back under pressure or by clear_cache().",
        otel=_MLX + "usage",
        instrument="updowncounter",
        ucum="By",
        attributes={"veloxquant.mlx.memory.state": "cached"},
        read_process=_process(lambda p: p.mlx_cache_bytes),
    ),
    Metric(
        name="veloxquant_mlx_memory_peak_bytes",
        kind="gauge",
        help="High-water mark of active bytes only, without the cache.",
        otel=_MLX + "usage_peak",
        instrument="gauge",
        ucum="By",
        read_process=_process(lambda p: p.mlx_peak_bytes),
    ),
    Metric(
        name="veloxquant_mlx_memory_limit_bytes",
        kind="gauge",
        help="Bytes that MLX should stay within: the device's recommended working set, or its "
        "memory. Absent where the device does not tell.",
        otel=_MLX + "limit",
        instrument="updowncounter",
        ucum="By",
        read_process=_process(lambda p: p.mlx_limit_bytes),
    ),
    Metric(
        name="veloxquant_process_resident_memory_bytes",
        kind="gauge",
        help="Resident memory of the serving process.",
        otel="process.memory.usage",
        instrument="updowncounter",
        ucum="By",
        read_process=_process(lambda p: p.resident_bytes),
    ),
    Metric(
        name="veloxquant_process_phys_footprint_bytes",
        kind="gauge",
        help="Physical footprint as Activity Monitor shows it; macOS only.",
        otel="veloxquant.process.phys_footprint",
        instrument="updowncounter",
        ucum="By",
        read_process=_process(lambda p: p.footprint_bytes),
    ),
    Metric(
        name="veloxquant_exporter_snapshot_timestamp_seconds",
        kind="gauge",
        help="When the process' snapshot was taken, in seconds since the epoch.",
        read_process=_process(lambda p: p.wall_s),
    ),
    Metric(
        name="veloxquant_exporter_collect_errors_total",
        kind="counter",
        help="Failures of the telemetry itself, by reason; the serving code never sees them.",
        labels=("reason",),
        otel="veloxquant.exporter.collect_errors",
        instrument="counter",
        ucum="{error}",
        read_process=lambda p: [((reason,), n) for reason, n in p.errors.items()],
    ),
    Metric(
        name="veloxquant_exporter_dropped_events_total",
        kind="counter",
        help="Events and pools that telemetry left out to stay within its bounds, by reason.",
        labels=("reason",),
        otel="veloxquant.exporter.dropped_events",
        instrument="counter",
        ucum="{event}",
        read_process=lambda p: [((reason,), n) for reason, n in p.dropped.items()],
    ),
    Metric(
        name="veloxquant_telemetry_overhead_seconds_total",
        kind="counter",
        help="Seconds of CPU spent on telemetry: samples and snapshots as timed, plain calls "
        "estimated. Its rate is the fraction of a core.",
        otel="veloxquant.telemetry.overhead",
        instrument="counter",
        ucum="s",
        read_process=_process(lambda p: p.overhead_s),
    ),
    Metric(
        name="veloxquant_build_info",
        kind="gauge",
        help="1, with versions as labels.",
        labels=("version", "python", "mlx"),
        read_process=lambda p: [((p.version, p.python, p.mlx), 1)],
    ),
)

# -- what an exporter or a benchmark knows itself ------------------------------------------------

_EXPORTER: Final = (
    Metric(
        name="veloxquant_exporter_up",
        kind="gauge",
        help="1 if the process' snapshot could be read, else 0.",
    ),
    Metric(
        name="veloxquant_exporter_collect_duration_seconds",
        kind="gauge",
        help="Seconds that making this page took.",
    ),
)

# What a sidecar alone knows: the files of its folder.
SIDECAR_ROWS: Final = (
    Metric(
        name="veloxquant_exporter_snapshot_files",
        kind="gauge",
        help="Files in the snapshot folder by the state of their process; unreadable ones apart.",
        labels=("state",),
    ),
    Metric(
        name="veloxquant_exporter_removed_files_total",
        kind="counter",
        help="Files of ended processes that the sidecar removed from the snapshot folder.",
    ),
)

_BENCH: Final = (
    Metric(
        name="veloxquant_bench_duration_seconds",
        kind="gauge",
        help="Seconds a call, by benchmark, size and statistic.",
        labels=("benchmark", "n_blocks", "stat"),
    ),
    Metric(
        name="veloxquant_bench_regression_ratio",
        kind="gauge",
        help="Time over that of the base it was compared with; above 1 is slower.",
        labels=("benchmark",),
    ),
    Metric(
        name="veloxquant_bench_scaling_exponent",
        kind="gauge",
        help="Slope of log time over log size.",
        labels=("benchmark",),
    ),
    Metric(
        name="veloxquant_bench_guard_ok",
        kind="gauge",
        help="1 if the scaling guard passed.",
        labels=("benchmark",),
    ),
    Metric(
        name="veloxquant_bench_last_success_timestamp_seconds",
        kind="gauge",
        help="When the benchmark last ran to its end, in seconds since the epoch.",
        labels=("benchmark",),
    ),
)

CATALOGUE: Final[tuple[Metric, ...]] = (*_POOL, *_PROCESS, *_EXPORTER, *SIDECAR_ROWS, *_BENCH)
