"""The scaling guard: counts exactly, times beside a frozen twin, and judges by budgets.toml.

    python -m benchmarks.guard [--out DIR] [--target package.module:factory]

Needs no stored baseline. Exit codes: 0 within budget (warnings allowed); 1 out of budget; 2 there is
no verdict: a benchmark is missing, a counter blind, a budget wrong, or pytest-xdist would run it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks.guard.check import OURS, TWIN, GuardError, guard
from veloxquant_exporters.bench.budgets import BudgetError, read_budgets
from veloxquant_exporters.bench.document import document, write
from veloxquant_exporters.bench.report import detail, markdown, table
from veloxquant_exporters.bench.run import MeasureError
from veloxquant_exporters.bench.verdict import Verdict

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main(argv: list[str] | None = None) -> int:
    """Run the guard and say how it went."""
    options = _options(argv)
    began = time.monotonic()
    try:
        budgets = read_budgets(options.budgets)
        if options.only:
            budgets = {name: budgets[name] for name in options.only.split(",")}
        verdicts, notes = guard(budgets, target=options.target, twin=options.twin)
    except (BudgetError, GuardError, MeasureError, KeyError) as error:
        print(f"guard: no verdict: {error}", file=sys.stderr)
        return 2
    took_s = time.monotonic() - began
    print(table(verdicts))
    for line in notes:
        print(line)
    print(f"{took_s:.1f} s")
    for verdict in verdicts:
        if verdict.status == "fail":
            print(detail(verdict))
    if options.out:
        _keep(verdicts, options, took_s)
    return 1 if any(verdict.status == "fail" for verdict in verdicts) else 0


def _keep(verdicts: list[Verdict], options: argparse.Namespace, took_s: float) -> None:
    """JSON, Markdown and pictures, under the folder named; Markdown also for the CI job's page."""
    out: Path = options.out
    found = document(verdicts, options.target, took_s, ROOT)
    write(found, out / "guard.json")
    text = markdown(verdicts, "Scaling guard")
    (out / "guard.md").write_text(text, "utf-8")
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page:
        with Path(page).open("a", encoding="utf-8") as summary:
            summary.write(text)
    if options.no_pictures:
        return
    try:
        from benchmarks.guard.plot import draw
    except ImportError as error:
        print(f"no pictures: {error}", file=sys.stderr)
    else:
        draw(found, out)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=__doc__)
    parser.add_argument("--target", default=OURS, help="package.module:factory (default: the pool)")
    parser.add_argument("--twin", default=TWIN, help="what stands beside it")
    parser.add_argument("--budgets", type=Path, default=HERE / "budgets.toml")
    parser.add_argument("--only", help="these benchmarks, by comma; for looking into one")
    parser.add_argument("--out", type=Path, help="folder for JSON, Markdown and pictures")
    parser.add_argument("--no-pictures", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
