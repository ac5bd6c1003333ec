"""Timing lock: stands in for a pool's lock while a sample is due, and tells when it was had."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Stamped", "timing_lock"]


class Stamped(Protocol):
    """Who is told."""

    def stamped(self, asked_ns: int, had_ns: int) -> None:
        """The lock was asked for and had at these times; it is held. Must not raise."""


def timing_lock(lock: Any, target: Stamped, clock: Callable[[], int]) -> Any:
    """A lock like the RLock `lock` that tells `target`, held weakly, of each outermost entry.

    Leaving is the real lock's own C function: a Python one could be interrupted before its first
    line, and the lock would be held for good. So the end of a call is told by its journal entry.
    """
    weakly = weakref.ref(target)
    owned = lock._is_owned

    def enter(_: object) -> bool:
        if owned():
            # A handler inside a call; the stamp is the outer call's.
            return bool(lock.acquire())
        asked = clock()
        try:
            lock.acquire()
            had = clock()
            told = weakly()
            if told is not None:
                told.stamped(asked, had)
        except BaseException:
            if owned():
                lock.release()
            raise
        return True

    methods = {
        "__doc__": "See `timing_lock`.",
        "__enter__": enter,
        # Builtin functions are no descriptors: these are the real lock's, called as they are.
        "__exit__": lock.__exit__,
        "acquire": lock.acquire,
        "release": lock.release,
        "_is_owned": owned,
    }
    return type("TimingLock", (), methods)()
