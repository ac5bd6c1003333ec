"""Sources: where an exporter gets its snapshots from.

Nothing else differs between the exporter in the serving process and the one in a sidecar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from veloxquant_mlx.telemetry import ProcessSnapshot, take_snapshot

__all__ = ["LiveSource", "Reading", "SnapshotSource"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a source had at one moment.

    Attributes:
        processes: Snapshots of live processes, each with its `process` label ("" in process).
        up: 1 or 0 by process: 0 for one that is known and whose snapshot cannot be had.
        errors: Failures of the source itself so far, by reason; every reason is there.
        sizes: Counts of the source itself, e.g. files by state; for the sidecar's own series.
    """

    processes: tuple[ProcessSnapshot, ...]
    up: Mapping[str, int]
    errors: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


class SnapshotSource(Protocol):
    """Gives snapshots; any thread may ask, and none is kept waiting for long."""

    @property
    def labels_processes(self) -> bool:
        """True where series of several processes meet, so that each carries the label."""
        ...

    def read(self) -> Reading:
        """The present state. Never raises: what cannot be read is counted in `errors`."""
        ...


class LiveSource:
    """The watched pools of this process."""

    labels_processes = False

    def read(self) -> Reading:
        """See `SnapshotSource.read`."""
        return Reading(processes=(take_snapshot(),), up={"": 1})
