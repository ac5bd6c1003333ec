"""Events: the newest calls as JSON objects, for snapshot files and for errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from veloxquant_mlx.memory.journal import EXHAUSTED, newest
from veloxquant_mlx.telemetry.trace.packer import OPERATION_OF
from veloxquant_mlx.telemetry.trace.schema import OPERATIONS

if TYPE_CHECKING:
    from veloxquant_mlx.memory.journal import Entry
    from veloxquant_mlx.telemetry.recorder.files import Source

__all__ = ["events_of"]


def events_of(
    entries: deque[Entry], n: int, source: Source, offset_s: float
) -> list[Mapping[str, Any]]:
    """The newest `n` entries, oldest first.

    Args:
        entries: The journal.
        n: How many.
        source: Whose they are.
        offset_s: What makes a Unix time of the pool's clock.
    """
    return [_event(entry, source, offset_s) for entry in newest(entries, n)]


def _event(entry: Entry, source: Source, offset_s: float) -> dict[str, Any]:
    at_ns, operation, what, n, n_tokens, taken, counts = entry
    parts = what if isinstance(what, tuple) else ((what, n, None),)
    lease = parts[0][0]
    event: dict[str, Any] = {
        "wall_s": round(at_ns / 1e9 + offset_s, 3),
        "pool": source.pool,
        "operation": OPERATIONS[OPERATION_OF[operation]],
        "outcome": "exhausted" if operation == EXHAUSTED else "ok",
        "streams": list(dict.fromkeys(part[0]._stream.name for part in parts)),
        "format": lease._format,
        "blocks": sum(part[1] for part in parts),
        "tokens": n_tokens,
        "in_use": taken - counts[0],
        "n_blocks": counts[4].n_blocks,
    }
    if source.owners and lease._owner is not None:
        event["owner"] = str(lease._owner)[:256]
    return event
