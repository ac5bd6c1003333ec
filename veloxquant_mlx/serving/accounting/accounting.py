"""Accounting: charges the plain KV caches of a program to a pool, request by request.

Events tell whose a row is; what it takes up is read off the shapes of the arrays at the end of each
round, so what mlx-lm copies and drops within one is never charged. Nothing here refuses anything to
a model: the pool is an account.
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
from veloxquant_mlx.serving.accounting.holdings import Holding, Holdings
from veloxquant_mlx.serving.accounting.ledger import Ledger
from veloxquant_mlx.serving.events import Listener
from veloxquant_mlx.serving.sequence import Sequence
from veloxquant_mlx.serving.wrap_caches import evict_oldest
from veloxquant_mlx.serving.wrap_requests import in_server

__all__ = ["NEEDED_HOOKS", "Accounting"]

_log = logging.getLogger("veloxquant_mlx.serving")

# Without one of these rows would be lost or be nobody's. Those that a program never imports are
# not missing.
NEEDED_HOOKS: Final = (
    "cache_census",
    "caches_made",
    "caches_loaded",
    "batches",
    "batch_generator",
    "sequences",
    "prompt_cache",
)
# So many caches are looked at before a thread that waits is let in.
SLICE: Final = 256


class Accounting(Listener):
    """The account of one program. Its methods may be called by any thread.

    Args:
        pool: What is charged, by nobody else.
    """

    def __init__(self, pool: BlockPoolAllocator) -> None:
        self.pool = pool
        self.ledger = Ledger(pool)
        self.holdings = Holdings(self.ledger)
        self._lock = threading.RLock()
        self._busy = False
        self._here = threading.local()
        self._prompt_caches: list[weakref.ref[Any]] = []
        # Set by who knows the hooks: names of those that this mlx-lm lacks.
        self.missing_hooks: Callable[[], list[str]] = list
        self.is_off = False
        self._named: set[str] = set()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_mend(weakref.ref(self)))

    # -- caches by themselves -------------------------------------------------------------------

    def on_cache_created(self, cache: Any) -> None:
        """Know it, whoever made it."""
        if not self.is_off:
            self.holdings.created(cache)

    def on_caches_made(self, model: Any, caches: list[Any]) -> None:
        """They belong to the sequence that is about to run, or else to a request to come."""
        with self._entered() as ready:
            if ready:
                made_for = getattr(self._here, "sequence", None)
                if made_for is None:
                    self._open(caches)
                else:
                    self._join(made_for, self.holdings.among(caches))

    def on_caches_loaded(self, caches: list[Any]) -> None:
        """They belong to a request to come."""
        with self._settled() as ready:
            if ready:
                self._open(caches)

    def on_sequence_started(self, sequence: Sequence) -> None:
        """All that it runs with is one request, a draft model's caches too."""
        with self._entered() as ready:
            if not ready:
                return
            sequence.notes = _Run()
            if sequence.caches is None:
                self._here.sequence = sequence
            else:
                self._join(sequence, self.holdings.among(sequence.caches))

    def on_sequence_token(self, sequence: Sequence) -> None:
        """Look at the arrays if they grew: every 256 tokens."""
        run = sequence.notes
        if run is None:
            return
        for holding in run.leads:
            cache = holding.ref()
            if cache is None or cache.offset > holding.capacity:
                self._grew(sequence)
                return
        if self.holdings.n_pending:
            with self._settled():
                pass

    def on_sequence_ended(self, sequence: Sequence) -> None:
        """Its caches stay charged for as long as they live."""
        if getattr(self._here, "sequence", None) is sequence:
            self._here.sequence = None
        with self._settled():
            pass

    def _join(self, sequence: Sequence, holdings: list[Holding]) -> None:
        """Put caches to a sequence's request, which is theirs if they have one."""
        run = sequence.notes
        for holding in holdings if run.account is None else ():
            if holding.owners is not None:
                run.account = holding.owners[0]
                break
        account = run.account = run.account or self.ledger.open()
        account.is_claimed = True
        for holding in holdings:
            self.holdings.assign(holding, (account,))
        run.leads = (*run.leads, *holdings[:1], *holdings[1:][-1:])
        run.holdings += holdings

    def _grew(self, sequence: Sequence) -> None:
        if getattr(self._here, "sequence", None) is sequence:
            self._here.sequence = None
        with self._settled() as ready:
            run = sequence.notes
            run.holdings = [one for one in run.holdings if one.ref() is not None]
            run.leads = tuple({one: None for one in (*run.holdings[:1], *run.holdings[-1:])})
            if ready:
                self.holdings.grew(run.holdings)

    # -- batches --------------------------------------------------------------------------------

    def on_batch_merged(self, batch: Any, caches: list[list[Any]]) -> None:
        """Each row is its request's; caches that had a request before are copied for another."""
        with self._entered() as ready:
            if ready:
                owners = tuple([self._claim(row) for row in caches])
                for holding in self.holdings.among(batch.prompt_cache):
                    self.holdings.assign(holding, owners)

    def _claim(self, caches: list[Any]) -> Account:
        for holding in self.holdings.among(caches):
            if holding.owners is not None and not holding.owners[0].is_claimed:
                holding.owners[0].is_claimed = True
                return holding.owners[0]
        return self.ledger.open(is_claimed=True)

    def on_batch_copied(self, batch: Any, copy: Any) -> None:
        """The copy's rows are the same requests'; both are filtered before they are looked at."""
        with self._entered() as ready:
            if ready:
                pairs = zip(self._known(batch), self._known(copy), strict=True)
                for old, new in pairs:
                    self.holdings.assign(new, old.owners or ())

    def on_batch_extended(self, batch: Any, other: Any) -> None:
        """The other's rows come last. Where there were none before, its caches just moved."""
        with self._entered() as ready:
            if ready:
                for mine, its in zip(self._known(batch), self._known(other), strict=False):
                    if mine is not its:
                        self.holdings.assign(mine, (mine.owners or ()) + (its.owners or ()))

    def on_batch_filtered(self, batch: Any, keep: list[int], uids: list[int]) -> None:
        """Rows went; without any left, so did the caches."""
        with self._entered() as ready:
            if ready:
                for holding in self._known(batch):
                    owners = holding.owners or ()
                    self.holdings.assign(holding, tuple([owners[i] for i in keep]))

    def on_row_extracted(self, batch: Any, index: int, caches: list[Any]) -> None:
        """A copy of a row is somebody's of its own, e.g. an entry of the prompt cache to be."""
        with self._entered() as ready:
            if ready:
                self._open(caches, is_claimed=True)

    def on_responses(self, generator: Any, prompts: list[Any], generated: list[Any]) -> None:
        """A round is done: charge what grew, came and went."""
        for batch in (generator._generation_batch, generator._prompt_batch):
            caches = batch.prompt_cache
            if caches and self._has_grown(caches):
                with self._entered() as ready:
                    if ready:
                        self.holdings.grew(self.holdings.among(caches))
        if self.holdings.n_pending:
            with self._settled():
                pass

    def _has_grown(self, caches: Iterable[Any]) -> bool:
        """Whether the first plain cache has passed what it was charged for; the others follow it."""
        for cache in caches:
            holding = self.holdings.of(cache)
            if holding is not None:
                return bool(getattr(cache, holding.position) > holding.capacity)
        return any(self._has_grown(getattr(cache, "caches", ())) for cache in caches)

    def on_sequences_removed(self, generator: Any, uids: list[int]) -> None:
        """Cancelled requests give back at once."""
        if self.holdings.n_pending:
            with self._settled():
                pass

    def _known(self, batch: Any) -> list[Holding]:
        return self.holdings.among(batch.prompt_cache)

    # -- the prompt cache -----------------------------------------------------------------------

    def on_prompt_cache_opened(self, prompt_cache: Any) -> None:
        """It may have to evict."""
        self._prompt_caches.append(weakref.ref(prompt_cache))

    def on_prompt_cache_fetched(
        self, prompt_cache: Any, tokens: list[int], caches: list[Any] | None, n: int
    ) -> None:
        """What was found is a copy, for the request that asked."""
        with self._settled(prompt_cache) as ready:
            if ready and caches is not None:
                self._open(caches)

    def on_entry_inserted(self, prompt_cache: Any, tokens: list[int], entry: Any) -> None:
        """What a prompt cache keeps is no request's any more, and does not grow."""
        with self._entered() as ready:
            if ready:
                for holding in self.holdings.among(entry.prompt_cache):
                    self.holdings.freeze(holding)
                    for account in holding.owners or ():
                        self.ledger.keep(account, cached=True)

    def on_entry_removed(self, prompt_cache: Any, entry: Any, reason: str) -> None:
        """Whoever else holds its caches is charged for them as before."""
        with self._entered() as ready:
            if ready:
                for holding in self.holdings.among(entry.prompt_cache):
                    self.holdings.assign(holding, holding.owners or ())
                    for account in holding.owners or ():
                        self.ledger.keep(account, cached=False)

    def on_prompt_cache_changed(self, prompt_cache: Any) -> None:
        """It may be called again, so now it may evict."""
        with self._settled(prompt_cache):
            pass

    # -- settling -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Charge all as it is now, with the token fill. Evaluates nothing; raises nothing of mlx-lm.

        Made for snapshots, on any thread. In a signal handler inside of an event it does nothing.
        """
        self._check_hooks()
        growing = self.holdings.growing()
        for start in range(0, len(growing), SLICE):
            with self._entered() as ready:
                if not ready:
                    return
                self.holdings.grew(growing[start : start + SLICE])
                self.holdings.update()
        with self._entered() as ready:
            if ready:
                self.holdings.update()
                self.ledger.settle()
        self._name_others()

    def close(self) -> None:
        """Give everything back, for good."""
        with self._entered():
            self.is_off = True
            self.holdings.close()
            self.ledger.settle()

    def _open(self, caches: Iterable[Any], *, is_claimed: bool = False) -> None:
        account = self.ledger.open(is_claimed=is_claimed)
        for holding in self.holdings.among(caches):
            self.holdings.assign(holding, (account,))

    @contextmanager
    def _entered(self) -> Iterator[bool]:
        """Alone with the books; False where there is nothing to do, or this thread is inside."""
        with self._lock:
            if self._busy or self.is_off:
                yield False
                return
            self._busy = True
            try:
                yield True
            finally:
                self._busy = False

    @contextmanager
    def _settled(self, prompt_cache: Any = None) -> Iterator[bool]:
        """`_entered`, and charge afterwards; over budget, let prompt caches evict.

        Args:
            prompt_cache: One that may be called now. All may, on the server's own thread.
        """
        with self._entered() as ready:
            yield ready
            if not ready:
                return
            self._charge()
        if self.ledger.n_excess:
            mine = [] if prompt_cache is None else [prompt_cache]
            self._make_room([ref() for ref in self._prompt_caches] if in_server() else mine)
        self.ledger.count_excess()

    def _charge(self) -> None:
        self.holdings.update()
        self.ledger.settle()

    def _make_room(self, prompt_caches: list[Any]) -> None:
        """Evict the oldest entries until nothing is short, or no entry is left that is charged."""
        for prompt_cache in prompt_caches:
            while prompt_cache is not None and len(prompt_cache):
                if not self.ledger.n_excess or not self.ledger.n_cached():
                    return
                evict_oldest(prompt_cache, "budget")
                with self._entered() as ready:
                    if not ready:
                        return
                    self._charge()

    # -- what cannot be charged -----------------------------------------------------------------

    def on_model_loaded(self, model: Any) -> None:
        """By now the program has imported what it needs."""
        self._check_hooks()

    def _check_hooks(self) -> None:
        """End the account where this mlx-lm lacks what it stands on; the rest of us goes on."""
        missing = [] if self.is_off else self.missing_hooks()
        if missing:
            self.close()
            _log.warning(
                "pool accounting is off: this mlx-lm lacks what it stands on (%s)",
                ", ".join(missing),
            )

    def _name_others(self) -> None:
        new = self.holdings.others - self._named
        if new:
            self._named |= new
            _log.warning("not charged to the pool: caches of %s", ", ".join(sorted(new)))


class _Run:
    """What is known of a sequence that runs."""

    __slots__ = ("account", "holdings", "leads")

    def __init__(self) -> None:
        self.account: Account | None = None
        self.holdings: list[Holding] = []
        # The first and the last one: with a draft model, one of each model.
        self.leads: tuple[Holding, ...] = ()


def _mend(ref: weakref.ref[Accounting]) -> Callable[[], None]:
    """In a forked child, the thread that was inside does not exist."""

    def mend() -> None:
        accounting = ref()
        if accounting is not None:
            accounting._lock = threading.RLock()
            accounting._busy = False

    return mend
