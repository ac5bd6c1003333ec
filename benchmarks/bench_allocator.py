"""What each call of the allocator costs, with pytest-benchmark.

    make bench BENCH_ARGS="-k bench_allocator"

What a round needs is made before it, and what it did is checked after it, both untimed. A round makes
many calls, as one release is close to the grain of the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant_mlx.memory.block_pool import Block, BlockPoolAllocator, PoolConfig

if TYPE_CHECKING:
    from benchmarks.conftest import Measure

SIZE = 16  # tokens a block
SIZES = {64: 256, 1024: 64, 4096: 16, 16384: 8, 65536: 4}  # blocks a call: calls a round
by_size = pytest.mark.parametrize(("n_blocks", "n_calls"), SIZES.items(), ids=map(str, SIZES))

Work = Callable[[BlockPoolAllocator], object]


def pool_of(n_blocks: int, *, separate_kv: bool = False) -> BlockPoolAllocator:
    """A pool that has handed out every block before."""
    pool = BlockPoolAllocator(PoolConfig(SIZE, n_blocks, separate_kv))
    for stream in ("k", "v") if separate_kv else ("k",):
        pool.allocate(stream, SIZE * pool.n_free(stream), 0)
    pool.free_all(0)
    return pool


def holding(n_blocks: int, owners: int) -> BlockPoolAllocator:
    """A pool in which every owner holds so many blocks."""
    pool = pool_of(n_blocks * owners)
    for owner in range(owners):
        pool.allocate("k", SIZE * n_blocks, owner)
    return pool


def run(
    measure: Measure,
    make: Callable[[], BlockPoolAllocator],
    work: Work,
    *,
    calls: int,
    n_blocks: int,
    taken: int = 0,
    freed: int = 0,
) -> None:
    """Time `work` on a new pool a round, and check that it took and freed so many blocks."""
    pools: list[BlockPoolAllocator] = []
    before: list[int] = []

    def setup() -> tuple[tuple[BlockPoolAllocator], dict[str, Any]]:
        pools[:] = [make()]
        before[:] = [pools[0].stats.n_allocations, pools[0].stats.n_frees]
        return (pools[0],), {}

    def check() -> bool:
        stats = pools[0].stats
        return [stats.n_allocations, stats.n_frees] == [before[0] + taken, before[1] + freed]

    measure(work, setup=setup, check=check, n_blocks=n_blocks, calls=calls, rounds=9)


@by_size
def test_free_all(measure: Measure, n_blocks: int, n_calls: int) -> None:
    """Release of an owner: the same at every size."""

    def release(pool: BlockPoolAllocator) -> None:
        for owner in range(n_calls):
            pool.free_all(owner)

    run(
        measure,
        lambda: holding(n_blocks, n_calls),
        release,
        calls=n_calls,
        n_blocks=n_blocks,
        freed=n_calls * n_blocks,
    )


@by_size
def test_free_all_of_keys_and_values(measure: Measure, n_blocks: int, n_calls: int) -> None:
    """Release of an owner in two streams, half of the blocks in each."""

    def make() -> BlockPoolAllocator:
        pool = pool_of(n_blocks * n_calls, separate_kv=True)
        for owner in range(n_calls):
            pool.allocate_kv(SIZE * n_blocks // 2, owner)
        return pool

    def release(pool: BlockPoolAllocator) -> None:
        for owner in range(n_calls):
            pool.free_all(owner)

    run(
        measure,
        make,
        release,
        calls=n_calls,
        n_blocks=n_blocks,
        freed=n_calls * n_blocks,
    )


@by_size
def test_allocate(measure: Measure, n_blocks: int, n_calls: int) -> None:
    """Handing out many blocks in one call."""

    def take(pool: BlockPoolAllocator) -> None:
        for owner in range(n_calls):
            pool.allocate("k", SIZE * n_blocks, owner)

    run(
        measure,
        lambda: pool_of(n_blocks * n_calls),
        take,
        calls=n_calls,
        n_blocks=n_blocks,
        taken=n_calls * n_blocks,
    )


@by_size
def test_free_reversed(measure: Measure, n_blocks: int, n_calls: int) -> None:
    """A list of all blocks of an owner, last block first."""
    n_calls = min(n_calls, 4)
    lists: list[list[Block]] = []

    def make() -> BlockPoolAllocator:
        pool = holding(n_blocks, n_calls)
        lists[:] = [pool.blocks_for(owner)[::-1] for owner in range(n_calls)]
        return pool

    def release(pool: BlockPoolAllocator) -> None:
        for blocks in lists:
            pool.free(blocks)

    run(
        measure,
        make,
        release,
        calls=n_calls,
        n_blocks=n_blocks,
        freed=n_calls * n_blocks,
    )


@by_size
def test_blocks_for(measure: Measure, n_blocks: int, n_calls: int) -> None:
    """The list of an owner's blocks."""

    def look(pool: BlockPoolAllocator) -> None:
        for owner in range(n_calls):
            pool.blocks_for(owner)

    run(measure, lambda: holding(n_blocks, n_calls), look, calls=n_calls, n_blocks=n_blocks)


def test_grow_by_one_block(measure: Measure) -> None:
    """A decode step that needs a block."""

    def grow(pool: BlockPoolAllocator) -> None:
        for _ in range(4000):
            pool.allocate("k", SIZE, 7)

    run(measure, lambda: pool_of(8192), grow, calls=4000, n_blocks=1, taken=4000)


def test_grow_by_one_block_of_keys_and_values(measure: Measure) -> None:
    """The same by turns in two streams."""

    def grow(pool: BlockPoolAllocator) -> None:
        for _ in range(2000):
            pool.allocate("k", SIZE, 7)
            pool.allocate("v", SIZE, 7)

    make = lambda: pool_of(8192, separate_kv=True)  # noqa: E731 - as short as the others
    run(measure, make, grow, calls=4000, n_blocks=1, taken=4000)


def test_cycle(measure: Measure) -> None:
    """One block for a new owner, and its release."""

    def cycle(pool: BlockPoolAllocator) -> None:
        for owner in range(4000):
            pool.allocate("k", SIZE, owner)
            pool.free_all(owner)

    run(measure, lambda: pool_of(64), cycle, calls=4000, n_blocks=1, taken=4000, freed=4000)


def test_mark_used(measure: Measure) -> None:
    """A token more in a block."""
    held: list[Block] = []

    def make() -> BlockPoolAllocator:
        pool = pool_of(64)
        held[:] = pool.allocate("k", 5, 1)
        return pool

    def mark(pool: BlockPoolAllocator) -> None:
        block = held[0]
        for _ in range(4000):
            pool.mark_used(block, 7)

    run(measure, make, mark, calls=4000, n_blocks=1)
    assert held[0].n_used == 7


def test_construct_and_hand_out(measure: Measure) -> None:
    """A pool of 262,144 blocks, made and handed out."""
    n = 262_144
    made: list[BlockPoolAllocator] = []

    def construct(_: BlockPoolAllocator) -> None:
        pool = BlockPoolAllocator(PoolConfig(SIZE, n, separate_kv=False))
        pool.allocate("k", SIZE * n, 1)
        made[:] = [pool]

    run(measure, lambda: pool_of(1), construct, calls=1, n_blocks=n)
    assert made[0].stats.blocks_in_use() == n
