"""The work that is compared: what a serving loop asks of a block allocator, timed.

Runs by itself in the environment of either package, with the standard library only, and prints one
JSON object: microseconds a call (bytes a block for `held_bytes`), by name. It uses what both
packages have on their public page. Every timed part is checked afterwards to have moved its blocks.

    python allocator_work.py
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig

SIZE = 16  # tokens a block
# CPU time of this thread: under load, wall time is longer for the slower package above all.
_now = time.thread_time


def pool_of(n_blocks: int, *, separate_kv: bool = False) -> BlockPoolAllocator:
    """A pool with one free list, unless told otherwise."""
    return BlockPoolAllocator(PoolConfig(SIZE, n_blocks, separate_kv))


def used_pool_of(n_blocks: int) -> BlockPoolAllocator:
    """A pool that handed out every block before, as one that has served for a while."""
    pool = pool_of(n_blocks)
    for owner in range(8):
        pool.allocate("k", SIZE * (n_blocks // 8), owner)
    for owner in range(8):
        pool.free_all(owner)
    return pool


def best(sample: Callable[[], float], rounds: int) -> float:
    """The least of some rounds, in us: what disturbs a round only ever adds to it."""
    return min(sample() for _ in range(rounds)) * 1e6


def free_all(n: int, owners: int) -> Callable[[], float]:
    """A call that releases `n` blocks; many owners a round, so that it is well above the clock."""
    pool = pool_of(n * owners)

    def sample() -> float:
        for owner in range(owners):
            pool.allocate("k", SIZE * n, owner)
        before = pool.stats.n_frees
        begin = _now()
        for owner in range(owners):
            pool.free_all(owner)
        took = _now() - begin
        assert pool.stats.n_frees - before == n * owners
        return took / owners

    return sample


def allocate(n: int, owners: int) -> Callable[[], float]:
    """A call that hands out `n` blocks."""
    pool = used_pool_of(n * owners)

    def sample() -> float:
        before = pool.stats.n_allocations
        begin = _now()
        for owner in range(owners):
            pool.allocate("k", SIZE * n, owner)
        took = _now() - begin
        assert pool.stats.n_allocations - before == n * owners
        for owner in range(owners):
            pool.free_all(owner)
        return took / owners

    return sample


def grow(pool: BlockPoolAllocator) -> float:
    """Growth by one block, for the best of some stretches of 1,000 calls."""
    allocate = pool.allocate
    took = []
    for _ in range(7):
        before = pool.stats.n_allocations
        begin = _now()
        for _ in range(1000):
            allocate("k", SIZE, 7)
        took.append((_now() - begin) / 1000)
        assert pool.stats.n_allocations - before == 1000
    return min(took)


def grow_k_and_v(pool: BlockPoolAllocator) -> float:
    """The same by turns in two streams."""
    allocate = pool.allocate
    took = []
    for _ in range(7):
        before = pool.stats.n_allocations
        begin = _now()
        for _ in range(500):
            allocate("k", SIZE, 7)
            allocate("v", SIZE, 7)
        took.append((_now() - begin) / 1000)
        assert pool.stats.n_allocations - before == 1000
    return min(took)


def cycle() -> float:
    """One block for a new owner, and its release."""
    pool = used_pool_of(4096)
    allocate, release = pool.allocate, pool.free_all
    begin = _now()
    for _ in range(2000):
        allocate("k", SIZE, 7)
        release(7)
    took = (_now() - begin) / 2000
    assert pool.stats.blocks_in_use() == 0
    assert pool.stats.n_frees == 4096 + 2000
    return took


def mark_used() -> float:
    """One token more in a block that is partly filled."""
    pool = pool_of(8)
    block = pool.allocate("k", 5, 1)[0]
    mark = pool.mark_used
    begin = _now()
    for _ in range(2000):
        mark(block, 7)
    took = (_now() - begin) / 2000
    assert block.n_used == 7
    return took


def free_reversed(n: int) -> float:
    """A list of all of an owner's blocks, last block first."""
    pool = pool_of(n)
    blocks = pool.allocate("k", SIZE * n, 1)[::-1]
    begin = _now()
    pool.free(blocks)
    took = _now() - begin
    assert pool.stats.n_frees == n
    return took


def construct(n: int) -> float:
    """A pool, and all of it handed out."""
    begin = _now()
    pool = pool_of(n)
    blocks = pool.allocate("k", SIZE * n, 1)
    took = _now() - begin
    assert len(blocks) == n
    return took


def held_bytes(n: int) -> float:
    """Bytes of the pool a block when all are held; the caller keeps none of the lists."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        pool = pool_of(n)
        for owner in range(16):
            pool.allocate("k", SIZE * n // 16, owner)
        assert pool.stats.blocks_in_use() == n
        return (tracemalloc.get_traced_memory()[0] - before) / n
    finally:
        tracemalloc.stop()


class Floor:
    """What a method with an uncontended lock costs before it does anything."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def with_lock(self) -> None:
        """Take the lock the usual way."""
        with self.lock:
            pass


def floor() -> float:
    """An empty method with one uncontended lock."""
    method = Floor().with_lock
    begin = _now()
    for _ in range(2000):
        method()
    return (_now() - begin) / 2000


def measure() -> dict[str, float]:
    """Every row."""
    return {
        "floor": best(floor, 25),
        "free_all_1024": best(free_all(1024, 16), 9),
        "free_all_16384": best(free_all(16384, 16), 7),
        "free_all_65536": best(free_all(65536, 16), 5),
        "allocate_1024": best(allocate(1024, 16), 9),
        "allocate_16384": best(allocate(16384, 8), 5),
        "allocate_65536": best(allocate(65536, 4), 5),
        "grow": best(lambda: grow(used_pool_of(8192)), 5),
        "grow_in_a_new_pool": best(lambda: grow(pool_of(8192)), 5),
        "grow_k_and_v": best(lambda: grow_k_and_v(pool_of(16384, separate_kv=True)), 5),
        "cycle": best(cycle, 25),
        "mark_used": best(mark_used, 25),
        "free_reversed_4096": best(lambda: free_reversed(4096), 2),
        "construct_1m": best(lambda: construct(1_000_000), 2),
        "held_bytes": held_bytes(65536),
    }


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    json.dump(measure(), sys.stdout)
