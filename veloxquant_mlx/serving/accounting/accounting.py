"""Accounting: charges the plain KV caches of a program to a pool, request by request.

Nothing here refuses anything to a model: the pool is an account.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.serving.accounting.admission import Admission
from veloxquant_mlx.serving.accounting.batches import BatchAccounting
from veloxquant_mlx.serving.accounting.books import Books
from veloxquant_mlx.serving.accounting.charged_bytes import ChargedBytes
from veloxquant_mlx.serving.accounting.entries import EntryAccounting
from veloxquant_mlx.serving.accounting.sequences import SequenceAccounting
from veloxquant_mlx.serving.accounting.settings import PoolSettings
from veloxquant_mlx.serving.events import Listener
from veloxquant_mlx.telemetry import instrument
from veloxquant_mlx.telemetry.program import AccountSnapshot

__all__ = ["NEEDED_HOOKS", "Accounting", "account_for"]

_log = logging.getLogger("veloxquant_mlx.serving")

# Without one of these, rows would be lost or be nobody's. What a program never imports is not
# missing.
NEEDED_HOOKS: Final = (
    "cache_census",
    "caches_made",
    "caches_loaded",
    "batches",
    "batch_generator",
    "sequences",
    "prompt_cache",
)


class Accounting(Listener):
    """The account of one program. Its methods may be called by any thread.

    Args:
        pool: What is charged, by nobody else.
        name: The pool's label in the metrics.
        enforce: Whether requests are sent away that arrive over budget.

    Attributes:
        pool, name: As given.
        listeners: What is to listen to the program's events.
    """

    def __init__(self, pool: BlockPoolAllocator, name: str, *, enforce: bool = False) -> None:
        self.pool = pool
        self.name = name
        self._enforce = enforce
        self._books = books = Books(pool)
        self._hooks: Callable[[], dict[str, bool]] = dict
        self.listeners: tuple[Listener, ...] = (
            SequenceAccounting(books),
            BatchAccounting(books),
            EntryAccounting(books),
            *((Admission(books),) if enforce else ()),
            self,
        )

    @property
    def bytes(self) -> ChargedBytes:
        """Those of the caches that are charged."""
        return self._books.holdings.bytes

    def needs(self, hooks: Callable[[], dict[str, bool]]) -> None:
        """Be off as soon as `hooks`, by name whether in place, lacks one that is needed."""
        self._hooks = hooks

    @property
    def is_on(self) -> bool:
        """False once a hook was found missing, or after `close`."""
        return not self._books.is_off

    def on_model_loaded(self, model: Any) -> None:
        """By now the program has imported what it needs."""
        self._check_hooks()

    def refresh(self) -> None:
        """Charge all as it is now, with the token fill; made for snapshots, evaluates nothing.

        In a signal handler inside of an event it does nothing.
        """
        self._check_hooks()
        self._books.refresh()

    def snapshot(self) -> AccountSnapshot | None:
        """What the pool's own series do not tell; None once it is off."""
        if not self.is_on:
            return None
        ledger = self._books.ledger
        return AccountSnapshot(
            pool=self.name,
            excess_blocks=ledger.n_excess,
            excess_blocks_total=ledger.n_excess_total,
            enforced=self._enforce,
        )

    def close(self) -> None:
        """Give everything back, for good."""
        self._books.close()

    def _check_hooks(self) -> None:
        """End the account where this mlx-lm lacks what it stands on; the rest of us goes on."""
        if self._books.is_off:
            return
        hooks = self._hooks()
        missing = [name for name in NEEDED_HOOKS if not hooks.get(name, True)]
        if missing:
            self.close()
            _log.warning(
                "pool accounting is off: this mlx-lm lacks what it stands on (%s)",
                ", ".join(missing),
            )


def account_for(settings: PoolSettings, *, enforce: bool = False) -> Accounting:
    """An account in a pool of its own, which is instrumented.

    Args:
        settings: The pool.
        enforce: Whether requests are sent away that arrive over budget.

    Raises:
        ValueError: The pool's name is taken, or is none.
    """
    pool = BlockPoolAllocator(settings.config)
    probe = instrument(pool, name=settings.name)
    accounting = Accounting(pool, probe.label, enforce=enforce)
    probe.add_storage(accounting.bytes)
    return accounting
