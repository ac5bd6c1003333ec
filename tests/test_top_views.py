"""vqmon top: what the figures are made of, against real snapshots and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.top_help import at, exhaust, snapshot, watched
from veloxquant_exporters.sources import Reading
from veloxquant_exporters.top.board import Board, MemoryView
from veloxquant_exporters.top.boards import BoardMaker
from veloxquant_exporters.top.history import COARSE_S, HISTORY_S, MAX_SNAPSHOTS, History, Moment
from veloxquant_exporters.top.quantile import difference, quantile
from veloxquant_exporters.top.track import rise, tracks
from veloxquant_exporters.top.units import amount, count, duration, gigabytes, percent, rate
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot


def board_of(*moments: Moment) -> Board:
    """The board after all of them."""
    maker = BoardMaker("made up")
    return [maker.add(moment) for moment in moments][-1]


# -- units ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (amount(None), "-"),
        (amount(0), "0"),
        (amount(950), "950"),
        (amount(999.9), "1.0k"),
        (amount(1234), "1.2k"),
        (amount(35_400), "35k"),
        (amount(4_100_000), "4.1M"),
        (count(12345), "12,345"),
        (rate(0.0), "0"),
        (rate(0.031), "0.03"),
        (rate(0.001), "<0.01"),
        (rate(7.54), "7.5"),
        (duration(0.0), "0s"),
        (duration(2.5e-6), "2.5us"),
        (duration(9.996e-4), "1.0ms"),
        (duration(0.34), "340ms"),
        (duration(12.0), "12s"),
        (duration(59.97), "1m"),
        (duration(200.0), "3m 20s"),
        (duration(7500.0), "2h 5m"),
        (duration(86400 * 4 + 3600 * 3), "4d 3h"),
        (gigabytes(512), "512 B"),
        (gigabytes(34_100_000), "34.1 MB"),
        (gigabytes(1_250_000_000), "1.25 GB"),
        (percent(0.0), "0%"),
        (percent(0.004), "0.4%"),
        (percent(0.9996), "99.9%"),
        (percent(1.0), "100%"),
        (percent(None), "-"),
    ],
)
def test_numbers_are_short(shown: str, wanted: str) -> None:
    """A few characters, which neither hide a fault nor show a full pool where there is room."""
    assert shown == wanted


@given(st.floats(0, 1e11))
def test_a_rate_fits_its_column(value: float) -> None:
    """Whatever it is, up to a hundred billion a second."""
    assert len(rate(value)) <= 5


# -- quantiles -----------------------------------------------------------------------------------


def test_a_quantile_is_interpolated_as_prometheus_does() -> None:
    """Within the bucket, from 0 in the first one; above all bounds, the last bound."""
    histogram = HistogramSnapshot((1.0, 2.0, 4.0), (2, 4, 4, 0), 0.0)
    assert quantile(histogram, 0.5) == 1.75
    assert quantile(histogram, 0.1) == 0.5
    assert quantile(histogram, 1.0) == 4.0
    assert quantile(HistogramSnapshot((1.0, 2.0), (1, 0, 9), 0.0), 0.99) == 2.0
    assert quantile(HistogramSnapshot((1.0,), (0, 0), 0.0), 0.5) is None
    assert quantile(HistogramSnapshot((), (0,), 0.0), 0.5) is None


@given(st.lists(st.integers(0, 5), min_size=5, max_size=5), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_its_rank(counts: list[int], share: float) -> None:
    """Held against the observations written out, each at its bucket's upper bound."""
    bounds = (1.0, 2.5, 5.0, 10.0)
    histogram = HistogramSnapshot(bounds, tuple(counts), 0.0)
    values = [value for value, n in zip((*bounds, 10.0), counts, strict=True) for _ in range(n)]
    found = quantile(histogram, share)
    if not values:
        assert found is None
        return
    upper = values[max(math.ceil(share * len(values) - 1e-9), 1) - 1]
    lower = max((bound for bound in (0.0, *bounds) if bound < upper), default=0.0)
    assert found is not None
    assert lower - 1e-9 <= found <= upper + 1e-9


def test_a_difference_is_what_came_since() -> None:
    """All of it, where the process began anew or has other buckets."""
    before = HistogramSnapshot((1.0,), (2, 1), 3.0)
    assert difference(HistogramSnapshot((1.0,), (5, 1), 6.0), before).counts == (3, 0)
    anew = HistogramSnapshot((1.0,), (1, 0), 0.5)
    assert difference(anew, before) == anew
    other = HistogramSnapshot((2.0,), (9, 9), 0.5)
    assert difference(other, before) == other


@given(st.lists(st.integers(0, 1000)))
def test_a_counter_that_begins_anew_counts_from_0(values: list[int]) -> None:
    """Held against a walk over the values."""
    total, last = 0, None
    for value in values:
        if last is not None:
            total += value - last if value >= last else value
        last = value
    assert rise(list(map(float, values))) == total


# -- views ---------------------------------------------------------------------------------------


def test_a_pool_is_shown_as_its_snapshot_has_it() -> None:
    """Blocks, streams, fill, owners: the pool's own figures."""
    with watched("viewed", n_blocks=64, separate_kv=True) as pool:
        pool.allocate_kv(40, "one", n_filled=33)
        pool.allocate("k", 16, "two")
        pool.free_all("two")
        board = board_of(at(0, snapshot("viewed", process="w")))
    (view,) = board.pools
    assert view.key == ("w", "viewed")
    assert (view.n_blocks, view.in_use, view.peak) == (64, 6, 7)
    assert (view.limit, view.may_grow, view.usage) == (64, False, 6 / 64)
    assert (view.slots_held, view.slots_used) == (96, 66)
    assert view.waste == pytest.approx(1 - 66 / 96)
    assert [(s.name, s.in_use, s.free) for s in view.streams] == [("k", 3, 29), ("v", 3, 29)]
    assert view.owners == 1
    assert view.formats == {"fp16": 6}
    assert view.rates is None, "one reading gives no rate"
    assert view.past == (6 / 64,)
    calls = {view.operation: view.calls for view in view.operations}
    assert calls == {"allocate": 2, "free": 0, "free_all": 1, "shrink": 0}


def test_rates_are_of_two_readings() -> None:
    """Blocks and calls a second, by the process' own clock."""
    with watched("rated", n_blocks=64, separate_kv=False) as pool:
        pool.allocate("kv", 160, 1)
        first = at(0, snapshot("rated"))
        pool.allocate("kv", 160, 2)
        pool.free_all(1)
        exhaust(pool, "kv", times=3)
        second = at(4, snapshot("rated"))
    (view,) = board_of(first, second).pools
    found = view.rates
    assert found is not None
    assert found.over_s == 4
    assert (found.allocations, found.frees, found.exhaustions) == (2.5, 2.5, 0.75)
    assert found.requests == 1.0, "the failed calls are requests too"
    allocate = next(view for view in view.operations if view.operation == "allocate")
    assert allocate.calls_per_s == 0.25
    assert view.exhausted == 3


def test_a_snapshot_read_twice_tells_nothing_new() -> None:
    """A publisher slower than top: the rate stays what it was, and the figures grow old."""
    with watched("slow", n_blocks=64) as pool:
        first = at(0, snapshot("slow"))
        pool.allocate("k", 160, 1)
        second = at(2, snapshot("slow"))
    again = [Moment(2.0 + n, second.wall_s + n, second.reading) for n in range(1, 4)]
    (view,) = board_of(first, second, *again).pools
    assert view.rates is not None
    assert view.rates.allocations == 5.0
    assert view.age_s == 3.0
    assert len(view.past) == 2


def test_a_restarted_process_gives_no_rate_below_0() -> None:
    """Its counters begin anew; what it counted since is what counts."""
    with watched("again", n_blocks=64) as pool:
        pool.allocate("k", 160, 1)
        first = at(0, snapshot("again"))
    with watched("fresh", n_blocks=64) as pool:
        pool.allocate("k", 32, 1)
        found = snapshot("fresh")
    renamed = replace(found, pools=(replace(found.pools[0], name="again"),))
    (view,) = board_of(first, at(2, renamed)).pools
    assert view.rates is not None
    assert view.rates.allocations == 1.0


def test_latency_is_of_the_last_minute_if_anything_was_timed() -> None:
    """Else of everything since the start, and it says which."""
    with watched("timed", n_blocks=4096) as pool:
        for _ in range(2000):
            pool.allocate("k", 16, 1)
            pool.free_all(1)
        first = at(0, snapshot("timed"))
        (alone,) = board_of(first).pools
        assert alone.latency("allocate").p99_s is not None
        assert not alone.latency("allocate").lately
        for _ in range(2000):
            pool.allocate("k", 16, 1)
            pool.free_all(1)
        (view,) = board_of(first, at(30, snapshot("timed"))).pools
    found = view.latency("free_all")
    assert found.lately
    assert found.p50_s is not None and found.p99_s is not None
    assert 0 < found.p50_s <= found.p99_s
    assert view.latency("shrink").p99_s is None


def test_active_memory_is_pools_weights_and_rest() -> None:
    """What nobody accounts for is the rest, and never below 0: MLX is lazy."""
    told = {"cache": 1, "peak": 90, "limit": 200, "footprint": None, "resident": 150}
    whole = MemoryView(active=100, pools=30, caches=5, weights=50, **told)
    assert whole.rest == 15
    lazy = MemoryView(active=10, pools=30, caches=None, weights=None, **told)
    assert lazy.rest == 0
    untold = MemoryView(active=None, pools=None, caches=None, weights=None, **told)
    assert untold.rest is None


def test_memory_is_read_off_the_snapshot() -> None:
    """The buffers of all pools together; None where no pool has a storage."""
    with watched("stored", n_blocks=8), watched("bare", n_blocks=8):
        found = snapshot("stored", "bare", mlx_active_bytes=100, mlx_limit_bytes=1000)
    stored = replace(found.pools[0], storage={"resident": 40})
    board = board_of(at(0, replace(found, pools=(stored, found.pools[1]))))
    memory = board.processes[0].memory
    assert memory is not None
    assert (memory.pools, memory.rest, memory.limit) == (40, 60, 1000)
    without = board_of(at(0, found)).processes[0].memory
    assert without is not None and without.pools is None


def test_who_is_down_is_listed_without_figures() -> None:
    """A process whose snapshot cannot be had is no pool with 0 blocks."""
    with watched("up", n_blocks=8):
        board = board_of(at(0, snapshot("up", process="a"), up={"a": 1, "b": 0}))
    assert [(p.name, p.up, p.age_s) for p in board.processes] == [
        ("a", True, 0.0),
        ("b", False, None),
    ]
    assert [pool.process for pool in board.pools] == ["a"]


def test_a_change_that_was_seen_tells_better_than_clocks() -> None:
    """A worker's clock an hour behind does not make its figures old."""
    with watched("skewed", n_blocks=8):
        found = snapshot("skewed")
        other = snapshot("skewed")
    behind = [
        Moment(float(n), 5000.0 + n, Reading((replace(p, wall_s=1400.0 + n),), {"": 1}))
        for n, p in enumerate((found, other))
    ]
    assert board_of(behind[0]).pools[0].age_s == 3600.0
    assert board_of(*behind).pools[0].age_s == 0.0


# -- the history ---------------------------------------------------------------------------------


def test_the_history_is_short_and_thin() -> None:
    """A day of readings: fine for a minute, coarse for a quarter of an hour, and no more."""
    history = History()
    for n in range(3000):
        history.add(at(float(n)))
    ages = [history.now.at_s - moment.at_s for moment in history]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] <= HISTORY_S
    assert ages[0] > HISTORY_S - 2 * COARSE_S, "the longest window of an alert is covered"
    assert [age for age in ages if age < 60] == [float(n) for n in range(59, -1, -1)]
    assert len(history) < 300
    assert history.watched_s == 2999


def test_the_history_of_very_many_pools_is_thinner() -> None:
    """Snapshots kept are bounded, whatever a sidecar tells of; rates stay known."""
    with watched("many", n_blocks=8):
        found = snapshot("many")
    many = replace(found, pools=found.pools * (MAX_SNAPSHOTS // 10))
    history = History()
    for n in range(50):
        history.add(at(float(n), many))
    assert sum(len(m.reading.processes[0].pools) for m in history) <= MAX_SNAPSHOTS
    assert len(history) >= 2


def test_going_back_in_time_begins_anew() -> None:
    """A trace's slider: what came later is not the past."""
    history = History()
    for seconds in (0.0, 5.0, 9.0, 3.0):
        history.add(at(seconds))
    assert [moment.at_s for moment in history] == [3.0]
    assert history.watched_s == 0


def test_tracks_are_of_what_is_there_now() -> None:
    """A pool that is gone is no longer shown, and one snapshot counts once."""
    with watched("stays", n_blocks=8), watched("goes", n_blocks=8):
        first = at(0, snapshot("stays", "goes"))
        second = at(1, snapshot("stays"))
    history = History()
    for moment in (first, second, Moment(2.0, second.wall_s, second.reading)):
        history.add(moment)
    found = tracks(history)
    assert list(found.pools) == [("", "stays")]
    assert len(found.pools["", "stays"].points) == 2
