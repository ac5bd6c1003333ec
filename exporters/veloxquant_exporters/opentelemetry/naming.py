"""Naming: which OpenTelemetry attribute a catalogue label becomes, and in which style."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from veloxquant_mlx.telemetry.catalogue import CATALOGUE, Metric

__all__ = [
    "ENV_STYLE",
    "HISTOGRAMS",
    "OBSERVABLES",
    "PROCESS",
    "SCOPE",
    "Style",
    "attribute",
    "attributes_of",
    "style_of",
]

SCOPE: Final = "veloxquant_exporters.opentelemetry"
PROCESS: Final = "veloxquant.process"
ENV_STYLE: Final = "VELOXQUANT_OTEL_ATTRIBUTES"

# "semantic": namespaced, as OpenTelemetry's conventions have it. "prometheus": the labels of the
# Prometheus exporter, so that its boards and alerts read counters and histograms unchanged.
Style = Literal["semantic", "prometheus"]

# By OpenTelemetry name: rows that share one differ in their constant attributes.
OBSERVABLES: Final[Mapping[str, tuple[Metric, ...]]] = {
    name: tuple(row for row in CATALOGUE if row.otel == name)
    for name in dict.fromkeys(
        row.otel for row in CATALOGUE if row.otel and row.instrument != "histogram"
    )
}
HISTOGRAMS: Final = tuple(row for row in CATALOGUE if row.instrument == "histogram")


def style_of(style: str | None) -> Style:
    """`style`, or else what the environment says, or else "semantic".

    Raises:
        ValueError: It is neither "semantic" nor "prometheus".
    """
    chosen = style if style is not None else os.environ.get(ENV_STYLE) or "semantic"
    if chosen == "semantic":
        return "semantic"
    if chosen == "prometheus":
        return "prometheus"
    raise ValueError(
        f"attribute names must be 'semantic' or 'prometheus', got {chosen!r} "
        f"({'argument' if style is not None else ENV_STYLE})"
    )


def attribute(row: Metric, label: str, style: Style) -> str:
    """The attribute that `label` of `row` becomes."""
    if style == "prometheus":
        return label
    if label in row.attribute_names:
        return row.attribute_names[label]
    if row.read_pool is not None:
        return f"veloxquant.block_pool.{'name' if label == 'pool' else label}"
    return f"veloxquant.exporter.{label}"


def attributes_of(
    row: Metric, labels: Iterable[tuple[str, str | None]], process: str, style: Style
) -> dict[str, str]:
    """The attributes of one point: no value is None or empty, such attributes are left out."""
    attributes = {attribute(row, label, style): value for label, value in labels if value}
    attributes.update(row.attributes)
    if process:
        attributes["process" if style == "prometheus" else PROCESS] = process
    return attributes
