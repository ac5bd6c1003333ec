"""Books: the caches and the ledger of an account, behind one lock, and when it is settled.

What a round of mlx-lm copies and drops again is never charged: events tell whose a row is at once,
but the arrays are looked at, and the pool is charged, when a round is over.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.serving.accounting.account import Account
from veloxquant_mlx.serving.accounting.holdings import Holdings
from veloxquant_mlx.serving.accounting.ledger import Ledger
from veloxquant_mlx.serving.wrap_caches import evict_oldest
from veloxquant_mlx.serving.wrap_requests import in_server

__all__ = ["Books"]

_log = logging.getLogger("veloxquant_mlx.serving")

# So many caches are looked at before a thread that waits is let in.
SLICE: Final = 256
# Nobody holds the lock for so long; but a handler that interrupted a call of the pool might wait for
# a thread that waits for that call. What is missed then is made good by the next `refresh`.
PATIENCE_S: Final = 1.0
PATIENCE_OF_SNAPSHOTS_S: Final = 0.1


class Books:
    """The books of one account. Its methods may be called by any thread.

    Args:
        pool: What is charged, by nobody else.

    Attributes:
        prompt_caches: Those of mlx-lm's server that live, weakly.
        n_layers: Plain caches of a request, at most so far.
        may_evict: Whether prompt caches are to make room.
        is_off: Nothing is charged any more.
    """

    def __init__(self, pool: BlockPoolAllocator) -> None:
        self.pool = pool
        self.ledger = Ledger(pool)
        self.holdings = Holdings(self.ledger)
        self.prompt_caches: list[weakref.ref[Any]] = []
        self.n_layers = 0
        self.may_evict = True
        self.is_off = False
        self._named: set[str] = set()
        self._lock = threading.RLock()
        self._busy = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_mend(weakref.ref(self)))

    def refresh(self) -> None:
        """Charge all as it is now, with the token fill. Evaluates nothing; raises nothing of mlx-lm.

        Made for snapshots, on any thread. In a signal handler inside of an event it does nothing.
        """
        growing = self.holdings.growing()
        for start in range(0, max(1, len(growing)), SLICE):
            with self.entered(PATIENCE_OF_SNAPSHOTS_S) as ready:
                if not ready:
                    return
                self.holdings.grew(growing[start : start + SLICE])
                self._charge()
                if not any(ref() for ref in self.prompt_caches):
                    self.ledger.count_excess()  # else the thread that may evict comes to it
        self._name_others()

    @property
    def is_due(self) -> bool:
        """Whether there is something to settle, or to evict."""
        return bool(self.holdings.n_pending) or self.ledger.is_over

    def n_available(self) -> int:
        """Blocks that a request could have now, those of the prompt cache among them."""
        with self.entered() as ready:
            if ready:
                self._charge()
        return self.ledger.n_available()

    def close(self) -> None:
        """Give everything back, for good."""
        with self.entered():
            self.is_off = True
            self.holdings.close()
            self.ledger.settle()

    def open(self, caches: Iterable[Any], *, is_claimed: bool = False) -> Account:
        """Let all of `caches` be of one new account. To be called when `entered`."""
        account = self.ledger.open(is_claimed=is_claimed)
        holdings = self.holdings.among(caches)
        for holding in holdings:
            self.holdings.assign(holding, (account,))
        self.n_layers = max(self.n_layers, len(holdings))
        return account

    @contextmanager
    def entered(self, wait_s: float = PATIENCE_S) -> Iterator[bool]:
        """Alone with the books; False where that cannot be, or this thread is inside already."""
        lock = self._lock
        if not lock.acquire(timeout=wait_s):
            yield False
            return
        try:
            if self._busy or self.is_off:
                yield False
                return
            self._busy = True
            try:
                yield True
            finally:
                self._busy = False
        finally:
            lock.release()

    @contextmanager
    def settled(self, prompt_cache: Any = None) -> Iterator[bool]:
        """`entered`, and charge afterwards; over budget, let prompt caches evict.

        Args:
            prompt_cache: One that may be called now. All may, on the server's own thread.
        """
        with self.entered() as ready:
            yield ready
            if not ready:
                return
            self._charge()
        if self.ledger.n_excess:
            mine = [] if prompt_cache is None else [prompt_cache]
            self._make_room([ref() for ref in self.prompt_caches] if in_server() else mine)
            with self.entered() as ready:
                if ready:
                    self.ledger.count_excess()

    def _charge(self) -> None:
        self.holdings.update()
        self.ledger.settle()

    def _make_room(self, prompt_caches: list[Any]) -> None:
        """Evict the oldest entries until nothing is short, or no entry is left that is charged."""
        for prompt_cache in prompt_caches if self.may_evict else ():
            while prompt_cache is not None and (n := len(prompt_cache)):
                if not self.ledger.n_excess or not self.ledger.n_cached():
                    return
                evict_oldest(prompt_cache, "budget")
                if len(prompt_cache) >= n:
                    break  # another mlx-lm evicts in another way: never go on for ever
                with self.entered() as ready:
                    if not ready:
                        return
                    self._charge()

    def _name_others(self) -> None:
        new = self.holdings.others - self._named
        if new:
            self._named |= new
            _log.warning("not charged to the pool: caches of %s", ", ".join(sorted(new)))


def _mend(ref: weakref.ref[Books]) -> Callable[[], None]:
    """In a forked child, the thread that was inside does not exist."""

    def mend() -> None:
        books = ref()
        if books is not None:
            books._lock = threading.RLock()  # noqa: SLF001 - its own
            books._busy = False  # noqa: SLF001

    return mend
