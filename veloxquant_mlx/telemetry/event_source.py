"""Event source: where the last events that go into a snapshot file come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

__all__ = ["MAX_EVENTS", "EventSource", "has_source", "last_events", "set_event_source"]

MAX_EVENTS: Final = 64

EventSource = Callable[[], Sequence[Mapping[str, Any]]]
_source: list[EventSource] = []


def set_event_source(source: EventSource | None) -> None:
    """Let `source` give the last events that go into each file, e.g. the flight recorder's.

    Args:
        source: Called on the publishing thread; gives JSON objects, oldest first, of which the
            last 64 are written. None: no events.
    """
    _source[:] = [] if source is None else [source]


def has_source() -> bool:
    """Whether events come from anywhere."""
    return bool(_source)


def last_events() -> tuple[Mapping[str, Any], ...]:
    """The events that belong into the next file.

    Raises:
        Exception: What the source raises, and what says that its events are no JSON.
    """
    if not _source:
        return ()
    events = tuple(_source[0]())[-MAX_EVENTS:]
    json.dumps(events, allow_nan=False)
    return events
