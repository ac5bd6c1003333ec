"""Stream: the free blocks of one logical stream, last in first out.

Blocks that were handed out before lie on `top`, under it in `below` as whole released regions, so
that a release pushes one list and never visits its blocks. Blocks never handed out come last: the
ids `next_id`..`end_id`, made into `unborn` Blocks in steps.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from benchmarks.guard.twin.block import Block
from benchmarks.guard.twin.lease import Lease

if TYPE_CHECKING:
    from benchmarks.guard.twin.journal import Entry

__all__ = ["MERGED_REGION", "Stream", "make_blocks"]

# Regions up to this size are copied onto `top`: cheaper than a list a region, and still constant.
MERGED_REGION: Final = 16
# Blocks are made when they are needed, so many at a time. The first ones are made with the pool:
# then most pools make none while they serve, and a pool of millions costs nothing up front.
MINT_STEP: Final = 256
MINT_AT_START: Final = 16384

_new_block: Callable[[Any], Block] = object.__new__


class Stream:
    """Free list and sums of one stream. Every method is called under the pool's lock."""

    __slots__ = (
        "below",
        "end_id",
        "gave",
        "home",
        "managed",
        "n_below",
        "name",
        "next_id",
        "retired",
        "slack",
        "took",
        "top",
        "unborn",
    )

    def __init__(
        self, name: str, home: object, first_id: int, n_blocks: int, log: Callable[[Entry], None]
    ) -> None:
        self.name = name
        self.home = home  # the pool's token
        self.managed = n_blocks
        self.n_below = 0  # blocks in `below`
        self.slack = 0  # token slots that are held and not filled
        self.top: list[Block] = []
        self.below: list[list[Block] | dict[Block, None]] = []
        self.unborn: list[Block] = []  # ids descending: the end is handed out next
        self.next_id = first_id
        self.end_id = first_id + n_blocks
        self.mint(MINT_AT_START)
        self.retired = Lease(self, None, "fp16")
        # Journal slots: instrumentation swaps these instead of wrapping methods.
        self.took = log
        self.gave = log

    @property
    def n_free(self) -> int:
        """Free blocks: counted from the lists, so that no move has to keep the number."""
        return len(self.top) + self.n_below + len(self.unborn) + self.end_id - self.next_id

    def expose(self, n: int) -> None:
        """Bring at least `n` of the blocks handed out before, or all, from `below` onto `top`.

        What moves is at most what the allocation takes, or a whole region by reference. Between
        the two halves of a move stands no call, so an interrupt leaves the stack whole.
        """
        while len(self.top) < n and self.below:
            region = self.below[-1]
            if isinstance(region, dict):
                region = list(region)
                self.below[-1] = region
            held = len(region)
            if not self.top:
                self.top = region
                self.n_below -= held
                del self.below[-1]
                continue
            moved = region[len(self.top) - n :]
            n_moved = len(moved)
            # commit
            self.top[:0] = moved
            self.n_below -= n_moved
            if n_moved == held:
                del self.below[-1]
            else:
                del region[-n_moved:]

    def mint(self, n: int) -> None:
        """Make Block objects for at least `n` unborn ids, as far as there are any."""
        short = n - len(self.unborn)
        if short > 0 and self.next_id < self.end_id:
            stop = min(self.end_id, self.next_id + max(short, MINT_STEP))
            made = make_blocks(range(self.next_id, stop))
            made.reverse()
            self.unborn[:0] = made
            self.next_id = stop

    def coldest(self) -> list[Block]:
        """The list whose front is free the longest; blocks never handed out come first."""
        if self.unborn:
            return self.unborn
        if not self.below:
            return self.top
        region = self.below[0]
        if isinstance(region, dict):
            region = list(region)
            self.below[0] = region
        return region

    def free_blocks(self) -> list[Block]:
        """Every free block that was made, coldest first. Linear; for checks and repair."""
        blocks = list(self.unborn)
        for region in self.below:
            blocks += region
        return blocks + self.top


def make_blocks(ids: range) -> list[Block]:
    """Blocks for `ids`, without lease or fill: these are stored when they are handed out."""
    blocks = list(map(_new_block, repeat(Block, len(ids))))
    for block, block_id in zip(blocks, ids, strict=True):
        block._id = block_id
    return blocks
