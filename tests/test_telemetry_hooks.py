"""Hooks: what is counted and sampled stays true, whatever the pool is put through."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError, OwnerAlreadyActiveError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.memory.journal import BULK
from veloxquant_mlx.telemetry import PoolSnapshot, Probe, instrument, uninstrument
from veloxquant_mlx.telemetry.calibration import hook_cost_ns
from veloxquant_mlx.telemetry.slots import MAX_STRIDE, HookSlot, RareSlot, make_hooks

US = 1_000


class SteppingClock:
    """A clock that stands still but for what a test adds, and a step at each reading if asked."""

    def __init__(self, now_ns: int = 1_000_000_000, step_ns: int = 0) -> None:
        self.now_ns, self.step_ns = now_ns, step_ns

    def __call__(self) -> int:
        """The time, which then moves on by a step."""
        now = self.now_ns
        self.now_ns += self.step_ns
        return now


def a_pool(n_blocks: int = 64, **options: Any) -> BlockPoolAllocator:
    """A unified pool of small blocks, whose clock a test may set before it is watched."""
    options.setdefault("separate_kv", False)
    return BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks, **options))


@pytest.fixture
def watched() -> Iterator[Any]:
    """Makes watched pools, and lets go of them after."""
    pools: list[BlockPoolAllocator] = []

    def make(
        n_blocks: int = 64, clock: SteppingClock | None = None, **options: Any
    ) -> tuple[BlockPoolAllocator, Probe]:
        pool = a_pool(n_blocks, **options)
        if clock is not None:
            pool._clock = clock
            pool._now = clock.now_ns
        pools.append(pool)
        return pool, instrument(pool, name=f"hooks-{id(pool)}")

    yield make
    for pool in pools:
        uninstrument(pool)


def seen(probe: Probe) -> PoolSnapshot:
    """The snapshot, which there is."""
    snapshot = probe.snapshot()
    assert snapshot is not None
    return snapshot


# -- counts ---------------------------------------------------------------------------------------


def test_A02_calls_and_blocks_are_counted_apart(watched: Any) -> None:
    """One call of 10 blocks is one call and ten blocks, on both sides."""
    pool, probe = watched()
    pool.allocate("k", 40, 1)
    pool.free(pool.blocks_for(1)[:3])
    pool.free_all(1)
    now = seen(probe)
    assert now.calls == {"allocate": 1, "free": 1, "free_all": 1, "shrink": 0}
    assert (now.n_allocations, now.n_frees, now.blocks_in_use) == (10, 10, 0)


def test_A01_every_operation_has_durations_and_sizes(watched: Any) -> None:
    """Three owners with 1, 5 and 40 calls: latency by operation, blocks a request, no owner ids."""
    pool, probe = watched(256)
    for owner, n in (("a", 1), ("b", 5), ("c", 40)):
        for _ in range(n):
            pool.allocate("k", 4, owner)
    for owner in "abc":
        pool.free_all(owner)
    pool.shrink("k", 200)
    now = seen(probe)
    assert now.calls["allocate"] == 46 and now.calls["free_all"] == 3 and now.calls["shrink"] == 1
    for operation, n in now.calls.items():
        assert now.durations[operation].n_observed == n, operation
    assert now.request_blocks.n_observed == 46
    assert now.request_blocks.counts[0] == 46  # of one block each
    assert now.occupancy.n_observed == 46


def test_A04_growth_shrink_collision_contention_and_exhaustion_have_their_own(watched: Any) -> None:
    """Each of the five shows as a number of its own."""
    pool, probe = watched(4, grow_on_exhaustion=True, max_blocks=8)
    pool.register_owner(1)
    with pytest.raises(OwnerAlreadyActiveError):
        pool.register_owner(1)
    pool.allocate("k", 24, 1)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 400, 2)
    pool.free_all(1)
    pool.shrink("k", 1)
    now = seen(probe)
    assert now.n_grown == 2 and now.n_retired == 5 and now.owner_collisions == 1
    assert now.n_exhausted == 1 and now.streams["kv"].shortfall == 100
    assert now.grow_attempts == {"full": 1, "denied": 1}
    assert now.lock_wait.n_observed == sum(now.calls.values())


def test_B20_exhaustions_tell_their_reason_and_add_up(watched: Any) -> None:
    """No free block, the cap, the other stream: three reasons, one sum."""
    pool, probe = watched(8, separate_kv=True)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 17 * 4, 1)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 6 * 4, 1)
    capped, capped_probe = watched(4, grow_on_exhaustion=True, max_blocks=4)
    with pytest.raises(BlockPoolExhaustedError):
        capped.allocate("k", 5 * 4, 1)
    assert seen(probe).streams["k"].exhausted == {"full": 1, "stranded": 1, "limit": 0}
    assert seen(capped_probe).streams["kv"].exhausted == {"full": 0, "stranded": 0, "limit": 1}
    for each in (probe, capped_probe):
        now = seen(each)
        by_reason = sum(sum(s.exhausted.values()) for s in now.streams.values())
        assert by_reason == now.n_exhausted
        assert sum(s.allocate_requests for s in now.streams.values()) == by_reason


def test_B27_double_frees_are_counted(watched: Any) -> None:
    """Twice in one call is repeated, a second call finds it free."""
    pool, probe = watched()
    (block,) = pool.allocate("k", 4, 1)
    pool.free([block, block])
    pool.free([block])
    rejected = seen(probe).rejected
    assert rejected["repeated"] == 1 and rejected["free"] == 1


def test_requests_of_both_streams_count_in_each_and_as_one_call(watched: Any) -> None:
    """`allocate_kv` is one call; in a unified pool it is one request of its stream."""
    separate, separate_probe = watched(16, separate_kv=True)
    separate.allocate_kv(4, 1)
    unified, unified_probe = watched(16)
    unified.allocate_kv(4, 1)
    streams = seen(separate_probe).streams
    assert streams["k"].allocate_requests == streams["v"].allocate_requests == 1
    assert seen(unified_probe).streams["kv"].allocate_requests == 1
    for probe in (separate_probe, unified_probe):
        now = seen(probe)
        assert now.calls["allocate"] == now.request_blocks.n_observed == 1
        assert now.request_blocks.total == 2


def test_formats_are_counted_and_invented_ones_are_other(watched: Any) -> None:
    """Blocks by format follow every path; 500 invented tags make no key."""
    pool, probe = watched(4096)
    pool.allocate("k", 8, 1)
    pool.allocate("k", 4, 2, "int4")
    pool.allocate("k", 4, 2, "int4")  # a decode step
    pool.allocate_kv(4, 3, "int8")
    for n in range(500):
        pool.allocate("k", 4, f"o{n}", f"invented-{n}")
    formats = seen(probe).formats
    assert formats == {
        "fp32": 0, "fp16": 2, "bf16": 0, "int8": 2, "int4": 2, "int2": 0, "int1": 0, "other": 500
    }  # fmt: skip
    pool.free(pool.blocks_for(2)[:1])
    pool.free_all(3)
    for n in range(500):
        pool.free_all(f"o{n}")
    formats = seen(probe).formats
    assert formats["int4"] == 1 and formats["int8"] == 0 and formats["other"] == 0
    assert sum(formats.values()) == seen(probe).blocks_in_use == 3


def test_fp16_that_is_another_object_is_still_fp16(watched: Any) -> None:
    """The hook looks at identity; what fails it and is equal is not counted apart."""
    pool, probe = watched()
    pool.allocate("k", 4, 1, "fp16!"[:4])
    assert seen(probe).formats["fp16"] == 1
    pool.free_all(1)
    assert not any(seen(probe).formats.values())


def test_formats_of_before_are_counted_when_watching_begins() -> None:
    """A pool may be in use when it is first watched."""
    pool = a_pool()
    pool.allocate("k", 8, 1, "int4")
    pool.allocate("k", 4, 1)
    probe = instrument(pool, name="hooks-late")
    assert seen(probe).formats["int4"] == 2 and seen(probe).formats["fp16"] == 1
    pool.free_all(1)
    assert not any(seen(probe).formats.values())
    uninstrument(pool)


# -- samples --------------------------------------------------------------------------------------


def test_durations_are_those_of_the_calls(watched: Any) -> None:
    """With a clock that steps 3 us a reading, each call takes a multiple of that."""
    clock = SteppingClock(step_ns=3 * US)
    pool, probe = watched(64, clock)
    for _ in range(50):
        pool.allocate("k", 4, 1)
        pool.allocate("k", 8, 2)
        pool.free(pool.blocks_for(2)[:1])
        pool.free_all(1)
        pool.free_all(2)
    now = seen(probe)
    for operation in ("allocate", "free", "free_all"):
        histogram = now.durations[operation]
        assert histogram.n_observed == now.calls[operation]
        mean_us = histogram.total / histogram.n_observed * 1e6
        assert 2.9 <= mean_us <= 30, operation
        assert sum(histogram.counts[:2]) == 0  # nothing below 2.5 us


def test_weights_make_the_histogram_true_of_a_mixture(watched: Any) -> None:
    """Nine calls of one block to one of three: the sampled sizes are about so mixed, and all."""
    pool, probe = watched(8192)
    clock = pool._clock
    for n in range(20_000):
        pool.allocate("k", 12 if n % 10 == 3 else 4, n % 7)
        if n % 7 == 6:
            for owner in range(7):
                pool.free_all(owner)
    now = seen(probe)
    sizes = now.request_blocks
    assert pool._clock is clock
    assert sizes.n_observed == now.calls["allocate"] == 20_000
    share = sizes.counts[2] / 20_000  # (2, 4]
    assert 0.02 < share < 0.35


def sampled_at_rate(slot: RareSlot, calls_a_second: int, n_samples: int = 40) -> int:
    """Let calls come in at an even rate, sample those that are due; returns the last stride."""
    each_ns = 1_000_000_000 // calls_a_second
    calls, now_ns = slot.sampled_calls or 10_000, slot.sampled_ns or 10**12
    slot.sampled_calls, slot.sampled_ns = calls, now_ns
    for _ in range(n_samples):
        calls += slot.left
        now_ns += slot.left * each_ns
        slot.sampled(calls, now_ns, 0.5)
    return slot.left


def test_strides_are_short_at_first_and_for_quiet_pools() -> None:
    """Twice the calls at first, then so that 20 samples a second are taken, up to the most."""
    slot = RareSlot("allocate")
    assert slot.stride(1, 0, 0.5) == 2
    for calls_a_second, stride in ((10, 1), (100, 5), (4000, 200), (10_000_000, MAX_STRIDE)):
        assert sampled_at_rate(RareSlot("allocate"), calls_a_second) == stride
    assert sampled_at_rate(slot, 4000) == 200
    assert sampled_at_rate(slot, 10) == 1, "a pool that has become quiet"
    assert sampled_at_rate(slot, 4000) == pytest.approx(200, rel=0.02), "and busy again"
    slot = RareSlot("allocate")
    slot.sampled_calls, slot.sampled_ns = 10_000_000, 10**12
    assert slot.stride(20_000_000, 10**12, 0.99) <= 1.5 * MAX_STRIDE


def test_two_calls_at_once_do_not_blind_a_quiet_pool() -> None:
    """A pair of calls every second: the second of each is a microsecond after the first."""
    slot = RareSlot("allocate")
    slot.sampled_calls, slot.sampled_ns = 10_000, 10**12
    n_sampled, calls, now_ns = 0, 10_000, 10**12
    for _ in range(200):
        now_ns += 1_000_000_000
        for after_ns in (0, 1_000):
            calls += 1
            slot.left -= 1
            if slot.left <= 0:
                slot.sampled(calls, now_ns + after_ns, 0.5)
                n_sampled += 1
    assert n_sampled >= 200


def test_a_round_of_layers_and_streams_is_sampled_all_over() -> None:
    """Each call of a round of 64 gets its turn, whatever the stride aims at: it is jittered."""
    rng = random.Random(1)
    for stride in (64, 128, 512, MAX_STRIDE):
        slot = RareSlot("allocate")
        positions: Counter[int] = Counter()
        calls = 10_000
        for _ in range(6400):
            slot.sampled_calls, slot.sampled_ns = calls - stride, 0
            calls += slot.stride(calls, 50_000_000, rng.random())  # a 20th of a second
            positions[calls % 64] += 1
        assert len(positions) == 64
        assert max(positions.values()) < 3 * min(positions.values())


def test_large_calls_are_timed_each_and_count_once(watched: Any) -> None:
    """Calls of 4,096 blocks and more stand for themselves alone, among many small ones."""
    pool, probe = watched(4 * BULK)
    for _ in range(3000):
        pool.allocate("k", 4, 1)
    pool.free_all(1)
    pool.allocate("k", 4, 1)
    pool.free_all(1)
    for _ in range(5):
        pool.allocate("k", 4 * BULK, 2)
        pool.free(pool.blocks_for(2))
        pool.allocate("k", 4 * BULK, 3)
        pool.free_all(3)
    now = seen(probe)
    assert now.calls["allocate"] == 3011 == now.request_blocks.n_observed
    assert now.request_blocks.counts[-1] == 10  # above 1,024 blocks
    assert now.durations["free"].n_observed == 5
    assert now.durations["free_all"].n_observed == now.calls["free_all"] == 7


def test_large_calls_are_not_missed_for_want_of_a_sample(watched: Any) -> None:
    """Each has its own duration, however long the stride of the small ones is."""
    pool, probe = watched(2 * BULK)
    for _ in range(30_000):
        pool.allocate("k", 4, 1)
        pool.free_all(1)
    clock = SteppingClock()
    probe._hooks._clock = probe._hooks._sampler._clock = pool._clock = clock
    for _ in range(3):
        for _ in range(2):
            clock.step_ns = 2_000_000
            pool.allocate("k", 4 * BULK, 2)
            pool.free_all(2)
            clock.step_ns = 0
    now = seen(probe)
    for operation in ("allocate", "free_all"):
        assert sum(now.durations[operation].counts[9:]) == 6, operation  # above 1 ms


def test_lifetimes_and_idle_gaps_are_told_in_seconds(watched: Any) -> None:
    """Held for two seconds, idle for five."""
    clock = SteppingClock()
    pool, probe = watched(1, clock)
    for _ in range(20):
        pool.allocate("k", 4, 1)
        clock.now_ns += 2_000_000_000
        pool.free_all(1)
        clock.now_ns += 5_000_000_000
        seen(probe)  # a scrape, which refreshes the coarse clock
    now = seen(probe)
    lifetime = now.block_lifetime
    assert lifetime.n_observed > 0
    assert lifetime.total / lifetime.n_observed == pytest.approx(2, abs=0.01)
    assert now.lease_lifetime.total / now.lease_lifetime.n_observed == pytest.approx(2, abs=0.01)
    assert now.block_idle.n_observed > 0
    assert now.block_idle.total / now.block_idle.n_observed == pytest.approx(5, abs=0.01)


def test_cold_blocks_do_not_stop_the_watch_for_reuse(watched: Any) -> None:
    """Freed blocks that nobody wants give way, and are counted as given up."""
    clock = SteppingClock(step_ns=1_000_000_000)  # a quiet pool: every call is sampled
    pool, probe = watched(512, clock)
    for owner in range(200):
        pool.allocate("k", 4, owner)
    for owner in range(200):
        pool.free(pool.blocks_for(owner))
        seen(probe)
    assert probe.n_idle_samples_dropped() > 0
    before = seen(probe).block_idle.n_observed
    for _ in range(200):
        pool.free(pool.allocate("k", 8, 1))
        seen(probe)
    assert seen(probe).block_idle.n_observed > before


def test_a_rare_release_is_timed_although_other_calls_come_between(watched: Any) -> None:
    """One free_all in 600 calls is sampled: waiting for it is not given up too early."""
    pool, probe = watched(1024)
    for _ in range(12):
        for _ in range(600):
            pool.allocate("k", 4, 1)
        pool.free_all(1)
    now = seen(probe)
    assert now.calls["free_all"] == now.durations["free_all"].n_observed == 12
    assert now.durations["allocate"].n_observed == 7200


def test_the_timing_lock_does_not_stay(watched: Any) -> None:
    """Without the call that it waits for, it is put back in the end."""
    pool, probe = watched(64)
    real = probe._hooks._timer._real_lock
    (block,) = pool.allocate("k", 3, 1)
    pool.free_all(1)  # arms for the next one
    (block,) = pool.allocate("k", 3, 1)
    for n in range(21_000):
        pool.mark_used(block, 1 + n % 3)
    assert pool._lock is real


def test_the_telemetry_accounts_for_itself(watched: Any) -> None:
    """Plain calls by what a hook costs here, samples and snapshots as they took; it never falls."""
    pool, probe = watched()
    before = probe.overhead_s()
    for _ in range(500):
        pool.allocate("k", 4, 1)
        pool.free_all(1)
    after_calls = probe.overhead_s()
    assert after_calls - before >= 1000 * hook_cost_ns() / 1e9
    assert hook_cost_ns() == hook_cost_ns() >= 0
    seen(probe)
    assert probe.overhead_s() > after_calls


# -- on and off -----------------------------------------------------------------------------------


def test_watching_ends_without_a_trace() -> None:
    """The slots and the lock are the pool's own again, also when it ends while a sample is due."""
    pool = a_pool()
    log = pool._journal.append
    lock = pool._lock
    for n_calls in range(8):
        instrument(pool, name="hooks-off")
        assert pool._lock is not lock  # the first calls are sampled
        for _ in range(n_calls):
            pool.allocate("k", 4, 1)
        pool.free_all(1)
        uninstrument(pool)
        assert pool._lock is lock
        assert pool._rare == pool._streams[0].took == pool._streams[0].gave == log
        assert pool._timed is None


def test_watching_ends_from_inside_a_hook(watched: Any) -> None:
    """A signal handler that strikes in a hook may take it out."""
    pool, probe = watched()
    fire = probe._hooks._fire

    def meddling(*args: Any) -> None:
        fire(*args)
        uninstrument(pool)

    hooks = make_hooks("allocate", pool._journal.append, meddling, fire, {"hook": 0})
    pool._streams[0].took = hooks.plain
    assert isinstance(hooks.slot, HookSlot)
    assert len(pool.allocate("k", 4, 1)) == 1
    assert pool._streams[0].took == pool._journal.append
    assert probe.snapshot() is None
    pool.free_all(1)


def test_a_dropped_pool_dies_at_once() -> None:
    """No cycle runs through the hooks, and what they sampled keeps neither blocks nor leases."""
    pool = a_pool()
    instrument(pool, name="hooks-dropped")
    for turn in range(40):
        pool.allocate("k", 9, 1)
        pool.allocate_kv(4, 2, "int4")
        pool.free(pool.blocks_for(2)[:1])
        pool.free_all(turn % 3)
    (block,) = pool.allocate("k", 4, "dropped")
    lease_type = type(block.lease)
    gone = weakref.ref(pool)
    gc.disable()
    try:
        del pool, block
        assert gone() is None
    finally:
        gc.enable()
    gc.collect()
    leases = [x for x in gc.get_objects() if type(x) is lease_type]
    assert not [x for x in leases if x.owner == "dropped"]


def test_threads_lose_no_count(watched: Any) -> None:
    """Four threads, every call counted and stood for, with the timing lock swapped in and out."""
    pool, probe = watched(1024)
    n_rounds = 1500

    def work(owner: int) -> None:
        for _ in range(n_rounds):
            pool.allocate("k", 4, owner)
            pool.allocate("k", 4, owner)
            pool.free_all(owner)

    threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in range(4)]
    for thread in threads:
        thread.start()
    snapshots = [seen(probe)]
    while any(thread.is_alive() for thread in threads):
        snapshots.append(seen(probe))
    for thread in threads:
        thread.join(60)
    now = seen(probe)
    assert now.calls == {"allocate": 8 * n_rounds, "free": 0, "free_all": 4 * n_rounds, "shrink": 0}
    assert now.durations["allocate"].n_observed == 8 * n_rounds
    assert now.durations["free_all"].n_observed == 4 * n_rounds
    assert now.lock_wait.n_observed == 12 * n_rounds
    assert not any(probe.errors().values())
    for before, after in pairwise([*snapshots, now]):
        assert before.calls["allocate"] <= after.calls["allocate"]
        assert before.n_allocations <= after.n_allocations
        waits = zip(before.lock_wait.counts, after.lock_wait.counts, strict=True)
        assert all(a <= b for a, b in waits)


def test_a_wait_for_the_lock_is_seen(watched: Any) -> None:
    """A call that waits while another thread holds the lock shows as a long wait."""
    pool, probe = watched()
    holding, done = threading.Event(), threading.Event()
    lock = probe._hooks._timer._real_lock

    def hold() -> None:
        with lock:
            holding.set()
            # The other thread is inside the wait when its time of asking was noted.
            done.wait(0.2)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert holding.wait(10)
    pool.allocate("k", 4, 1)
    thread.join(10)
    done.set()
    now = seen(probe)
    assert now.lock_wait.total > 0.01
    assert now.durations["allocate"].total < now.lock_wait.total


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_a_sample_is_due(watched: Any) -> None:
    """In the child, where the holder of the lock does not exist, calls and samples go on."""
    pool, probe = watched()
    holding, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            holding.set()
            leave.wait(30)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert holding.wait(10)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for _ in range(300):
                pool.allocate("k", 4, 1)
                pool.free_all(1)
            now = probe.snapshot()
            assert now is not None
            report = [now.calls["allocate"], now.durations["allocate"].n_observed]
            os.write(writer, f"{report}{sum(probe.errors().values())}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    leave.set()
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "[300, 300]0"
    os.waitpid(child, 0)
    thread.join(10)


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where",
    ["_fire", "_on_rare", "_tally_took", "_tally_gave", "_on_special", "stamped", "observe_bulk"],
)
def test_a_fault_in_a_hook_is_counted_and_never_raised(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in each part in turn: the pool works on, and the telemetry tells."""
    from veloxquant_mlx.telemetry.hooks import Hooks
    from veloxquant_mlx.telemetry.lock_timer import LockTimer
    from veloxquant_mlx.telemetry.sampler import Sampler

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    # Two of them catch inside, so plant below them.
    below = {"_on_special": "_slot_of", "stamped": "_give_up"}.get(where, where)
    owner = next(part for part in (Hooks, LockTimer, Sampler) if below in vars(part))
    monkeypatch.setattr(owner, below, broken)
    pool = a_pool(2 * BULK)
    probe = instrument(pool, name=f"hooks-broken-{where}")
    for _ in range(70):
        pool.allocate("k", 4, 1, "int4")
        pool.free_all(1)
    pool.allocate("k", 4 * BULK, 1)
    assert len(pool.blocks_for(1)) == BULK
    pool.free(pool.blocks_for(1)[: BULK // 2])
    pool.free_all(1)
    pool.allocate_kv(4, 1)
    pool.free_all(1)
    assert pool.stats.blocks_in_use() == 0
    assert probe.errors()["hook"] > 0
    assert probe.snapshot() is not None
    uninstrument(pool)


def test_a_fault_while_a_pool_is_made_is_no_fault_of_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`instrument_all` may fail; making a pool may not."""
    from veloxquant_mlx.telemetry import instrument_all, registry, stop_instrumenting_all

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    instrument_all()
    try:
        monkeypatch.setattr(registry, "instrument", broken)
        before = registry._registry._errors["hook"]
        assert a_pool().n_free("k") == 64
        assert registry._registry._errors["hook"] == before + 1
    finally:
        stop_instrumenting_all()
