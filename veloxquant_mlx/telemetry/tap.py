"""Tap: what a recorder hears of a pool's hooks, beyond the journal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from veloxquant_mlx.memory.journal import Entry
    from veloxquant_mlx.telemetry.samples import Sample

__all__ = ["Tap"]


class Tap(Protocol):
    """What a recorder wants to be told, beyond the journal. Under the pool's lock, but for `gone`."""

    def freed(self, entry: Entry) -> None:
        """A `free` of single blocks, the newest in the journal."""

    def resized(self) -> None:
        """The pool grew, or retired blocks."""

    def refused(self) -> None:
        """An allocation failed."""

    def sampled(self, sample: Sample) -> None:
        """A call was timed."""

    def violated(self) -> None:
        """The self-check found a fault. Without the lock."""

    def removed(self) -> None:
        """The hooks are about to be taken out."""

    def gone(self) -> None:
        """The pool was collected; on any thread, at any moment."""
