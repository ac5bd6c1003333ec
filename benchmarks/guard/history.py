"""History: measure the newest commits of this repository and write them as a backfill.

    python -m benchmarks.guard.history --commits 20 --out DIR

Each commit that touched the allocator is measured by the benchmarks of this checkout, in a worktree, so
that a point of the history is the code's doing and not the benchmark's. Writes one JSON a commit, and
history.om for `promtool tsdb create-blocks-from openmetrics`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.guard.check import OURS
from benchmarks.guard.publish import main as publish
from benchmarks.guard.worktrees import ROOT, RevisionError, checkout
from veloxquant_exporters.bench.budgets import default_budget
from veloxquant_exporters.bench.document import commit, document, write
from veloxquant_exporters.bench.run import MeasureError, times_of
from veloxquant_exporters.bench.verdict import judge
from veloxquant_exporters.bench.workloads import WORKLOADS


def newest(n: int) -> list[str]:
    """The newest commits that touched the allocator, oldest first."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "log", f"-{n}", "--format=%H", "--", "veloxquant_mlx/memory"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[::-1]


def measure(rev: str, out: Path) -> Path | None:
    """One commit's JSON, or None when its allocator does not run."""
    began = time.monotonic()
    names = [name for name, workload in WORKLOADS.items() if not workload.needs_ours]
    try:
        with checkout([rev]) as (folder,):
            times = times_of(OURS, names, twin=None, rounds=3, quick=True, paths=[folder])
    except MeasureError as error:
        print(f"{rev[:12]}: left out: {error}", file=sys.stderr)
        return None
    verdicts = [
        judge(name, default_budget(WORKLOADS[name]), samples, None)
        for name, samples in times.items()
        if samples.unsupported is None
    ]
    found = document(verdicts, OURS, time.monotonic() - began)
    found["commit"] = commit(ROOT, rev)
    path = out / f"{found['commit']['time_s']}-{rev[:12]}.json"
    write(found, path)
    print(f"{rev[:12]}: {len(verdicts)} benchmarks", file=sys.stderr)
    return path


def main(argv: list[str] | None = None) -> int:
    """Measure and publish; exit code 2 when no commit could be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard.history")
    parser.add_argument("--commits", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        paths = [path for rev in newest(options.commits) if (path := measure(rev, options.out))]
    except (RevisionError, subprocess.CalledProcessError) as error:
        print(f"history: {error}", file=sys.stderr)
        return 2
    if not paths:
        print("history: no commit could be measured", file=sys.stderr)
        return 2
    return publish([*map(str, paths), "--openmetrics", str(options.out / "history.om")])


if __name__ == "__main__":
    sys.exit(main())
