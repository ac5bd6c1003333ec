"""Stream: the free blocks of one logical stream, last in first out.

Blocks that were handed out before lie on `top`, under it in `below` as whole released regions, so
that a release pushes one list and never visits its blocks. Blocks never handed out come last: the
ids `next_id`..`end_id`, made into `unborn` Blocks in steps.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from veloxquant_mlx.memory.block import Block, Lease

if TYPE_CHECKING:
    from veloxquant_mlx.memory.journal import Entry

__all__ = ["Stream", "make_blocks"]

# Regions up to this size are copied onto `top`: cheaper than a list a region, and still constant.
MERGED_REGION: Final = 16
# Unborn blocks are made this many at a time: one-block growth then pays 1/64 of the set-up.
MINT_STEP: Final = 64

_new_block: Callable[[Any], Block] = object.__new__


class Stream:
    """Free list and sums of one stream. Every method is called under the pool's lock."""

    __slots__ = (
        "below",
        "end_id",
        "gave",
        "managed",
        "n_free",
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
        self.managed = n_blocks
        self.n_free = n_blocks
        self.slack = 0  # token slots that are held and not filled
        self.top: list[Block] = []
        self.below: list[list[Block] | dict[Block, None]] = []
        self.unborn: list[Block] = []  # ids descending: the end is handed out next
        self.next_id = first_id
        self.end_id = first_id + n_blocks
        self.retired = Lease(home, self, None, "fp16")
        self.retired._why = "retired"
        # Journal slots: instrumentation swaps these instead of wrapping methods.
        self.took = log
        self.gave = log

    def n_unborn(self) -> int:
        """Blocks never handed out."""
        return len(self.unborn) + self.end_id - self.next_id

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
            if not self.top:
                self.top = region
                del self.below[-1]
                continue
            wanted = n - len(self.top)
            moved = region[-wanted:]
            self.top[:0] = moved
            del region[-wanted:]
            if not region:
                del self.below[-1]

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
        """The non-empty list whose front is free the longest; never handed out comes first."""
        if self.unborn:
            return self.unborn
        while self.below:
            region = self.below[0]
            if isinstance(region, dict):
                region = list(region)
                self.below[0] = region
            if region:
                return region
            del self.below[0]
        return self.top

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
