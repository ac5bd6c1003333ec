"""Interrupts: a Ctrl-C that comes while a library loads is neither lost nor the library's end.

What C and C++ code calls of Python while it loads may raise, as Ctrl-C does, at any place: some of
it passes over that, some takes it for an ImportError, and MLX ends the process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

__all__ = ["Interrupts", "interrupts_held"]


class Interrupts:
    """Notes each Ctrl-C while it is entered, and raises `KeyboardInterrupt` as Python does.

    On the main thread, and where Ctrl-C does what it does by itself; otherwise it changes nothing.

    Attributes:
        came: Whether one came, whatever became of the exception.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if _is_default():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.default_int_handler(number, frame)

    def __exit__(self, *exc_info: object) -> None:
        # What was entered meanwhile and not left, as by a command that goes on, stays.
        if self._before is not None and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, self._before)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold a Ctrl-C back until the block is done; the second one is not held.

    On the main thread, otherwise it changes nothing.

    Raises:
        KeyboardInterrupt: At the end of the block, or whatever else the handler does that was there.
    """
    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[FrameType | None] = []

    def hold(_number: int, frame: FrameType | None) -> None:
        held.append(frame)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(signal.SIGINT, held[0])


def _is_default() -> bool:
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
