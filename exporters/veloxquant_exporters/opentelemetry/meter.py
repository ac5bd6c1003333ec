"""instrument_meter: the catalogue on a meter provider, whoever owns it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

from opentelemetry.metrics import Meter, MeterProvider, get_meter_provider

from veloxquant_exporters import __version__
from veloxquant_exporters.opentelemetry.buckets import BucketExporter
from veloxquant_exporters.opentelemetry.drain import Drain
from veloxquant_exporters.opentelemetry.feed import Feed
from veloxquant_exporters.opentelemetry.instruments import Instruments
from veloxquant_exporters.opentelemetry.naming import SCOPE, style_of
from veloxquant_exporters.opentelemetry.spans import dropped_span_events
from veloxquant_exporters.sources import LiveSource, SnapshotSource

__all__ = ["Instrumentation", "instrument_meter"]


@dataclass(frozen=True, slots=True)
class _Made:
    """What was made on a provider, once and for good."""

    meter: Meter
    instruments: Instruments
    drain: Drain


_lock = threading.Lock()
_made: Final[WeakKeyDictionary[MeterProvider, _Made]] = WeakKeyDictionary()
# On the global provider: the stand-in that the API has before a program sets one hands its
# instruments over to the real one, where they would be made a second time.
_global: Final[list[_Made]] = []


class Instrumentation:
    """What `instrument_meter` started.

    Attributes:
        feed: Its readings and its own failures.
    """

    def __init__(self, made: _Made, feed: Feed, buckets: BucketExporter | None) -> None:
        self.feed = feed
        self._made = made
        self._buckets = buckets

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop: the instruments show nothing any more. May be called twice.

        Args:
            timeout_s: Longest wait for the thread, which may be reading a locked pool.
        """
        if self._made.instruments.feed is self.feed:
            self._made.instruments.feed = None
        if self._buckets is not None:
            self._buckets.bind(None)
        self.feed.close()
        self.feed.join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def instrument_meter(
    meter_provider: MeterProvider | None = None,
    source: SnapshotSource | None = None,
    *,
    buckets: BucketExporter | None = None,
    attributes: str | None = None,
    max_wait_s: float | None = None,
) -> Instrumentation:
    """Show the catalogue on `meter_provider`: every metric, for every pool that `source` has.

    Nothing is made or changed globally. Instrumenting a provider again replaces what it shows.

    Args:
        meter_provider: None takes the global one, and never sets it.
        source: None takes the watched pools of this process.
        buckets: The exporter of the provider's reader, if it is ours; without it, histograms are
            fed as records, at most 500 a collection (see `Drain`).
        attributes: "semantic" or "prometheus"; None takes `VELOXQUANT_OTEL_ATTRIBUTES` of the
            environment, else "semantic".
        max_wait_s: Longest time that a collection waits for a pool that is locked; None is 2 s.

    Raises:
        ValueError: `attributes` is something else.
    """
    style = style_of(attributes)
    with _lock:
        made = _make(meter_provider if meter_provider is not None else get_meter_provider())
    earlier = made.instruments.feed
    feed = Feed(
        source if source is not None else LiveSource(),
        max_wait_s=max_wait_s,
        after=None if buckets is not None else made.drain.drain,
    )
    made.instruments.style = made.drain.style = style
    made.instruments.dropped = lambda: {
        "otel_sampled": made.drain.n_dropped,
        "span_events": dropped_span_events(),
    }
    if buckets is not None:
        buckets.bind(feed, style)
    made.instruments.feed = feed
    if earlier is not None:
        earlier.close()
    return Instrumentation(made, feed, buckets)


def _make(provider: MeterProvider) -> _Made:
    is_global = provider is _global_provider()
    made = _made.get(provider)
    if made is None and is_global and _global:
        made = _global[0]
    if made is None:
        meter = provider.get_meter(SCOPE, __version__)
        made = _Made(meter, Instruments(meter), Drain(meter, "semantic"))
    _made[provider] = made
    if is_global:
        _global[:] = [made]
    return made


def _global_provider() -> Any:
    return get_meter_provider()


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - another thread's, which does not exist here
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
