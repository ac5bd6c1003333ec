"""A metrics page, read back into the snapshots that it was made from.

The inverse of the catalogue: what the page tells is as in the snapshot, what it does not tell is 0
or absent. A page of an older version lacks series; they count as untold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample  # noqa: TC002 - loaded with the parsers anyway

from veloxquant_exporters.sources import Reading
from veloxquant_exporters.top.page_program import read_program
from veloxquant_exporters.top.page_series import Series
from veloxquant_exporters.top.source import SourceError
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot, StreamSnapshot

__all__ = ["read_page"]

PREFIX: Final = "veloxquant_"
P: Final = "veloxquant_block_pool_"
_MANAGED: Final = P + "blocks_managed"
_STORAGE: Final = {
    "resident": "storage_bytes",
    "fp16_equivalent": "storage_fp16_equivalent_bytes",
    "in_use": "storage_in_use_bytes",
    "free_cached": "storage_free_cached_bytes",
    "logical": "storage_logical_bytes",
    "retired": "storage_retired_bytes",
    "written": "storage_written_bytes",
    "evaluated": "storage_evaluated_bytes",
}

Scope = tuple[str, str | None]  # process, and pool or None


def read_page(text: str, content_type: str, wall_s: float) -> Reading:
    """The processes of a metrics page, of a process itself or of a sidecar.

    Args:
        text: The page.
        content_type: Without parameters.
        wall_s: When it was fetched; for a page that does not tell when it was made.

    Raises:
        SourceError: It is no metrics page, or none with block pools.
    """
    samples = list(_samples(text, content_type))
    labelled = any("process" in sample.labels for sample in samples)
    scopes: dict[Scope, Series] = {}
    for sample in samples:
        scope = (sample.labels.get("process", ""), sample.labels.get("pool"))
        scopes.setdefault(scope, Series()).add(sample)
    processes = _processes(scopes, labelled=labelled, wall_s=wall_s)
    up = {
        process: int(series.number("veloxquant_exporter_up") or 0)
        for (process, pool), series in scopes.items()
        if pool is None and series.number("veloxquant_exporter_up") is not None
    }
    errors: dict[str, int] = {}
    if labelled:  # the sidecar's own state has no process' name
        up.pop("", None)
        own = scopes.get(("", None), Series())
        errors = own.by("veloxquant_exporter_collect_errors_total", "reason")
    return Reading(processes=processes, up=up, errors=errors)


def _samples(text: str, content_type: str) -> Iterable[Sample]:
    """Our samples; the rest of a page, e.g. a server's own metrics, is not parsed."""
    ours = [line for line in text.split("\n") if _is_ours(line)]
    openmetrics = content_type == "application/openmetrics-text"
    if not ours:
        raise SourceError(_what_it_is(text, content_type))
    page = "\n".join(ours) + "\n"
    try:
        if openmetrics:
            families = list(parse_openmetrics(page + "# EOF\n"))  # type: ignore[no-untyped-call]
        else:
            families = list(parse_text(page))
    except (ValueError, KeyError, IndexError) as error:
        raise SourceError(f"is no metrics page: {' '.join(str(error).split())[:120]}") from (error)
    return [sample for family in families for sample in family.samples]


def _is_ours(line: str) -> bool:
    return line.startswith((PREFIX, f"# TYPE {PREFIX}", f"# HELP {PREFIX}"))


def _what_it_is(text: str, content_type: str) -> str:
    """Why a page has nothing for us, in a line."""
    start = text.lstrip()[:200].lower()
    if content_type == "text/html" or start.startswith(("<!doctype", "<html")):
        return "is HTML, no metrics page; that is usually at /metrics"
    try:
        n = sum(len(family.samples) for family in parse_text(text[: 2**20]))
    except (ValueError, KeyError, IndexError):
        return "is no metrics page"
    if not n:
        return "is an empty page"
    return "has metrics, but none of block pools; is it the right port?"


def _processes(
    scopes: Mapping[Scope, Series], *, labelled: bool, wall_s: float
) -> tuple[ProcessSnapshot, ...]:
    pools: dict[str, list[PoolSnapshot]] = {}
    for (process, pool), series in scopes.items():
        # Of a dead process a sidecar goes on telling what it counted, and nothing else.
        if pool is not None and _MANAGED in series.samples:
            taken_s = scopes.get((process, None), Series()).number(_TAKEN) or wall_s
            pools.setdefault(process, []).append(_pool(pool, series, taken_s))
    names = {process for process, pool in scopes if pool is None}
    live = [
        name
        for name in sorted(names | set(pools))
        if name in pools or _TAKEN in scopes[name, None].samples
    ]
    return tuple(
        _process(name, scopes.get((name, None), Series()), tuple(pools.get(name, ())), wall_s)
        for name in live
        if name or not labelled or name in pools
    )


_TAKEN: Final = "veloxquant_exporter_snapshot_timestamp_seconds"


def _process(
    name: str, series: Series, pools: tuple[PoolSnapshot, ...], wall_s: float
) -> ProcessSnapshot:
    build = series.labels("veloxquant_build_info")
    return ProcessSnapshot(
        process=name,
        sequence=0,
        wall_s=series.number(_TAKEN) or wall_s,
        version=build.get("version", ""),
        python=build.get("python", ""),
        mlx=build.get("mlx", ""),
        resident_bytes=series.whole("veloxquant_process_resident_memory_bytes"),
        footprint_bytes=series.whole("veloxquant_process_phys_footprint_bytes"),
        mlx_active_bytes=series.whole("veloxquant_mlx_memory_active_bytes"),
        mlx_cache_bytes=series.whole("veloxquant_mlx_memory_cache_bytes"),
        mlx_peak_bytes=series.whole("veloxquant_mlx_memory_peak_bytes"),
        mlx_limit_bytes=series.whole("veloxquant_mlx_memory_limit_bytes"),
        errors=series.by("veloxquant_exporter_collect_errors_total", "reason"),
        dropped=series.by("veloxquant_exporter_dropped_events_total", "reason"),
        overhead_s=series.number("veloxquant_telemetry_overhead_seconds_total") or 0.0,
        pools=pools,
        program=read_program(series),
    )


def _pool(name: str, series: Series, taken_s: float) -> PoolSnapshot:
    config = series.labels(P + "config_info")
    limit = config.get("max_blocks", "none")
    n_blocks = series.whole(_MANAGED) or 0
    grown, retired = _count(series, "grown_total"), _count(series, "retired_total")
    operations = series.by(P + "operations_total", "operation")
    return PoolSnapshot(
        name=name,
        sequence=0,
        wall_s=taken_s,
        monotonic_ns=0,
        block_size=_count(series, "block_size_tokens"),
        separate_kv=config.get("separate_kv") == "true",
        grow_on_exhaustion=config.get("grow", _grows(series, n_blocks)) == "true",
        max_blocks=int(limit) if limit.isdecimal() else None,
        initial_blocks=n_blocks - grown + retired,
        n_blocks=n_blocks,
        n_allocations=_count(series, "allocations_total"),
        n_frees=_count(series, "frees_total"),
        n_reused=_count(series, "reused_total"),
        n_exhausted=_count(series, "exhausted_total"),
        n_grown=grown,
        n_retired=retired,
        peak_blocks_in_use=_count(series, "peak_blocks_in_use"),
        partial_blocks=_count(series, "partial_blocks"),
        streams=_streams(series),
        owners_active=_count(series, "owners_active"),
        oldest_owner_age_s=series.number(P + "oldest_active_owner_age_seconds") or 0.0,
        cached_blocks=_count(series, "cached_blocks"),
        formats=series.by(P + "format_blocks_in_use", "format"),
        calls=operations,
        grow_attempts=series.by(P + "grow_attempts_total", "outcome"),
        rejected=series.by(P + "rejected_blocks_total", "reason"),
        owner_collisions=_count(series, "owner_collisions_total"),
        invariant_violations=series.by(P + "invariant_violations_total", "check"),
        durations={
            operation: series.histogram(P + "operation_duration_seconds", operation=operation)
            for operation in operations
        },
        lock_wait=series.histogram(P + "lock_wait_seconds"),
        block_lifetime=series.histogram(P + "block_lifetime_seconds"),
        block_idle=series.histogram(P + "block_idle_seconds"),
        request_blocks=series.histogram(P + "request_blocks"),
        occupancy=series.histogram(P + "occupancy_ratio"),
        storage=_storage(series),
        lease_lifetime=series.histogram(P + "lease_lifetime_seconds"),
        idle_owner_blocks=_count(series, "idle_owner_blocks"),
        storage_formats=series.by(P + "storage_format_bytes", "format"),
        n_pools=_count(series, "pools") or 1,
    )


def _count(series: Series, name: str) -> int:
    return series.whole(P + name) or 0


def _grows(series: Series, n_blocks: int) -> str:
    """Of pools that are summed, which have no one configuration: whether more can come."""
    limit = series.number(P + "blocks_limit")
    return "true" if limit is not None and limit > n_blocks else "false"


def _streams(series: Series) -> dict[str, StreamSnapshot]:
    free = series.by(P + "free_blocks", "stream")
    in_use = series.by(P + "stream_blocks_in_use", "stream")
    held = series.by(P + "token_slots_allocated", "stream")
    used = series.by(P + "token_slots_used", "stream")
    asked = series.by(P + "allocate_requests_total", "stream")
    short = series.by(P + "shortfall_blocks_total", "stream")
    exhausted: dict[str, dict[str, int]] = {}
    for labels, value in series.samples.get(P + "exhaustions_total", ()):
        by_reason = exhausted.setdefault(labels.get("stream", ""), {})
        by_reason[labels.get("reason", "")] = round(value)
    return {
        name: StreamSnapshot(
            managed=free.get(name, 0) + in_use.get(name, 0),
            free=free.get(name, 0),
            slots_used=used.get(name, 0),
            allocate_requests=asked.get(name, 0),
            shortfall=short.get(name, 0),
            exhausted=exhausted.get(name, {}),
            slots_held=held.get(name),
        )
        for name in sorted(free.keys() | in_use.keys())
    }


def _storage(series: Series) -> dict[str, int]:
    found = {kind: series.whole(P + name) for kind, name in _STORAGE.items()}
    return {kind: n for kind, n in found.items() if n is not None}
