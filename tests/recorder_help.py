"""Helpers for the tests of recording and replaying: random histories, and what the books are after."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from veloxquant_mlx.memory.block_pool import (
    BlockPoolAllocator,
    BlockPoolExhaustedError,
    PoolConfig,
)

if TYPE_CHECKING:
    from veloxquant_exporters.replay import Driver

__all__ = ["FORMATS", "Books", "Call", "books", "driver_books", "history", "play"]

FORMATS = ("fp16", "int4", "int2")
OWNERS = ("req-a", "req-b", 3, 4, "req-e")

# kind, owner, size, stream or format, choice
Call = tuple[str, int, int, int, int]
# Of each owner, blocks by stream and format; of each stream, free and managed blocks.
Books = tuple[dict[int | str, Counter[tuple[str, str]]], list[tuple[int, int]]]

KINDS = ("allocate", "allocate_kv", "free", "free_all", "shrink", "mark_used")


def play(pool: BlockPoolAllocator, calls: list[Call]) -> int:
    """Make these calls; returns how many were refused."""
    n_refused = 0
    for kind, who, size, which, choice in calls:
        owner = OWNERS[who]
        fmt = FORMATS[which % 3]
        try:
            if kind == "allocate":
                pool.allocate("kv"[which % 2], size, owner, fmt)
            elif kind == "allocate_kv":
                pool.allocate_kv(size, owner, fmt, n_filled=size // 2)
            elif kind == "free_all":
                pool.free_all(owner)
            elif kind == "shrink":
                pool.shrink("kv"[which % 2], choice % 8)
            elif kind == "mark_used":
                for block in pool.blocks_for(owner)[-1:]:
                    pool.mark_used(block, choice % (pool.config.block_size + 1))
            else:
                blocks = pool.blocks_for(owner)
                Random(choice).shuffle(blocks)
                pool.free(blocks[: size % 7])
        except BlockPoolExhaustedError:
            n_refused += 1
    return n_refused


def history(seed: int, n_calls: int) -> list[Call]:
    """Calls for `play`."""
    rng = Random(seed)
    kinds = rng.choices(KINDS, (6, 4, 6, 2, 1, 2), k=n_calls)
    return [
        (
            kind,
            rng.randrange(len(OWNERS)),
            rng.randrange(1, 60),
            rng.randrange(6),
            rng.getrandbits(30),
        )
        for kind in kinds
    ]


def books(pool: BlockPoolAllocator) -> Books:
    """Who holds what, and the streams."""
    held = {
        owner: Counter((b.stream, b.format) for b in pool.blocks_for(owner)) for owner in OWNERS
    }
    return (
        {owner: counter for owner, counter in held.items() if counter},
        [(stream.n_free, stream.managed) for stream in pool._streams],
    )


def driver_books(driver: Driver) -> Books:
    """The same of a driven pool, by the names that the trace has for its owners."""
    trace, pool = driver.trace, driver.pool
    held: dict[int | str, Counter[tuple[str, str]]] = {}
    for number, name in enumerate(trace.owners):
        counter = Counter((b.stream, b.format) for b in pool.blocks_for(number))
        if counter:
            held[name] = counter
    return held, [(stream.n_free, stream.managed) for stream in pool._streams]


def small_pool(*, separate: bool, grow: bool, n_blocks: int = 24) -> BlockPoolAllocator:
    """A pool that such histories exhaust, or make grow."""
    return BlockPoolAllocator(
        PoolConfig(8, n_blocks, separate, grow, n_blocks * 2 if grow else None)
    )
