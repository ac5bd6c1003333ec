"""Stop: Ctrl-C and SIGTERM as a wish that is looked at between two steps."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Final, Self

__all__ = ["Stop"]

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Notes the first signal while it is entered; a second one acts as it would without.

    For the main thread, which is where Python runs handlers.

    Attributes:
        signal: The number of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
