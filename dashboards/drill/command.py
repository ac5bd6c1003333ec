"""The drill's command line."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from dashboards.drill.healthy import HEALTHY
from dashboards.drill.incidents import INCIDENTS
from dashboards.drill.report import table
from dashboards.drill.rules import ALERTS, RECORDS, Rules
from dashboards.drill.scenario import Scenario
from dashboards.drill.verdict import Verdict, judge, play

__all__ = ["main"]

SCENARIOS: Final = {one.name: one for one in (*INCIDENTS, *HEALTHY)}


def main(arguments: Sequence[str], now_s: float) -> int:
    """Play, judge, print. Returns 0 if all is as it should be, 1 if not, 2 without promtool.

    Args:
        arguments: Of the command line.
        now_s: Seconds since the epoch; the clock of this process is not to be asked.
    """
    options = _options(arguments)
    logging.disable(logging.CRITICAL)  # what servers would log in these hours
    scenarios = [SCENARIOS[name] for name in options.names]
    if options.openmetrics is not None:
        end_s = now_s // 60 * 60 if options.end is None else options.end
        return _write_openmetrics(scenarios, options.openmetrics, end_s)
    if shutil.which("promtool") is None:
        print("drill: promtool is missing (Debian package prometheus)", file=sys.stderr)
        return 2
    if options.jobs > 1 and len(scenarios) > 1:
        verdicts = _judged_in_processes(scenarios, options)
    else:
        verdicts = _judged(scenarios, options)
    print(json.dumps(_as_json(verdicts)) if options.json else table(verdicts))
    return int(any(verdict.wrong for verdict in verdicts))


def _judged(scenarios: Sequence[Scenario], options: argparse.Namespace) -> list[Verdict]:
    rules = Rules(options.alerts.resolve(), options.records.resolve())
    with tempfile.TemporaryDirectory(prefix="veloxquant-drill-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        # promtool judges one while the next is played.
        with ThreadPoolExecutor(1) as judges:
            judged = [
                judges.submit(judge, play(one, options.seed), rules, folder) for one in scenarios
            ]
            return [one.result() for one in judged]


# -- several processes: each has a clock ---------------------------------------------------------


def _judged_in_processes(
    scenarios: Sequence[Scenario], options: argparse.Namespace
) -> list[Verdict]:
    shares = [share for share in _shares(scenarios, options.jobs) if share]
    with ThreadPoolExecutor(len(shares)) as threads:
        told = list(threads.map(lambda share: _in_process(share, options), shares))
    by_name = {one["name"]: one for part in told for one in part}
    return [
        Verdict(one, by_name[one.name]["fired_s"], tuple(by_name[one.name]["wrong"]))
        for one in scenarios
    ]


def _shares(scenarios: Iterable[Scenario], n: int) -> list[list[str]]:
    """Scenarios dealt out, the long ones first."""
    shares: list[list[str]] = [[] for _ in range(n)]
    cost = [0.0] * n
    for one in sorted(scenarios, key=_cost, reverse=True):
        least = cost.index(min(cost))
        shares[least].append(one.name)
        cost[least] += _cost(one)
    return shares


def _cost(scenario: Scenario) -> float:
    """Of a play: its scrapes, and the requests between them."""
    return scenario.seconds / scenario.interval_s + scenario.seconds / 40


def _in_process(names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "dashboards.drill", "--jobs=1", "--json", *names]
    command += [
        "--seed",
        options.seed,
        "--alerts",
        str(options.alerts),
        "--records",
        str(options.records),
    ]
    if options.keep is not None:
        command += ["--keep", str(options.keep)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode not in (0, 1):
        raise RuntimeError(f"the drill's process for {', '.join(names)} broke: {ran.returncode}")
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def _as_json(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    return [
        {
            "name": one.scenario.name,
            "title": one.scenario.title,
            "alert": one.scenario.alert,
            "within_s": one.scenario.within_s,
            "fired_s": one.fired_s,
            "wrong": list(one.wrong),
        }
        for one in verdicts
    ]


# -- the rest ------------------------------------------------------------------------------------


def _write_openmetrics(scenarios: Iterable[Scenario], folder: Path, end_s: float) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for scenario in scenarios:
        with (folder / f"{scenario.name}.om").open("w", encoding="utf-8") as file:
            file.writelines(play(scenario).series.openmetrics(end_s))
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dashboards.drill",
        description="Act out incidents and healthy workloads, and see which alerts fire.",
        epilog=f"Scenarios: {', '.join(SCENARIOS)}.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="scenarios; none means all")
    add("--alerts", type=Path, default=ALERTS, metavar="FILE", help="alert rules to drill")
    add("--records", type=Path, default=RECORDS, metavar="FILE", help="recording rules")
    add("--keep", type=Path, metavar="DIR", help="leave the rule tests there")
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--jobs", type=int, default=2, metavar="N", help="processes (default: 2)")
    add("--seed", default="", metavar="TEXT", help="play with another chance")
    add("--openmetrics", type=Path, metavar="DIR", help="write series there, and judge nothing")
    add("--end", type=float, metavar="SECONDS", help="epoch time of the last scrape in them")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(SCENARIOS))
    if unknown:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    options.names = options.names or list(SCENARIOS)
    return options
