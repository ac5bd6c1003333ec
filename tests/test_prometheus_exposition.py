"""Plain families as text: the same bytes that prometheus-client writes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

pytest.importorskip("prometheus_client", reason="the extra `prometheus` brings it")
pytest.importorskip("h11", reason="the extra `prometheus` brings it")

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Enum, Histogram, Info, Summary
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import generate_latest as reference_text
from prometheus_client.metrics_core import Metric  # noqa: TC002 - loaded with the families anyway
from prometheus_client.openmetrics.exposition import generate_latest as reference_openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from veloxquant_exporters.prometheus import PoolCollector
from veloxquant_exporters.prometheus.exposition import render_plain
from veloxquant_exporters.prometheus.page import OPENMETRICS, TEXT, render
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument
from veloxquant_mlx.telemetry import registry as watched


class Fixed(Collector):
    """Gives the same families each time."""

    def __init__(self, *families: Metric) -> None:
        self.families = families

    def collect(self) -> Iterator[Metric]:
        """The families."""
        return iter(self.families)


def reference(families: Collector, *, openmetrics: bool) -> bytes:
    """What prometheus-client makes of them."""
    if not openmetrics:
        return reference_text(families)
    page: bytes = reference_openmetrics(families)  # type: ignore[no-untyped-call]
    return page


def same(families: Collector) -> bool:
    """Whether both formats come out as prometheus-client writes them, and by the short way."""
    return all(
        render_plain(families.collect(), openmetrics=openmetrics)
        == reference(families, openmetrics=openmetrics)
        for openmetrics in (False, True)
    )


texts = st.text('ab"\\\n{},=# \x00é☃\U0001f600', max_size=8)
names = st.text("abz_", min_size=1, max_size=4).map(lambda text: f"{text}x")
label_names = st.text("abz_", min_size=1, max_size=3)
# -0.0 is written as 0.0, which no value here is the worse for.
numbers = st.one_of(st.integers(-(10**18), 10**18), st.floats()).map(lambda value: value or 0.0)
exemplars = st.builds(
    Exemplar,
    st.dictionaries(label_names, texts, max_size=2),
    st.floats(),
    st.none() | st.floats(0, 1e10),
)


@st.composite
def any_family(draw: st.DrawFn) -> Metric:
    """A gauge, counter or histogram with samples."""
    labels = draw(st.lists(label_names, max_size=3, unique=True))
    name, text = draw(names), draw(texts)
    points = draw(st.lists(st.tuples(*(texts for _ in labels), numbers), max_size=3))
    kind = draw(st.sampled_from(["gauge", "counter", "histogram"]))
    if kind == "gauge":
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for *values, number in points:
            gauge.add_metric(values, number)
        return gauge
    if kind == "counter":
        counter = CounterMetricFamily(name, text, labels=labels)
        for *values, number in points:
            counter.add_metric(values, number, exemplar=draw(st.none() | exemplars))
        return counter
    histogram = HistogramMetricFamily(name, text, labels=labels)
    for *values, number in points:
        histogram.add_metric(values, [("1.0", 2), ("+Inf", number)], sum_value=number)
    return histogram


@given(st.lists(any_family(), max_size=4))
def test_any_plain_families_come_out_the_same(families: list[Metric]) -> None:
    """Whatever names, texts, values and exemplars there are."""
    assert same(Fixed(*families))


@pytest.mark.parametrize(
    "value",
    [0, 1, -1, 0.1, 1e6, 1234567.0, 1e7, 12345678.9, 1e21, 1e-7, math.inf, -math.inf, math.nan],
)
def test_values_are_written_as_go_does(value: float) -> None:
    """The exponents begin where Prometheus' own parser expects them."""
    gauge = GaugeMetricFamily("a", "A.")
    gauge.add_metric([], value)
    assert same(Fixed(gauge))


def test_the_pools_page_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page this is for: all of it, with an exemplar and an infinite limit, goes the short way."""
    monkeypatch.setattr(watched, "_registry", watched.Registry())
    pools = [BlockPoolAllocator(PoolConfig(n_blocks=8)) for _ in range(3)]
    pools.append(BlockPoolAllocator(PoolConfig(n_blocks=0, grow_on_exhaustion=True)))
    for number, pool in enumerate(pools):
        instrument(pool, name=f'pool "{number}"\\')
        pool.allocate("k", 40, "x")
    with pytest.raises(BlockPoolExhaustedError):
        pools[0].allocate("k", 1_000, 'r"1')
    assert same(Fixed(*PoolCollector().collect()))


ODD = ("created", "summary", "info", "enum", "unit", "name", "colon", "label", "time")


def odd_registry(kind: str) -> CollectorRegistry:
    """A registry with something that is not plain."""
    registry = CollectorRegistry()
    if kind == "created":
        Counter("a", "A.", registry=registry).inc(exemplar={"b": "c"})
        Histogram("h", "H.", registry=registry).observe(1, exemplar={"b": "c"})
    elif kind == "summary":
        Summary("a", "A.", registry=registry).observe(1)
    elif kind == "info":
        Info("a", "A.", registry=registry).info({"b": "c"})
    elif kind == "enum":
        Enum("a", "A.", states=["b", "c"], registry=registry).state("c")
    else:
        gauge = GaugeMetricFamily(
            {"name": "a.b", "colon": "a:b"}.get(kind, "a"),
            "A.",
            labels=["c.d" if kind == "label" else "c"],
            unit="seconds" if kind == "unit" else "",
        )
        gauge.add_metric(["e"], 1, timestamp=17 if kind == "time" else None)
        registry.register(Fixed(gauge))
    return registry


@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_plain_is_left_to_prometheus_client(kind: str) -> None:
    """One such family, and the whole page is prometheus-client's."""
    registry = odd_registry(kind)
    for openmetrics in (False, True):
        assert render_plain(registry.collect(), openmetrics=openmetrics) is None
    assert render(registry, TEXT) == reference(registry, openmetrics=False)
    assert render(registry, OPENMETRICS) == reference(registry, openmetrics=True)


def test_the_comparison_sees_a_difference() -> None:
    """A page that is off by one character is not the same."""
    gauge = GaugeMetricFamily("a", "A.", value=1)
    page = render_plain([gauge], openmetrics=False)
    assert page == reference(Fixed(gauge), openmetrics=False)
    assert page is not None
    assert page.replace(b"1.0", b"1.1") != reference(Fixed(gauge), openmetrics=False)
