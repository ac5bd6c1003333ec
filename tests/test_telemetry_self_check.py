"""The self-check: a planted corruption is named, with what was done last, and never raised."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import PoolSnapshot, instrument, take_snapshot, uninstrument
from veloxquant_mlx.telemetry.self_check import EVERY_S, check_pool


def a_pool(n_blocks: int = 32) -> BlockPoolAllocator:
    """A pool in use, with free blocks that were handed out before."""
    pool = BlockPoolAllocator(PoolConfig(4, n_blocks, separate_kv=False))
    pool.allocate("k", 30, "gone")
    pool.allocate("k", 10, "here")
    pool.free_all("gone")
    return pool


def free_twice(pool: BlockPoolAllocator) -> None:
    """The same block on the free list twice."""
    top = pool._streams[0].top
    top.append(top[0])


def free_a_held_one(pool: BlockPoolAllocator) -> None:
    """A block that an owner holds, on the free list in the place of another."""
    pool._streams[0].top[-1] = pool.blocks_for("here")[0]


def lose_one(pool: BlockPoolAllocator) -> None:
    """A free block that is in no list any more."""
    pool._streams[0].top.pop()


def miscount_managed(pool: BlockPoolAllocator) -> None:
    """A stream that thinks it has more than the pool."""
    pool._streams[0].managed += 1


def miscount_partial(pool: BlockPoolAllocator) -> None:
    """Fewer partly filled blocks than none."""
    gave, born, _, peak, era = pool._counts
    pool._counts = (gave, born, -1, peak, era)


def share_a_block(pool: BlockPoolAllocator) -> None:
    """Two owners of one block: only the full audit sees it."""
    pool.allocate("k", 4, "thief")
    pool._owners["thief"]._blocks[0] = pool.blocks_for("here")[0]  # type: ignore[index, assignment]


FAULTS: dict[str, tuple[Callable[[BlockPoolAllocator], None], str]] = {
    "free_twice": (free_twice, "free_list"),
    "free_a_held_one": (free_a_held_one, "free_list"),
    "lose_one": (lose_one, "free_list"),
    "miscount_managed": (miscount_managed, "managed"),
    "miscount_partial": (miscount_partial, "counters"),
    "share_a_block": (share_a_block, "owners"),
}


def named(name: str) -> PoolSnapshot:
    """The watched pool of that name."""
    (found,) = [pool for pool in take_snapshot().pools if pool.name == name]
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_B05_a_corruption_is_named_with_the_last_operations(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted by check, logged once with what was done last; scraping goes on."""
    plant, check = FAULTS[fault]
    name = f"corrupt-{fault}"
    pool = a_pool()
    probe = instrument(pool, name=name)
    assert not any(named(name).invariant_violations.values())
    pool.allocate("k", 4, "last one")
    plant(pool)
    with caplog.at_level(logging.ERROR, "veloxquant_mlx.telemetry"):
        for _ in range(3):
            probe.next_check_s = 0.0
            now = named(name)
    assert now.invariant_violations[check] >= 3
    text = caplog.text
    assert name in text and check in text
    assert "allocate of 1 blocks (4 tokens; kv/fp16 of owner 'last one')" in text
    assert len({record.getMessage() for record in caplog.records}) == len(caplog.records)
    assert not any(probe.errors().values())
    uninstrument(pool)


def test_a_sound_pool_has_no_faults() -> None:
    """The strict form, for tests and CI."""
    assert check_pool(a_pool()) == []


def test_large_pools_get_the_checks_of_constant_cost() -> None:
    """Two ends of the free list are looked at; nothing visits a hundred thousand blocks."""
    pool = a_pool(100_000)
    assert check_pool(pool) == []
    free_twice(pool)
    assert {check for check, _ in check_pool(pool)} == {"free_list"}


def test_checks_are_ten_seconds_apart() -> None:
    """However often it is scraped."""
    pool = a_pool()
    probe = instrument(pool, name="checked-rarely")
    named("checked-rarely")
    due = probe.next_check_s
    named("checked-rarely")
    assert probe.next_check_s == due
    assert EVERY_S >= 10
    uninstrument(pool)


def test_B07_a_leak_is_told_and_nothing_is_raised() -> None:
    """Blocks that nobody gives back show in gauges; the pool serves on."""
    pool = BlockPoolAllocator(PoolConfig(4, 8, separate_kv=False))
    instrument(pool, name="leaky")
    pool.allocate("k", 12, "leak")
    now = named("leaky")
    assert now.blocks_in_use == 3 and now.owners_active == 1 and now.oldest_owner_age_s >= 0
    assert not any(now.invariant_violations.values())
    assert len(pool.allocate("k", 4, 2)) == 1
    uninstrument(pool)


def test_a_check_that_fails_is_counted_and_costs_no_series(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool too broken to be checked may still be counted."""
    from veloxquant_mlx.telemetry import self_check

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(self_check, "audit", broken)
    pool = a_pool()
    instrument(pool, name="uncheckable")
    before = take_snapshot().errors["self_check"]
    probe = instrument(pool)
    probe.next_check_s = 0.0
    assert named("uncheckable").n_blocks == 32
    assert take_snapshot().errors["self_check"] == before + 1
    uninstrument(pool)


def test_a_call_under_way_in_this_thread_is_left_for_later() -> None:
    """A handler that scrapes inside a call sees books that do not add up yet, and says nothing."""
    pool = a_pool()
    probe = instrument(pool, name="busy")
    with pool._lock:
        lose_one(pool)
        probe.next_check_s = 0.0
        assert not any(named("busy").invariant_violations.values())
        assert probe.next_check_s == 0.0
    assert named("busy").invariant_violations["free_list"] == 1
    uninstrument(pool)
