"""Span events: what befalls a pool stands on the span during which it happened."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from veloxquant_exporters.opentelemetry import SpanEvents
from veloxquant_exporters.opentelemetry.spans import MAX_EVENTS, dropped_span_events
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, take_snapshot, uninstrument

P = "veloxquant.block_pool."


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Ended spans; events are on."""
    events = SpanEvents()
    events.start()
    exporter = InMemorySpanExporter()
    yield exporter
    events.stop()


def tracer(exporter: InMemorySpanExporter, **options: Any) -> trace.Tracer:
    """A tracer that is nobody else's."""
    provider = TracerProvider(shutdown_on_exit=False, **options)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


@pytest.fixture
def pool() -> Iterator[BlockPoolAllocator]:
    """A watched pool that may grow to 16 blocks."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=8, grow_on_exhaustion=True, max_blocks=16))
    instrument(pool, name="spans")
    yield pool
    uninstrument(pool)


def test_exhaustion_and_growth_stand_on_the_current_span(
    spans: InMemorySpanExporter, pool: BlockPoolAllocator
) -> None:
    """With stream, blocks and owner, in the order in which they happened, the error after them."""

    def generate() -> None:
        with tracer(spans).start_as_current_span("generate"):
            pool.allocate("k", 16 * 6, "request-1")
            pool.allocate("v", 16 * 99, "request-2")

    with pytest.raises(BlockPoolExhaustedError):
        generate()
    (ended,) = spans.get_finished_spans()
    by_name = {event.name: dict(event.attributes or {}) for event in ended.events}
    assert by_name[P + "grown"] == {
        P + "name": "spans",
        P + "operation": "allocate",
        P + "stream": "k",
        P + "blocks": 2,
        P + "owner": "request-1",
    }
    assert by_name[P + "exhausted"][P + "owner"] == "request-2"
    assert by_name[P + "exhausted"][P + "stream"] == "v"
    assert by_name[P + "exhausted"][P + "blocks"] == 99
    assert ended.end_time is not None
    times = [e.timestamp for e in ended.events if e.name.startswith(P)]
    assert times == sorted(times)
    assert ended.start_time <= times[0] <= times[-1] <= ended.end_time  # type: ignore[operator]
    assert "exception" in by_name  # what the SDK itself records


def test_a_slow_operation_stands_on_the_span(
    spans: InMemorySpanExporter, pool: BlockPoolAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its duration; here every call that is timed is slow."""
    monkeypatch.setattr("veloxquant_mlx.telemetry.hooks.SLOW_NS", 0)
    with tracer(spans).start_as_current_span("generate"):
        pool.allocate("k", 16 * 3, "request-1")
    (ended,) = spans.get_finished_spans()
    slow = [e for e in ended.events if e.name == P + "slow_operation"]
    assert slow and slow[0].attributes is not None
    assert slow[0].attributes[P + "operation"] == "allocate"
    assert isinstance(slow[0].attributes[P + "duration"], float)


def test_nothing_is_done_where_no_span_records(
    spans: InMemorySpanExporter, pool: BlockPoolAllocator
) -> None:
    """Without a span, and under one that is not sampled."""
    n_errors = take_snapshot().errors["hook"]
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("v", 16 * 99, 1)
    unsampled = tracer(spans, sampler=sampling.ALWAYS_OFF)
    with pytest.raises(BlockPoolExhaustedError), unsampled.start_as_current_span("quiet") as span:
        pool.allocate("v", 16 * 99, 1)
    assert "end" not in vars(span)
    assert spans.get_finished_spans() == ()
    assert take_snapshot().errors["hook"] == n_errors


def test_events_go_to_the_span_of_the_calling_thread(
    spans: InMemorySpanExporter, pool: BlockPoolAllocator
) -> None:
    """Context decides, not which span is newest."""
    outer = tracer(spans)

    def other() -> None:
        with outer.start_as_current_span("other"):
            pool.allocate("k", 16, "other")

    with outer.start_as_current_span("mine"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        with pytest.raises(BlockPoolExhaustedError):
            pool.allocate("v", 16 * 99, "mine")
    n_events = {s.name: len(s.events) for s in spans.get_finished_spans()}
    assert n_events == {"other": 0, "mine": 1}


def test_events_of_one_span_are_bounded(
    spans: InMemorySpanExporter, pool: BlockPoolAllocator
) -> None:
    """A request that fails for ever costs a bounded list, and the rest is counted."""
    before = dropped_span_events()
    with tracer(spans).start_as_current_span("stubborn"):
        for _ in range(MAX_EVENTS + 5):
            with pytest.raises(BlockPoolExhaustedError):
                pool.allocate("v", 16 * 99, 1)
    (ended,) = spans.get_finished_spans()
    assert len(ended.events) == MAX_EVENTS
    assert dropped_span_events() - before == 5


def test_stopped_means_silent(pool: BlockPoolAllocator) -> None:
    """After `stop` nothing new arrives; what waited still does."""
    exporter = InMemorySpanExporter()
    events = SpanEvents()
    events.start()
    with tracer(exporter).start_as_current_span("half"):
        with pytest.raises(BlockPoolExhaustedError):
            pool.allocate("v", 16 * 99, "before")
        events.stop()
        with pytest.raises(BlockPoolExhaustedError):
            pool.allocate("v", 16 * 99, "after")
    (ended,) = exporter.get_finished_spans()
    assert [dict(e.attributes or {})[P + "owner"] for e in ended.events] == ["before"]


@pytest.mark.timeout(30)
def test_a_span_whose_lock_is_held_holds_up_no_allocation(
    spans: InMemorySpanExporter, pool: BlockPoolAllocator
) -> None:
    """The hazard itself: another thread is inside the span, waiting for the pool."""
    with tracer(spans).start_as_current_span("shared") as span:
        failed = threading.Event()
        context = trace.set_span_in_context(span)

        def exhaust() -> None:
            from opentelemetry import context as contexts

            contexts.attach(context)
            try:
                pool.allocate("v", 16 * 99, "elsewhere")
            except BlockPoolExhaustedError:
                failed.set()

        with span._lock:  # type: ignore[attr-defined] # as while it takes an attribute
            thread = threading.Thread(target=exhaust)
            thread.start()
            assert failed.wait(10), "an allocation waited for a span"
        thread.join(10)
    (ended,) = spans.get_finished_spans()
    assert [e.name for e in ended.events] == [P + "exhausted"]


def test_a_span_is_collected_as_ever(spans: InMemorySpanExporter, pool: BlockPoolAllocator) -> None:
    """What waits in a span keeps neither it nor its owner alive beyond its end."""
    import weakref

    span = tracer(spans).start_span("gone")
    with trace.use_span(span, end_on_exit=True), pytest.raises(BlockPoolExhaustedError):
        pool.allocate("v", 16 * 99, 1)
    weakly = weakref.ref(span)
    assert "end" not in vars(span)
    spans.clear()
    del span
    gc.collect()
    assert weakly() is None
