"""What `vqmon export` writes: Grafana boards, Prometheus rules, and the runbooks both link to.

The files come with the installation; nothing here needs a library. `boards` and `rules` make the
files of an export as a mapping from path to text, and `files` puts such a mapping on disk.
"""

from __future__ import annotations

from veloxquant_exporters.export.boards import board_files
from veloxquant_exporters.export.errors import ExportError
from veloxquant_exporters.export.files import Exported, write_files
from veloxquant_exporters.export.rules import operator_files, rule_files
from veloxquant_exporters.export.runbooks import LocalRunbooks

__all__ = [
    "ExportError",
    "Exported",
    "LocalRunbooks",
    "board_files",
    "operator_files",
    "rule_files",
    "write_files",
]
