"""What a display of the demo is, and what it is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from veloxquant_exporters.demo.figures import Figures
from veloxquant_exporters.demo.traffic import Progress

__all__ = ["POOL_NAME", "Frame", "Screen", "megabytes"]

POOL_NAME = "demo"


@dataclass(frozen=True, slots=True)
class Frame:
    """The demo at one moment.

    Attributes:
        title: The model.
        note: What to know of it, or "".
        url: Of the metrics page.
        block_size: Token slots of a block.
        once: True when the demo ends with the first round.
        round: From 1.
        n_requests: Requests of a round.
        elapsed_s: Seconds since the first request.
        rate: Tokens generated a second, lately.
        progress: Of the traffic.
        figures: Of the pool and of MLX.
    """

    title: str
    note: str
    url: str
    block_size: int
    once: bool
    round: int
    n_requests: int
    elapsed_s: float
    rate: float
    progress: Progress
    figures: Figures

    @property
    def served(self) -> int:
        """Requests of this round that are done."""
        return self.progress.served - (self.round - 1) * self.n_requests


class Screen(Protocol):
    """Shows frames while it is entered."""

    def __init__(self, look: Callable[[], Frame]) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def tick(self) -> None:
        """Called often by the thread that generates: show a frame if it is time."""


def megabytes(n_bytes: int) -> str:
    """A size in units of a million bytes, as in "18.3 MB"."""
    return f"{n_bytes / 1e6:,.1f} MB"
