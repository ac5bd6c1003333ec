"""The command line of a program that writes a page from the code, or checks that it is up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["write_or_check"]


def write_or_check(
    render: Callable[[], str], arguments: Sequence[str] | None, *, description: str, stale: str
) -> int:
    """Write the page, or with `--check` compare it byte for byte.

    Args:
        render: Gives the page.
        arguments: The command line; None takes the process's own.
        description: What the program does, for its help.
        stale: What is said of a page that would change; `{path}` stands for its file.

    Returns:
        The exit status: 1 for a page that would change.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("path", type=Path)
    parser.add_argument("--check", action="store_true", help="only say whether it would change")
    options = parser.parse_args(arguments)
    page = render().encode()
    if not options.check:
        options.path.write_bytes(page)
        return 0
    if options.path.is_file() and options.path.read_bytes() == page:
        return 0
    sys.stderr.write(stale.format(path=options.path) + "\n")
    return 1
