"""SpanEvents: exhaustions, growth and slow calls as events on the span that is current.

A pool tells of them under its lock, where no span may be touched: a span has a lock of its own, and
whoever holds that may be waiting for the pool. So the event waits in the span's `end`, which is
replaced, on that one span, by one that adds what waits and then ends the span as ever.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace

from veloxquant_mlx.telemetry.notices import Notice, add_listener, remove_listener

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["SpanEvents", "dropped_span_events"]

_PREFIX: Final = "veloxquant.block_pool."
_NAMES: Final = {"exhausted": "exhausted", "grown": "grown", "slow": "slow_operation"}
# As many as an SDK keeps of a span by default.
MAX_EVENTS: Final = 128

_dropped = [0]


def dropped_span_events() -> int:
    """Events so far that no span could take."""
    return _dropped[0]


class SpanEvents:
    """Puts what befalls watched pools on the spans during which it happens.

    Nothing happens where no span is recording, and nothing in a forked child.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin."""
        add_listener(self._on_notice)

    def stop(self) -> None:
        """End; what waits on spans that have not ended is still added."""
        remove_listener(self._on_notice)

    def _on_notice(self, notice: Notice) -> None:
        """Under the pool's lock: reads a context variable and touches no lock."""
        span = trace.get_current_span()
        if span is trace.INVALID_SPAN or not span.is_recording() or os.getpid() != self._pid:
            return
        attributes: dict[str, str | int | float] = {
            _PREFIX + "name": notice.pool,
            _PREFIX + "operation": notice.operation,
            _PREFIX + "blocks": notice.n_blocks,
        }
        if notice.stream:
            attributes[_PREFIX + "stream"] = notice.stream
        if notice.owner:
            attributes[_PREFIX + "owner"] = notice.owner
        if notice.seconds is not None:
            attributes[_PREFIX + "duration"] = notice.seconds
        _put_off(span, _PREFIX + _NAMES[notice.kind], attributes)


def _put_off(span: Span, name: str, attributes: dict[str, str | int | float]) -> None:
    """Add the event when `span` ends."""
    own = getattr(span, "__dict__", None)
    if own is None:
        _dropped[0] += 1  # a span of another make than the SDK's
        return
    ending = own.get("end")
    if not isinstance(ending, _Ending):
        ending = _Ending(span)
        own["end"] = ending
    if len(ending.events) < MAX_EVENTS:
        ending.events.append((name, attributes, time.time_ns()))
    else:
        _dropped[0] += 1


class _Ending:
    """Stands in for `end` of one span."""

    __slots__ = ("_span", "events")

    def __init__(self, span: Span) -> None:
        self._span = span
        self.events: deque[tuple[str, dict[str, str | int | float], int]] = deque()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        span = self._span
        vars(span).pop("end", None)
        try:
            while self.events:
                span.add_event(*self.events.popleft())
        finally:
            span.end(*args, **kwargs)
