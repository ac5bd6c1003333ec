"""The expressions of the boards and the names of the rules that came with this installation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from veloxquant_exporters.export.shipped import shipped

__all__ = ["Board", "PanelQuery", "boards", "rule_names"]

_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
_RULE: Final = re.compile(r"(?m)^\s*- (alert|record): *(\S+) *$")
_METRIC: Final = re.compile(r"(?:[a-z]\w*:)?veloxquant_\w+(?::\w+)?")
# Rules that a scraped setup has no use for: they translate what comes over OTLP.
_OPTIONAL: Final = ("bridge.yaml",)


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """An expression of a panel, its variables filled in for everything there is."""

    panel: str
    expression: str

    @property
    def metrics(self) -> set[str]:
        """Names of ours that it reads, recorded ones too."""
        return set(_METRIC.findall(self.expression))


@dataclass(frozen=True, slots=True)
class Board:
    """A board: its title and its queries; annotations have none here, as they are mostly empty."""

    title: str
    queries: tuple[PanelQuery, ...]


def boards(range_s: int) -> list[Board]:
    """The boards of this installation.

    Args:
        range_s: Seconds that stand for a range that follows the scrape interval.

    Raises:
        ExportError: They are not there.
    """
    return [_board(json.loads(text), range_s) for text in shipped("boards").values()]


def _board(board: dict[str, Any], range_s: int) -> Board:
    queries = (
        PanelQuery(panel.get("title", "?"), _filled(target["expr"], range_s))
        for panel in _panels(board)
        for target in panel.get("targets", ())
        if target.get("expr")
    )
    return Board(board["title"], tuple(queries))


def _panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())  # of a row that is folded


def _filled(expression: str, range_s: int) -> str:
    """As Grafana sends it when every variable says All."""
    ranges = {"__rate_interval": range_s, "__interval": range_s, "__range": max(range_s, 3600)}

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return f"{ranges[name]}s" if name in ranges else ".*"

    return _VARIABLE.sub(value, expression)


def rule_names() -> dict[str, set[str]]:
    """Names of the rules by kind, `alert` and `record`, that a server should have loaded."""
    names: dict[str, set[str]] = {"alert": set(), "record": set()}
    for file, text in shipped("rules").items():
        if file not in _OPTIONAL:
            for kind, name in _RULE.findall(text):
                names[kind].add(name)
    return names
