"""Reference: a plain pool of known shape, to stand beside a target in the timed layer.

Machines change speed under load, and more so for large working sets. Both halves of a pair feel that
alike; the ratio to a reference that is known to be linear does not. The guard uses a frozen copy of
the real allocator instead, whose mix of operations is the same.
"""

from __future__ import annotations

from typing import Any

from veloxquant_exporters.bench.target import BLOCK_SIZE

__all__ = ["ListPool"]


class ListPool:
    """Blocks are ints, an owner a dict of them: linear in what is asked for, nothing else.

    For timing only: checks nothing, and no thread may share it.
    """

    def __init__(self, n_blocks: int) -> None:
        self._free = list(range(n_blocks - 1, -1, -1))
        self._held: dict[Any, dict[int, Any]] = {}
        self._owner: dict[int, Any] = {}
        self._fill: dict[int, int] = {}

    def allocate(self, stream: str, n_tokens: int, owner: Any, format: str = "fp16") -> list[int]:
        """Take blocks, newest free first."""
        n = -(-n_tokens // BLOCK_SIZE)
        taken = self._free[-n:][::-1]
        del self._free[-n:]
        held = self._held.setdefault(owner, {})
        for block in taken:
            held[block] = None
            self._owner[block] = owner
        return taken

    def free(self, blocks: list[int]) -> None:
        """Give blocks back, in any order."""
        for block in blocks:
            del self._held[self._owner.pop(block)][block]
            self._free.append(block)

    def free_all(self, owner: Any) -> None:
        """Give back all of an owner; linear in what it holds."""
        for block in self._held.pop(owner):
            del self._owner[block]
            self._free.append(block)

    def blocks_for(self, owner: Any) -> list[int]:
        """What an owner holds, in order."""
        return list(self._held[owner])

    def shrink(self, stream: str, target_free: int) -> int:
        """Forget free blocks, one by one."""
        n = max(0, len(self._free) - target_free)
        for _ in range(n):
            self._free.pop()
        return n

    def mark_used(self, block: int, n_used: int) -> None:
        """Note the fill of one block."""
        self._fill[block] = n_used

    def n_free(self, stream: str = "k") -> int:
        """Free blocks."""
        return len(self._free)
