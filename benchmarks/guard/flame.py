"""Flame: where the slowest benchmark of a run spends its time, as a page to look at.

    python -m benchmarks.guard.flame RUN.json --out flame.html [--only NAME]

Samples the calls in process with pyinstrument (dependency group `bench`).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.guard.check import OURS
from veloxquant_exporters.bench.document import DocumentError, read
from veloxquant_exporters.bench.target import load
from veloxquant_exporters.bench.workloads import WORKLOADS

WATCHED_S = 1.0


def slowest(found: dict[str, Any]) -> str:
    """The benchmark whose call at its largest size takes longest."""
    timed: dict[str, float] = {
        name: one["times"]["target_s"][-1]
        for name, one in found["benchmarks"].items()
        if one["times"] and one["times"]["target_s"]
    }
    if not timed:
        raise DocumentError("the run has no times")
    return max(timed, key=timed.__getitem__)


def main(argv: list[str] | None = None) -> int:
    """Profile and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard.flame")
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="this benchmark instead of the slowest")
    options = parser.parse_args(argv)
    try:
        from pyinstrument import Profiler
        from pyinstrument.renderers import HTMLRenderer

        name = options.only or slowest(read(options.run))
    except (DocumentError, ImportError) as error:
        print(f"flame: {error}", file=sys.stderr)
        return 2
    workload = WORKLOADS[name]
    work = workload.start(load(OURS), workload.sizes[-1])
    profiler = Profiler(interval=0.0005)
    watched_s = 0.0
    while watched_s < WATCHED_S:
        work.ready()
        began = time.perf_counter()
        with profiler:
            work.run()
        watched_s += time.perf_counter() - began
        work.check()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(profiler.output(HTMLRenderer()), "utf-8")
    print(profiler.output_text(unicode=False, color=False))
    print(f"{name}: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
