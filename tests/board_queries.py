"""The queries of boards and rules as Grafana and Prometheus would run them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = [
    "ALERTS",
    "BOARDS",
    "RECORDS",
    "Query",
    "Selector",
    "board_queries",
    "rules_of",
    "selectors",
]

ROOT = Path(__file__).resolve().parent.parent
BOARDS = sorted((ROOT / "dashboards" / "grafana").glob("*.json"))
ALERTS = ROOT / "dashboards" / "alerts" / "alerts.yaml"
RECORDS = ROOT / "dashboards" / "alerts" / "records.yaml"

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTOR = re.compile(
    r'([a-zA-Z_:][\w:]*)(?![\w:])\s*(\{(?:"(?:[^"\\]|\\.)*"|[^}"])*\})?(?!\s*\()'
)
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_WORDS = {"and", "or", "unless", "bool", "offset", "Inf", "NaN", "inf", "nan", "group_left"}


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a board.

    Attributes:
        board, where: The board's file name, and the panel's or annotation's title.
        expr: As in the file, with Grafana's variables.
        instant: Asked for one moment.
    """

    board: str
    where: str
    expr: str
    instant: bool

    def filled(self, values: Mapping[str, str], range_s: int) -> str:
        """With the variables as Grafana puts them in: rates over four scrapes of a minute."""
        text = self.expr.replace("$__rate_interval", "240s").replace("$__range", f"{range_s}s")
        text = text.replace("$__interval", "60s")
        for name, value in values.items():
            text = text.replace(f"${name}", value)
        assert "$" not in text, text
        return text


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric in a query, with the labels that its matchers name."""

    name: str
    matchers: str
    labels: frozenset[str]


def board_queries() -> Iterator[Query]:
    """Those of all panels and annotations."""
    for file in BOARDS:
        board: dict[str, Any] = json.loads(file.read_text("utf-8"))
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield Query(file.stem, panel["title"], target["expr"], target["instant"])
        for note in board["annotations"]["list"]:
            yield Query(file.stem, f"annotation {note['name']}", note["expr"], False)


def rules_of(file: Path) -> dict[str, str]:
    """Expression by the name of the alert or record."""
    groups = yaml.safe_load(file.read_text("utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules}


def selectors(expr: str) -> list[Selector]:
    """The metrics of a query."""
    text = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub("", expr))
    found = []
    for name, matchers in _SELECTOR.findall(text):
        if name in _WORDS or (not matchers and "_" not in name and name != "up"):
            continue
        plain = _STRING.sub('""', matchers)
        labels = frozenset(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*""', plain))
        found.append(Selector(name, matchers, labels))
    return found


def grouped_labels(expr: str) -> set[str]:
    """Labels that the query groups by or matches on."""
    return {label.strip() for part in _GROUPING.findall(expr) for label in part.split(",")} - {""}
