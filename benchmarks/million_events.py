"""A trace of a million calls: recorded, loaded, drawn, and simulated under twelve configurations.

    python benchmarks/million_events.py [--calls 1000000] [--jobs N]

Prints wall seconds beside their budgets, and fails on none: they are this machine's. The traffic is
that of a busy server: prompts of some hundred tokens, then a block at a time.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "exporters")]

from veloxquant_exporters.report import write_report  # noqa: E402 - after the path
from veloxquant_exporters.simulate import Grid, simulate_all  # noqa: E402
from veloxquant_mlx.memory import BlockPoolAllocator, PoolConfig  # noqa: E402
from veloxquant_mlx.telemetry import instrument, record  # noqa: E402
from veloxquant_mlx.telemetry.trace import load_trace  # noqa: E402

Result = TypeVar("Result")

BUDGET_S = 120.0
RECORDED = PoolConfig(block_size=16, n_blocks=1 << 15)
# 12 in all, the recorded one among them.
GRID = Grid((8, 16, 32), separate_kv=(True, False), grow=(True, False))


def serve(pool: BlockPoolAllocator, n_calls: int) -> None:
    """40 requests at once, a new one for each that ended."""
    rng = random.Random(1)
    left: dict[int, int] = {}
    n = n_begun = 0
    while n < n_calls:
        if len(left) < 40:
            left[n_begun] = rng.randrange(10, 400)
            pool.allocate("k", rng.choice([30, 200, 1500]), n_begun)
            n_begun += 1
        else:
            owner = rng.choice(list(left))
            left[owner] -= 1
            if left[owner] < 0:
                del left[owner]
                pool.free_all(owner)
            else:
                pool.allocate("k" if n % 2 else "v", rng.choice([1, 16, 16, 16]), owner)
        n += 1


def main() -> int:
    """Record, and time what is done with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "million.vqtrace"
        pool = BlockPoolAllocator(RECORDED)
        instrument(pool, name="million")
        recorder = record(pool, path, capacity=1 << 20)
        told("recording", lambda: (serve(pool, options.calls), recorder.stop()))
        print(f"  {path.stat().st_size / 1e6:.1f} MB, {recorder.n_lost} calls lost")
        trace = told("loading", lambda: load_trace(path))
        page = Path(folder) / "million.html"
        told("report", lambda: write_report(trace, page))
        print(f"  {page.stat().st_size / 1e6:.1f} MB")
        configs = GRID.configs(trace.header.config)
        told(
            f"simulating {len(configs)} configurations in {options.jobs} processes",
            lambda: simulate_all(path, trace, configs, jobs=options.jobs),
            BUDGET_S,
        )
    return 0


def told(what: str, work: Callable[[], Result], budget_s: float | None = None) -> Result:
    """Do it, and print how long it took."""
    began = time.perf_counter()
    result = work()
    budget = "" if budget_s is None else f" (budget {budget_s:.0f} s)"
    print(f"{what}: {time.perf_counter() - began:.1f} s{budget}")
    return result


if __name__ == "__main__":
    sys.exit(main())
