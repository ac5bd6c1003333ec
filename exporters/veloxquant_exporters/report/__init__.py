"""Report: a trace as one HTML page that needs no server and nothing from the network."""

from __future__ import annotations

from veloxquant_exporters.report.page import write_report

__all__ = ["write_report"]
