"""`python -m veloxquant_exporters.bench.timing`: times of a target, as JSON on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from veloxquant_exporters.bench.reference import ListPool
from veloxquant_exporters.bench.target import Factory, TargetError, load
from veloxquant_exporters.bench.timed import ROUNDS, sample
from veloxquant_exporters.bench.workloads import WORKLOADS

__all__ = ["main"]


def main() -> int:
    """Parse, time, print; exit code 3 when the target cannot be loaded."""
    parser = argparse.ArgumentParser(prog="python -m veloxquant_exporters.bench.timing")
    parser.add_argument("--target", required=True)
    parser.add_argument("--twin", help="another target, or 'reference'")
    parser.add_argument("--names", required=True, help="workloads, by comma")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="leave out the largest sizes")
    options = parser.parse_args()
    try:
        factory, twin = load(options.target), _twin(options.twin)
    except TargetError as error:
        print(f"TargetError: {error}", file=sys.stderr)  # noqa: T201
        return 3
    found = {}
    for name in options.names.split(","):
        workload = WORKLOADS[name]
        stands_by = None if workload.needs_ours else twin
        sizes = workload.sizes[: 4 if len(workload.sizes) > 4 else 3] if options.quick else None
        found[name] = asdict(
            sample(workload, factory, stands_by, rounds=options.rounds, sizes=sizes)
        )
    print(json.dumps(found))  # noqa: T201 - its output
    return 0


def _twin(name: str | None) -> Factory | None:
    if name is None:
        return None
    return ListPool if name == "reference" else load(name)


if __name__ == "__main__":
    sys.exit(main())
