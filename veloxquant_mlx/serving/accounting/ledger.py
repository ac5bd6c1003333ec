"""Ledger: who takes up how many blocks, and what the pool was charged for it.

The bookkeeping half of the account: it knows no cache, no array and no mlx-lm. A share is what one
cache object takes up: so many blocks for each of its rows, and each row is somebody's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from veloxquant_mlx.serving.accounting.account import Account

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["Ledger", "Share", "room"]

UNLIMITED: Final = 1 << 62


class Share:
    """What one cache object takes up.

    Attributes:
        rows: Whose each row is; one account may have several.
        n_blocks: Blocks that a row takes up in each stream.
        n_filled: Token slots of a row that hold tokens.
    """

    __slots__ = ("n_blocks", "n_filled", "rows")

    def __init__(self) -> None:
        self.rows: tuple[Account, ...] = ()
        self.n_blocks = self.n_filled = 0


class Ledger:
    """The shares and accounts of one pool, which nobody else charges. For one thread at a time.

    Args:
        pool: What is charged. It refuses nothing here: what it cannot cover is short.

    Attributes:
        n_excess: Blocks over both streams that are taken up and not charged, as last settled.
        n_excess_total: Blocks by which that rose, all together; see `count_excess`.
    """

    def __init__(self, pool: BlockPoolAllocator) -> None:
        self.pool = pool
        self.n_excess = self.n_excess_total = 0
        self._counted = 0
        self._numbers = itertools.count(1)
        self._changed: dict[Account, None] = {}
        self._short: dict[Account, None] = {}
        self._cached: dict[Account, None] = {}
        self._charged: dict[Account, None] = {}

    def open(self, kind: str = "request", *, is_claimed: bool = False) -> Account:
        """An account that has nothing yet; it ends with the last share that names it."""
        return Account(f"{kind}-{next(self._numbers)}", is_claimed=is_claimed)

    def put(self, share: Share, rows: tuple[Account, ...], n_blocks: int, n_filled: int) -> None:
        """Let `share` be this from now on."""
        if (rows, n_blocks, n_filled) == (share.rows, share.n_blocks, share.n_filled):
            return
        old = share.rows, share.n_blocks, share.n_filled
        share.rows, share.n_blocks, share.n_filled = rows, n_blocks, n_filled
        self._add(*old, -1)
        self._add(rows, n_blocks, n_filled, 1)

    def _add(self, rows: Iterable[Account], n_blocks: int, n_filled: int, sign: int) -> None:
        for account in rows:
            account.n_wanted += sign * n_blocks
            account.n_filled += sign * n_filled
            self._changed[account] = None

    def keep(self, account: Account, *, cached: bool) -> None:
        """Say whether a prompt cache keeps this account on purpose."""
        account.is_cached = cached
        self._changed[account] = None
        if cached:
            self._cached[account] = None
        else:
            self._cached.pop(account, None)

    def settle(self) -> None:
        """Charge what the accounts take up, as far as the pool goes: the first to be short first."""
        # What is interrupted is settled the next time.
        self._short.update(self._changed)
        self._changed = {}
        for account in self._short:
            account.give_back(self.pool)
            if account.n_wanted:
                self._charged[account] = None
                if account.is_cached:
                    self._cached[account] = None
            else:
                self._charged.pop(account, None)
                self._cached.pop(account, None)
        for account in self._short:
            n = min(account.n_short, room(self.pool)) if account.n_short else 0
            if n:
                account.take(self.pool, n)
            account.tell(self.pool)
        self._short = {account: None for account in self._short if account.n_short}
        self.n_excess = 2 * sum(account.n_short for account in self._short)

    def count_excess(self) -> None:
        """Count by how much the excess rose since it was last counted: no eviction will help."""
        self.n_excess_total += max(0, self.n_excess - self._counted)
        self._counted = self.n_excess

    @property
    def is_over(self) -> bool:
        """Whether there is an excess that was not counted yet, or that an eviction might lower."""
        return self.n_excess > self._counted or bool(self.n_excess and self._cached)

    @property
    def n_running(self) -> int:
        """Accounts that take up something and are kept by no prompt cache."""
        return len(self._charged) - len(self._cached)

    def n_cached(self) -> int:
        """Blocks over both streams that are charged to what a prompt cache keeps."""
        return 2 * sum(account.n_held for account in self._cached)

    def n_available(self) -> int:
        """Blocks over both streams that a request could have, the prompt cache's among them."""
        return 2 * room(self.pool) + self.n_cached() - self.n_excess


def room(pool: BlockPoolAllocator) -> int:
    """Blocks that the pool could hand out in each of the two streams, with growth."""
    config = pool.config
    if config.separate_kv:
        few, many = sorted((pool.n_free("k"), pool.n_free("v")))
    else:
        few, odd = divmod(pool.n_free("kv"), 2)
        many = few + odd
    if not config.grow_on_exhaustion:
        return few
    if config.max_blocks is None:
        return UNLIMITED
    growth = max(0, config.max_blocks - pool.stats.n_blocks)
    if growth <= many - few:
        return few + growth
    return many + (growth - (many - few)) // 2
