"""Sidecar: the metrics of processes that publish snapshot files, also of those that died.

Importing this package loads no exporter library; `DirectorySource` and `check_directory` need none.
"""

from __future__ import annotations

from veloxquant_exporters.sidecar.check import DirectoryReport, check_directory
from veloxquant_exporters.sidecar.directory_source import DirectorySource
from veloxquant_exporters.sidecar.state import STATES, State

__all__ = ["STATES", "DirectoryReport", "DirectorySource", "State", "check_directory"]
