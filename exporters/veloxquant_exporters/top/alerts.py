"""AlertWatch: which rules' conditions hold, and since when."""

from __future__ import annotations

from typing import Final

from veloxquant_exporters.top.board import AlertView
from veloxquant_exporters.top.rule import Finding, Rule, Scene
from veloxquant_exporters.top.rules import RULES

__all__ = ["AlertWatch"]

_GRAVITY: Final = {"critical": 0, "warning": 1, "info": 2}


class AlertWatch:
    """Judges the rules at each reading, and remembers since when a condition holds.

    One thread at a time.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, str, str, str], float] = {}

    def clear(self) -> None:
        """Forget since when conditions hold."""
        self._since.clear()

    def look(self, scene: Scene) -> tuple[AlertView, ...]:
        """The alerts of this reading: firing before pending, grave ones first."""
        since: dict[tuple[str, str, str, str], float] = {}
        found: list[AlertView] = []
        for rule in RULES:
            for finding in rule.judge(rule, scene):
                key = (rule.name, finding.process, finding.pool, finding.label)
                since[key] = self._since.get(key, scene.now.at_s)
                found.append(_view(rule, finding, scene.now.at_s - since[key]))
        self._since = since
        return tuple(sorted(found, key=_order))


def _view(rule: Rule, finding: Finding, held_s: float) -> AlertView:
    return AlertView(
        name=rule.name,
        severity=rule.severity,
        state="firing" if held_s >= rule.for_s else "pending",
        process=finding.process,
        pool=finding.pool,
        detail=finding.detail,
        held_s=held_s,
        for_s=rule.for_s,
        runbook=rule.runbook,
    )


def _order(alert: AlertView) -> tuple[bool, int, str, str, str]:
    grave = _GRAVITY[alert.severity]
    return alert.state != "firing", grave, alert.name, alert.process, alert.pool
