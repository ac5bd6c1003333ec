"""Sequence: one run of `generate_step`, by itself or inside of something else."""

from __future__ import annotations

from typing import Any

__all__ = ["Sequence"]


class Sequence:
    """One run of a generator, for those who listen to it.

    Attributes:
        caches: What it was given as `prompt_cache`; None where it makes its own.
        notes: For the listener that keeps the caches' account; nobody else's.
    """

    __slots__ = ("caches", "notes")

    def __init__(self, caches: list[Any] | None) -> None:
        self.caches = caches
        self.notes: Any = None
