"""Holdings: the live plain caches of mlx-lm, and what each takes up, read off attributes and shapes.

No array is evaluated. Caches are known by identity and held weakly; the end of one is noted by a
callback that does nothing but append, since it may run in the middle of anything.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from veloxquant_mlx.serving.accounting.account import Account
from veloxquant_mlx.serving.accounting.charged_bytes import ChargedBytes
from veloxquant_mlx.serving.accounting.ledger import Ledger, Share

__all__ = ["Holding", "Holdings"]

_MODULE: Final = "mlx_lm.models.cache"
# Where each keeps the number of slots that it has written.
_POSITION: Final = {"KVCache": "offset", "BatchKVCache": "_idx"}
_LIST: Final = "CacheList"
_FORMATS: Final = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_formats: Final[dict[Any, str]] = {}  # by dtype, as they are met


class _Ref(weakref.ref[Any]):
    __slots__ = ("holding",)
    holding: Holding


class Holding(Share):
    """A live cache object.

    Attributes:
        ref: The cache, weakly.
        position: The attribute with the slots that it has written.
        owners: Whose its rows are, as the events tell; None where none has told yet.
        capacity: Slots that a row was last seen to have room for.
        n_bytes: What was entered of its arrays: format, bytes, logical bytes, bytes as fp16.
        was_seen: Nobody's at the last look; at the next one it is taken for somebody's.
    """

    __slots__ = ("capacity", "key", "n_bytes", "owners", "position", "ref", "was_seen")

    def __init__(self, cache: Any, position: str, ended: deque[_Ref]) -> None:
        super().__init__()
        self.key = id(cache)
        self.ref = _Ref(cache, ended.append)
        self.ref.holding = self
        self.position = position
        self.owners: tuple[Account, ...] | None = None
        self.capacity = 0
        self.n_bytes: tuple[str, int, int, int] | None = None
        self.was_seen = False


class Holdings:
    """All plain caches of the process from now on.

    `created` may be called by any thread at any time, the rest by one thread at a time.

    Args:
        ledger: Where they are entered.

    Attributes:
        bytes: Of all of them, as last seen.
        others: Names of cache classes that were seen and are not charged.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._size = ledger.pool.config.block_size
        self._live: dict[int, Holding] = {}
        # Those that still grow; what a prompt cache keeps does not.
        self._growing: dict[Holding, None] = {}
        self._stale: dict[Holding, None] = {}
        self._ended: deque[_Ref] = deque()
        self._positions: dict[type, str | None] = {}
        self._stray: Account | None = None
        self.bytes = ChargedBytes()
        self.others: set[str] = set()

    def created(self, cache: Any) -> None:
        """Know `cache`, which has no attributes yet, if it is a plain one."""
        cls = type(cache)
        try:
            position = self._positions[cls]
        except KeyError:
            position = self._position_of(cls)
        if position is not None:
            holding = Holding(cache, position, self._ended)
            self._live[holding.key] = holding
            self._growing[holding] = None

    def _position_of(self, cls: type) -> str | None:
        # Exactly these: a subclass may keep its tokens, or its account, in another way.
        mine = cls.__module__ == _MODULE
        position = _POSITION.get(cls.__name__) if mine else None
        self._positions[cls] = position
        if position is None and not (mine and cls.__name__ == _LIST):
            self.others.add(cls.__name__)
        return position

    def of(self, cache: Any) -> Holding | None:
        """What `cache` is known as; None if it is not plain."""
        holding = self._live.get(id(cache))
        return holding if holding is not None and holding.ref() is cache else None

    def among(self, caches: Iterable[Any]) -> list[Holding]:
        """Those of `caches` that are plain, also in lists of caches, in their order."""
        found: list[Holding] = []
        for cache in caches:
            holding = self.of(cache)
            if holding is not None:
                found.append(holding)
            elif type(cache).__name__ == _LIST:
                found += self.among(cache.caches)
        return found

    def assign(self, holding: Holding, owners: tuple[Account, ...]) -> None:
        """Let the rows of `holding` be `owners`'; it is looked at when all is settled."""
        holding.owners = owners or None
        self._stale[holding] = None
        self._growing[holding] = None

    def grew(self, holdings: Iterable[Holding]) -> None:
        """Look at these when all is settled."""
        self._stale.update(dict.fromkeys(holdings))

    def freeze(self, holding: Holding) -> None:
        """It will not grow: look at it once more only."""
        self._growing.pop(holding, None)
        self._stale[holding] = None

    @property
    def n_pending(self) -> int:
        """What is to be looked at before all is settled."""
        return len(self._ended) + len(self._stale)

    def update(self) -> None:
        """Enter what changed: ended caches, and those that were assigned or grew."""
        self._bury()
        while self._stale:
            holding, _ = self._stale.popitem()
            self.measure(holding)

    def growing(self) -> list[Holding]:
        """All that may have grown since they were last looked at."""
        self._stray = None
        return list(self._growing)

    def close(self) -> None:
        """Forget all, and take them out of the ledger."""
        for holding in list(self._live.values()):
            self._end(holding)
        self._ended.clear()

    def _bury(self) -> None:
        while self._ended:
            self._end(self._ended.popleft().holding)

    def _end(self, holding: Holding) -> None:
        # The id may be another object's by now.
        if self._live.get(holding.key) is holding:
            del self._live[holding.key]
        self._growing.pop(holding, None)
        self._stale.pop(holding, None)
        self._enter(holding, (), 0, 0, None)

    def measure(self, holding: Holding) -> None:
        """Enter what `holding` takes up now."""
        cache = holding.ref()
        keys = getattr(cache, "keys", None)
        if cache is None or keys is None:  # ended, empty, or not made whole yet
            holding.capacity = 0
            self._enter(holding, (), 0, 0, None)
            return
        n_rows, _, capacity, _ = keys.shape
        if holding.owners is None:
            if not holding.was_seen:
                holding.was_seen = True
                return
            # Found together, they are one account together.
            self._stray = self._stray or self._ledger.open("caches", is_claimed=True)
            holding.owners = (self._stray,)
        rows = _fitted(holding.owners, n_rows)
        fmt = _format_of(keys)
        if not holding.capacity:
            for account in holding.owners:
                account.format = fmt
        held = min(getattr(cache, holding.position), capacity)
        n_bytes = keys.nbytes + cache.values.nbytes
        logical = n_bytes * held // capacity if capacity else 0
        holding.capacity = capacity
        self._enter(
            holding, rows, -(-capacity // self._size), held,
            (fmt, n_bytes, logical, 2 * n_bytes // keys.itemsize),
        )  # fmt: skip

    def _enter(
        self,
        holding: Holding,
        rows: tuple[Account, ...],
        n_blocks: int,
        n_filled: int,
        n_bytes: tuple[str, int, int, int] | None,
    ) -> None:
        self._ledger.put(holding, rows, n_blocks, n_filled)
        if n_bytes != holding.n_bytes:
            if holding.n_bytes is not None:
                self.bytes.add(*holding.n_bytes, -1)
            if n_bytes is not None:
                self.bytes.add(*n_bytes, 1)
            holding.n_bytes = n_bytes


def _fitted(owners: tuple[Account, ...], n_rows: int) -> tuple[Account, ...]:
    """An owner for each row, whatever was told: the sum of the charges is that of the arrays."""
    if len(owners) == n_rows:
        return owners
    return owners[:n_rows] + owners[-1:] * (n_rows - len(owners))


def _format_of(keys: Any) -> str:
    dtype = keys.dtype
    fmt = _formats.get(dtype)
    if fmt is None:
        name = str(dtype).rpartition(".")[2]
        fmt = _formats[dtype] = _FORMATS.get(name, name)
    return fmt
