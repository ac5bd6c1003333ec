"""Run: measure a target in processes of its own, and judge it.

Each layer runs in a fresh process: the counter owns the tracing hook and replaces modules, and times
must not depend on what ran before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from veloxquant_exporters.bench.budgets import Budget
from veloxquant_exporters.bench.timed import ROUNDS, Samples
from veloxquant_exporters.bench.verdict import Verdict, judge

__all__ = ["MeasureError", "counts_of", "judge_all", "times_of"]

_TIMEOUT_S: Final = 240


class MeasureError(RuntimeError):
    """A measuring process failed: there is no verdict, which is a failure."""


def counts_of(target: str, names: Sequence[str], paths: Sequence[Path] = ()) -> dict[str, Any]:
    """Counts by workload name, from a fresh process.

    Args:
        target: `package.module:factory`.
        names: Workloads.
        paths: Folders put before all others on the import path.

    Raises:
        MeasureError: The counter was blind, or the process failed otherwise.
    """
    return _run("counting", target, names, ["--names", ",".join(names)], paths)


def times_of(
    target: str,
    names: Sequence[str],
    *,
    twin: str | None,
    rounds: int = ROUNDS,
    quick: bool = False,
    paths: Sequence[Path] = (),
) -> dict[str, Samples]:
    """Samples by workload name, from a fresh process.

    Args:
        target: `package.module:factory`.
        names: Workloads.
        twin: Another factory to stand beside it, or None.
        rounds: Timed rounds.
        quick: Leave out the largest sizes.
        paths: Folders put before all others on the import path.

    Raises:
        MeasureError: The process failed.
    """
    options = ["--names", ",".join(names), "--rounds", str(rounds)]
    options += ["--twin", twin] if twin else []
    options += ["--quick"] if quick else []
    found = _run("timing", target, names, options, paths)
    return {name: Samples(**fields) for name, fields in found.items()}


def judge_all(
    budgets: Mapping[str, Budget],
    times: Mapping[str, Samples] | None,
    counts: Mapping[str, Any] | None,
    twin_counts: Mapping[str, Any] | None = None,
) -> list[Verdict]:
    """A verdict for each budget.

    Raises:
        MeasureError: A layer that ran has nothing on a benchmark: missing is not passing.
    """
    for what, found in (("times", times), ("counts", counts)):
        missing = [] if found is None else sorted(budgets.keys() - found.keys())
        if missing:
            raise MeasureError(f"no {what} of {', '.join(missing)}: missing, renamed or disabled")
    return [
        judge(
            name,
            budget,
            None if times is None else times[name],
            None if counts is None else counts[name],
            None if twin_counts is None else twin_counts.get(name),
        )
        for name, budget in budgets.items()
    ]


def _run(
    module: str, target: str, names: Sequence[str], options: list[str], paths: Sequence[Path]
) -> dict[str, Any]:
    package = __name__.rpartition(".")[0]
    command = [sys.executable, "-m", f"{package}.{module}", "--target", target, *options]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command,
            env=_environment(paths),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MeasureError(f"{module} of {target}: not done after {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise MeasureError(f"{module} of {target} failed ({done.returncode}): {last[0]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    missing = [name for name in names if name not in found]
    if missing:
        raise MeasureError(f"{module} of {target} has nothing on {', '.join(missing)}")
    return found


def _environment(paths: Sequence[Path]) -> dict[str, str]:
    """This process's import path for the child, with `paths` first; and a fixed hash seed."""
    here = str(Path(__file__).resolve().parents[2])
    search = [*map(str, paths), here, *(path for path in sys.path if path)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(search)),
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "1",
    }
