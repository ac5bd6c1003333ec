"""Figures: what the page draws, on one axis of time that zooms for all of them together."""

from __future__ import annotations

from veloxquant_exporters.report.figures.axes import owner_text, time_range
from veloxquant_exporters.report.figures.block_map import map_figure
from veloxquant_exporters.report.figures.events import event_figure
from veloxquant_exporters.report.figures.latency import latency_figure
from veloxquant_exporters.report.figures.levels import level_figure, waste_figure
from veloxquant_exporters.report.figures.owners import owner_figure

__all__ = [
    "event_figure",
    "latency_figure",
    "level_figure",
    "map_figure",
    "owner_figure",
    "owner_text",
    "time_range",
    "waste_figure",
]
