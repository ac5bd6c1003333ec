"""Faults: calls that take long and locks that are held by others, told by the virtual clock."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from dashboards.drill.clock import CLOCK
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["Contended", "slow_down"]


def slow_down(pool: BlockPoolAllocator, operation: int, ns_a_block: int) -> None:
    """Make calls take time by the block, inside the pool: what an allocator does that visits each.

    Stands before the pool's journal slots, where a call is entered once it is done.

    Args:
        pool: Watched already.
        operation: Of `veloxquant_mlx.memory.journal`.
        ns_a_block: Nanoseconds.
    """

    def slowly(log: Callable[[Any], None]) -> Callable[[Any], None]:
        def entered(entry: Any) -> None:
            if entry[1] == operation:
                CLOCK.pass_ns(entry[3] * ns_a_block)
            log(entry)

        return entered

    for stream in pool._streams:
        stream.took, stream.gave = slowly(stream.took), slowly(stream.gave)
    pool._rare = slowly(pool._rare)


class Contended:
    """An RLock that another thread asks for again and again.

    The others' calls are short, but the interpreter hands a lock over at its switch interval, so
    that whoever waits for it may wait for as long as that.

    Args:
        share: Of the calls, how many find it taken.
        wait_ns: The switch interval.
        chance: Decides who waits, and how long.
    """

    def __init__(self, share: float, wait_ns: int, chance: random.Random) -> None:
        self.share = share
        self._wait_ns = wait_ns
        self._random = chance
        lock: Any = threading.RLock()
        self._lock = lock
        self.release = lock.release
        self._is_owned = lock._is_owned

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Wait one's turn."""
        if not self._is_owned() and self._random.random() < self.share:
            CLOCK.pass_ns(int(self._wait_ns * self._random.uniform(0.5, 1.5)))
        return bool(self._lock.acquire(blocking, timeout))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
