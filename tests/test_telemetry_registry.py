"""The registry: names, what a name counted before, pools beyond those told apart, switching on."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import (
    CATALOGUE,
    PoolSnapshot,
    instrument,
    instrument_all,
    registry,
    stop_instrumenting_all,
    take_snapshot,
    uninstrument,
)
from veloxquant_mlx.telemetry.carry import carry, merge
from veloxquant_mlx.telemetry.registry import Registry
from veloxquant_mlx.telemetry.table import MAX_POOLS, MAX_REMEMBERED

ROOT = Path(__file__).resolve().parents[1]


def a_pool(n_blocks: int = 16, size: int = 4, **options: Any) -> BlockPoolAllocator:
    """A small pool."""
    options.setdefault("separate_kv", False)
    return BlockPoolAllocator(PoolConfig(size, n_blocks, **options))


@pytest.fixture
def own() -> Iterator[Registry]:
    """A registry of its own, so that counts of other tests are not in the way."""
    watching = Registry()
    yield watching
    for probe in list(watching._table.probes.values()):
        probe.remove()


def named(own: Registry, name: str) -> PoolSnapshot:
    """The pool of that name."""
    (found,) = [pool for pool in own.collect().pools if pool.name == name]
    return found


def names(own: Registry) -> list[str]:
    """Who is watched."""
    return [pool.name for pool in own.collect().pools]


# -- names ----------------------------------------------------------------------------------------


def test_names_are_unique_among_live_pools(own: Registry) -> None:
    """A second live pool of a name is refused with the name in the message, and left alone."""
    first, second = a_pool(), a_pool()
    own.add(first, "taken", None)
    with pytest.raises(ValueError, match="'taken'"):
        own.add(second, "taken", None)
    assert second._timed is None and names(own) == ["taken"]
    own.remove(first)
    assert own.add(second, "taken", None).name == "taken"


def test_unnamed_pools_get_the_lowest_free_number(own: Registry) -> None:
    """As DESIGN says, also after one left."""
    pools = [a_pool() for _ in range(3)]
    assert [own.add(pool, None, None).name for pool in pools] == ["pool-0", "pool-1", "pool-2"]
    own.remove(pools[1])
    assert own.add(a_pool(), None, None).name == "pool-1"


@pytest.mark.parametrize("name", ["", "other", "x" * 129, "\ud800", 7, b"bytes"])
def test_bad_names_are_refused(own: Registry, name: Any) -> None:
    """Nothing that would break a page or hide among the rest."""
    pool = a_pool()
    with pytest.raises(ValueError, match="name must"):
        own.add(pool, name, None)
    assert names(own) == []


def test_watching_twice_is_watching_once(own: Registry) -> None:
    """The same probe, and calls counted once."""
    pool = a_pool()
    probe = own.add(pool, "once", None)
    assert own.add(pool, "once", None) is probe is own.add(pool, None, None)
    pool.allocate("k", 4, 1)
    assert named(own, "once").calls["allocate"] == 1


def test_unwatching_takes_the_series_away(own: Registry) -> None:
    """And doing so twice, or to a stranger, is no error."""
    pool = a_pool()
    own.add(pool, "gone", None)
    own.remove(pool)
    own.remove(pool)
    own.remove(a_pool())
    assert names(own) == []


def test_what_is_no_pool_is_refused() -> None:
    """With a word about what is allowed."""
    with pytest.raises(TypeError, match="BlockPoolAllocator"):
        instrument(object())  # type: ignore[arg-type]


# -- counters of a name never step down -----------------------------------------------------------


def test_the_next_pool_of_a_name_goes_on(own: Registry) -> None:
    """Unwatched or collected, seen before or not: what was counted stays, to the block."""
    for turn in range(1, 4):
        pool = a_pool()
        own.add(pool, "relay", None)
        pool.allocate("k", 12, 1)
        with pytest.raises(BlockPoolExhaustedError):
            pool.allocate("k", 1000, 2)
        if turn == 1:
            own.remove(pool)
        del pool  # never scraped while it lived
        gc.collect()
        assert names(own) == []
        pool = a_pool()
        own.add(pool, "relay", None)
        now = named(own, "relay")
        assert (now.n_allocations, now.n_exhausted) == (3 * turn, turn)
        assert now.calls["allocate"] == turn
        assert now.streams["kv"].allocate_requests == 2 * turn
        assert now.durations["allocate"].n_observed == turn
        # What pools held when they ended is given back, so levels are those of the present pool.
        assert now.n_allocations - now.n_frees == now.blocks_in_use == 0
        assert now.initial_blocks + now.n_grown - now.n_retired == now.n_blocks == 16
        del pool
        gc.collect()


def test_a_pool_that_is_watched_again_is_not_counted_twice(own: Registry) -> None:
    """Its books go on, and so do the calls; calls in between were nobody's to see."""
    pool = a_pool()
    for turn in range(1, 5):
        own.add(pool, "again", None)
        pool.allocate("k", 4, turn)
        now = named(own, "again")
        assert (now.n_allocations, now.calls["allocate"]) == (turn, turn)
        assert now.blocks_in_use == turn
        own.remove(pool)


def test_a_name_that_changes_hands_while_its_pool_lives(own: Registry) -> None:
    """The name's counters keep what the first pool had counted when it was last watched."""
    first, second = a_pool(), a_pool()
    own.add(first, "handed", None)
    first.allocate("k", 8, 1)
    own.remove(first)
    first.allocate("k", 8, 2)  # unseen
    own.add(second, "handed", None)
    second.allocate("k", 4, 1)
    now = named(own, "handed")
    assert (now.n_allocations, now.n_frees, now.blocks_in_use) == (3, 2, 1)


def test_no_counter_falls_whatever_becomes_of_the_pools(own: Registry) -> None:
    """Every counter of the catalogue over a history of making, dropping, watching, unwatching."""
    import random

    rng = random.Random(4)
    alive: dict[str, BlockPoolAllocator] = {}
    last: dict[tuple[str, ...], float] = {}
    for _ in range(300):
        name = rng.choice("abc")
        match rng.randrange(5):
            case 0 if name not in own._table.probes:
                alive[name] = a_pool(grow_on_exhaustion=True, max_blocks=32)
                own.add(alive[name], name, None)
            case 1 if name in alive:
                own.remove(alive[name])
            case 2 if name in alive:
                del alive[name]
            case 3 if name in alive and name not in own._table.probes:
                own.add(alive[name], name, None)
            case _ if name in alive:
                alive[name].allocate("k", rng.randint(1, 9), rng.randrange(3))
                alive[name].free_all(rng.randrange(3))
                alive[name].shrink("k", 9)
        for pool in own.collect().pools:
            assert pool.initial_blocks + pool.n_grown - pool.n_retired == pool.n_blocks
            assert pool.n_allocations - pool.n_frees == pool.blocks_in_use
            for key, value in counters(pool).items():
                assert value >= last.get(key, 0), key
                last[key] = value


def counters(pool: PoolSnapshot) -> dict[tuple[str, ...], float]:
    """Every counter and bucket of a pool, by pool, name and labels."""
    values: dict[tuple[str, ...], float] = {}
    for metric in CATALOGUE:
        if metric.read_pool is None or metric.kind == "gauge":
            continue
        for labels, value in metric.read_pool(pool):
            if isinstance(value, (int, float)):
                values[(pool.name, metric.name, *labels)] = value
            else:
                for n, count in enumerate(value.counts):
                    values[(pool.name, metric.name, *labels, str(n))] = count
    return values


def test_remembered_names_are_bounded(own: Registry) -> None:
    """A program that invents names is not remembered for ever."""
    for n in range(MAX_REMEMBERED + 20):
        own.add(a_pool(2), f"short-lived-{n}", None)
    own.collect()
    assert len(own._table.before) <= MAX_REMEMBERED
    assert not own._table.probes


# -- more pools than are told apart ---------------------------------------------------------------


def test_pools_beyond_the_64th_are_one(own: Registry) -> None:
    """Summed as "other", token slots right whatever the block sizes, and counted."""
    pools = [a_pool() for _ in range(MAX_POOLS)]
    pools += [a_pool(8, size=4), a_pool(10, size=16)]
    for n, pool in enumerate(pools):
        own.add(pool, f"p{n}", None)
    pools[-2].allocate("k", 4, 1)
    pools[-1].allocate("k", 16 + 3, 1)
    collected = own.collect()
    assert len(collected.pools) == MAX_POOLS + 1
    assert collected.dropped["pools_merged"] == 2
    rest = named(own, "other")
    assert (rest.n_pools, rest.n_blocks, rest.blocks_in_use, rest.block_size) == (2, 18, 3, 0)
    assert rest.slots_held("kv") == 4 + 2 * 16
    assert rest.streams["kv"].slots_used == 4 + 19
    assert rest.calls["allocate"] == 2
    assert rest.initial_blocks + rest.n_grown - rest.n_retired == rest.n_blocks
    assert rest.blocks_limit == 18
    # Whoever leaves, nobody moves from one label to another, and "other" never falls.
    own.remove(pools[0])
    assert named(own, "other").n_allocations == 3
    own.remove(pools[-1])
    assert named(own, "other").n_allocations == 3
    assert named(own, "other").blocks_in_use == 1
    own.add(pools[-1], "p65", None)  # there is room now
    assert named(own, "other").n_allocations == 3
    assert own.collect().dropped["pools_merged"] == 2


def test_a_sum_has_no_limit_when_one_has_none(own: Registry) -> None:
    """Unbounded growth of one pool is unbounded growth of the sum."""
    limited, unlimited = a_pool(), a_pool(grow_on_exhaustion=True)
    one = own.add(limited, "limited", None).snapshot()
    two = own.add(unlimited, "unlimited", None).snapshot()
    assert one is not None
    assert two is not None
    assert merge("other", [one, two]).blocks_limit == float("inf")
    assert merge("other", [one, one]).blocks_limit == 32
    assert carry(one, two).n_blocks == 16


def test_merged_pools_have_no_configuration_to_show(own: Registry) -> None:
    """A label that speaks for several pools shows no config and no block size of one of them."""
    one = own.add(a_pool(size=4), "one", None)
    kept = a_pool(size=8), a_pool(size=4)
    snapshots = [own.add(pool, f"m{n}", None).snapshot() for n, pool in enumerate(kept)]
    assert one.name == "one"
    rest = merge("other", [snapshot for snapshot in snapshots if snapshot is not None])
    rows = {metric.name: metric for metric in CATALOGUE}
    for name in ("block_size_tokens", "config_info"):
        read = rows[f"veloxquant_block_pool_{name}"].read_pool
        assert read is not None
        assert list(read(rest)) == []


# -- faults ---------------------------------------------------------------------------------------


def test_one_pools_fault_costs_its_own_series(
    own: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot that raises is counted; the others are there."""
    good, bad = a_pool(), a_pool()
    own.add(good, "good", None)
    broken = own.add(bad, "bad", None)

    def raises() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(broken, "snapshot", raises)
    now = own.collect()
    assert [pool.name for pool in now.pools] == ["good"]
    assert now.n_unread_pools == 1 and now.errors["snapshot"] == 1


def test_a_process_that_cannot_tell_its_memory_is_told_all_the_same(
    own: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails is left out and counted."""

    def raises() -> None:
        raise OSError

    monkeypatch.setattr(registry, "resident_bytes", raises)
    monkeypatch.setattr(registry, "mlx_memory", raises)
    now = own.collect()
    assert now.resident_bytes is None and now.mlx_active_bytes is None
    assert now.errors["process"] == 2


@pytest.mark.timeout(60)
def test_pools_come_and_go_while_scraping(own: Registry) -> None:
    """Two threads make, use, drop and unwatch pools; every scrape succeeds and no counter falls."""
    failures: list[BaseException] = []

    def churn(me: int) -> None:
        try:
            for turn in range(150):
                pool = a_pool()
                own.add(pool, f"churn-{me}-{turn % 3}", None)
                pool.allocate("k", 9, turn)
                if turn % 2:
                    own.remove(pool)
                del pool
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(me,), daemon=True) for me in range(2)]
    for thread in threads:
        thread.start()
    last: dict[tuple[str, ...], float] = {}
    scrapes = []
    while any(thread.is_alive() for thread in threads):
        scrapes.append(own.collect())
        for pool in scrapes[-1].pools:
            for key, value in counters(pool).items():
                assert value >= last.get(key, 0), key
                last[key] = value
    assert failures == []
    assert not any(scrape.n_unread_pools for scrape in scrapes)
    assert all(a.sequence < b.sequence for a, b in pairwise(scrapes))


@pytest.mark.timeout(30)
def test_a_handler_inside_a_pool_never_waits_for_a_scrape(own: Registry) -> None:
    """One thread scrapes and waits for a pool; the thread inside that pool scrapes too: no hang."""
    pool = a_pool()
    own.add(pool, "inside", None)
    scraping = threading.Event()
    seen: list[int] = []

    def scrape() -> None:
        scraping.set()
        seen.append(len(own.collect().pools))

    thread = threading.Thread(target=scrape, daemon=True)
    with pool._lock:
        thread.start()
        assert scraping.wait(10)
        seen.append(len(own.collect().pools))
        other = a_pool()
        own.add(other, "made-inside", None)
        own.remove(other)
    thread.join(20)
    assert not thread.is_alive()
    assert seen == [1, 1] or seen == [1, 2]


# -- switching on ---------------------------------------------------------------------------------


def test_instrument_all_watches_what_is_made_after() -> None:
    """And only that; switching it on twice is as once."""
    before = a_pool()
    instrument_all()
    instrument_all()
    try:
        made = a_pool()
    finally:
        stop_instrumenting_all()
        stop_instrumenting_all()
    after = a_pool()
    assert before._timed is None and after._timed is None
    assert made._timed is not None
    assert instrument(made).numbered
    uninstrument(made)


SCRIPT = """
import sys
import veloxquant_mlx
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("mlx", "mlx_lm", "http"))
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
pool = BlockPoolAllocator()
pool.allocate("k", 40, 1)
from veloxquant_mlx.telemetry import take_snapshot
print([(p.name, p.calls["allocate"]) for p in take_snapshot().pools], loaded)
"""


@pytest.mark.parametrize(
    ("value", "watched"), [("1", True), ("true", True), ("", False), ("0", False), (None, False)]
)
def test_environment_switches_it_on(value: str | None, watched: bool) -> None:
    """VELOXQUANT_INSTRUMENT=1 watches every pool of the process, and loads no MLX for it."""
    environment = {k: v for k, v in os.environ.items() if k != "VELOXQUANT_INSTRUMENT"}
    environment["PYTHONPATH"] = str(ROOT)
    if value is not None:
        environment["VELOXQUANT_INSTRUMENT"] = value
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout == ("[('pool-0', 1)] []\n" if watched else "[] []\n")


def test_the_global_registry_is_what_take_snapshot_tells() -> None:
    """One registry a process."""
    pool = a_pool()
    instrument(pool, name="global-one")
    assert "global-one" in [p.name for p in take_snapshot().pools]
    uninstrument(pool)
    assert "global-one" not in [p.name for p in take_snapshot().pools]
