"""Bridge: recording rules that give every gauge its Prometheus name where it came over OTLP.

Counters and histograms are named so that the standard translation of OTLP into Prometheus yields
their names; gauges follow OpenTelemetry's conventions (usage by state, no unit in the name), so
that boards and alerts need them recorded under the names of the catalogue. `scripts/bridge` writes
the rules. This module needs no OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from veloxquant_exporters.opentelemetry.naming import HISTOGRAMS, PROCESS, attribute
from veloxquant_mlx.telemetry.catalogue import CATALOGUE, Metric

__all__ = ["Rule", "bridge_rules", "render", "sanitize", "translated"]

_UNITS: Final = {"s": "seconds", "By": "bytes"}
# Gauges without an instrument of their own: sums and aliases of others, the labels summed away.
_DERIVED: Final = {
    "veloxquant_block_pool_blocks_in_use": ("veloxquant_block_pool_stream_blocks_in_use", "stream"),
    "veloxquant_block_pool_blocks_total": ("veloxquant_block_pool_blocks_managed", ""),
}
# What receivers may add of the scope; a recorded series is the Prometheus exporter's own.
_SCOPE_LABELS: Final = ("otel_scope_name", "otel_scope_version", "otel_scope_schema_url")


@dataclass(frozen=True, slots=True)
class Rule:
    """One recording rule.

    Attributes:
        record: The catalogue's name.
        sources: The names under which it may arrive; never `record` with `record`'s own labels.
        expr: PromQL.
    """

    record: str
    sources: tuple[str, ...]
    expr: str


def sanitize(name: str) -> str:
    """An OpenTelemetry name or attribute as Prometheus spells it."""
    return "".join(c if c.isalnum() or c in "_:" else "_" for c in name)


def translated(row: Metric, *, ratio: bool = True) -> str:
    """The name under which `row` arrives by the standard translation, "" if it has no OTLP name.

    Args:
        row: Of the catalogue.
        ratio: Whether the receiver appends `_ratio` to gauges of unit 1, as some can be told not to.
    """
    if row.otel is None:
        return ""
    name = sanitize(row.otel)
    unit = _UNITS.get(row.ucum, "")
    if row.ucum == "1" and row.instrument == "gauge" and ratio:
        unit = "ratio"
    if unit and unit not in name.split("_"):
        name = f"{name}_{unit}"
    return f"{name}_total" if row.instrument == "counter" else name


def bridge_rules() -> Iterator[Rule]:
    """Every rule, in the order of the catalogue."""
    by_name = {row.name: row for row in CATALOGUE}
    for row in CATALOGUE:
        if row.kind != "gauge":
            continue
        source, away = _DERIVED.get(row.name, (row.name, ""))
        origin = by_name[source]
        if origin.otel is None:
            continue
        names = dict.fromkeys((translated(origin, ratio=True), translated(origin, ratio=False)))
        yield Rule(row.name, tuple(names), _expr(origin, names, row.name, away))
    for row in HISTOGRAMS:
        name = translated(row)
        if name != row.name:
            for part in ("bucket", "count", "sum"):
                names = {f"{name}_{part}": None}
                record = f"{row.name}_{part}"
                yield Rule(record, tuple(names), _expr(row, names, record, ""))


def render() -> str:
    """The rules file."""
    lines = [
        "# Written by scripts/bridge from the catalogue; do not edit.",
        "#",
        "# For metrics that came over OTLP, into Prometheus' own receiver or through a collector:",
        "# records every gauge under the name and labels of the Prometheus exporter, whether or not",
        "# the translation appends _ratio. Where metrics are scraped, these rules match nothing.",
        "groups:",
        "  - name: veloxquant-otlp-bridge",
        "    rules:",
    ]
    for rule in bridge_rules():
        lines += [f"      - record: {rule.record}", "        expr: |-"]
        lines += [f"          {line}" for line in rule.expr.splitlines()]
    return "\n".join(lines) + "\n"


def _expr(row: Metric, names: Iterable[str], record: str, away: str) -> str:
    """`row` as it arrives under any of `names`, with the labels of the Prometheus exporter."""
    renamed = [(sanitize(attribute(row, label, "semantic")), label) for label in row.all_labels]
    renamed.append((sanitize(PROCESS), "process"))
    selected = {sanitize(key): value for key, value in row.attributes.items()}
    found = " or ".join(_selector(name, record, renamed[0][0], selected) for name in names)
    for theirs, ours in renamed:
        # Where points carry our label already, theirs is absent and nothing is replaced.
        found = f'label_replace({found}, "{ours}", "$1", "{theirs}", "(.+)")'
    dropped = [*(theirs for theirs, _ in renamed), *selected, *_SCOPE_LABELS]
    if away:
        dropped.append(away)
    return f"sum without ({', '.join(dropped)}) (\n  {found}\n)"


def _selector(name: str, record: str, key: str, selected: dict[str, str]) -> str:
    matchers = [f'{label}="{value}"' for label, value in selected.items()]
    if name == record:
        # Only what came over OTLP: a rule must not feed on what it records.
        matchers.append(f'{key}!=""')
    return f"{name}{{{', '.join(matchers)}}}" if matchers else name
