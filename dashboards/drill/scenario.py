"""Scenario: what is acted out, and what the alert rules have to make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dashboards.drill.stage import Stage

__all__ = ["HOUR", "MINUTE", "Scenario"]

MINUTE: Final = 60
HOUR: Final = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """An incident, or a healthy workload.

    Attributes:
        name: Short, as in a file name.
        title: What happens.
        act: Sets it up on a stage.
        seconds: How long it is watched.
        interval_s: Between scrapes.
        alert: What has to fire; None of a healthy workload.
        begins_s: When the incident begins.
        within_s: The alert has to fire so many seconds after that.
        says: Patterns that its summary and description have to hold.
        labels: Labels that the firing alert has to have.
        companions: Alerts that may fire too; its runbook has to name them.
        before: A counter whose first rise the alert has to precede, by `ahead_s`.
    """

    name: str
    title: str
    act: Callable[[Stage], None]
    seconds: int
    interval_s: int = 15
    alert: str | None = None
    begins_s: int = 20 * MINUTE
    within_s: int = 0
    says: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    companions: tuple[str, ...] = ()
    before: str | None = None
    ahead_s: int = 0
