"""SequenceAccounting: caches as they are made, and the sequences that run by themselves with them."""

from __future__ import annotations

import threading
from typing import Any

from veloxquant_mlx.serving.accounting.account import Account
from veloxquant_mlx.serving.accounting.books import Books
from veloxquant_mlx.serving.accounting.holdings import Holding
from veloxquant_mlx.serving.events import Listener
from veloxquant_mlx.serving.sequence import Sequence

__all__ = ["SequenceAccounting"]


class SequenceAccounting(Listener):
    """Listens to new caches, and to `generate_step` in all its forms."""

    def __init__(self, books: Books) -> None:
        self._books = books
        # The sequence that is about to make its own caches on this thread.
        self._here = threading.local()

    def on_cache_created(self, cache: Any) -> None:
        """Know it, whoever made it."""
        if not self._books.is_off:
            self._books.holdings.created(cache)

    def on_caches_made(self, model: Any, caches: list[Any]) -> None:
        """They belong to the sequence that is about to run, or else to a request to come."""
        with self._books.entered() as ready:
            if ready:
                made_for = getattr(self._here, "sequence", None)
                if made_for is None:
                    self._books.open(caches)
                else:
                    self._join(made_for, self._books.holdings.among(caches))

    def on_caches_loaded(self, caches: list[Any]) -> None:
        """They belong to a request to come."""
        with self._books.settled() as ready:
            if ready:
                self._books.open(caches)

    def on_sequence_started(self, sequence: Sequence) -> None:
        """All that it runs with is one request, a draft model's caches too."""
        with self._books.entered() as ready:
            if not ready:
                return
            sequence.notes = _Run()
            if sequence.caches is None:
                self._here.sequence = sequence
            else:
                self._join(sequence, self._books.holdings.among(sequence.caches))

    def on_sequence_token(self, sequence: Sequence) -> None:
        """Look at the arrays if they grew: every 256 tokens."""
        run = sequence.notes
        if run is None:
            return
        for holding in run.leads:
            cache = holding.ref()
            if cache is None or getattr(cache, holding.position) > holding.capacity:
                self._grew(sequence)
                return
        if self._books.is_due:
            with self._books.settled():
                pass

    def on_sequence_ended(self, sequence: Sequence) -> None:
        """Its caches stay charged for as long as they live.

        A generator that is dropped comes here in the middle of anything: no lock is taken.
        """
        if getattr(self._here, "sequence", None) is sequence:
            self._here.sequence = None

    def _join(self, sequence: Sequence, holdings: list[Holding]) -> None:
        """Put caches to a sequence's request, which is theirs if they have one."""
        run = sequence.notes
        for holding in holdings if run.account is None else ():
            if holding.owners is not None:
                run.account = holding.owners[0]
                break
        account = run.account = run.account or self._books.ledger.open()
        account.is_claimed = True
        for holding in holdings:
            self._books.holdings.assign(holding, (account,))
        run.leads = (*run.leads, *holdings[:1], *holdings[1:][-1:])
        run.holdings += holdings

    def _grew(self, sequence: Sequence) -> None:
        if getattr(self._here, "sequence", None) is sequence:
            self._here.sequence = None
        with self._books.settled() as ready:
            run = sequence.notes
            run.holdings = [one for one in run.holdings if one.ref() is not None]
            run.leads = tuple(dict.fromkeys((*run.holdings[:1], *run.holdings[-1:])))
            if ready:
                self._books.holdings.grew(run.holdings)


class _Run:
    """What is known of a sequence that runs."""

    __slots__ = ("account", "holdings", "leads")

    def __init__(self) -> None:
        self.account: Account | None = None
        self.holdings: list[Holding] = []
        # The first and the last one: with a draft model, one of each model.
        self.leads: tuple[Holding, ...] = ()
