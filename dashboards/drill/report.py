"""Report: the table of incidents and alerts, with the time to fire."""

from __future__ import annotations

from collections.abc import Iterable

from dashboards.drill.verdict import Verdict

__all__ = ["table"]

PREFIX = "VeloxQuant"


def table(verdicts: Iterable[Verdict]) -> str:
    """Lines for a terminal: what fired when, then what is wrong."""
    verdicts = list(verdicts)
    wide = max(len(verdict.scenario.title) for verdict in verdicts)
    incidents = [verdict for verdict in verdicts if verdict.scenario.alert]
    healthy = [verdict for verdict in verdicts if not verdict.scenario.alert]
    lines = []
    if incidents:
        lines.append(f"{'incident':{wide}}  alert (minutes to fire / at most)")
        lines += [f"{one.scenario.title:{wide}}  {_cells(one)}" for one in incidents]
    if healthy:
        lines.append(f"{'healthy':{wide}}")
        lines += [f"{one.scenario.title:{wide}}  {_cells(one)}" for one in healthy]
    for verdict in verdicts:
        lines += [f"WRONG {verdict.scenario.name}: {text}" for text in verdict.wrong]
    n_wrong = sum(bool(verdict.wrong) for verdict in verdicts)
    lines.append(f"{len(verdicts) - n_wrong} of {len(verdicts)} as they should be")
    return "\n".join(lines)


def _cells(verdict: Verdict) -> str:
    scenario = verdict.scenario
    fired = dict(verdict.fired_s)
    cells = []
    if scenario.alert is not None:
        at_s = fired.pop(scenario.alert, None)
        told = "never" if at_s is None else f"{at_s / 60:.0f}"
        cells.append(f"{_short(scenario.alert)} ({told} / {scenario.within_s / 60:.0f})")
    others = sorted(fired.items(), key=lambda item: item[1])
    cells += [f"+ {_short(name)} ({at_s / 60:.0f})" for name, at_s in others]
    return " ".join(cells) or "-"


def _short(name: str) -> str:
    return name.removeprefix(PREFIX)
