"""Snapshots: consistent in every state, checked against naive counts, from any thread."""

from __future__ import annotations

import inspect
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import Block, BlockPoolAllocator, PoolConfig
from veloxquant_mlx.memory.journal import ALLOCATE, FREE, FREE_ALL, SHRINK
from veloxquant_mlx.telemetry import (
    CATALOGUE,
    PoolSnapshot,
    Probe,
    instrument,
    take_snapshot,
    uninstrument,
)
from veloxquant_mlx.telemetry.elders import IDLE_S, Elders

SIZE = 4


@pytest.fixture
def watched() -> Iterator[Any]:
    """Makes watched pools, and lets go of them after."""
    pools: list[BlockPoolAllocator] = []

    def make(n_blocks: int = 24, **options: Any) -> tuple[BlockPoolAllocator, Probe]:
        pool = BlockPoolAllocator(PoolConfig(SIZE, n_blocks, **options))
        pools.append(pool)
        return pool, instrument(pool, name=f"snapshots-{id(pool)}")

    yield make
    for pool in pools:
        uninstrument(pool)


def seen(probe: Probe) -> PoolSnapshot:
    """The snapshot, which there is."""
    snapshot = probe.snapshot()
    assert snapshot is not None
    return snapshot


def assert_invariants(now: PoolSnapshot) -> None:
    """What holds in every snapshot."""
    for stream in now.streams.values():
        assert stream.free + stream.in_use == stream.managed
        assert 0 <= stream.slots_used <= (stream.slots_held or 0)
        assert sum(stream.exhausted.values()) <= stream.allocate_requests
    assert sum(stream.managed for stream in now.streams.values()) == now.n_blocks
    assert now.initial_blocks + now.n_grown - now.n_retired == now.n_blocks
    assert now.n_allocations - now.n_frees == now.blocks_in_use
    assert 0 <= now.n_reused <= now.n_allocations
    assert now.blocks_in_use <= now.peak_blocks_in_use
    assert sum(now.formats.values()) == now.blocks_in_use
    assert 0 <= now.partial_blocks <= now.blocks_in_use
    assert sum(sum(s.exhausted.values()) for s in now.streams.values()) == now.n_exhausted
    for operation, n in now.calls.items():
        assert now.durations[operation].n_observed <= n
    assert now.blocks_limit >= now.n_blocks


def counters(now: PoolSnapshot) -> dict[tuple[str, ...], float]:
    """Every counter and bucket of the catalogue, by name and labels."""
    values: dict[tuple[str, ...], float] = {}
    for metric in CATALOGUE:
        if metric.read_pool is None or metric.kind == "gauge":
            continue
        for labels, value in metric.read_pool(now):
            if isinstance(value, (int, float)):
                values[(metric.name, *labels)] = value
            else:
                for n, count in enumerate(value.counts):
                    values[(metric.name, *labels, str(n))] = count
    return values


class Naive:
    """Counts kept by hand beside the pool."""

    def __init__(self, pool: BlockPoolAllocator) -> None:
        self.pool = pool
        self.calls: Counter[str] = Counter()
        self.formats: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.held: dict[int, list[Block]] = {}
        self.format_of: dict[Block, str] = {}

    def take(self, owner: int, blocks: list[Block], fmt: str) -> None:
        """Note what `owner` got."""
        self.held.setdefault(owner, []).extend(blocks)
        self.formats[fmt] += len(blocks)
        self.format_of.update(dict.fromkeys(blocks, fmt))

    def give(self, owner: int, blocks: list[Block]) -> None:
        """Note what `owner` gave back."""
        for block in blocks:
            self.held[owner].remove(block)
            self.formats[self.format_of[block]] -= 1

    def allocate(self, owner: int, stream: str, n_tokens: int, fmt: str) -> None:
        """One stream."""
        self.requests[stream] += 1
        with suppress(BlockPoolExhaustedError):
            self.take(owner, self.pool.allocate(stream, n_tokens, owner, fmt), fmt)
            self.calls["allocate"] += 1

    def allocate_kv(self, owner: int, n_tokens: int, fmt: str) -> None:
        """Both streams."""
        try:
            keys, values = self.pool.allocate_kv(n_tokens, owner, fmt)
        except BlockPoolExhaustedError as error:
            self.requests[str(error.stream)] += 1
            return
        self.take(owner, keys + values, fmt)
        self.calls["allocate"] += 1
        self.requests["k"] += 1
        self.requests["v"] += 1

    def free(self, owner: int, every: int) -> None:
        """Some blocks."""
        gone = self.held.get(owner, [])[::every]
        if gone:
            self.pool.free(gone)
            self.give(owner, gone)
            self.calls["free"] += 1

    def free_all(self, owner: int) -> None:
        """All blocks."""
        gone = list(self.held.get(owner, []))
        self.pool.free_all(owner)
        if gone:
            self.give(owner, gone)
            self.calls["free_all"] += 1

    def shrink(self, stream: str, target: int) -> None:
        """Retire."""
        if self.pool.shrink(stream, target):
            self.calls["shrink"] += 1

    def mark(self, owner: int, n_used: int) -> None:
        """Fill."""
        for block in self.held.get(owner, [])[:1]:
            self.pool.mark_used(block, n_used)


owners = st.integers(1, 4)
streams = st.sampled_from("kv")
formats = st.sampled_from(["fp16", "int4", "made up"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), owners, streams, st.integers(1, 30), formats),
        st.tuples(st.just("allocate_kv"), owners, st.integers(1, 20), formats),
        st.tuples(st.just("free"), owners, st.integers(1, 3)),
        st.tuples(st.just("free_all"), owners),
        st.tuples(st.just("shrink"), streams, st.integers(0, 8)),
        st.tuples(st.just("mark"), owners, st.integers(0, SIZE)),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(steps, st.booleans(), st.booleans())
def test_snapshots_agree_with_naive_counts(
    history: list[tuple[Any, ...]], grows: bool, rewatched: bool
) -> None:
    """After each call of any history: the invariants, the naive counts, and no counter fell."""
    pool = BlockPoolAllocator(
        PoolConfig(SIZE, 24, grow_on_exhaustion=grows, max_blocks=40 if grows else None)
    )
    probe = instrument(pool, name="naive")
    naive = Naive(pool)
    before: dict[tuple[str, ...], float] = {}
    for n, (name, *arguments) in enumerate(history):
        getattr(naive, name)(*arguments)
        if rewatched and n % 7 == 6:
            uninstrument(pool)
            probe = instrument(pool, name="naive")
        now = seen(probe)
        assert_invariants(now)
        assert {k: n for k, n in now.calls.items() if n} == {
            k: n for k, n in naive.calls.items() if n
        }
        held = {block for blocks in naive.held.values() for block in blocks}
        assert now.blocks_in_use == len(held)
        assert now.partial_blocks == sum(0 < block.n_used < SIZE for block in held)
        for stream in "kv":
            mine = [block for block in held if block.stream == stream]
            assert now.streams[stream].in_use == len(mine)
            assert now.streams[stream].slots_used == sum(block.n_used for block in mine)
            assert now.streams[stream].allocate_requests == naive.requests[stream]
        assert now.formats["int4"] == naive.formats["int4"]
        assert now.formats["other"] == naive.formats["made up"]
        assert now.owners_active == sum(bool(blocks) for blocks in naive.held.values())
        after = counters(now)
        assert all(after[key] >= value for key, value in before.items())
        before = after
    uninstrument(pool)


@pytest.mark.timeout(60)
def test_snapshots_hold_under_threads(watched: Any) -> None:
    """Three threads take and give, one scrapes: each snapshot adds up and no counter falls."""
    pool, probe = watched(64, grow_on_exhaustion=True, max_blocks=96)
    failures: list[BaseException] = []
    enough = threading.Event()

    def work(me: int) -> None:
        rng = random.Random(me)
        naive = Naive(pool)
        try:
            while not enough.is_set():
                naive.allocate(
                    me, rng.choice("kv"), rng.randint(1, 24), rng.choice(["fp16", "int4"])
                )
                if rng.random() < 0.5:
                    naive.free_all(me)
                else:
                    naive.free(me, 2)
                if rng.random() < 0.1:
                    pool.shrink("k", 4)
            pool.free_all(me)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in range(3)]
    for thread in threads:
        thread.start()
    try:
        before = counters(seen(probe))
        while not failures and seen(probe).calls["allocate"] < 1500:
            now = seen(probe)
            assert_invariants(now)
            after = counters(now)
            assert all(after[key] >= value for key, value in before.items())
            before = after
    finally:
        enough.set()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert seen(probe).blocks_in_use == 0


# -- B26: no path goes by the hooks ----------------------------------------------------------------

# Each public mutator of blocks, and a call of it that moves some.
MUTATORS: dict[str, Callable[[BlockPoolAllocator], object]] = {
    "allocate": lambda pool: pool.allocate("k", 9, 2),
    "allocate_kv": lambda pool: pool.allocate_kv(9, 2, "int4"),
    "free": lambda pool: pool.free(pool.blocks_for(1)[:2]),
    "free_held": lambda pool: pool.free_held(
        pool.blocks_for(1)[:2], *{b.lease for b in pool.blocks_for(1)}
    ),
    "free_held_later": lambda pool: (
        pool.free_held_later(pool.blocks_for(1)[:2], *{b.lease for b in pool.blocks_for(1)}),
        pool.stats,
    ),
    "free_all": lambda pool: pool.free_all(1),
    "shrink": lambda pool: pool.shrink("k", 3),
}
# What moves no block: reads, registrations, fill.
UNMOVING = {
    "add_filled",
    "add_retire_listener",
    "blocks_for",
    "config",
    "fresh_owner",
    "history",
    "mark_cached",
    "mark_used",
    "n_free",
    "refusal",
    "register_owner",
    "rejected",
    "release_owner",
    "stats",
}


def test_B26_every_public_method_is_told_apart() -> None:
    """A new public method of the pool has to be entered here, and so tried below."""
    public = {name for name, _ in inspect.getmembers(BlockPoolAllocator) if name[0] != "_"}
    assert public == set(MUTATORS) | UNMOVING


@pytest.mark.parametrize("name", MUTATORS)
@pytest.mark.parametrize("separate_kv", [True, False])
def test_B26_events_are_the_deltas_of_the_counters(
    name: str, separate_kv: bool, watched: Any
) -> None:
    """Blocks in the hook's events == blocks by the pool's counters, for every way in."""
    assert_events_are_deltas(watched, name, separate_kv)


def assert_events_are_deltas(watched: Any, name: str, separate_kv: bool) -> None:
    """Compare what passes the slots with what the counters say."""
    pool, probe = watched(64, separate_kv=separate_kv)
    pool.allocate_kv(17, 1)
    pool.allocate("k", 9, 1, "int4")
    moved: Counter[int] = Counter()

    def tap(slot: Callable[[Any], None]) -> Callable[[Any], None]:
        def tapped(entry: Any) -> None:
            moved[entry[1]] += entry[3]
            slot(entry)

        return tapped

    for stream in pool._streams:
        stream.took, stream.gave = tap(stream.took), tap(stream.gave)
    pool._rare = tap(pool._rare)
    before = seen(probe)
    MUTATORS[name](pool)
    now = seen(probe)
    assert moved[ALLOCATE] == now.n_allocations - before.n_allocations
    assert moved[FREE] + moved[FREE_ALL] == now.n_frees - before.n_frees
    assert moved[SHRINK] == now.n_retired - before.n_retired
    assert sum(moved.values()) > 0
    assert sum(now.calls.values()) == sum(before.calls.values()) + 1
    assert_invariants(now)


def test_B26_a_bypassed_hook_is_noticed(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard fails when a path goes by the slot."""

    def bypass(pool: BlockPoolAllocator) -> None:
        pool._streams[0].took = pool._journal.append
        pool.allocate("k", 9, 2)

    monkeypatch.setitem(MUTATORS, "allocate", bypass)
    with pytest.raises(AssertionError):
        assert_events_are_deltas(watched, "allocate", separate_kv=False)


def test_B26_caches_go_by_the_hooks(watched: Any) -> None:
    """Growth, trim, release and end of pool-backed caches are events like any others."""
    mx = pytest.importorskip("mlx.core")
    pytest.importorskip("mlx_lm")
    from veloxquant_mlx.memory.pool_backed_cache import PoolBackedKVCache

    pool, probe = watched(2000)
    cache = PoolBackedKVCache(pool, "request", step=4)
    rows = mx.zeros((1, 1, 9, 4))
    cache.update_and_fetch(rows, rows)
    now = seen(probe)
    assert now.blocks_in_use > 0 and now.calls["allocate"] > 0
    assert now.streams["k"].slots_used == now.streams["v"].slots_used == 9
    cache.trim(4)
    assert seen(probe).streams["k"].slots_used == 5
    cache.release()
    now = seen(probe)
    assert now.blocks_in_use == 0 and now.calls["free"] + now.calls["free_all"] > 0
    assert now.n_allocations == now.n_frees
    assert_invariants(now)


# -- owners ---------------------------------------------------------------------------------------


def test_B11_the_oldest_owner_and_what_idles_are_told(watched: Any) -> None:
    """An owner that does nothing for long shows by its age, and its blocks as held by an idler."""
    pool = BlockPoolAllocator(PoolConfig(SIZE, 64))
    now_ns = 10**12
    pool._clock = lambda: now_ns
    pool._now = now_ns
    probe = instrument(pool, name="idle")
    pool.register_owner("stuck")
    pool.allocate("k", 12, "stuck")
    busy = pool.allocate("k", 3, "busy")
    with pool._lock:
        probe.check_owners(pool, now_ns)
    for minute in range(1, 7):
        now_ns = 10**12 + minute * 60 * 10**9
        pool.mark_used(busy[0], 1 + minute % 2)
        with pool._lock:
            probe.check_owners(pool, now_ns)
    now = seen(probe)
    assert now.oldest_owner_age_s == pytest.approx(360)
    assert now.idle_owner_blocks == 3
    pool.free_all("stuck")
    assert seen(probe).oldest_owner_age_s == pytest.approx(360)  # busy began with it
    pool.free_all("busy")
    assert seen(probe).oldest_owner_age_s == 0
    with pool._lock:
        probe.check_owners(pool, now_ns)
    assert seen(probe).idle_owner_blocks == 0
    assert IDLE_S < 360
    uninstrument(pool)


def test_what_a_prompt_cache_keeps_is_counted_as_cached_and_does_not_age(watched: Any) -> None:
    """A marked owner shows by its blocks alone; without the mark it is the oldest again."""
    pool, probe = watched(64)
    now_ns = 10**12
    pool._clock = lambda: now_ns
    pool.allocate_kv(40, "kept")
    now_ns += 10**9
    pool.allocate("k", 8, "busy")
    assert not pool.mark_cached("unknown")
    assert seen(probe).cached_blocks == 0
    now_ns += 3600 * 10**9
    assert pool.mark_cached("kept")
    shown = seen(probe)
    assert shown.cached_blocks == len(pool.blocks_for("kept"))
    assert shown.oldest_owner_age_s == pytest.approx(3600)
    with pool._lock:
        probe.check_owners(pool, now_ns)
    now_ns += 400 * 10**9
    with pool._lock:
        probe.check_owners(pool, now_ns)
    assert seen(probe).idle_owner_blocks == len(pool.blocks_for("busy"))
    assert pool.mark_cached("kept", cached=False)
    shown = seen(probe)
    assert shown.cached_blocks == 0
    assert shown.oldest_owner_age_s == pytest.approx(4001)
    pool.mark_cached("kept")
    pool.free_all("kept")
    pool.allocate("k", 8, "kept")
    assert seen(probe).cached_blocks == 0, "the mark ends with the holding"


def test_marks_of_ended_owners_are_forgotten() -> None:
    """As many marks as pass by, memory for those that live alone."""
    pool = BlockPoolAllocator(PoolConfig(SIZE, 64, separate_kv=False))
    for owner in range(5000):
        pool.allocate("k", 8, owner)
        pool.mark_cached(owner)
        pool.free_all(owner)
    assert len(pool._cached.marks) <= 64


def test_the_oldest_owner_is_the_true_one_through_any_history() -> None:
    """Against the owners' own leases, with second leases, ends in any order, and returns."""
    rng = random.Random(5)
    pool = BlockPoolAllocator(PoolConfig(SIZE, 4096, separate_kv=False))
    clock = iter(range(10**9, 10**12, 10**6))
    pool._clock = lambda: next(clock)
    elders = Elders()
    began: dict[int, int] = {}
    for _ in range(3000):
        owner = rng.randrange(300)
        if owner in began and rng.random() < 0.5:
            pool.free_all(owner)
            del began[owner]
        else:
            lease = pool.allocate("k", 8, owner, rng.choice(["fp16", "int4"]))[0].lease
            began.setdefault(owner, lease._born_ns)
        if rng.random() < 0.2 and began:
            assert elders.oldest_ns(pool) == min(began.values())
    for owner in list(began):
        pool.free_all(owner)
    assert elders.oldest_ns(pool) is None


def test_the_oldest_owner_takes_few_steps_after_many_left() -> None:
    """After 20,000 departures at the front, what is looked at is counted, not timed."""
    pool = BlockPoolAllocator(PoolConfig(SIZE, 21_000, separate_kv=False))
    for owner in range(20_200):
        pool.allocate("k", 1, owner)
    for owner in range(20_000):
        pool.free_all(owner)
    elders = Elders()
    assert elders.oldest_ns(pool) is not None
    known = elders._known
    n_fronts = 0
    for owner in range(20_000, 20_060):
        pool.free_all(owner)
        elders.oldest_ns(pool)
        n_fronts += elders._known is not known
    assert n_fronts == 0, "the front of the owners was walked again"


# -- bounds ---------------------------------------------------------------------------------------


def test_series_and_memory_are_flat_in_owners_and_formats(watched: Any) -> None:
    """1,000 or 6,000 owners, 500 invented formats: the same series, the same sizes."""
    pool, probe = watched(512, separate_kv=False)

    def live(n: int, first: int) -> tuple[int, int]:
        for owner in range(first, first + n):
            pool.allocate("k", 5, owner, f"made-up-{owner % 500}")
            pool.free_all(owner)
        now = seen(probe)
        kept = (
            len(probe._hooks._sampler._samples)
            + len(probe._meters._watched)
            + len(probe._meters.formats)
        )
        return len(counters(now)), kept

    series, _ = live(1000, 0)
    more_series, kept = live(5000, 10_000)
    assert more_series == series
    assert kept < 100


def test_a_snapshot_makes_the_same_work_whatever_the_pool_holds(watched: Any) -> None:
    """Calls made by a snapshot are counted: as many with 10,000 blocks and 1,000 owners as with 1."""
    import sys

    def work(probe: Probe) -> int:
        probe.snapshot()
        n_calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal n_calls
            n_calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            probe.snapshot()
        finally:
            sys.setprofile(None)
        return n_calls

    small, small_probe = watched(16, separate_kv=False)
    small.allocate("k", 1, 1)
    large, large_probe = watched(20_000, separate_kv=False)
    for owner in range(1000):
        large.allocate("k", 10 * SIZE, owner)
    assert work(large_probe) == work(small_probe) < 250


# -- stuck ----------------------------------------------------------------------------------------


@pytest.mark.timeout(30)
def test_C03_a_stuck_pool_is_told_as_it_was_last_known(watched: Any) -> None:
    """A thread that sits on the lock does not hang a scrape: the last snapshot is given again."""
    pool, probe = watched()
    pool.allocate("k", 8, 1)
    last = seen(probe)
    holding, leave = threading.Event(), threading.Event()

    def sit() -> None:
        with pool._lock:
            holding.set()
            leave.wait(20)

    thread = threading.Thread(target=sit, daemon=True)
    thread.start()
    assert holding.wait(10)
    began = time.monotonic()
    assert probe.snapshot(timeout_s=0.05) is last
    assert probe.errors()["lock_timeout"] == 1
    leave.set()
    thread.join(10)
    assert time.monotonic() - began < 20
    assert seen(probe).sequence > last.sequence


def test_a_storage_is_found_and_a_broken_one_is_counted(watched: Any) -> None:
    """An MLXBlockStorage of the pool needs no naming; one that fails costs its own bytes only."""
    mx = pytest.importorskip("mlx.core")
    from veloxquant_mlx.memory.mlx_storage import MLXBlockStorage

    class Broken:
        def usage(self) -> object:
            raise ZeroDivisionError

    pool, probe = watched(16)
    assert seen(probe).storage == {}
    storage = MLXBlockStorage(pool, 8)
    broken = Broken()
    probe.add_storage(broken)
    (block,) = pool.allocate("k", SIZE, 1, "fp16")
    storage.write(block, 0, mx.zeros((SIZE, 8), dtype=mx.float16))
    now = seen(probe)
    assert now.storage["resident"] == now.storage["in_use"] == SIZE * 8 * 2
    assert now.storage_formats["fp16"] == SIZE * 8 * 2
    assert probe.errors()["storage"] >= 1
    pool.free_all(1)
    assert seen(probe).storage["free_cached"] == SIZE * 8 * 2
    pool.shrink("k", 0)
    del block
    now = seen(probe)
    assert now.storage["resident"] == 0 and now.storage["retired"] == 0


def test_B28_no_gauge_tells_a_rate() -> None:
    """Throughput is told by counters alone; an idle pool's gauges tell levels, not speeds."""
    for metric in CATALOGUE:
        if metric.kind == "gauge":
            assert "per_second" not in metric.name and "_rate" not in metric.name


def test_B29_raw_counts_stand_beside_every_ratio() -> None:
    """Free, in use, managed, cached, and the storage's parts are all there to divide."""
    names = {metric.name.removeprefix("veloxquant_block_pool_") for metric in CATALOGUE}
    assert names >= {
        "blocks_in_use",
        "blocks_managed",
        "free_blocks",
        "cached_blocks",
        "partial_blocks",
        "storage_bytes",
        "storage_in_use_bytes",
        "storage_free_cached_bytes",
        "storage_retired_bytes",
    }


def test_process_snapshot_tells_of_the_process() -> None:
    """Sequence, memory and versions are there, and MLX's memory only where MLX is."""
    first, second = take_snapshot(), take_snapshot()
    assert second.sequence > first.sequence
    assert second.python.startswith("3.")
    assert second.overhead_s >= first.overhead_s >= 0
    assert set(second.errors) >= {"hook", "snapshot", "storage", "self_check", "lock_timeout"}
    assert set(second.dropped) == {"pools_merged", "idle_samples"}
