"""The command `vqmon`: `main` is its entry point.

Importing this package loads no other library, so that a bare installation says what it lacks
instead of showing a traceback. The commands are listed in `commands`.

Exit codes: 0 done, and nothing wrong; 1 it could not be done, as one line says, or something is
wrong; 2 wrong usage, or a library that an extra would bring is missing; 130 ended by Ctrl-C before
it was done; 141 what reads its output went away.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from veloxquant_exporters.missing import explain

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run `vqmon` and end the process.

    Args:
        args: What stands behind the command's name; None takes the process's own arguments.

    Raises:
        SystemExit: Always, with the exit code.
    """
    try:
        from veloxquant_exporters.cli.group import run
    except ImportError as error:
        line = explain(error, "vqmon", ("cli",))
        if line is None:
            raise
        print(f"Error: {line}", file=sys.stderr)  # noqa: T201 - click, which would, is missing
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run(args))
