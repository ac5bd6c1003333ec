"""instrument_meter: the catalogue on a provider, in both temporalities, and out again."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry import metrics
from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader

from veloxquant_exporters.opentelemetry import instrument_meter
from veloxquant_exporters.opentelemetry.drain import MAX_RECORDS
from veloxquant_exporters.opentelemetry.naming import HISTOGRAMS, OBSERVABLES, SCOPE, style_of
from veloxquant_exporters.sources import LiveSource, Reading
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import CATALOGUE, instrument, take_snapshot, uninstrument
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

DELTA = dict.fromkeys(
    (sdk.Counter, sdk.ObservableCounter, sdk.Histogram), AggregationTemporality.DELTA
)
Points = dict[tuple[str, frozenset[tuple[str, str]]], Any]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not cost a cycle."""
    monkeypatch.setattr("veloxquant_exporters.opentelemetry.feed.MAX_WAIT_S", 30.0)


@pytest.fixture
def pool() -> Iterator[BlockPoolAllocator]:
    """A watched pool that has seen work, a failure among it."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=64))
    instrument(pool, name="otel-main")
    for owner in range(200):
        pool.allocate("k", 40, owner)
        if owner >= 8:
            pool.free_all(owner - 8)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("v", 16 * 999, "greedy")
    yield pool
    uninstrument(pool)


def reader(*, delta: bool = False) -> InMemoryMetricReader:
    """A reader of one temporality."""
    return InMemoryMetricReader(preferred_temporality=DELTA if delta else None)  # type: ignore[arg-type]


def metrics_of(reader: InMemoryMetricReader) -> list[Any]:
    """Every metric of one collection, of our scope only."""
    data = reader.get_metrics_data()
    if data is None:
        return []
    (resource,) = data.resource_metrics
    assert [scope.scope.name for scope in resource.scope_metrics] == [SCOPE]
    return list(resource.scope_metrics[0].metrics)


def points_of(reader: InMemoryMetricReader) -> Points:
    """Every number of one collection by name and attributes."""
    found: Points = {}
    for metric in metrics_of(reader):
        for point in metric.data.data_points:
            key = (metric.name, frozenset(point.attributes.items()))
            assert key not in found
            found[key] = getattr(point, "value", None) if hasattr(point, "value") else point
    return found


def drained(reader: InMemoryMetricReader, handle: Any) -> Points:
    """A collection, after the drain of an earlier one has ended."""
    reader.collect()
    assert handle.feed.settled.wait(20)
    return points_of(reader)


def test_every_name_of_the_catalogue_is_there_once(pool: BlockPoolAllocator) -> None:
    """One scope, no name twice, units and kinds as the catalogue has them."""
    read = reader()
    handle = instrument_meter(MeterProvider([read]))
    drained(read, handle)
    found = metrics_of(read)
    names = [metric.name for metric in found]
    assert len(names) == len(set(names))
    # macOS only, and beside MLX; storage, MLX and vqmon run's program need what they are about
    absent = {"veloxquant.process.phys_footprint", "veloxquant.process.unaccounted"}
    others = (".mlx.", ".storage.", ".program.")
    expected = {n for n in OBSERVABLES if not any(part in n for part in others)} - absent
    assert expected <= set(names)
    by_name = {row.otel: row for row in CATALOGUE if row.otel}
    for metric in found:
        row = by_name[metric.name]
        assert metric.unit == row.ucum
        kind = type(metric.data).__name__
        assert kind == {"gauge": "Gauge", "histogram": "Histogram"}.get(row.instrument or "", "Sum")
        if kind == "Sum":
            assert metric.data.is_monotonic is (row.instrument == "counter")
    handle.close()


def test_values_are_those_of_the_snapshot(pool: BlockPoolAllocator) -> None:
    """Every number of a quiesced pool equals what the catalogue reads off a snapshot."""
    read = reader()
    with instrument_meter(MeterProvider([read])):
        found = points_of(read)
    (snapshot,) = [p for p in take_snapshot().pools if p.name == "otel-main"]
    compared = 0
    for row in CATALOGUE:
        if row.read_pool is None or row.otel is None or row.instrument == "histogram":
            continue
        for values, value in row.read_pool(snapshot):
            if row.otel.endswith("oldest_age") or not math.isfinite(value):  # type: ignore[arg-type]
                continue
            attributes = {"veloxquant.block_pool.name": "otel-main", **row.attributes}
            attributes |= {
                f"veloxquant.block_pool.{label}": v
                for label, v in zip(row.labels, values, strict=True)
            }
            assert found[row.otel, frozenset(attributes.items())] == value, row.name
            compared += 1
    assert compared > 50


def test_usage_sums_to_what_is_committed(pool: BlockPoolAllocator) -> None:
    """Points of one instrument never count a block twice."""
    read = reader()
    with instrument_meter(MeterProvider([read])):
        found = points_of(read)
    ours = {k: v for k, v in found.items() if ("veloxquant.block_pool.name", "otel-main") in k[1]}
    usage = sum(v for (name, _), v in ours.items() if name == "veloxquant.block_pool.block.usage")
    (committed,) = [v for (n, _), v in ours.items() if n == "veloxquant.block_pool.block.committed"]
    assert usage == committed == 64


def test_delta_points_add_up_and_are_never_negative(pool: BlockPoolAllocator) -> None:
    """What a delta reader sees over several cycles is what a cumulative one sees at the end."""
    cumulative, delta = reader(), reader(delta=True)
    handle = instrument_meter(MeterProvider([cumulative, delta]))
    sums: dict[Any, float] = {}
    for n in range(4):
        pool.allocate("v", 16, f"late-{n}")
        pool.free_all(f"late-{n}")
        for metric in metrics_of(delta):
            if type(metric.data).__name__ == "Sum" and metric.data.is_monotonic:
                assert metric.data.aggregation_temporality is AggregationTemporality.DELTA
                for point in metric.data.data_points:
                    assert point.value >= 0, metric.name
                    key = (metric.name, frozenset(point.attributes.items()))
                    sums[key] = sums.get(key, 0) + point.value
    final = points_of(cumulative)
    name = ("veloxquant.block_pool.name", "otel-main")
    for key, total in sums.items():
        if name in key[1]:
            assert final[key] == total, key
    handle.close()


class Stepping:
    """A source whose counters step back once, as a sum over pools not told apart may."""

    labels_processes = False

    def __init__(self) -> None:
        self.shown = [5, 9, 3, 4, 12]

    def read(self) -> Reading:
        """The next reading."""
        from dataclasses import replace

        process = take_snapshot()
        pools = [replace(p, n_allocations=self.shown[0]) for p in process.pools[:1]]
        del self.shown[0]
        return Reading(processes=(replace(process, pools=tuple(pools)),), up={"": 1})


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_count_that_steps_back_gives_no_negative_point(
    pool: BlockPoolAllocator, is_delta: bool
) -> None:
    """The highest value so far stands until it is passed."""
    read = reader(delta=is_delta)
    with instrument_meter(MeterProvider([read]), Stepping()):
        seen = [
            value
            for _ in range(5)
            for (name, _), value in points_of(read).items()
            if name == "veloxquant.block_pool.allocations"
        ]
    assert seen == ([5, 4, 0, 0, 3] if is_delta else [5, 9, 9, 9, 12])


def test_close_shows_nothing_and_a_second_start_shows_all_again(pool: BlockPoolAllocator) -> None:
    """An SDK never lets go of an instrument: the second start must find the first one's."""
    read = reader()
    provider = MeterProvider([read])
    first = instrument_meter(provider)
    before = points_of(read)
    first.close()
    first.close()
    assert [k for k in points_of(read) if "histogram" not in k[0] and k[0] in OBSERVABLES] == []
    second = instrument_meter(provider)
    assert set(before) <= set(points_of(read))
    third = instrument_meter(provider)  # replaces the second
    assert not second.feed.alive and third.feed.alive
    assert set(before) <= set(points_of(read))
    first.close()  # closing an old one takes nothing from the new one
    assert set(before) <= set(points_of(read))
    third.close()


def test_a_provider_that_is_dropped_is_not_kept_alive(pool: BlockPoolAllocator) -> None:
    """Providers are remembered weakly."""
    from veloxquant_exporters.opentelemetry import meter

    gc.collect()
    n_before = len(meter._made)
    provider = MeterProvider([reader()], shutdown_on_exit=False)
    instrument_meter(provider).close()
    assert len(meter._made) == n_before + 1
    del provider
    gc.collect()
    assert len(meter._made) <= n_before


def test_unbounded_limit_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """OpenTelemetry knows no infinite number; the SDK would log each one."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=4, grow_on_exhaustion=True, max_blocks=None))
    instrument(pool, name="otel-endless")
    read = reader()
    with caplog.at_level(logging.DEBUG), instrument_meter(MeterProvider([read])):
        found = points_of(read)
    mine = {n for n, a in found if ("veloxquant.block_pool.name", "otel-endless") in a}
    assert "veloxquant.block_pool.block.limit" not in mine
    assert "veloxquant.block_pool.block.committed" in mine
    assert [r for r in caplog.records if r.name.startswith("opentelemetry")] == []
    uninstrument(pool)


def test_prometheus_style_names_attributes_like_labels(
    pool: BlockPoolAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By argument or by environment; anything else is refused."""
    for argument, variable in (("prometheus", ""), (None, "prometheus")):
        monkeypatch.setenv("VELOXQUANT_OTEL_ATTRIBUTES", variable)
        read = reader()
        with instrument_meter(MeterProvider([read]), attributes=argument):
            names = {key for _, attributes in points_of(read) for key, _ in attributes}
        assert {"pool", "stream", "reason"} <= names
        assert "veloxquant.block_pool.name" not in names
    monkeypatch.setenv("VELOXQUANT_OTEL_ATTRIBUTES", "shouting")
    with pytest.raises(ValueError, match="VELOXQUANT_OTEL_ATTRIBUTES"):
        style_of(None)
    with pytest.raises(ValueError, match="argument"):
        instrument_meter(MeterProvider(), attributes="loud")


class Processes(LiveSource):
    """A source of several processes, as a sidecar has."""

    labels_processes = True

    def read(self) -> Reading:
        """Two processes with the same pools."""
        from dataclasses import replace

        live = take_snapshot()
        both = tuple(replace(live, process=name) for name in ("w1", "w2"))
        return Reading(processes=both, up={"w1": 1, "w2": 1}, errors={"unreadable": 3})


def test_processes_are_told_apart_and_source_errors_are_shown(pool: BlockPoolAllocator) -> None:
    """A sidecar's series carry the process; its own failures carry none."""
    read = reader()
    with instrument_meter(MeterProvider([read]), Processes()):
        found = points_of(read)
    name = "veloxquant.block_pool.allocations"
    processes = {dict(a).get("veloxquant.process") for n, a in found if n == name}
    assert processes == {"w1", "w2"}
    own = frozenset({("veloxquant.exporter.reason", "unreadable")})
    assert found["veloxquant.exporter.collect_errors", own] == 3


def test_histograms_are_drained_within_the_budget(pool: BlockPoolAllocator) -> None:
    """On a foreign provider: at most 500 records a cycle, in their own buckets, said to be sampled."""
    for owner in range(1000, 6000):
        pool.allocate("k", 16, owner)
        pool.free_all(owner)
    read = reader()
    handle = instrument_meter(MeterProvider([read]))
    drained(read, handle)
    found = {m.name: m for m in metrics_of(read)}
    histograms = [found[row.otel] for row in HISTOGRAMS if row.otel in found]
    points = [point for m in histograms for point in m.data.data_points]
    n_fed = sum(point.count for point in points)
    n_dropped = handle._made.drain.n_dropped
    assert n_fed > 0 and n_dropped > 0
    (snapshot,) = [p for p in take_snapshot().pools if p.name == "otel-main"]
    ours = {"veloxquant.block_pool.name": "otel-main"}
    (blocks,) = [
        point
        for point in found["veloxquant.block_pool.request.blocks"].data.data_points
        if dict(point.attributes) == ours
    ]
    truth = snapshot.request_blocks
    assert tuple(blocks.explicit_bounds) == truth.bounds
    for fed, true in zip(blocks.bucket_counts, truth.counts, strict=True):
        assert fed <= true
    assert all("Sampled" in m.description for m in histograms)
    handle.close()


def test_a_drain_of_many_feeds_exactly_the_budget() -> None:
    """Whatever the number of buckets, and every n-th observation whichever its bucket."""
    from veloxquant_exporters.opentelemetry.drain import Drain, _gains

    pool = BlockPoolAllocator(PoolConfig(n_blocks=8))
    instrument(pool, name="otel-drain")
    base = take_snapshot()
    (snapshot,) = [p for p in base.pools if p.name == "otel-drain"]
    from dataclasses import replace

    big = HistogramSnapshot((0.5, 1.0, 2.0), (10_000, 5_000, 4_000, 1_000), 20_000.0)
    pools = (replace(snapshot, lock_wait=big),)
    read = reader()
    drain = Drain(MeterProvider([read]).get_meter(SCOPE), "semantic")
    drain.drain(Reading(processes=(replace(base, pools=pools),), up={"": 1}))
    (metric,) = [m for m in metrics_of(read) if m.name == "veloxquant.block_pool.lock.wait"]
    (point,) = metric.data.data_points
    assert point.count == MAX_RECORDS
    assert [round(c / MAX_RECORDS, 2) for c in point.bucket_counts] == [0.5, 0.25, 0.2, 0.05]
    assert drain.n_dropped == 20_000 - MAX_RECORDS
    few = HistogramSnapshot((1, 2, 4), (3, 0, 2, 0), 11.0)
    fed = list(_gains(few, None))
    assert math.isclose(sum(value * n for value, n in fed), 11.0)
    assert [n for _, n in fed] == [3, 2]
    uninstrument(pool)


def test_the_global_stand_in_hands_over_without_doubling() -> None:
    """Instrumenting before a program sets its provider, and again after, shows each series once."""
    code = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from veloxquant_exporters.opentelemetry import instrument_meter
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument

pool = BlockPoolAllocator(PoolConfig(n_blocks=8)); instrument(pool, name="early")
before = metrics.get_meter_provider()
first = instrument_meter()
assert metrics.get_meter_provider() is before, "the global provider was touched"
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader], shutdown_on_exit=False))
def committed():
    data = reader.get_metrics_data()
    return [p.value for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics
            if m.name == "veloxquant.block_pool.block.committed" for p in m.data.data_points]
assert committed() == [8]
second = instrument_meter()
assert committed() == [8]
first.close()
assert committed() == [8]
second.close()
assert reader.get_metrics_data() is None
"""
    from tests.otel_process import run_python

    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_opentelemetry() -> None:
    """Only the use of a name does, and an unknown one is an AttributeError."""
    from tests.otel_process import run_python

    done = run_python(
        "import sys, veloxquant_exporters.opentelemetry as o\n"
        "assert 'opentelemetry' not in sys.modules\n"
        "assert 'opentelemetry.sdk' not in sys.modules\n"
        "try: o.nothing\n"
        "except AttributeError: pass\n"
        "else: raise SystemExit('no error')\n"
        "o.instrument_meter\n"
        "assert 'opentelemetry.metrics' in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr


def test_the_global_provider_is_only_read() -> None:
    """In this process too: nothing here ever set one."""
    before = metrics.get_meter_provider()
    instrument_meter().close()
    assert metrics.get_meter_provider() is before
