"""The catalogue: names by the rules of their trade, every row readable, the page made from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import CATALOGUE, Metric, PoolSnapshot, instrument, uninstrument
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot
from veloxquant_mlx.telemetry.reference import main, render
from veloxquant_mlx.telemetry.registry import Registry

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
POOL = [metric for metric in CATALOGUE if metric.read_pool is not None]
by_name = pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
BOUNDED = {
    "stream", "format", "operation", "outcome", "reason", "kind", "check", "stat", "benchmark",
    "version", "python", "mlx", "block_size", "separate_kv", "grow", "max_blocks", "n_blocks", "state",
    "hook", "mlx_lm",
}  # fmt: skip


def snapshot(**options: Any) -> PoolSnapshot:
    """Of a pool at its beginning."""
    pool = BlockPoolAllocator(PoolConfig(4, 8, **options))
    probe = instrument(pool, name=f"catalogue-{id(pool)}")
    found = probe.snapshot()
    uninstrument(pool)
    assert found is not None
    return found


@by_name
def test_names_follow_the_guides(metric: Metric) -> None:
    """Snake case with one prefix; counters end in _total; the one gauge that does is waived."""
    assert re.fullmatch(r"veloxquant_[a-z0-9_]+", metric.name)
    ends = metric.name.endswith("_total")
    if metric.name != "veloxquant_block_pool_blocks_total":
        assert ends == (metric.kind == "counter")
    assert not re.search(r"_(count|sum|bucket|created|info_total)$", metric.name)
    assert metric.help.endswith(".") and "\n" not in metric.help
    assert set(metric.labels) <= BOUNDED, "owners and other unbounded things are no labels"


@by_name
def test_rows_are_whole(metric: Metric) -> None:
    """One way to be read at most; an OpenTelemetry name has an instrument that fits."""
    assert metric.read_pool is None or metric.read_process is None
    assert (metric.otel is None) == (metric.instrument is None)
    if metric.otel is not None:
        assert re.fullmatch(r"[a-z][a-z0-9_.]*[a-z0-9]", metric.otel)
        assert (metric.kind == "counter") == (metric.instrument == "counter")
        assert (metric.kind == "histogram") == (metric.instrument == "histogram")


def test_prometheus_names_are_unique_and_otel_names_too() -> None:
    """Two rows share an OpenTelemetry name only to tell its attributes apart."""
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    points = [(m.otel, *sorted(m.attributes.items())) for m in CATALOGUE if m.otel is not None]
    assert len(set(points)) == len(points)


def test_the_contract_of_to_prometheus_is_kept() -> None:
    """The ten names and types of the page that the allocator itself writes."""
    page = BlockPoolAllocator(PoolConfig(4, 8)).stats.to_prometheus()
    promised = dict(re.findall(r"# TYPE (\S+) (\S+)", page))
    assert len(promised) == 10
    kinds = {metric.name: metric.kind for metric in CATALOGUE}
    assert {name: kinds.get(name) for name in promised} == promised


@pytest.mark.parametrize("separate_kv", [True, False])
def test_all_known_series_are_there_from_the_start(separate_kv: bool) -> None:
    """At 0, with the labels that the row says; a pool without storage has no storage series."""
    now = snapshot(separate_kv=separate_kv)
    for metric in POOL:
        assert metric.read_pool is not None
        samples = list(metric.read_pool(now))
        if "storage" in metric.name:
            assert samples == []
            continue
        assert samples, metric.name
        assert len({labels for labels, _ in samples}) == len(samples)
        for labels, value in samples:
            assert len(labels) == len(metric.labels)
            assert all(isinstance(label, str) and label for label in labels)
            assert isinstance(value, HistogramSnapshot) == (metric.kind == "histogram")
            if metric.kind == "counter":
                assert value == 0


def test_series_of_a_pool_stay_within_their_budget() -> None:
    """About 240 a pool with its buckets; a row that breaks this is a decision to be made."""
    n = 0
    for metric in POOL:
        assert metric.read_pool is not None
        for _, value in metric.read_pool(snapshot()):
            n += len(value.counts) + 2 if isinstance(value, HistogramSnapshot) else 1
    assert n <= 330


@by_name
def test_process_rows_read_a_process(metric: Metric) -> None:
    """Off any process, also one that knows little of itself."""
    if metric.read_process is not None:
        for labels, value in metric.read_process(Registry().collect()):
            assert len(labels) == len(metric.labels)
            assert isinstance(value, (int, float))


def test_the_page_is_what_the_catalogue_says() -> None:
    """Byte for byte."""
    assert main(["--check", str(PAGE)]) == 0


def test_a_page_that_was_edited_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A byte more, or no page at all, fails the check; writing it mends it."""
    page = tmp_path / "metrics.md"
    assert main(["--check", str(page)]) == 1
    page.write_text(render() + "\n", encoding="utf-8")
    assert main(["--check", str(page)]) == 1
    assert "write it anew" in capsys.readouterr().err
    assert main([str(page)]) == 0
    assert main(["--check", str(page)]) == 0


def test_every_metric_stands_on_the_page_with_its_otel_name() -> None:
    """Nothing is left out."""
    page = render()
    for metric in CATALOGUE:
        assert f"`{metric.name}`" in page
        assert metric.otel is None or f"`{metric.otel}`" in page
