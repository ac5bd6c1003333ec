"""Compare two commits, or two files of results.

    python -m benchmarks.guard.compare commits --base REV [--head REV] [--runs 6] [--threshold 1.15]
    python -m benchmarks.guard.compare files BASE.json HEAD.json [--threshold 1.5]

`commits` checks both out beside each other and measures them in turn on this machine, each run in a
process of its own, with the benchmarks of this checkout. `files` takes explicit paths only and gives no
interval, since one run cannot know how far it is off.

Exit codes: 0 not slower; 1 slower than the threshold, by the lower end of the interval; 2 they cannot be
compared, as one line says.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.guard.check import OURS
from benchmarks.guard.ratios import Ratio, geometric, paired
from benchmarks.guard.results import durations
from benchmarks.guard.worktrees import RevisionError, checkout, resolve
from veloxquant_exporters.bench.document import DocumentError, machine, read, write
from veloxquant_exporters.bench.run import MeasureError, times_of
from veloxquant_exporters.bench.timed import Samples
from veloxquant_exporters.bench.workloads import WORKLOADS

# What numbers of two runs must share to say anything about the code.
SAME = ("system", "machine", "cpu", "cpus", "python", "implementation")


class CompareError(ValueError):
    """The two cannot be compared."""


def commits(options: argparse.Namespace) -> int:
    """Measure both in turn and judge."""
    base, head = resolve(options.base), resolve(options.head)
    names = options.only.split(",") if options.only else list(WORKLOADS)
    logs: dict[str, list[float]] = {name: [] for name in names}
    skipped: dict[str, str] = {}
    with checkout([base, head]) as folders:
        for number in range(options.runs):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            found = {side: measure(folders[side], names) for side in order}
            for name in names:
                reason = found[0][name].unsupported or found[1][name].unsupported
                if reason:
                    skipped[name] = reason
                else:
                    logs[name].append(geometric(by_size(found[0][name]), by_size(found[1][name])))
            print(f"pair {number + 1} of {options.runs}", file=sys.stderr)
    ratios = {name: paired(values) for name, values in logs.items() if name not in skipped}
    if not ratios:
        raise CompareError(f"no benchmark runs on both: {skipped}")
    title = f"{head[:12]} over {base[:12]}"
    report(ratios, options.threshold, title, skipped)
    if options.out:
        keep(ratios, options, title)
    return int(any(ratio.slower_than(options.threshold) for ratio in ratios.values()))


def measure(folder: Path, names: list[str]) -> dict[str, Samples]:
    """One process: this checkout's benchmarks on that folder's allocator."""
    return times_of(OURS, names, twin=None, rounds=3, quick=True, paths=[folder])


def by_size(samples: Samples) -> dict[int, float]:
    """Seconds a call by size."""
    return dict(zip(samples.sizes, samples.target_s, strict=True))


def files(options: argparse.Namespace) -> int:
    """Judge two stored runs."""
    if options.base.resolve() == options.head.resolve():
        raise CompareError(f"{options.base} would be compared with itself")
    base, head = read(options.base), read(options.head)
    if not options.any_machine:
        check_machine(base, head)
    before, after = durations(base), durations(head)
    missing = sorted(before.keys() - after.keys())
    if missing:
        raise CompareError(f"{options.head} lacks {', '.join(missing)}: renamed, or not run")
    ratios = {}
    for name, seconds in before.items():
        value = math.exp(geometric(seconds, after[name]))
        ratios[name] = Ratio(value, value, value, 1)
    report(ratios, options.threshold, f"{options.head.name} over {options.base.name}", {})
    return int(any(ratio.slower_than(options.threshold) for ratio in ratios.values()))


def check_machine(base: Mapping[str, Any], head: Mapping[str, Any]) -> None:
    """Raise `CompareError` when the runs are of different machines or interpreters."""
    one, other = (found.get("machine") or found.get("machine_info") or {} for found in (base, head))
    apart = [key for key in SAME if plain(one.get(key)) != plain(other.get(key))]
    if apart or not one:
        told = ", ".join(f"{key} {one.get(key)} and {other.get(key)}" for key in apart)
        raise CompareError(f"of different machines ({told or 'none is named'}); see --any-machine")


def plain(value: Any) -> Any:
    """pytest-benchmark stores much about a processor, of which clock rates change by themselves."""
    return value.get("brand_raw") if isinstance(value, Mapping) else value


def report(
    ratios: Mapping[str, Ratio], threshold: float, title: str, skipped: Mapping[str, str]
) -> None:
    """One line a benchmark, the slowest change first."""
    print(f"{title}: ratio of CPU time, 95 % interval; slower when its lower end > {threshold:.2f}")
    for name, ratio in sorted(ratios.items(), key=lambda item: -item[1].value):
        word = "SLOWER" if ratio.slower_than(threshold) else "faster" * (ratio.high < 1 / threshold)
        print(
            f"  {name:24} {ratio.value:6.3f}  [{ratio.low:.3f}, {ratio.high:.3f}]  {word}".rstrip()
        )
    for name, reason in skipped.items():
        print(f"  {name:24} left out: {reason}")


def keep(ratios: Mapping[str, Ratio], options: argparse.Namespace, title: str) -> None:
    """compare.json and the bars."""
    found = {
        "schema": "veloxquant-compare/1",
        "title": title,
        "threshold": options.threshold,
        "machine": machine(),
        "ratios": {
            name: {"ratio": r.value, "low": r.low, "high": r.high, "pairs": r.pairs}
            for name, r in ratios.items()
        },
    }
    write(found, options.out / "compare.json")
    try:
        from benchmarks.guard.plot import bars
    except ImportError as error:
        print(f"no pictures: {error}", file=sys.stderr)
        return
    rows = {name: (r.value, r.low, r.high) for name, r in ratios.items()}
    bars(rows, f"CPU time, {title}", options.out / "compare")


def main(argv: list[str] | None = None) -> int:
    """Parse, compare, and turn what cannot be done into one line."""
    options = parse(argv)
    try:
        code: int = options.run(options)
    except (CompareError, DocumentError, MeasureError, RevisionError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return code


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard.compare")
    ways = parser.add_subparsers(required=True)
    way = ways.add_parser("commits", help="measure two commits here and now")
    way.add_argument("--base", required=True)
    way.add_argument("--head", default="HEAD")
    way.add_argument("--runs", type=int, default=6, help="processes of each")
    way.add_argument("--only", help="these benchmarks, by comma")
    way.add_argument("--threshold", type=float, default=1.15)
    way.add_argument("--out", type=Path, help="folder for compare.json and pictures")
    way.set_defaults(run=commits)
    way = ways.add_parser("files", help="compare two stored runs")
    way.add_argument("base", type=Path)
    way.add_argument("head", type=Path)
    way.add_argument("--threshold", type=float, default=1.5)
    way.add_argument("--any-machine", action="store_true")
    way.set_defaults(run=files)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
