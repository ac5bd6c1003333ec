"""Verdict: plays a scenario, has promtool judge it, and says what is wrong."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass, field
from pathlib import Path

from dashboards.drill.promtool import Said, ask, expectations, questions, rule_test, unmet
from dashboards.drill.rules import Rules
from dashboards.drill.scenario import Scenario
from dashboards.drill.series import Series
from dashboards.drill.stage import Stage

__all__ = ["Play", "Verdict", "judge", "play"]


@dataclass(frozen=True, slots=True)
class Play:
    """A scenario that was acted out.

    Attributes:
        scenario: Which.
        series: What was scraped.
        problems: What the play itself found wrong.
    """

    scenario: Scenario
    series: Series
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of it.

    Attributes:
        scenario: Which.
        fired_s: When each alert first fired, in seconds since the incident began.
        wrong: What is wrong, in words; empty when all is well.
    """

    scenario: Scenario
    fired_s: dict[str, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()


def play(scenario: Scenario, seed: str = "") -> Play:
    """Act `scenario` out; another seed is another chance."""
    stage = Stage(scenario.name, scenario.interval_s, seed)
    try:
        scenario.act(stage)
        series = stage.run(scenario.seconds)
    finally:
        stage.close()
    gc.collect()
    return Play(scenario, series, tuple(stage.problems))


def judge(played: Play, rules: Rules, folder: Path) -> Verdict:
    """Have promtool judge; leaves the rule test in `folder`."""
    scenario = played.scenario
    wrong = [*played.problems, *_undeclared(scenario, rules)]
    kept = folder / f"{scenario.name}.yaml"
    asked = kept.with_suffix(".asked")
    test = rule_test(scenario, played.series, rules, expectations(scenario))
    kept.write_text(test, "utf-8")
    asked.write_text(test + "\n".join(questions(scenario)) + "\n", "utf-8")
    said = ask(asked)
    asked.unlink()
    if said.failures and not said.fired_s:
        wrong.append(f"promtool: {said.failures}")
    wrong += _wrong(scenario, said)
    wrong += _too_late(played, said)
    # Two readings of the same: promtool's own, and that of what it printed.
    if not wrong:
        wrong += [f"promtool expects otherwise: {expr}" for expr in unmet(scenario, said)]
    since = {name: at_s - scenario.begins_s for name, at_s in said.fired_s.items()}
    return Verdict(scenario, since, tuple(wrong))


def _undeclared(scenario: Scenario, rules: Rules) -> list[str]:
    if scenario.alert is None:
        return []
    missing = sorted(set(scenario.companions) - rules.companions(scenario.alert))
    return [f"the runbook of {scenario.alert} does not name {name}" for name in missing]


def _wrong(scenario: Scenario, said: Said) -> list[str]:
    allowed = {scenario.alert, *scenario.companions}
    wrong = [f"{name} fires" for name in said.fired_s if name not in allowed]
    if scenario.alert is None:
        return wrong
    at_s = said.fired_s.get(scenario.alert)
    if at_s is None:
        return [*wrong, f"{scenario.alert} does not fire"]
    since_s = at_s - scenario.begins_s
    if since_s < 0:
        wrong.append(f"{scenario.alert} fires {-since_s / 60:.0f} min before the incident")
    if since_s > scenario.within_s:
        wrong.append(
            f"{scenario.alert} fires after {since_s / 60:.0f} min, "
            f"not within {scenario.within_s / 60:.0f}"
        )
    wanted = [*scenario.says, *(f'{name}="{value}"' for name, value in scenario.labels)]
    texts = [" ".join(text) for text in said.texts]
    unsaid = [p for p in wanted if not any(re.search(p, text) for text in texts)]
    return [*wrong, *(f"{scenario.alert} does not say {p!r}: {texts}" for p in unsaid)]


def _too_late(played: Play, said: Said) -> list[str]:
    scenario = played.scenario
    fired_s = said.fired_s.get(scenario.alert or "")
    if scenario.before is None or fired_s is None:
        return []
    rose_s = first_rise(played.series, scenario.before)
    if rose_s is None:
        return [f"{scenario.before} never rises"]
    if rose_s - fired_s < scenario.ahead_s:
        ahead = f"{(rose_s - fired_s) / 60:.0f} min before {scenario.before} rises"
        return [f"{scenario.alert} fires {ahead}, not {scenario.ahead_s / 60:.0f}"]
    return []


def first_rise(series: Series, name: str) -> float | None:
    """When a counter first rose, in seconds."""
    for (found, _), values in series:
        if found == name:
            first = next(iter(values), None)
            for n, value in enumerate(values):
                if value is not None and first is not None and value > first:
                    return float(n * series.interval_s)
    return None
