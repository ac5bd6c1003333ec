"""Admission: with --enforce, a request that arrives over budget is sent away before it is queued."""

from __future__ import annotations

import weakref
from typing import Any, Final

from veloxquant_mlx.serving.accounting.books import Books
from veloxquant_mlx.serving.events import Listener, Refusal
from veloxquant_mlx.serving.fork_lock import lock_of
from veloxquant_mlx.serving.request import Request

__all__ = ["Admission"]

# By so many tokens the arrays of mlx-lm grow: the least that a request takes up.
STEP: Final = 256


class Admission(Listener):
    """Refuses while the pool cannot cover the first step of another request.

    What the prompt cache holds counts as free, since it would be evicted. Requests that were let in
    and hold nothing yet count as if they held one step.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._lock = lock_of(self)  # a generator that is collected ends its requests, anywhere
        self._inside: weakref.WeakSet[Request] = weakref.WeakSet()

    def admit(self, handler: Any, request: Any) -> Refusal | None:
        """Asked for each HTTP request that wants tokens."""
        if self._books.is_off:
            return None
        available = self._books.n_available()
        with self._lock:
            n_waiting = max(0, len(self._inside) - self._books.ledger.n_running)
        needed = self.first_step() * (n_waiting + 1)
        if available >= needed:
            return None
        return Refusal(
            message=f"The KV cache pool is over its budget: {max(0, available)} blocks are free or "
            f"can be evicted, and {needed} are needed for this request and {n_waiting} before it. "
            "Try again later.",
            code="pool_over_budget",
        )

    def first_step(self) -> int:
        """Blocks over both streams that a request takes up at the least."""
        size = self._books.pool.config.block_size
        return 2 * max(1, self._books.n_layers) * -(-STEP // size)

    def on_request_started(self, request: Request) -> None:
        """It is inside until it ends."""
        with self._lock:
            self._inside.add(request)

    def on_request_finished(self, request: Request) -> None:
        """It makes room."""
        with self._lock:
            self._inside.discard(request)
