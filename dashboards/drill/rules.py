"""Rules: which metrics they read, and what the runbook of an alert says may come with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

__all__ = ["ALERTS", "RECORDS", "Rules"]

ROOT: Final = Path(__file__).resolve().parents[2]
ALERTS: Final = ROOT / "dashboards" / "alerts" / "alerts.yaml"
RECORDS: Final = ROOT / "dashboards" / "alerts" / "records.yaml"
RUNBOOKS: Final = ROOT / "docs" / "runbooks"

_NAME: Final = re.compile(r"(?<![\w:])(?:up|veloxquant_\w+)\b(?!:)")
_ALERT: Final = re.compile(r"`(VeloxQuant\w+)`")


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules under drill.

    Attributes:
        alerts, records: Their files.
    """

    alerts: Path = ALERTS
    records: Path = RECORDS

    def metrics(self) -> set[str]:
        """Names of the series that rules and annotations read."""
        return {
            name
            for file in (self.alerts, self.records)
            for name in _NAME.findall(file.read_text("utf-8"))
        }

    def names(self) -> list[str]:
        """The alerts, in the order of the file."""
        return [rule["alert"] for rule in self._all()]

    def companions(self, alert: str) -> set[str]:
        """What the runbook of `alert` names as coming with it."""
        rule = next(rule for rule in self._all() if rule["alert"] == alert)
        runbook = RUNBOOKS / rule["annotations"]["runbook_url"].rpartition("/")[2]
        head = runbook.read_text("utf-8").partition("\n## ")[0]
        told = [line for line in head.splitlines() if line.startswith("May come with:")]
        return {name for line in told for name in _ALERT.findall(line)}

    def _all(self) -> list[dict[str, Any]]:
        groups = yaml.safe_load(self.alerts.read_text("utf-8"))["groups"]
        return [rule for group in groups for rule in group["rules"] if "alert" in rule]
