"""Validate the guard: does it catch what it must, and does it leave good code alone?

    python benchmarks/validate_guard.py [--docs docs/benchmarks.md] [--json FILE] [--minutes 12]

Each trial times in fresh processes. Counts are the same at every run, which is checked by making them
three times, and are then reused. While unchanged code is tried, both cores are kept busy: by what runs
on the machine anyway, and by spinning processes of our own for what is missing of that.

The table goes between the markers in the docs. Exit code 1 when a rate is below what it must be.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "exporters")]

from benchmarks.guard.check import OURS, TWIN, count, hear  # noqa: E402
from veloxquant_exporters.bench.budgets import Budget, read_budgets  # noqa: E402
from veloxquant_exporters.bench.document import commit, machine  # noqa: E402
from veloxquant_exporters.bench.verdict import Verdict  # noqa: E402

BEGIN, END = "<!-- validation: begin -->", "<!-- validation: end -->"
# Fault, benchmark: what changes the shape, in turn until there were 30.
SHAPES: Final = (
    ("linear:VisitsEveryBlock", "free_all"),
    ("quadratic:HeadFirst", "free_all"),
    ("quadratic:NewestFirst", "free_all"),
    ("quadratic:RebuiltPerBlock", "free_all"),
    ("pool_wide:Rescan", "free_all_in_pool"),
    ("pool_wide:HeldOverScan", "mark_used"),
)
TWICE: Final = ("dearer:TwiceTheWork", "free_all")


@dataclass(slots=True)
class Row:
    """A line of the table."""

    what: str
    trials: int
    caught: int
    by_layer: dict[str, int]
    need: int
    good_is_quiet: bool = False

    @property
    def met(self) -> bool:
        """True when the rate is what it must be."""
        return self.caught >= self.need

    def line(self) -> str:
        """As Markdown."""
        layers = ", ".join(f"{name} {n}" for name, n in sorted(self.by_layer.items())) or "-"
        verb = "passed" if self.good_is_quiet else "caught"
        return f"| {self.what} | {self.caught} of {self.trials} {verb} | {layers} | {self.need} |"


def spin(stop: Any) -> None:
    """Keep a core busy, in bursts as other work does."""
    while not stop.is_set():
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass


@contextmanager
def loaded() -> Iterator[str]:
    """Both cores busy; gives a sentence that says by what."""
    cores = os.cpu_count() or 1
    before = os.getloadavg()[0]
    missing = max(0, cores - int(before))
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    spinners = [context.Process(target=spin, args=(stop,), daemon=True) for _ in range(missing)]
    for spinner in spinners:
        spinner.start()
    try:
        yield f"load average {before:.1f} before, and {missing} spinning processes of its own"
    finally:
        stop.set()
        for spinner in spinners:
            spinner.join()


def trial(
    budgets: dict[str, Budget], target: str, counted: tuple[dict[str, Any], dict[str, Any]] | None
) -> list[Verdict]:
    """One run of the timed layer, with the counts given or none."""
    counts, twin_counts = counted or (None, None)
    return hear(budgets, target, TWIN, counts, twin_counts)[0]


def shapes(budgets: dict[str, Budget], n: int) -> list[Row]:
    """Faults of shape, by the clock alone and by the counts alone."""
    timed = Row("a fault of shape, by CPU time alone", n, 0, {}, n)
    exact = Row("the same faults, by the counts alone", len(SHAPES), 0, {}, len(SHAPES))
    for fault, name in SHAPES:
        one = {name: budgets[name]}
        found = count(one, f"tests.planted.{fault}", TWIN)
        (verdict,) = judged(one, found)
        exact.caught += verdict.status == "fail"
        note(exact, verdict)
    for number in range(n):
        fault, name = SHAPES[number % len(SHAPES)]
        (verdict,) = trial({name: budgets[name]}, f"tests.planted.{fault}", None)
        timed.caught += verdict.status == "fail"
        note(timed, verdict)
    return [timed, exact]


def judged(budgets: dict[str, Budget], found: tuple[Any, Any]) -> list[Verdict]:
    """Verdicts on counts alone."""
    from veloxquant_exporters.bench.run import judge_all

    return judge_all(budgets, None, *found)


def twice(budgets: dict[str, Budget], n: int) -> Row:
    """Twice the work: a warning by time, and by counts."""
    fault, name = TWICE
    row = Row("twice the constant, by CPU time alone (a warning counts)", n, 0, {}, n - 2)
    for _ in range(n):
        (verdict,) = trial({name: budgets[name]}, f"tests.planted.{fault}", None)
        row.caught += verdict.status != "pass"
        note(row, verdict)
    return row


def unchanged(budgets: dict[str, Budget], n: int, deadline: float) -> tuple[Row, str]:
    """Good code, all benchmarks, both layers, under load."""
    counted = count(budgets, OURS, TWIN)
    again = [count(budgets, OURS, TWIN) for _ in range(2)]
    assert all(other == counted for other in again), "counts differ from run to run"
    row = Row("unchanged code, all benchmarks, both layers, cores loaded", 0, 0, {}, 0, True)
    with loaded() as load:
        while row.trials < n and time.monotonic() < deadline:
            verdicts = trial(budgets, OURS, counted)
            row.trials += 1
            bad = [verdict for verdict in verdicts if verdict.status == "fail"]
            row.caught += not bad
            for verdict in bad:
                row.by_layer[verdict.name] = row.by_layer.get(verdict.name, 0) + 1
                print(verdict.name, [finding.text for finding in verdict.findings], flush=True)
    row.need = row.trials
    return row, load


def note(row: Row, verdict: Verdict) -> None:
    """Count the layers that spoke."""
    for layer in {finding.layer for finding in verdict.findings}:
        row.by_layer[layer] = row.by_layer.get(layer, 0) + 1


def page(rows: list[Row], load: str, took_s: float) -> str:
    """The section of the docs."""
    where = machine()
    rev = commit(ROOT)
    day = datetime.now(tz=UTC).date().isoformat()
    version = ".".join(platform.python_version_tuple()[:2])
    measured = (
        f"Measured {day} on {where['cpus']} shared {where['machine'].replace('_', '-')} cores, "
        f"{where['implementation']} {version}, at commit {rev['id'][:12] if rev else 'unknown'}, "
        f"in {took_s / 60:.1f} minutes; load while unchanged code was tried: {load}."
    )
    lines = [
        BEGIN,
        measured,
        "",
        "| tried | result | layers that spoke | must be |",
        "| --- | --- | --- | --- |",
        *(row.line() for row in rows),
        END,
    ]
    return "\n".join(lines)


def main() -> int:
    """Try everything, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, help="page whose marked section is replaced")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--minutes", type=float, default=12.0, help="stop trying good code then")
    parser.add_argument(
        "--trials", type=int, default=30, help="of faults; good code has twice that"
    )
    options = parser.parse_args()
    began = time.monotonic()
    budgets = read_budgets(ROOT / "benchmarks" / "guard" / "budgets.toml")
    rows = [*shapes(budgets, options.trials), twice(budgets, options.trials)]
    print(*(row.line() for row in rows), sep="\n", flush=True)
    good, load = unchanged(budgets, 2 * options.trials, began + 60 * options.minutes)
    rows.append(good)
    text = page(rows, load, time.monotonic() - began)
    print(text)
    if options.docs:
        old = options.docs.read_text("utf-8")
        head, rest = old.split(BEGIN)
        options.docs.write_text(head + text + rest.split(END)[1], "utf-8")
    if options.json:
        told = {row.what: [row.caught, row.trials, row.by_layer] for row in rows}
        options.json.write_text(json.dumps(told), "utf-8")
    return int(not all(row.met for row in rows))


if __name__ == "__main__":
    sys.exit(main())
