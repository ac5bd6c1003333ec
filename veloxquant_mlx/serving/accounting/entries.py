"""EntryAccounting: what a prompt cache keeps, and what it hands out again."""

from __future__ import annotations

import weakref
from typing import Any

from veloxquant_mlx.serving.accounting.books import Books
from veloxquant_mlx.serving.events import Listener

__all__ = ["EntryAccounting"]


class EntryAccounting(Listener):
    """Listens to the server's prompt cache."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def on_server_made(self, server: Any) -> None:
        """The ranks of a distributed server must find the same in their prompt caches."""
        if getattr(server, "_is_distributed", False):
            self._books.may_evict = False

    def on_prompt_cache_opened(self, prompt_cache: Any) -> None:
        """It may have to evict."""
        known = self._books.prompt_caches
        known[:] = [ref for ref in known if ref() is not None]
        known.append(weakref.ref(prompt_cache))

    def on_prompt_cache_fetched(
        self, prompt_cache: Any, tokens: list[int], caches: list[Any] | None, n: int
    ) -> None:
        """What was found is a copy, for the request that asked."""
        with self._books.settled(prompt_cache) as ready:
            if ready and caches is not None:
                self._books.open(caches)

    def on_entry_inserted(self, prompt_cache: Any, tokens: list[int], entry: Any) -> None:
        """An entry is an owner of its own, is no request's any more, and does not grow."""
        with self._books.entered() as ready:
            if ready:
                account = self._books.open(entry.prompt_cache, is_claimed=True)
                self._books.ledger.keep(account, cached=True)
                for holding in self._books.holdings.among(entry.prompt_cache):
                    self._books.holdings.freeze(holding)

    def on_entry_removed(self, prompt_cache: Any, entry: Any, reason: str) -> None:
        """Whoever else holds its caches is charged for them as before."""
        with self._books.entered() as ready:
            if ready:
                for holding in self._books.holdings.among(entry.prompt_cache):
                    self._books.holdings.assign(holding, holding.owners or ())
                    for account in holding.owners or ():
                        self._books.ledger.keep(account, cached=False)

    def on_prompt_cache_changed(self, prompt_cache: Any) -> None:
        """It may be called again, so now it may evict."""
        with self._books.settled(prompt_cache):
            pass
