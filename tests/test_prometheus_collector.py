"""PoolCollector: what stands on the page, in both formats, whatever happens to what is read."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the extra `prometheus` brings it")
pytest.importorskip("h11", reason="the extra `prometheus` brings it")

from prometheus_client import CollectorRegistry, Gauge

from tests.metrics_pages import (
    CONTRACT,
    WAIVER,
    P,
    Series,
    checked,
    families_of,
    lint,
    page_of,
    series_of,
)
from veloxquant_exporters.prometheus import PoolCollector
from veloxquant_exporters.prometheus.exemplars import MAX_CHARS
from veloxquant_exporters.prometheus.families import PAGE_ROWS
from veloxquant_exporters.prometheus.page import OPENMETRICS, TEXT, Offer, choose
from veloxquant_exporters.sources import LiveSource, Reading
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError, OwnerAlreadyActiveError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import (
    CATALOGUE,
    PoolSnapshot,
    ProcessSnapshot,
    instrument,
    take_snapshot,
    uninstrument,
)
from veloxquant_mlx.telemetry import registry as watched
from veloxquant_mlx.telemetry.catalogue import SIDECAR_ROWS
from veloxquant_mlx.telemetry.snapshot import Exhaustion

BOTH = pytest.mark.parametrize("offer", [TEXT, OPENMETRICS], ids=["text", "openmetrics"])
UP = "veloxquant_exporter_up"
ERRORS = "veloxquant_exporter_collect_errors_total"


@pytest.fixture(autouse=True)
def _nothing_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with a process that watches no pool and remembers none."""
    monkeypatch.setattr(watched, "_registry", watched.Registry())


class Clock:
    """Steps by a second each time it is read."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def __call__(self) -> float:
        """The next second."""
        return float(next(self._ticks))


class Source:
    """Gives what it was told to, as a sidecar would."""

    def __init__(
        self,
        *processes: ProcessSnapshot,
        up: Mapping[str, int] | None = None,
        errors: Mapping[str, int] | None = None,
        labels_processes: bool = True,
    ) -> None:
        self.labels_processes = labels_processes
        self.reading = Reading(
            processes=processes,
            up={process.process: 1 for process in processes} if up is None else up,
            errors=errors or {},
        )

    def read(self) -> Reading:
        """What it was told to."""
        return self.reading


def collecting(source: Any = None, **kwargs: Any) -> CollectorRegistry:
    """A registry with nothing but a collector."""
    registry = CollectorRegistry()
    registry.register(PoolCollector(source, **kwargs))
    return registry


def watched_pool(name: str = "a", **config: Any) -> BlockPoolAllocator:
    """A pool that is instrumented."""
    pool = BlockPoolAllocator(PoolConfig(**{"n_blocks": 8, **config}))
    instrument(pool, name=name)
    return pool


def exercise(pool: BlockPoolAllocator) -> None:
    """Make everything happen once that a series counts."""
    stream = pool._streams[0].name
    blocks = pool.allocate(stream, 20, "one", format="int4")
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate(stream, 16 * 10_000, "two")
    with pytest.raises(OwnerAlreadyActiveError):
        pool.register_owner("one")
    pool.free(blocks)
    pool.free(blocks)
    pool.allocate(stream, 5, "three", format="a tag of my own")
    pool.free_all("three")
    pool.shrink(stream, 2)


def edited_process(edit: Callable[[PoolSnapshot], PoolSnapshot], process: str) -> ProcessSnapshot:
    """This process' snapshot under another name, its pools edited."""
    snapshot = take_snapshot()
    return dataclasses.replace(
        snapshot, process=process, pools=tuple(edit(pool) for pool in snapshot.pools)
    )


def value(series: Series, name: str, **labels: str) -> float:
    """The value of one series; KeyError if it is not there."""
    return series[name, tuple(sorted(labels.items()))]


# -- what is there -------------------------------------------------------------------------------


@BOTH
def test_the_contract_names_are_there_from_the_start(offer: Offer) -> None:
    """The ten names of to_prometheus() stand on the page of a pool that did nothing yet."""
    pool = watched_pool()
    series = series_of(page_of(collecting(), offer), offer.content_type)
    got = {name: value(series, name, pool="a") for name in CONTRACT}
    assert got == dict.fromkeys(CONTRACT, 0.0) | {P + "blocks_total": 8.0}
    assert pool.stats.n_blocks == 8


@BOTH
@pytest.mark.parametrize("separate_kv", [True, False])
def test_every_series_is_there_from_the_start(offer: Offer, separate_kv: bool) -> None:
    """What a pool goes through adds no series: a rate over the first event needs a zero before it."""
    pool = watched_pool(separate_kv=separate_kv)
    registry = collecting()
    before = series_of(page_of(registry, offer), offer.content_type)
    exercise(pool)
    after = series_of(page_of(registry, offer), offer.content_type)
    assert before.keys() == after.keys()
    assert sum(before[key] != after[key] for key in before) > 20


def test_without_a_pool_the_process_is_there() -> None:
    """No pool is no error: the page says so, with the telemetry's own series at 0."""
    text = page_of(collecting())
    series = series_of(text)
    assert value(series, UP) == 1
    assert {key[0] for key in series}.isdisjoint(CONTRACT)
    assert {v for (name, _), v in series.items() if name == ERRORS} == {0}


def test_values_are_those_of_the_books() -> None:
    """The page tells what the pool itself tells, and the next page what it tells then."""
    pool = watched_pool()
    registry = collecting()
    exercise(pool)
    for owner in ("x", "y"):
        pool.allocate("v", 16, owner)
        series = series_of(page_of(registry))
        stats = pool.stats.snapshot()
        told = {
            "blocks_in_use": stats.blocks_in_use(),
            "blocks_total": stats.n_blocks,
            "fragmentation": stats.fragmentation(),
            "peak_blocks_in_use": stats.peak_blocks_in_use,
            "allocations_total": stats.n_allocations,
            "frees_total": stats.n_frees,
            "reused_total": stats.n_reused,
            "exhausted_total": stats.n_exhausted,
            "grown_total": stats.n_grown,
            "retired_total": stats.n_retired,
        }
        assert {name: value(series, P + name, pool="a") for name in told} == told


def test_the_rows_on_the_page_are_those_of_the_catalogue() -> None:
    """One table: what it names is on the page with its help and type, and nothing else is."""
    pool = watched_pool()
    families = {
        family.name: family for family in families_of(page_of(collecting()), TEXT.content_type)
    }
    rows = {row.name.removesuffix("_total") if row.kind == "counter" else row.name: row
            for row in CATALOGUE
            if "_bench_" not in row.name and row not in SIDECAR_ROWS}  # fmt: skip
    assert families.keys() == rows.keys()
    for name, row in rows.items():
        assert (families[name].type, families[name].documentation) == (row.kind, row.help)
    assert pool.stats.n_blocks == 8


def test_collecting_takes_its_time_from_the_clock() -> None:
    """The duration is what the clock says between beginning and end."""
    series = series_of(page_of(collecting(clock=Clock())))
    assert value(series, "veloxquant_exporter_collect_duration_seconds") == 1


def test_registering_reads_no_pool() -> None:
    """A registry asks what a collector's names are; that answers without a snapshot."""
    source = Source()
    source.read = pytest.fail  # type: ignore[method-assign]
    registry = collecting(source)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Gauge(P + "blocks_in_use", "A name that is taken.", registry=registry)


def test_series_leave_with_their_pool() -> None:
    """A pool that is dropped or un-instrumented takes its series along."""
    pool, dropped = watched_pool("kept"), watched_pool("dropped")
    other = watched_pool("unwatched")
    registry = collecting()

    def names() -> set[str]:
        return {dict(labels)["pool"] for name, labels in series_of(page_of(registry))
                if name == P + "blocks_in_use"}  # fmt: skip

    assert names() == {"kept", "dropped", "unwatched"}
    uninstrument(other)
    del dropped
    gc.collect()
    assert names() == {"kept"}
    assert pool.stats.n_blocks == 8


def test_two_collectors_agree() -> None:
    """Two registries, as with two scrapers: nothing is reset by reading."""
    pool = watched_pool()
    exercise(pool)
    first, second = collecting(), collecting()
    varying = ("overhead", "duration", "timestamp", "resident", "lock_wait", "age_seconds")

    def steady(registry: CollectorRegistry) -> Series:
        return {key: v for key, v in series_of(page_of(registry)).items()
                if not any(word in key[0] for word in varying)}  # fmt: skip

    assert steady(first) == steady(second) == steady(first)


# -- several processes ---------------------------------------------------------------------------


@BOTH
def test_processes_are_told_apart_only_where_there_are_several(offer: Offer) -> None:
    """A sidecar's series carry `process`; those of a process about itself do not."""
    pool = watched_pool()
    here = series_of(page_of(collecting(), offer), offer.content_type)
    assert not [key for key in here if "process" in dict(key[1])]
    source = Source(edited_process(lambda p: p, "1"), edited_process(lambda p: p, "2"))
    series = series_of(page_of(collecting(source), offer), offer.content_type)
    for process in ("1", "2"):
        assert value(series, P + "blocks_total", process=process, pool="a") == pool.stats.n_blocks
        assert value(series, UP, process=process) == 1
    # Of the exporter itself: it belongs to none of them.
    assert value(series, UP, process="") == 1


def test_a_process_that_cannot_be_read_is_down_alone() -> None:
    """The source knows of a process and has no snapshot: up is 0, the others stay."""
    pool = watched_pool()
    source = Source(
        edited_process(lambda p: p, "1"), up={"1": 1, "2": 0}, errors={"torn": 3, "old": 0}
    )
    series = series_of(page_of(collecting(source)))
    assert (value(series, UP, process="1"), value(series, UP, process="2")) == (1, 0)
    assert value(series, P + "blocks_total", process="1", pool="a") == pool.stats.n_blocks
    assert value(series, ERRORS, process="", reason="torn") == 3
    assert value(series, ERRORS, process="", reason="old") == 0


def test_a_process_told_twice_stands_once(caplog: pytest.LogCaptureFixture) -> None:
    """Two snapshots with one label would make the page unreadable: the second is counted."""
    pool = watched_pool()
    source = Source(edited_process(lambda p: p, "1"), edited_process(lambda p: p, "1"))
    series = series_of(page_of(collecting(source)))
    assert value(series, P + "blocks_total", process="1", pool="a") == pool.stats.n_blocks
    assert value(series, ERRORS, process="1", reason="duplicate") == 1
    assert value(series, UP, process="1") == 0
    assert "duplicate" in caplog.text


def test_a_pool_told_twice_stands_once() -> None:
    """The same for two pools of one name in a snapshot that somebody else wrote."""
    pool = watched_pool()
    snapshot = edited_process(lambda p: p, "1")
    source = Source(dataclasses.replace(snapshot, pools=snapshot.pools * 2))
    series = series_of(page_of(collecting(source)))
    assert value(series, P + "blocks_total", process="1", pool="a") == pool.stats.n_blocks
    assert value(series, ERRORS, process="1", reason="duplicate") == 1


def test_failures_of_processes_that_are_gone_are_let_go() -> None:
    """Processes come and go for weeks; what is remembered of them does not pile up."""
    pool = watched_pool()
    source = Source()
    registry = collecting(source)
    (collector,) = registry._collector_to_names
    assert isinstance(collector, PoolCollector)
    for n in range(5):
        twice = edited_process(lambda p: p, str(n))
        source.reading = Reading(processes=(twice, twice), up={str(n): 1})
        assert len(list(registry.collect())) == len(PAGE_ROWS)
    assert {process for process, _ in collector._failures} == {"4"}
    assert pool.stats.n_blocks == 8


# -- what cannot be read -------------------------------------------------------------------------


def test_C19_what_cannot_be_read_is_absent_and_up_is_0(caplog: pytest.LogCaptureFixture) -> None:
    """A number that is none costs its own series: no NaN, no infinite counter, and up says so."""
    pool = watched_pool("good")
    source = LiveSource()
    good = source.read().processes[0]
    faults: tuple[tuple[dict[str, Any], set[str]], ...] = (
        ({"partial_blocks": float("nan")}, {"partial_blocks", "fragmentation"}),
        ({"n_allocations": float("inf")}, {"allocations_total"}),
        ({"n_frees": -1}, {"frees_total"}),
        ({"oldest_owner_age_s": None}, {"oldest_active_owner_age_seconds"}),
        ({"rejected": {}}, {"rejected_blocks_total", "double_frees_total"}),
        ({"lock_wait": 3}, {"lock_wait_seconds"}),
        (
            {"occupancy": dataclasses.replace(good.pools[0].occupancy, total=float("nan"))},
            {"occupancy_ratio"},
        ),
    )
    for fault, dead in faults:
        bad = dataclasses.replace(good.pools[0], name="bad", **fault)
        process = dataclasses.replace(good, pools=(good.pools[0], bad))
        series = series_of(page_of(collecting(Source(process, labels_processes=False))))
        assert names_of("good", series) - names_of("bad", series) == dead
        assert value(series, UP) == 0
        assert value(series, ERRORS, reason="reading") >= 1
    assert len(caplog.records) >= len(faults)
    assert pool.stats.n_blocks == 8


def names_of(pool: str, series: Series) -> set[str]:
    """Names, without the prefix and a histogram's suffixes, of the series of a pool."""
    ends = re.compile("_(bucket|sum|count)$")
    return {
        ends.sub("", name).removeprefix(P)
        for name, labels in series
        if dict(labels).get("pool") == pool
    }


def test_C19_a_pool_of_no_blocks_has_no_ratio_over_zero() -> None:
    """With nothing managed, the fragmentation is 0 and every value is a number."""
    pool = watched_pool(n_blocks=0)
    series = series_of(page_of(collecting()))
    assert value(series, P + "fragmentation", pool="a") == 0
    assert value(series, P + "blocks_total", pool="a") == pool.stats.n_blocks == 0
    assert value(series, UP) == 1


def test_unbounded_growth_is_the_one_infinite_value() -> None:
    """A limit that is none is +Inf, by choice; no other series is infinite."""
    pool = watched_pool(grow_on_exhaustion=True)
    series = series_of(page_of(collecting()))
    infinite = {name for (name, _), v in series.items() if v == float("inf")}
    assert infinite == {P + "blocks_limit"}
    assert pool.stats.n_blocks == 8


def test_a_pool_whose_snapshot_raises_costs_its_own_series(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One broken pool is left out and counted, up is 0; when it is whole again, so is the page."""
    good, bad = watched_pool("good"), watched_pool("bad")
    registry = collecting()
    with monkeypatch.context() as broken:
        broken.delattr(bad, "_streams")
        series = series_of(page_of(registry))
    assert value(series, P + "blocks_total", pool="good") == good.stats.n_blocks
    assert (P + "blocks_total", (("pool", "bad"),)) not in series
    assert value(series, UP) == 0
    assert value(series, ERRORS, reason="snapshot") == 1
    series = series_of(page_of(registry))
    assert value(series, P + "blocks_total", pool="bad") == bad.stats.n_blocks
    assert value(series, UP) == 1
    assert value(series, ERRORS, reason="snapshot") == 1


def test_a_source_that_raises_costs_its_own_series() -> None:
    """Against its promise, but the page goes on and says so."""

    class Broken(LiveSource):
        def read(self) -> Reading:
            raise OSError("gone")

    registry = collecting(Broken())
    for n in (1, 2):
        series = series_of(page_of(registry))
        assert value(series, UP) == 0
        assert value(series, ERRORS, reason="source") == n


def test_faults_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A fault that comes back with each scrape fills no log."""
    pool = watched_pool()
    bad = edited_process(lambda p: dataclasses.replace(p, n_frees=-1), "")
    registry = collecting(Source(bad, labels_processes=False))
    with caplog.at_level(logging.DEBUG, "veloxquant_exporters"):
        for _ in range(5):
            page_of(registry)
    assert len(caplog.records) == 1
    assert pool.stats.n_blocks == 8


# -- the checks of pages -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "page"),
    [
        ("NaN", "# HELP a A.\n# TYPE a gauge\na NaN\n"),
        ("twice", "# HELP a A.\n# TYPE a gauge\na 1\na 2\n"),
        ("unreadable", "# HELP a A.\n# TYPE a gauge\na{b=} 1\n"),
        ("created", "# HELP a_created A.\n# TYPE a_created gauge\na_created 1\n"),
    ],
)
def test_C20_a_bad_line_fails_the_check(fault: str, page: str) -> None:
    """Every page here goes through `checked`, which a single bad line does not pass."""
    with pytest.raises((AssertionError, ValueError)):
        checked(page.encode(), TEXT.content_type)


def test_C20_openmetrics_without_its_end_fails_the_check() -> None:
    """A page that was cut off is no page."""
    pool = watched_pool()
    text = page_of(collecting(), OPENMETRICS)
    with pytest.raises(AssertionError):
        checked(text.removesuffix("# EOF\n").encode(), OPENMETRICS.content_type)
    assert pool.stats.n_blocks == 8


@pytest.mark.skipif(
    lint("# HELP a_total A.\n# TYPE a_total gauge\na_total 1\n") == [],
    reason="promtool (Debian's prometheus package) is not installed",
)
class TestPromtool:
    """promtool reads the page as Prometheus does, and knows the guide to names."""

    def test_C21_the_page_is_clean_but_for_the_waiver(self) -> None:
        """One remark, on the one name that the contract fixes."""
        pool = watched_pool()
        exercise(pool)
        assert lint(page_of(collecting())) == [WAIVER]

    @pytest.mark.parametrize(
        "page",
        [
            "# HELP a_total A.\n# TYPE a_total gauge\na_total 1\n",
            "# HELP a A.\n# TYPE a counter\na 1\n",
            "# TYPE a gauge\na 1\n",
            "# HELP a_milliseconds A.\n# TYPE a_milliseconds gauge\na_milliseconds 1\n",
        ],
        ids=["gauge named total", "counter not named total", "no help", "no base unit"],
    )
    def test_C21_a_bad_name_is_seen(self, page: str) -> None:
        """The linter has teeth, and `checked` minds them."""
        assert lint(page)
        with pytest.raises(AssertionError):
            checked(page.encode(), TEXT.content_type)


def test_C21_suffix_type_and_help_agree_in_the_catalogue() -> None:
    """`_total` if and only if it is a counter, the waiver apart; everything has a help and a prefix."""
    wrong = {
        row.name for row in PAGE_ROWS if row.name.endswith("_total") != (row.kind == "counter")
    }
    assert wrong == {P + "blocks_total"}
    assert all(row.help.strip() and row.name.startswith("veloxquant_") for row in PAGE_ROWS)


def test_U35_two_pools_share_a_page_that_strict_parsers_read() -> None:
    """What to_prometheus() cannot do: labelled, with help, and fit for OpenMetrics."""
    pools = [watched_pool(name) for name in ("a", "b")]
    for pool in pools:
        exercise(pool)
    joined = pools[0].stats.to_prometheus(P.rstrip("_")) * 2
    with pytest.raises((AssertionError, ValueError)):
        checked(joined.encode(), TEXT.content_type)
    for offer in (TEXT, OPENMETRICS):
        series = series_of(page_of(collecting(), offer), offer.content_type)
        for name in CONTRACT:
            assert value(series, name, pool="a") == value(series, name, pool="b")


# -- bounds --------------------------------------------------------------------------------------

# The series budget: docs/prometheus.md names these numbers.
SERIES_A_POOL = 264
SERIES_A_PROCESS = 32


def test_C14_the_budget_is_documented() -> None:
    """What users size their Prometheus by is what is tested."""
    text = (Path(__file__).parent.parent / "docs" / "prometheus.md").read_text("utf-8")
    assert f"up to {SERIES_A_POOL} series a pool" in text
    assert f"up to {SERIES_A_PROCESS} for" in text


@BOTH
def test_C14_a_pool_stays_within_its_series(offer: Offer) -> None:
    """Counted in both formats, which agree: no `_created` doubles a counter in either."""
    registry = collecting()
    alone = len(series_of(page_of(registry, offer), offer.content_type))
    assert alone <= SERIES_A_PROCESS
    pools = []
    for n in (1, 2, 3):
        pools.append(watched_pool(f"p{n}"))
        exercise(pools[-1])
        text = page_of(registry, offer)
        series = series_of(text, offer.content_type)
        assert len(series) - alone <= n * SERIES_A_POOL
        assert "_created" not in text


def test_C12_200_pools_are_64_and_the_rest() -> None:
    """Series are bounded: what is over 64 pools is summed as `other`, and counted."""
    pools = [watched_pool(f"p{n}", n_blocks=10) for n in range(200)]
    series = series_of(page_of(collecting()))
    names = {dict(labels)["pool"] for name, labels in series if name == P + "blocks_total"}
    assert len(names) == 65
    assert value(series, P + "blocks_total", pool="other") == 136 * 10
    assert len(series) <= 65 * SERIES_A_POOL + SERIES_A_PROCESS
    dropped = "veloxquant_exporter_dropped_events_total"
    assert value(series, dropped, reason="pools_merged") == 136
    assert len(pools) == 200


class Scanning(LiveSource):
    """What must not be: it looks at each owner of a pool."""

    def __init__(self, pool: BlockPoolAllocator) -> None:
        self._pool = pool

    def read(self) -> Reading:
        """The same, more slowly."""
        for owner in list(self._pool._owners):
            self._pool.blocks_for(owner)
        return super().read()


def calls_for(n: int, source: Callable[[BlockPoolAllocator], LiveSource]) -> int:
    """Python and C calls that one collection makes, with a pool of 2 n blocks and n owners."""
    pool = watched_pool(f"of {n}", n_blocks=2 * n)
    for owner in range(n):
        pool.allocate("k", 16, owner)
    registry = collecting(source(pool))
    page_of(registry)  # what is done once is done, the self-check among it
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        list(registry.collect())
    finally:
        sys.setprofile(None)
    uninstrument(pool)
    return calls


def test_C12_a_scrape_does_the_same_work_for_any_number_of_blocks_and_owners() -> None:
    """Counted in calls, not timed: thousands of blocks and owners cost what ten do."""
    few, many = (calls_for(n, lambda _: LiveSource()) for n in (10, 3_000))
    assert abs(few - many) < 30 < few


def test_C12_the_count_of_calls_sees_a_scan() -> None:
    """The check above has teeth: one look at each owner shows."""
    few, many = (calls_for(n, Scanning) for n in (10, 3_000))
    assert many > few + 2_000


# -- texts ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "name",
    ['a"b\\c\nd', "é☃", "{}=,", "a" * 128, " ", "#"],
    ids=["escapes", "unicode", "braces", "long", "blank", "hash"],
)
def test_a_pool_may_be_named_anything(offer: Offer, name: str) -> None:
    """Any name comes through both formats and their parsers."""
    pool = watched_pool(name)
    series = series_of(page_of(collecting(), offer), offer.content_type)
    assert value(series, P + "blocks_total", pool=name) == pool.stats.n_blocks


@BOTH
def test_a_name_that_cannot_be_encoded_is_spelled_out(offer: Offer) -> None:
    """A snapshot that somebody else wrote may hold what UTF-8 does not: the page goes on."""
    pool = watched_pool()
    names = ("\ud800", "\ud801")
    (here,) = take_snapshot().pools
    process = dataclasses.replace(
        take_snapshot(),
        process="\udfff",
        pools=tuple(dataclasses.replace(here, name=name) for name in names),
    )
    series = series_of(page_of(collecting(Source(process)), offer), offer.content_type)
    for shown in ("\\ud800", "\\ud801"):
        held = value(series, P + "blocks_total", process="\\udfff", pool=shown)
        assert held == pool.stats.n_blocks


@BOTH
@pytest.mark.parametrize(
    "owner",
    ["r1", 'r"2\\\n', "é" * 200, "\udfff", "", 7],
    ids=["plain", "escapes", "long", "surrogate", "empty", "int"],
)
def test_exhaustion_has_an_exemplar_in_openmetrics_alone(offer: Offer, owner: str | int) -> None:
    """Who was refused, within 128 characters; the text format has no place for it."""
    pool = watched_pool()
    registry = collecting()
    assert 'owner="' not in page_of(registry, offer)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 1_000, owner)
    (sample,) = (
        sample
        for family in families_of(page_of(registry, offer), offer.content_type)
        for sample in family.samples
        if sample.name == P + "exhausted_total"
    )
    assert sample.value == 1
    if offer is TEXT:
        assert sample.exemplar is None
        return
    assert sample.exemplar is not None
    labels = sample.exemplar.labels
    assert sum(map(len, (*labels, *labels.values()))) <= MAX_CHARS
    spelled = str(owner).encode("utf-8", "replace").decode().replace('"', "'")
    assert list(labels) == ["owner"]
    assert spelled.startswith(labels["owner"]) and bool(labels["owner"]) == bool(spelled)
    assert sample.exemplar.timestamp is not None
    assert float(sample.exemplar.timestamp) == pytest.approx(take_snapshot().wall_s, abs=60)


def test_the_exemplar_names_the_trace() -> None:
    """Within a span, the exemplar leads to its trace; without one there is no such label."""
    trace = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `otel` brings it")
    pool = watched_pool()
    with (
        trace.TracerProvider(shutdown_on_exit=False)
        .get_tracer("tests")
        .start_as_current_span("request") as span,
        pytest.raises(BlockPoolExhaustedError),
    ):
        pool.allocate("k", 1_000, "o" * 300)
    trace_id = f"{span.get_span_context().trace_id:032x}"
    text = page_of(collecting(), OPENMETRICS)
    (line,) = (line for line in text.splitlines() if line.startswith(P + "exhausted_total{"))
    assert f'trace_id="{trace_id}"' in line
    families_of(text, OPENMETRICS.content_type)  # its parser refuses more than 128 characters


def test_the_parser_refuses_an_exemplar_that_is_too_long() -> None:
    """The bound that the tests above rely on is kept by somebody."""
    line = 'a_total 1.0 # {owner="%s"} 1.0\n'
    for n, fits in ((MAX_CHARS - len("owner"), True), (MAX_CHARS, False)):
        page = f"# TYPE a counter\n{line % ('o' * n)}# EOF\n"
        if fits:
            assert families_of(page, OPENMETRICS.content_type)
        else:
            with pytest.raises(ValueError, match="too long"):
                families_of(page, OPENMETRICS.content_type)


def test_an_owner_too_long_for_an_exemplar_is_cut() -> None:
    """Whatever a snapshot holds, names and values stay within 128 characters together."""
    pool = watched_pool()
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 1_000, "me")
    last = Exhaustion(owner="é" * 300, trace_id="a" * 32, wall_s=1.5)
    process = edited_process(lambda p: dataclasses.replace(p, last_exhaustion=last), "")
    text = page_of(collecting(Source(process, labels_processes=False)), OPENMETRICS)
    (line,) = (line for line in text.splitlines() if line.startswith(P + "exhausted_total{"))
    owner = "é" * (MAX_CHARS - 32 - len("ownertrace_id"))
    assert line.endswith(f'# {{owner="{owner}",trace_id="{"a" * 32}"}} 1.0 1.5')


def test_no_exemplars_of_several_processes() -> None:
    """A sidecar's reader has no use for another process' owner."""
    pool = watched_pool()
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 1_000, "me")
    source = Source(edited_process(lambda p: p, "1"))
    assert "owner=" not in page_of(collecting(source), OPENMETRICS)
    assert "owner=" in page_of(collecting(), OPENMETRICS)


# -- threads -------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_scrapes_and_pool_calls_do_not_disturb_each_other() -> None:
    """Pages made while other threads allocate are whole, and their counters never fall."""
    pool = watched_pool(n_blocks=64)
    registry = collecting()
    stop = threading.Event()

    def churn(owner: str) -> None:
        while not stop.is_set():
            pool.allocate("k", 40, owner)
            pool.free_all(owner)

    threads = [threading.Thread(target=churn, args=(f"o{n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    try:
        pages = [series_of(page_of(registry)) for _ in range(8)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for before, after in itertools.pairwise(pages):
        assert before.keys() == after.keys()
        fallen = [
            key for key in before if key[0].endswith(("_total", "_bucket", "_count", "_sum"))
            and key[0] != P + "blocks_total" and after[key] < before[key]
        ]  # fmt: skip
        assert fallen == []
        for page in (before, after):
            held = value(page, P + "allocations_total", pool="a") - value(
                page, P + "frees_total", pool="a"
            )
            assert value(page, P + "blocks_in_use", pool="a") == held


# -- which format --------------------------------------------------------------------------------

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,/;q=0.1"
)
PROMETHEUS_WITHOUT_OPENMETRICS = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "offer"),
    [
        (PROMETHEUS_2, OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS),
        (PROMETHEUS_WITHOUT_OPENMETRICS, TEXT),
        (BROWSER, TEXT),
        ("", TEXT),
        ("*/*", TEXT),
        ("application/json", TEXT),
        ("text/plain", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/*", OPENMETRICS),
        ("Application/OpenMetrics-Text; Version=1.0.0", OPENMETRICS),
        ('application/openmetrics-text; version="1.0.0"', OPENMETRICS),
        ("application/openmetrics-text; version=2.0.0", TEXT),
        ("application/openmetrics-text; version=2.0.0, */*;q=0.1", TEXT),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=0, */*", TEXT),
        ("application/openmetrics-text;q=0.4, text/plain;q=0.5", TEXT),
        ("application/openmetrics-text;q=0.5, text/plain;q=0.4", OPENMETRICS),
        ("text/plain, application/openmetrics-text", OPENMETRICS),
        ("text/plain;q=0, */*", OPENMETRICS),
        ("application/openmetrics-text;q=high", TEXT),
        ("application/openmetrics-text;q=nan", TEXT),
        ("application/openmetrics-text;q=7, text/plain", OPENMETRICS),
        (";;,,;q=1,=", TEXT),
    ],
)
def test_the_format_is_the_one_that_is_liked_best(accept: str, offer: Offer) -> None:
    """By q, then by what is named; a client that accepts neither gets the text format."""
    assert choose(accept) is offer


def test_names_that_need_escaping_are_escaped() -> None:
    """A program's own registry may hold UTF-8 names, which both formats here do not know."""
    registry = CollectorRegistry()
    Gauge("dotted.name", "Dotted.", ["c.d"], registry=registry).labels("x").set(1)
    for offer in (TEXT, OPENMETRICS):
        series = series_of(page_of(registry, offer), offer.content_type)
        assert list(series) == [("dotted_name", (("c_d", "x"),))]
