"""What the screens share: the board that is shown, and how the person wants it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from veloxquant_exporters.top.board import Board, PoolView, ProcessView
from veloxquant_exporters.top.panels.pools import SORTS, sorted_pools
from veloxquant_exporters.top.poller import Heard
from veloxquant_exporters.top.units import duration

__all__ = ["State"]

_SORTS: Final = tuple(SORTS)


@dataclass(slots=True)
class State:
    """What is shown, and how.

    Attributes:
        board: The board on the screens.
        heard: What is known of the source, also while the board is held.
        paused: Whether the board is held.
        sort: An order of `SORTS`.
        selected: The key of the pool that is marked; None marks the first.
        now_s: The clock, at the last look.
    """

    board: Board
    heard: Heard = field(default_factory=Heard)
    paused: bool = False
    sort: str = _SORTS[0]
    selected: tuple[str, str] | None = None
    now_s: float = 0.0

    def take(self, heard: Heard, now_s: float) -> bool:
        """Take in what is known now; True if another board is to be shown."""
        self.heard, self.now_s = heard, now_s
        if self.paused or heard.board is None or heard.board is self.board:
            return False
        self.board = heard.board
        return True

    @property
    def pools(self) -> list[PoolView]:
        """The pools in their order."""
        return sorted_pools(self.board, self.sort)

    @property
    def pool(self) -> PoolView | None:
        """The marked pool; the first where it is gone, None without pools."""
        found = self.board.pool(self.selected) if self.selected is not None else None
        if found is not None:
            return found
        pools = self.pools
        return pools[0] if pools else None

    @property
    def process(self) -> ProcessView | None:
        """The process of the marked pool, or the first there is."""
        if self.pool is not None:
            return self.board.process(self.pool.process)
        return self.board.processes[0] if self.board.processes else None

    def move(self, by: int) -> None:
        """Mark the pool `by` places further down, or the last there is."""
        keys = [pool.key for pool in self.pools]
        if not keys:
            return
        marked = self.pool
        place = keys.index(marked.key) if marked is not None else 0
        self.selected = keys[min(max(place + by, 0), len(keys) - 1)]

    def sort_next(self) -> None:
        """Go on to the next order."""
        self.sort = _SORTS[(_SORTS.index(self.sort) + 1) % len(_SORTS)]

    @property
    def fault(self) -> str:
        """What is wrong with the source, "" if nothing is."""
        return self.heard.trouble(self.now_s)

    @property
    def status(self) -> str:
        """How the source is, in a few words; "" if it gives what it should."""
        if self.fault:
            return f"last seen {duration(max(0.0, self.heard.quiet_s(self.now_s)))} ago"
        return "PAUSED" if self.paused else ""
