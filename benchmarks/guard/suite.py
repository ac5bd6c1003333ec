"""Suite: check that a pytest-benchmark file has every benchmark it should have.

    python -m benchmarks.guard.suite RUN.json

pytest-benchmark itself is silent about a benchmark that was renamed, skipped or disabled. Exit codes:
0 complete; 1 something is missing; 2 the file is no run.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from veloxquant_exporters.bench.document import DocumentError, read

__all__ = ["EXPECTED", "main", "missing"]

EXPECTED: Final = Path(__file__).resolve().parent.parent / "suite.toml"


def missing(found: Mapping[str, Any], expected: Mapping[str, list[str]]) -> list[str]:
    """What is expected and has no samples in the run, as "file::name"."""
    ran = set()
    for one in found["benchmarks"]:
        if one.get("stats", {}).get("rounds", 0) > 0:
            path, _, name = one["fullname"].partition("::")
            ran.add((Path(path).name, name.partition("[")[0]))
    return [
        f"{file}::{name}"
        for file, names in expected.items()
        for name in names
        if (file, name) not in ran
    ]


def main(argv: list[str] | None = None) -> int:
    """Check and say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard.suite")
    parser.add_argument("run", type=Path)
    options = parser.parse_args(argv)
    try:
        found = read(options.run)
        if not isinstance(found["benchmarks"], list):
            raise DocumentError(f"{options.run} is no file of pytest-benchmark")
    except DocumentError as error:
        print(f"suite: {error}", file=sys.stderr)
        return 2
    absent = missing(found, tomllib.loads(EXPECTED.read_text("utf-8"))["expected"])
    if absent:
        print(f"suite: missing, renamed, skipped or disabled: {', '.join(absent)}", file=sys.stderr)
        return 1
    print(f"suite: complete, {len(found['benchmarks'])} benchmarks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
