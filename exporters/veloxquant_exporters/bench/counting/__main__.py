"""`python -m veloxquant_exporters.bench.counting`: counts of a target, as JSON on standard output.

Exit code 3: the counter is blind, or an operation cannot be counted; the reason is on standard error.
"""

from __future__ import annotations

import argparse
import json
import sys

from veloxquant_exporters.bench.counting.count import count_all
from veloxquant_exporters.bench.counting.instructions import BlindCounterError
from veloxquant_exporters.bench.counting.rewrite import CannotCountError
from veloxquant_exporters.bench.target import TargetError


def main() -> int:
    """Parse, count, print."""
    parser = argparse.ArgumentParser(prog="python -m veloxquant_exporters.bench.counting")
    parser.add_argument("--target", required=True)
    parser.add_argument("--names", required=True, help="workloads, by comma")
    parser.add_argument("--sizes", default="256,512,1024,2048")
    options = parser.parse_args()
    try:
        counts = count_all(
            options.target, options.names.split(","), [int(n) for n in options.sizes.split(",")]
        )
    except (BlindCounterError, CannotCountError, TargetError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return 3
    print(json.dumps(counts))  # noqa: T201 - its output
    return 0


if __name__ == "__main__":
    sys.exit(main())
