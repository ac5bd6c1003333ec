"""Names of watched pools: a numbered one gives way to one that the program chooses."""

from __future__ import annotations

import pytest

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import (
    instrument,
    instrument_all,
    stop_instrumenting_all,
    take_snapshot,
    uninstrument,
)


def names() -> list[str]:
    """The watched pools."""
    return [pool.name for pool in take_snapshot().pools]


def test_a_program_may_name_a_pool_that_was_watched_for_it() -> None:
    """Auto-instrumentation comes first and must not make the program's own call fail."""
    instrument_all()
    try:
        pool = BlockPoolAllocator(PoolConfig(n_blocks=4))
    finally:
        stop_instrumenting_all()
    numbered = instrument(pool).name
    assert instrument(pool, name="registry-main").name == "registry-main"
    assert "registry-main" in names() and numbered not in names()
    pool.allocate("k", 1, 1)
    (seen,) = [p for p in take_snapshot().pools if p.name == "registry-main"]
    assert seen.n_allocations == 1
    uninstrument(pool)


def test_a_bad_name_leaves_the_pool_watched_as_it_was() -> None:
    """The old name stays when the new one is refused."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=4))
    numbered = instrument(pool).name
    with pytest.raises(ValueError, match="not be 'other'"):
        instrument(pool, name="other")
    assert numbered in names()
    uninstrument(pool)


def test_a_chosen_name_stays() -> None:
    """Two choices are a mistake worth telling."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=4))
    instrument(pool, name="registry-first")
    with pytest.raises(ValueError, match="registry-first"):
        instrument(pool, name="registry-second")
    assert instrument(pool).name == "registry-first"
    uninstrument(pool)
