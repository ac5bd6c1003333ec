"""Notices: what befalls a pool is told as it happens, and telling cannot hurt the caller."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, notices, take_snapshot, uninstrument
from veloxquant_mlx.telemetry.notices import Notice, add_listener, remove_listener


@pytest.fixture
def heard() -> Iterator[list[Notice]]:
    """What a listener heard."""
    told: list[Notice] = []
    add_listener(told.append)
    yield told
    remove_listener(told.append)
    gc.collect()


def watched(n_blocks: int, **options: object) -> BlockPoolAllocator:
    """A watched pool."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=n_blocks, **options))  # type: ignore[arg-type]
    instrument(pool, name=f"notices-{id(pool)}")
    return pool


def test_exhaustion_is_told_with_stream_blocks_and_owner(heard: list[Notice]) -> None:
    """A failed allocation names who asked for how much."""
    pool = watched(4)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("v", 16 * 3, "request-7")
    (notice,) = heard
    assert (notice.kind, notice.operation, notice.stream) == ("exhausted", "allocate", "v")
    assert (notice.n_blocks, notice.owner) == (3, "request-7")
    assert notice.pool.startswith("notices-")


@pytest.mark.parametrize("paired", [False, True])
def test_growth_is_told_once(heard: list[Notice], paired: bool) -> None:
    """Growth names what was added, by one stream or by both together."""
    pool = watched(4, grow_on_exhaustion=True, max_blocks=64)
    if paired:
        pool.allocate_kv(16 * 5, 3)
    else:
        pool.allocate("k", 16 * 5, 3)
    pool.allocate("k", 1, 3) if paired else pool.allocate("v", 16, 3)
    grown = [(n.kind, n.stream, n.n_blocks, n.owner) for n in heard]
    assert grown[0] == (("grown", "", 6, "3") if paired else ("grown", "k", 3, "3"))
    assert sum(n.n_blocks for n in heard) == pool.stats.n_grown


def test_growth_before_anyone_listened_is_not_told_later() -> None:
    """Only news is told."""
    pool = watched(4, grow_on_exhaustion=True, max_blocks=64)
    pool.allocate("k", 16 * 5, 3)
    told: list[Notice] = []
    add_listener(told.append)
    try:
        pool.allocate("k", 16 * 2, 3)
    finally:
        remove_listener(told.append)
    assert [n.n_blocks for n in told if n.kind == "grown"] == [2]


def test_slow_call_is_told_with_its_duration(
    heard: list[Notice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call beyond the threshold is told; here every one is beyond it."""
    monkeypatch.setattr("veloxquant_mlx.telemetry.hooks.SLOW_NS", 0)
    pool = watched(64)
    pool.allocate("k", 16 * 5, "slow one")
    slow = next(n for n in heard if n.kind == "slow")
    assert (slow.operation, slow.stream, slow.n_blocks) == ("allocate", "k", 5)
    assert slow.owner == "slow one" and slow.seconds is not None and slow.seconds >= 0


def test_a_listener_that_raises_is_counted_and_goes_no_further() -> None:
    """The caller sees its own error only, the next listener is called all the same."""
    told: list[Notice] = []

    def bad(_: Notice) -> None:
        raise ZeroDivisionError

    add_listener(bad)
    add_listener(told.append)
    pool = watched(2)
    before = take_snapshot().errors["hook"]
    try:
        with pytest.raises(BlockPoolExhaustedError):
            pool.allocate("k", 16 * 9, 1)
    finally:
        remove_listener(bad)
        remove_listener(told.append)
    assert len(told) == 1
    assert take_snapshot().errors["hook"] == before + 1
    uninstrument(pool)


def test_listeners_are_added_once_and_removed_without_fuss() -> None:
    """Adding twice tells once; removing a stranger is no error."""
    told: list[Notice] = []
    add_listener(told.append)
    add_listener(told.append)
    assert notices.listeners().count(told.append) == 1
    remove_listener(told.append)
    remove_listener(told.append)
    assert told.append not in notices.listeners()
