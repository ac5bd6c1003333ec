"""Rule: an alert rule that is judged from readings, and what it may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from veloxquant_exporters.top.history import Moment
from veloxquant_exporters.top.track import Tracks

__all__ = ["Finding", "Rule", "Scene", "Severity"]

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a rule may look at.

    Attributes:
        moments: The readings that are kept, the newest last.
        tracks: Of what is there now.
    """

    moments: tuple[Moment, ...]
    tracks: Tracks

    @property
    def now(self) -> Moment:
        """The newest reading."""
        return self.moments[-1]


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that holds now.

    Attributes:
        process, pool: What it is about; "" where it is about less.
        detail: The figures, in a few words.
        label: Tells it from others of the same rule and pool, e.g. an operation.
    """

    process: str
    pool: str
    detail: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """An alert rule.

    Attributes:
        name: As in alerts.yaml.
        severity: As there.
        for_s: How long the condition must hold.
        runbook: File in docs/runbooks.
        judge: Gives what holds now.
        limits: Thresholds, in the order in which the expression has them.
        window_s: Of the expression's range; 0 without one.
    """

    name: str
    severity: Severity
    for_s: float
    runbook: str
    judge: Callable[[Rule, Scene], Iterator[Finding]]
    limits: tuple[float, ...] = (0.0,)
    window_s: float = 0.0
