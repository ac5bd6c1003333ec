"""CachedOwners: which owners' blocks a prompt cache keeps on purpose, until it evicts them.

Kept beside the books and not in them: the calls of a decode step must not pay for it, so the end of
an owner is noticed when somebody asks.
"""

from __future__ import annotations

from typing import Final

from veloxquant_mlx.memory.block import Lease, Owner

__all__ = ["CachedOwners"]

# Ended owners may pile up to so many before they are forgotten.
FORGOTTEN_AT: Final = 64


class CachedOwners:
    """The owners marked as cached; under the pool's lock only.

    Args:
        owners: The pool's own table, the first lease of each owner that holds blocks.

    Attributes:
        marks: The first lease of each marked owner by then. Who frees that lease block by block
            puts the owner's next one in its place; of others the mark has ended.
        version: Rises with each change of a mark.
    """

    __slots__ = ("_forget_at", "_owners", "marks", "version")

    def __init__(self, owners: dict[Owner, Lease]) -> None:
        self._owners = owners
        self.marks: dict[Owner, Lease] = {}
        self._forget_at = FORGOTTEN_AT
        self.version = 0

    def mark(self, owner: Owner) -> bool:
        """Mark `owner`; False if it holds nothing."""
        first = self._owners.get(owner)
        if first is None:
            return False
        if len(self.marks) >= self._forget_at:
            self._forget()
        self.marks[first._owner] = first
        self.version += 1
        return True

    def unmark(self, owner: Owner) -> bool:
        """Take the mark off; False if there was none."""
        known = self.marks.pop(owner, None)
        self.version += 1
        return known is not None and self._owners.get(owner) is known

    def holds(self, first: Lease) -> bool:
        """Whether the owner with this first lease is marked."""
        return self.marks.get(first._owner) is first

    def n_blocks(self) -> int:
        """Blocks that marked owners hold; linear in those owners, 0.1 us each."""
        n = 0
        # A copy: a signal handler may mark another between two steps.
        for owner, first in list(self.marks.items()):
            if self._owners.get(owner) is first:
                group = first._group
                leases = (first,) if group is None else group.leases
                n += sum(len(lease._blocks) for lease in leases)
        return n

    def _forget(self) -> None:
        """Drop the marks of ended owners: an id may come back as another request's."""
        get = self._owners.get
        self.marks = {owner: first for owner, first in self.marks.items() if get(owner) is first}
        self._forget_at = max(FORGOTTEN_AT, 2 * len(self.marks))
