"""Notices: what befell a pool just now, for listeners that tell it as it happens, such as traces.

Nothing is made and nothing is paid while nobody listens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["SLOW_NS", "Listener", "Notice", "add_listener", "listeners", "remove_listener", "tell"]

# A call that took this long, its wait for the lock included, is told as slow.
SLOW_NS: Final = 10_000_000


@dataclass(frozen=True, slots=True)
class Notice:
    """One incident.

    Attributes:
        kind: "exhausted", a failed allocation; "grown"; "slow", a call of `SLOW_NS` or longer.
            The pool times large calls and all off the hot path, the others are sampled.
        pool: Name of the pool.
        operation: As in `OPERATIONS`.
        stream: Name of the stream, "" where several were touched.
        n_blocks: Blocks asked for, grown by, or moved.
        owner: Who called, as text; "" where that is unknown.
        seconds: How long it took, of a slow call.
    """

    kind: Literal["exhausted", "grown", "slow"]
    pool: str
    operation: str
    stream: str
    n_blocks: int
    owner: str
    seconds: float | None = None


# Called on the thread that called the pool, under the pool's lock: a listener must take no lock,
# must not call the pool, and must be quick. What it raises is counted and goes no further.
Listener = Callable[[Notice], None]

# Replaced, never changed, so that hooks read it without a lock.
_listeners: tuple[Listener, ...] = ()


def listeners() -> tuple[Listener, ...]:
    """Who listens now."""
    return _listeners


def add_listener(listener: Listener) -> None:
    """Call `listener` with every notice from now on; adding it again changes nothing."""
    global _listeners  # noqa: PLW0603 - one value, replaced whole
    if listener not in _listeners:
        _listeners = (*_listeners, listener)


def remove_listener(listener: Listener) -> None:
    """Undo `add_listener`; unknown ones are no error."""
    global _listeners  # noqa: PLW0603
    _listeners = tuple(known for known in _listeners if known != listener)


def tell(notice: Notice) -> int:
    """Call every listener; returns how many of them raised."""
    n_failed = 0
    for listener in _listeners:
        try:
            listener(notice)
        except Exception:  # noqa: BLE001 - one listener's fault is no other's
            n_failed += 1
    return n_failed
