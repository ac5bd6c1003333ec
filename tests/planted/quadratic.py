"""free_all that is quadratic in the owner's blocks, in three ways."""

from __future__ import annotations

from tests.planted.owned import OwnedPool

__all__ = ["HeadFirst", "NewestFirst", "RebuiltPerBlock"]


class HeadFirst(OwnedPool):
    """The historical fault: found at once, but `remove` moves the whole tail. One instruction each."""

    def free_all(self, owner: int | str) -> None:
        """Take the oldest id off the list, block by block."""
        ids = self.ids.get(owner, [])
        for block_id in list(ids):
            if block_id in ids:
                ids.remove(block_id)
        super().free_all(owner)


class NewestFirst(OwnedPool):
    """As `HeadFirst`, from the other end: every search scans the whole list."""

    def free_all(self, owner: int | str) -> None:
        """Search the newest id in the list, block by block."""
        ids = self.ids.get(owner, [])
        for block_id in reversed(list(ids)):
            if block_id in ids:
                ids.remove(block_id)
        super().free_all(owner)


class RebuiltPerBlock(OwnedPool):
    """The list of what is left is made anew for each block: instructions see this one."""

    def free_all(self, owner: int | str) -> None:
        """Filter the list, block by block."""
        ids = self.ids.get(owner, [])
        for block_id in list(ids):
            ids = [other for other in ids if other != block_id]
        super().free_all(owner)
