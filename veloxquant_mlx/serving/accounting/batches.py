"""BatchAccounting: whose the rows of batches are, through merges, copies, filters and extensions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from veloxquant_mlx.serving.accounting.account import Account
from veloxquant_mlx.serving.accounting.books import Books
from veloxquant_mlx.serving.accounting.holdings import Holding
from veloxquant_mlx.serving.events import Listener

__all__ = ["BatchAccounting"]


class BatchAccounting(Listener):
    """Listens to batches, and settles after each round of a batch generator."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def on_batch_merged(self, batch: Any, caches: list[list[Any]]) -> None:
        """Each row is its request's; caches that had a request before are copied for another."""
        with self._books.entered() as ready:
            if ready:
                owners = tuple([self._claim(row) for row in caches])
                for holding in self._books.holdings.among(batch.prompt_cache):
                    self._books.holdings.assign(holding, owners)

    def _claim(self, caches: list[Any]) -> Account:
        for holding in self._books.holdings.among(caches):
            if holding.owners is not None and not holding.owners[0].is_claimed:
                holding.owners[0].is_claimed = True
                return holding.owners[0]
        return self._books.ledger.open(is_claimed=True)

    def on_batch_copied(self, batch: Any, copy: Any) -> None:
        """The copy's rows are the same requests'; both are filtered before they are looked at."""
        with self._books.entered() as ready:
            if ready:
                pairs = zip(self._known(batch), self._known(copy), strict=True)
                for old, new in pairs:
                    self._books.holdings.assign(new, old.owners or ())

    def on_batch_extended(self, batch: Any, other: Any) -> None:
        """The other's rows come last. Where there were none before, its caches just moved."""
        with self._books.entered() as ready:
            if ready:
                for mine, its in zip(self._known(batch), self._known(other), strict=False):
                    if mine is not its:
                        self._books.holdings.assign(mine, (mine.owners or ()) + (its.owners or ()))

    def on_batch_filtered(self, batch: Any, keep: list[int], uids: list[int]) -> None:
        """Rows went; without any left, so did the caches."""
        with self._books.entered() as ready:
            if ready:
                for holding in self._known(batch):
                    owners = holding.owners or ()
                    self._books.holdings.assign(holding, tuple([owners[i] for i in keep]))

    def on_row_extracted(self, batch: Any, index: int, caches: list[Any]) -> None:
        """A copy of a row is somebody's of its own, e.g. an entry of the prompt cache to be."""
        with self._books.entered() as ready:
            if ready:
                self._books.open(caches, is_claimed=True)

    def on_responses(self, generator: Any, prompts: list[Any], generated: list[Any]) -> None:
        """A round is done: charge what grew, came and went."""
        batches = generator._generation_batch, generator._prompt_batch  # noqa: SLF001 - as mlx-lm does
        for batch in batches:
            caches = batch.prompt_cache
            if caches and self._has_grown(caches):
                with self._books.entered() as ready:
                    if ready:
                        self._books.holdings.grew(self._books.holdings.among(caches))
        if self._books.is_due:
            with self._books.settled():
                pass

    def _has_grown(self, caches: Iterable[Any]) -> bool:
        """Whether the first plain cache has passed what it was charged for; the others follow it."""
        for cache in caches:
            holding = self._books.holdings.of(cache)
            if holding is not None:
                return bool(getattr(cache, holding.position) > holding.capacity)
        return any(self._has_grown(getattr(cache, "caches", ())) for cache in caches)

    def on_sequences_removed(self, generator: Any, uids: list[int]) -> None:
        """Cancelled requests give back at once."""
        if self._books.is_due:
            with self._books.settled():
                pass

    def _known(self, batch: Any) -> list[Holding]:
        return self._books.holdings.among(batch.prompt_cache)
