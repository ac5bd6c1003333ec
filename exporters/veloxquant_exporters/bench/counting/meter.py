"""Meter: the three counts of one call."""

from __future__ import annotations

from typing import Final

__all__ = ["METER", "Meter"]


class Meter:
    """Running counts; one a process, as the rewritten code has to find it.

    Attributes:
        steps: Bytecode instructions.
        moves: Elements that containers compared, copied or moved inside one instruction.
        longest_hold: The most steps and moves within one hold of a lock.
        n_holds: Outermost lock acquisitions.
    """

    __slots__ = ("longest_hold", "moves", "n_holds", "steps")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start from nothing."""
        self.steps = self.moves = self.longest_hold = self.n_holds = 0

    def total(self) -> int:
        """Steps and moves so far."""
        return self.steps + self.moves


METER: Final = Meter()
