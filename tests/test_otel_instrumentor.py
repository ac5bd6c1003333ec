"""BlockPoolInstrumentor: on and off by hand, without arguments, and without harm to a program."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

pytest.importorskip("opentelemetry.instrumentation", reason="the extra otel is not installed")
pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.otel_process import run_python
from veloxquant_exporters.opentelemetry import BlockPoolInstrumentor
from veloxquant_mlx.memory import block_pool
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, notices, take_snapshot, uninstrument


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not cost a cycle."""
    monkeypatch.setattr("veloxquant_exporters.opentelemetry.feed.MAX_WAIT_S", 30.0)


@pytest.fixture
def instrumentor() -> Iterator[BlockPoolInstrumentor]:
    """Off before and after."""
    gc.collect()
    found = BlockPoolInstrumentor()
    yield found
    if found.is_instrumented_by_opentelemetry:
        found.uninstrument()


def names() -> set[str]:
    """The watched pools."""
    return {pool.name for pool in take_snapshot().pools}


def shown(reader: InMemoryMetricReader) -> set[str]:
    """The pools that a reader sees."""
    data = reader.get_metrics_data()
    return {
        str((point.attributes or {})["veloxquant.block_pool.name"])
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "veloxquant.block_pool.block.committed"
        for point in metric.data.data_points
    }


def test_present_and_coming_pools_are_shown_until_it_is_switched_off(
    instrumentor: BlockPoolInstrumentor,
) -> None:
    """Everything is put back: hooks, observers, listeners."""
    observers, listening = list(block_pool._observers), notices.listeners()
    present = BlockPoolAllocator(PoolConfig(n_blocks=4))
    own = BlockPoolAllocator(PoolConfig(n_blocks=4))
    instrument(own, name="the program's own")
    before = names()
    reader = InMemoryMetricReader()
    instrumentor.instrument(meter_provider=MeterProvider([reader], shutdown_on_exit=False))
    coming = BlockPoolAllocator(PoolConfig(n_blocks=4))
    assert len(names() - before) >= 2
    assert shown(reader) == names()
    instrumentor.uninstrument()
    assert names() == before
    assert shown(reader) == set()
    assert block_pool._observers == observers and notices.listeners() == listening
    assert present._timed is None and coming._timed is None and own._timed is not None
    uninstrument(own)


def test_it_can_be_switched_on_again(instrumentor: BlockPoolInstrumentor) -> None:
    """On the same provider, which keeps instruments for good."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    pool = BlockPoolAllocator(PoolConfig(n_blocks=4))
    for _ in range(2):
        instrumentor.instrument(meter_provider=provider)
        assert shown(reader) == names() != set()
        instrumentor.uninstrument()
        assert shown(reader) == set()
    assert pool._timed is None


def test_a_pool_that_the_program_names_afterwards_stays_its_own(
    instrumentor: BlockPoolInstrumentor,
) -> None:
    """The program's call works as without us, and switching off leaves its pool watched."""
    instrumentor.instrument(span_events=False)
    pool = BlockPoolAllocator(PoolConfig(n_blocks=4))
    instrument(pool, name="named late")
    assert "named late" in names()
    instrumentor.uninstrument()
    assert "named late" in names()
    uninstrument(pool)


def test_without_arguments_it_uses_the_global_provider_and_sets_none(
    instrumentor: BlockPoolInstrumentor,
) -> None:
    """`instrument()` does what `opentelemetry-instrument` does."""
    from opentelemetry import metrics, trace

    before = metrics.get_meter_provider(), trace.get_tracer_provider()
    instrumentor.instrument()
    assert (metrics.get_meter_provider(), trace.get_tracer_provider()) == before


def test_bad_arguments_change_nothing(instrumentor: BlockPoolInstrumentor) -> None:
    """The error comes first."""
    observers, before = list(block_pool._observers), names()
    with pytest.raises(ValueError, match="semantic"):
        instrumentor.instrument(attributes="loud")
    assert block_pool._observers == observers and names() == before
    assert not instrumentor.is_instrumented_by_opentelemetry


def test_a_pool_that_cannot_be_watched_is_made_all_the_same(
    instrumentor: BlockPoolInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its constructor never fails for our sake; the log tells."""

    def refuse(pool: BlockPoolAllocator) -> None:
        raise OSError("no room to watch")

    instrumentor.instrument(span_events=False)
    monkeypatch.setattr("veloxquant_exporters.opentelemetry.instrumentor.instrument", refuse)
    pool = BlockPoolAllocator(PoolConfig(n_blocks=4))
    assert len(pool.allocate("k", 16, 1)) == 1
    assert "no room to watch" in caplog.text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("again", [False, True])
def test_a_forked_child_is_silent_until_it_is_instrumented_again(again: bool) -> None:
    """On the program's own provider, whose reader thread the SDK revives in the child."""
    done = run_python(f"""
import os, warnings; warnings.simplefilter("ignore", DeprecationWarning)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from veloxquant_exporters.opentelemetry import BlockPoolInstrumentor
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
reader = InMemoryMetricReader()
provider = MeterProvider([reader], shutdown_on_exit=False)
BlockPoolInstrumentor().instrument(meter_provider=provider)
pool = BlockPoolAllocator(PoolConfig(n_blocks=4))
def names():
    data = reader.get_metrics_data()
    return {{m.name for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics
            if m.data.data_points and type(m.data).__name__ != "Histogram"}} if data else set()
assert "veloxquant.block_pool.block.committed" in names()
pid = os.fork()
if pid == 0:
    try:
        import faulthandler; faulthandler.dump_traceback_later(20, exit=True)
        pool.allocate("k", 16, 1)
        assert names() == set(), names()
        if {again}:
            BlockPoolInstrumentor().uninstrument()
            BlockPoolInstrumentor().instrument(meter_provider=provider)
            assert "veloxquant.block_pool.block.committed" in names()
            BlockPoolInstrumentor().uninstrument()
    except BaseException:
        import traceback; traceback.print_exc(); os._exit(3)
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert "veloxquant.block_pool.block.committed" in names()
""")
    assert done.returncode == 0, done.stderr
