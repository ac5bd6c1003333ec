"""LiveOnly: a folder's processes without the dead ones, for exporters that cannot show half of one."""

from __future__ import annotations

from dataclasses import replace

from veloxquant_exporters.sidecar.directory_source import DirectorySource
from veloxquant_exporters.sources import Reading

__all__ = ["LiveOnly"]


class LiveOnly:
    """A `SnapshotSource` over another one.

    Args:
        source: Whose dead processes are left out; their `up` stays 0.
    """

    labels_processes = True

    def __init__(self, source: DirectorySource) -> None:
        self._source = source

    def read(self) -> Reading:
        """See `SnapshotSource.read`."""
        reading = self._source.read()
        dead = self._source.dead_processes
        live = tuple(process for process in reading.processes if process.process not in dead)
        return replace(reading, processes=live)
