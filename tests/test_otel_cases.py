"""Faults that others met with opentelemetry-python's metrics, each tried on ours."""

from __future__ import annotations

import gc
import logging
import random
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.otel_process import run_python
from veloxquant_exporters.opentelemetry import instrument_meter
from veloxquant_exporters.opentelemetry.bridge import translated
from veloxquant_exporters.opentelemetry.naming import HISTOGRAMS, OBSERVABLES, SCOPE
from veloxquant_exporters.sources import LiveSource, Reading
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import CATALOGUE, instrument, take_snapshot, uninstrument
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

P = "veloxquant.block_pool."
POOL = frozenset({(P + "name", "case")})


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not cost a cycle."""
    monkeypatch.setattr("veloxquant_exporters.opentelemetry.feed.MAX_WAIT_S", 30.0)


@pytest.fixture
def pool() -> Iterator[BlockPoolAllocator]:
    """One watched pool."""
    gc.collect()
    pool = BlockPoolAllocator(PoolConfig(n_blocks=64))
    instrument(pool, name="case")
    yield pool
    uninstrument(pool)


@pytest.fixture
def sdk_log(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """What the SDK and we logged."""
    with caplog.at_level(logging.DEBUG):
        yield caplog.records


def provider(*readers: InMemoryMetricReader) -> MeterProvider:
    """A provider of nobody else's."""
    return MeterProvider(list(readers), shutdown_on_exit=False)


def points(reader: InMemoryMetricReader) -> dict[tuple[str, frozenset[Any]], Any]:
    """One collection by name and attributes."""
    data = reader.get_metrics_data()
    return {
        (metric.name, frozenset((point.attributes or {}).items())): getattr(
            point, "value", getattr(point, "count", None)
        )
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def errors(found: dict[tuple[str, frozenset[Any]], Any]) -> dict[str, int]:
    """The self-metric by reason."""
    return {
        dict(attributes)["veloxquant.exporter.reason"]: value
        for (name, attributes), value in found.items()
        if name == "veloxquant.exporter.collect_errors"
    }


class HeldSource(LiveSource):
    """The live pools, once `free` is set: as while a pool's lock is held."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def read(self) -> Reading:
        """When it may."""
        assert self.free.wait(30)
        return super().read()


@pytest.mark.timeout(60)
def test_D01_slow_callback_does_not_kill_the_reader(
    pool: BlockPoolAllocator, sdk_log: list[logging.LogRecord]
) -> None:
    """The lock of the pool itself is held: the cycle is skipped and counted, the next one exports."""
    reader = InMemoryMetricReader()
    handle = instrument_meter(provider(reader), max_wait_s=0.05)
    with pool._lock:
        found = points(reader)
        assert (P + "block.committed", POOL) not in found
        assert errors(found)["otel_skipped"] == 1
        assert errors(points(reader))["otel_skipped"] == 2  # still one reading under way
    found = points(reader)
    while (P + "block.committed", POOL) not in found:  # the late reading ends, at some point
        found = points(reader)
    assert errors(found)["otel_skipped"] >= 2
    assert not [r for r in sdk_log if r.levelno >= logging.WARNING]
    handle.close()


@pytest.mark.timeout(60)
def test_D01_a_late_reading_is_not_shown_as_a_new_one(pool: BlockPoolAllocator) -> None:
    """What was read for a skipped cycle is as old as that cycle."""
    source, reader = HeldSource(), InMemoryMetricReader()
    handle = instrument_meter(provider(reader), source, max_wait_s=0.05)
    points(reader)
    late = handle.feed._pending
    assert late is not None
    source.free.set()
    assert late.done.wait(20)
    pool.allocate("k", 16 * 5, 1)
    assert points(reader)[P + "allocations", POOL] == pool.stats.n_allocations
    handle.close()


@pytest.mark.parametrize("n_pools", [0, 1, 3])
def test_D02_callbacks_return_observations(n_pools: int, sdk_log: list[logging.LogRecord]) -> None:
    """One observation a pool and stream; without pools nothing, and no error is logged."""
    gc.collect()
    others = {p.name for p in take_snapshot().pools}
    pools = [BlockPoolAllocator(PoolConfig(n_blocks=8)) for _ in range(n_pools)]
    for n, one in enumerate(pools):
        instrument(one, name=f"d02-{n}")
    reader = InMemoryMetricReader()
    handle = instrument_meter(provider(reader))
    found = points(reader)
    handle.close()
    shown = [dict(a) for n, a in found if n == P + "token_slot.usage"]
    assert sorted((a[P + "name"], a[P + "stream"]) for a in shown if a[P + "name"] not in others) \
        == [(f"d02-{n}", stream) for n in range(n_pools) for stream in ("k", "v")]  # fmt: skip
    assert not [r for r in sdk_log if r.name.startswith("opentelemetry")]
    for one in pools:
        uninstrument(one)


def test_D07_the_global_provider_is_left_alone() -> None:
    """Set before or after: the program's provider is the one that is global, unless we are told."""
    done = run_python("""
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from veloxquant_exporters.opentelemetry import BlockPoolInstrumentor, OtlpPipeline, instrument_meter
before = metrics.get_meter_provider()
instrument_meter(MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False))
instrument_meter()
BlockPoolInstrumentor().instrument()
pipeline = OtlpPipeline("http://127.0.0.1:1", interval_s=3600)
assert metrics.get_meter_provider() is before
mine = MeterProvider(shutdown_on_exit=False)
metrics.set_meter_provider(mine)  # is not refused
assert metrics.get_meter_provider() is mine
instrument_meter()
assert metrics.get_meter_provider() is mine
pipeline.close(0.2)
""")
    assert done.returncode == 0, done.stderr
    done = run_python("""
from opentelemetry import metrics
from veloxquant_exporters.opentelemetry import OtlpPipeline
pipeline = OtlpPipeline("http://127.0.0.1:1", interval_s=3600, set_global=True)
assert metrics.get_meter_provider() is pipeline.provider
pipeline.close(0.2)
""")
    assert done.returncode == 0, done.stderr


def test_D08_each_process_has_an_identity_of_its_own() -> None:
    """Three processes, three instances, each stable; and what the environment says is honoured."""
    code = """
from veloxquant_exporters.opentelemetry import make_resource
first, second = make_resource().attributes, make_resource().attributes
assert first["service.instance.id"] == second["service.instance.id"]
print(first["service.instance.id"])
"""
    ids = {run_python(code).stdout for _ in range(3)}
    assert len(ids) == 3 and "" not in ids
    chosen = run_python(code, {"OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=chosen"})
    assert chosen.stdout.strip() == "chosen"


def test_D09_one_mapping_of_names(pool: BlockPoolAllocator) -> None:
    """OpenTelemetry's own translation gives the names that `translated` tells, none doubled."""
    exporter = pytest.importorskip(
        "opentelemetry.exporter.prometheus", reason="the exporter to compare with is not installed"
    )
    from prometheus_client import REGISTRY, generate_latest

    read = exporter.PrometheusMetricReader()
    try:
        handle = instrument_meter(MeterProvider([read], shutdown_on_exit=False))
        page = generate_latest(REGISTRY).decode()
        handle.close()
    finally:
        read.shutdown()
    ours = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE veloxquant_")]
    assert len(ours) == len(set(ours))
    by_otel = {row.otel: row for rows in OBSERVABLES.values() for row in rows}
    # That exporter appends no `_ratio`; the receivers that do are served by the bridge rules.
    expected = {translated(row, ratio=False) for row in by_otel.values()}
    named = {name for name in ours if name not in {translated(row) for row in HISTOGRAMS}}
    assert named and named <= expected, named - expected
    for doubled in ("_total_total", "_bytes_total_bytes", "_seconds_seconds", "_bytes_bytes"):
        assert doubled not in page
    counters = {row.name for row in CATALOGUE if row.instrument == "counter"}
    assert {name for name in ours if name.endswith("_total")} <= counters


def _with_histogram(value: HistogramSnapshot) -> Reading:
    process = take_snapshot()
    pools = tuple(replace(p, lock_wait=value, block_idle=value) for p in process.pools)
    return Reading(processes=(replace(process, pools=pools),), up={"": 1})


def test_D10_histograms_have_explicit_buckets_and_take_any_spread(
    pool: BlockPoolAllocator, sdk_log: list[logging.LogRecord]
) -> None:
    """Zero, tiny and huge values, empty windows, random sequences: every cycle exports."""
    chance = random.Random(10)
    shapes: list[tuple[int, ...]] = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (5, 0, 0, 9)]
    shapes += [tuple(chance.randrange(4) for _ in range(4)) for _ in range(60)]
    seen = [0, 0, 0, 0]

    class Source(LiveSource):
        def read(self) -> Reading:
            shape = shapes.pop(0) if shapes else (0, 0, 0, 0)
            for n, gain in enumerate(shape):
                seen[n] += gain
            return _with_histogram(
                HistogramSnapshot((1e-9, 1e-3, 1.0), tuple(seen), sum(seen) * chance.random() * 1e3)
            )

    reader = InMemoryMetricReader()
    handle = instrument_meter(provider(reader), Source())
    while shapes:
        assert (P + "block.committed", POOL) in points(reader)
        if len(shapes) % 8 == 0:
            assert handle.feed.settled.wait(20)  # else only the last of several is drained
    assert handle.feed.settled.wait(20)
    found = points(reader)
    assert 0 < found[P + "lock.wait", POOL] <= sum(seen)
    assert errors(found)["otel_row"] == 0
    assert not [r for r in sdk_log if r.levelno >= logging.WARNING]
    handle.close()


def test_D10_a_broken_histogram_stops_no_other_metric(pool: BlockPoolAllocator) -> None:
    """Nor does one counter that cannot be read; both are counted."""

    class Broken(LiveSource):
        def read(self) -> Reading:
            process = take_snapshot()
            pools = [replace(p, lock_wait=None, calls=None) for p in process.pools]  # type: ignore[arg-type]
            return Reading(processes=(replace(process, pools=tuple(pools)),), up={"": 1})

    reader = InMemoryMetricReader()
    handle = instrument_meter(provider(reader), Broken())
    points(reader)
    assert handle.feed.settled.wait(20)
    found = points(reader)
    assert (P + "block.committed", POOL) in found and (P + "allocations", POOL) in found
    assert P + "operations" not in {name for name, _ in found}
    assert errors(found)["otel_row"] >= 2
    handle.close()


@pytest.mark.timeout(60)
def test_D11_threads_that_make_new_series_break_no_collection(
    sdk_log: list[logging.LogRecord],
) -> None:
    """Sixteen threads bring pools, formats and failures up while a reader collects without pause."""
    gc.collect()
    reader = InMemoryMetricReader()
    handle = instrument_meter(provider(reader))
    start, left = threading.Barrier(17), threading.Semaphore(0)
    pools: list[BlockPoolAllocator] = []

    def work(n: int) -> None:
        start.wait(20)
        for k in range(3):
            one = BlockPoolAllocator(PoolConfig(n_blocks=32))
            instrument(one, name=f"d11-{n}-{k}")
            pools.append(one)
            for fmt in ("fp16", "int8", "int4", "mystery"):
                one.allocate("k", 16, f"{k}-{fmt}", fmt)
            one.free_all(f"{k}-int8")
        left.release()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    start.wait(20)
    n_done = 0
    while n_done < 16:
        points(reader)
        n_done += left.acquire(timeout=0.01)
    for thread in threads:
        thread.join(20)
    found = points(reader)
    done = {dict(a).get(P + "name") for n, a in found if n == P + "allocations"}
    assert {f"d11-{n}-{k}" for n in range(16) for k in range(3)} <= done
    assert not [r for r in sdk_log if r.levelno >= logging.WARNING]
    handle.close()
    for one in pools:
        uninstrument(one)


@pytest.mark.timeout(60)
def test_D12_hooks_that_fire_during_a_collection_do_not_deadlock(pool: BlockPoolAllocator) -> None:
    """A finalizer releases blocks in the middle of a callback, as the collector of garbage would."""

    class Cache:
        def __init__(self, owner: str) -> None:
            pool.allocate("k", 16, owner)
            weakref.finalize(self, pool.free_all, owner)
            self.cycle = self

    class Source(LiveSource):
        def read(self) -> Reading:
            Cache("in the feed")
            gc.collect(0)
            return super().read()

    reader = InMemoryMetricReader()
    handle = instrument_meter(provider(reader), Source())
    for n in range(20):
        Cache(f"dropped-{n}")
        gc.collect(0)
        found = points(reader)
    assert found[P + "frees", POOL] > 0
    assert pool.stats.blocks_in_use() == 0
    handle.close()


def test_D13_no_attribute_is_none(sdk_log: list[logging.LogRecord]) -> None:
    """An unnamed pool, a process without label and MLX: what is unknown is left out."""
    gc.collect()
    pool = BlockPoolAllocator(PoolConfig(n_blocks=8))
    instrument(pool)

    class Nameless(LiveSource):
        def read(self) -> Reading:
            process = take_snapshot()
            return Reading(processes=(replace(process, mlx="", process=""),), up={"": 1})

    reader = InMemoryMetricReader()
    handle = instrument_meter(provider(reader), Nameless())
    points(reader)
    assert handle.feed.settled.wait(20)
    found = points(reader)
    assert found
    for name, attributes in found:
        for key, value in attributes:
            assert isinstance(value, str) and value, (name, key)
    assert not [r for r in sdk_log if r.levelno >= logging.WARNING]
    handle.close()
    uninstrument(pool)


def test_D14_one_scope_and_one_family_each(pool: BlockPoolAllocator) -> None:
    """Two pools, two readers and a second instrumentation: every family once, in one scope."""
    second = BlockPoolAllocator(PoolConfig(n_blocks=8))
    instrument(second, name="case-2")
    readers = [InMemoryMetricReader(), InMemoryMetricReader()]
    shared = provider(*readers)
    instrument_meter(shared)
    handle = instrument_meter(shared)
    for reader in readers:
        data = reader.get_metrics_data()
        assert data is not None
        (resource,) = data.resource_metrics
        (scope,) = resource.scope_metrics
        assert scope.scope.name == SCOPE
        names = [metric.name for metric in scope.metrics]
        assert len(names) == len(set(names))
    handle.close()
    uninstrument(second)


@pytest.mark.timeout(60)
def test_D15_a_collection_lets_other_threads_run(pool: BlockPoolAllocator) -> None:
    """Allocations go on during collections, of 16 pools each: neither the pool nor Python is held.

    How long the worst delay is, benchmarks/bench_otel.py prints.
    """
    pools = [BlockPoolAllocator(PoolConfig(n_blocks=8)) for _ in range(15)]
    for n, one in enumerate(pools):
        instrument(one, name=f"d15-{n}")
    reader = InMemoryMetricReader()
    handle = instrument_meter(provider(reader))
    stop, n_pairs = threading.Event(), [0]

    def serve() -> None:
        while not stop.is_set():
            pool.allocate("k", 16, "busy")
            pool.free_all("busy")
            n_pairs[0] += 1

    thread = threading.Thread(target=serve)
    thread.start()
    interval = sys.getswitchinterval()
    during = []
    try:
        while n_pairs[0] == 0:
            points(reader)
        for _ in range(10):
            before = n_pairs[0]
            points(reader)
            during.append(n_pairs[0] - before)
    finally:
        stop.set()
        thread.join(20)
    assert all(during), during
    assert sys.getswitchinterval() == interval
    handle.close()
    for one in pools:
        uninstrument(one)


def test_the_global_provider_of_this_process_was_never_set() -> None:
    """None of the above did."""
    assert type(metrics.get_meter_provider()).__name__ == "_ProxyMeterProvider"
