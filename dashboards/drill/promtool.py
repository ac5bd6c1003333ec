"""Promtool: a scenario's series as a rule test, and what promtool says of it.

The file has the verdict as expectations, which anybody can run again; and, while the drill runs it,
two queries that are expected to have no result, so that promtool prints what they have: when each
alert first fired, and what it said.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dashboards.drill.rules import Rules
from dashboards.drill.scenario import Scenario
from dashboards.drill.series import Series

__all__ = ["Said", "ask", "expectations", "questions", "rule_test", "unmet"]

TIMEOUT_S: Final = 120
# Rules are evaluated so often; it is what promtool takes its time for.
EVALUATION_S: Final = 30
FIRED: Final = (
    'min by (alertname)(min_over_time(timestamp(ALERTS{{alertstate="firing"}})[{}s:{}s]))'
)
_FIRED: Final = re.compile(r'\{alertname="(\w+)"\} ([\d.E+]+)')
_SAID: Final = re.compile(r"Labels:\{(.*?)\}\n\s+Annotations:\{(.*)\}")


@dataclass(slots=True)
class Said:
    """What promtool printed.

    Attributes:
        fired_s: When each alert first fired, in seconds since the beginning.
        texts: Labels, then summary and description, of the alert in question at its end.
        failures: Everything it printed, where an expectation was not met or a rule is no rule.
    """

    fired_s: dict[str, float] = field(default_factory=dict)
    texts: list[tuple[str, str]] = field(default_factory=list)
    failures: str = ""


def rule_test(scenario: Scenario, series: Series, rules: Rules, more: list[str]) -> str:
    """The file. `more` are lines of expectations, see `expectations` and `_questions`."""
    lines = [
        f"# {scenario.title}: written by dashboards/drill.",
        f"rule_files: [{json.dumps(str(rules.records))}, {json.dumps(str(rules.alerts))}]",
        f"evaluation_interval: {max(EVALUATION_S, scenario.interval_s)}s",
        "tests:",
        f"  - name: {json.dumps(scenario.title)}",
        f"    interval: {scenario.interval_s}s",
        "    input_series:",
    ]
    for name, values in series.for_promtool(rules.metrics()):
        lines += [f"      - series: {json.dumps(name)}", f"        values: {json.dumps(values)}"]
    return "\n".join([*lines, *more]) + "\n"


def expected(scenario: Scenario) -> list[tuple[str, int, list[float]]]:
    """Expressions, when they are evaluated, and their values: right in time, and nothing else."""
    every = f"{scenario.interval_s}s"
    allowed = "|".join(filter(None, (scenario.alert, *scenario.companions)))
    others = f'ALERTS{{alertstate="firing",alertname!~"{allowed}"}}[{scenario.seconds}s:{every}]'
    found: list[tuple[str, int, list[float]]] = [
        (f"count by (alertname)(count_over_time({others}))", scenario.seconds, [])
    ]
    if scenario.alert is not None:
        right = f'ALERTS{{alertstate="firing",alertname="{scenario.alert}"}}'
        before_s = scenario.begins_s - scenario.interval_s
        at_s = scenario.begins_s + scenario.within_s
        if before_s > 0:
            found.append((f"count(count_over_time({right}[{before_s}s:{every}]))", before_s, []))
        within = f"count(count_over_time({right}[{at_s}s:{every}])) > bool 0"
        found.append((within, at_s, [1.0]))
    return found


def expectations(scenario: Scenario) -> list[str]:
    """Lines of `expected`."""
    lines = ["    promql_expr_test:"]
    for expr, at_s, values in expected(scenario):
        lines += _expect(expr, at_s, values)
    return lines


def unmet(scenario: Scenario, said: Said) -> list[str]:
    """Expectations that promtool says are not met."""
    return [
        expr for expr, _, _ in expected(scenario) if f"expr: {json.dumps(expr)}" in said.failures
    ]


def questions(scenario: Scenario) -> list[str]:
    """What to ask: when each alert fired, and what the right one says from the beginning on."""
    fired = FIRED.format(scenario.seconds, scenario.interval_s)
    lines = _expect(fired, scenario.seconds, [])
    if scenario.alert is not None:
        lines.append("    alert_rule_test:")
        end_s = min(scenario.seconds, scenario.begins_s + scenario.within_s)
        lines += [
            f"      - {{eval_time: {at_s}s, alertname: {scenario.alert}, exp_alerts: []}}"
            for at_s in range(scenario.begins_s, end_s + 1, 60)
        ]
    return lines


def ask(file: Path) -> Said:
    """Run promtool on `file`, and read what it says."""
    ran = subprocess.run(
        ["promtool", "test", "rules", file.name],
        cwd=file.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    text = ran.stdout + ran.stderr
    said = Said(failures="" if ran.returncode == 0 else text.strip())
    said.fired_s = {name: float(value) for name, value in _FIRED.findall(text)}
    said.texts = [(labels, notes) for labels, notes in _SAID.findall(text)]
    return said


def _expect(expr: str, at_s: float, values: list[float]) -> list[str]:
    samples = "[" + ", ".join(f"{{labels: '{{}}', value: {value:g}}}" for value in values) + "]"
    return [
        f"      - expr: {json.dumps(expr)}",
        f"        eval_time: {at_s:.0f}s",
        f"        exp_samples: {samples}",
    ]
