"""FolderSource: the snapshot folder into which processes publish."""

from __future__ import annotations

import os
import time
from pathlib import Path

from veloxquant_exporters.sidecar import DirectorySource
from veloxquant_exporters.top.history import Moment
from veloxquant_exporters.top.source import SourceError

__all__ = ["FolderSource"]


class FolderSource:
    """Reads a snapshot folder, and changes nothing in it; a `Source`.

    Args:
        directory: The folder.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._source = _Untouched(directory)

    @property
    def title(self) -> str:
        """The folder."""
        return str(self._directory)

    def read(self) -> Moment:
        """See `Source.read`."""
        try:
            os.scandir(self._directory).close()
        except OSError as error:
            why = error.strerror or str(error)
            raise SourceError(f"the folder {self._directory} cannot be read: {why}") from error
        reading = self._source.read()
        return Moment(time.monotonic(), time.time(), reading)


class _Untouched(DirectorySource):
    """A `DirectorySource` that leaves the files of ended processes to the sidecar."""

    def _remove(self, path: str) -> bool:
        return False
