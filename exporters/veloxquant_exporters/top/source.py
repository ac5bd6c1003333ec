"""Source: where `vqmon top` reads; each kind has a module of its own."""

from __future__ import annotations

from typing import Protocol

from veloxquant_exporters.top.history import Moment

__all__ = ["Source", "SourceError"]


class SourceError(Exception):
    """What was to be read cannot be; the text is one line for a person."""


class Source(Protocol):
    """Gives readings, one after the other; asked by one thread at a time."""

    @property
    def title(self) -> str:
        """What is read, without any password."""
        ...

    def read(self) -> Moment:
        """The present state. May take long, or hang: who asks does so on a thread to spare.

        Raises:
            SourceError: There is none to be had now.
        """
        ...
