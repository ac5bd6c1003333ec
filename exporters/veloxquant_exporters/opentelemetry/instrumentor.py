"""BlockPoolInstrumentor: found by `opentelemetry-instrument`, or used by hand."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined, unused-ignore] # opts out of types
    BaseInstrumentor,
)

from veloxquant_exporters.opentelemetry.meter import Instrumentation, instrument_meter
from veloxquant_exporters.opentelemetry.spans import SpanEvents
from veloxquant_mlx.memory import block_pool
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.telemetry import Probe, instrument, registry, uninstrument

__all__ = ["BlockPoolInstrumentor"]

_log = logging.getLogger("veloxquant_exporters.opentelemetry")


class BlockPoolInstrumentor(BaseInstrumentor):  # type: ignore[misc, unused-ignore]
    """Watches every pool, the present and the coming ones, and exports them.

    `instrument()` takes, all optional:
        meter_provider: None takes the global one.
        source, attributes: As in `instrument_meter`.
        span_events: False leaves traces alone.

    `uninstrument()` puts everything back: pools that this instrumentor began to watch are watched
    no more, those that the program itself instrumented stay.
    """

    _instrumentation: Instrumentation | None = None
    _events: SpanEvents | None = None
    _watched: weakref.WeakKeyDictionary[BlockPoolAllocator, Probe] | None = None

    def instrumentation_dependencies(self) -> Collection[str]:
        """None: what is instrumented comes in the same distribution."""
        return []

    def _instrument(self, **kwargs: Any) -> None:
        # First, as it refuses bad arguments, and then nothing must have been changed.
        self._instrumentation = instrument_meter(
            kwargs.get("meter_provider"),
            kwargs.get("source"),
            attributes=kwargs.get("attributes"),
        )
        self._watched = weakref.WeakKeyDictionary()
        for pool in list(block_pool._pools):  # noqa: SLF001 - the pools that live already
            self._watch(pool)
        block_pool._observers.append(self._watch)  # noqa: SLF001 - and those to come
        if kwargs.get("span_events", True):
            self._events = SpanEvents()
            self._events.start()

    def _uninstrument(self, **kwargs: Any) -> None:
        if self._watch in block_pool._observers:  # noqa: SLF001
            block_pool._observers.remove(self._watch)  # noqa: SLF001
        if self._events is not None:
            self._events.stop()
        if self._instrumentation is not None:
            self._instrumentation.close()
        for pool, probe in list((self._watched or {}).items()):
            if _probe_of(pool) is probe:  # else the program has named it since, to keep it
                uninstrument(pool)
        self._instrumentation = self._events = self._watched = None

    def _watch(self, pool: BlockPoolAllocator) -> None:
        """Runs in the constructor of every pool, to which nothing may go wrong for our sake."""
        try:
            if self._watched is not None and _probe_of(pool) is None:
                self._watched[pool] = instrument(pool)
        except Exception:  # noqa: BLE001 - whatever it is, the pool must come to be
            _log.exception("a pool could not be watched")


def _probe_of(pool: BlockPoolAllocator) -> Probe | None:
    """What watches `pool` already: the program itself, or another tool."""
    return registry._registry._probe_of(pool)  # noqa: SLF001 - the question has no public form
