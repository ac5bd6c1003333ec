"""The commands of `vqmon`. To add one, write its module and add its row here.

The module lies in this folder and has the click command under the name `command`. It imports click
at its top and everything else inside the function, so that only what is asked for is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["COMMANDS", "Entry"]

_HERE = "veloxquant_exporters.cli"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command is and what `vqmon --help` says of it, known without loading it.

    Attributes:
        module: The module that has the click command as `command`.
        help: One line, the first of the command's docstring; a test compares them.
        extras: Extras that hold all it needs; "mlx" stands for the platform's MLX backend.
        reads: Whether it reads something and says what it found: then it has `--json`.
    """

    module: str
    help: str
    extras: tuple[str, ...] = ("cli",)
    reads: bool = True


COMMANDS: Final[dict[str, Entry]] = {
    "demo": Entry(
        f"{_HERE}.demo",
        "Serve simulated requests through one pool, and watch it.",
        ("cli", "prometheus", "mlx"),
        reads=False,
    ),
    "serve": Entry(
        f"{_HERE}.serve",
        "Serve the metrics of the processes that publish into a folder.",
        ("cli", "prometheus"),
        reads=False,
    ),
    "run": Entry(
        f"{_HERE}.run",
        "Run a program that uses mlx-lm, and watch its memory.",
        ("cli", "prometheus", "mlx"),
        reads=False,
    ),
    "export": Entry(
        f"{_HERE}.export",
        "Write the Grafana boards or the Prometheus rules into a folder.",
    ),
    "top": Entry(
        f"{_HERE}.top",
        "Watch pools, memory and alerts on the terminal.",
        ("cli", "top", "trace"),
    ),
    "doctor": Entry(
        f"{_HERE}.doctor",
        "Find what keeps pools from being watched, and how to mend it.",
    ),
    "check": Entry(
        f"{_HERE}.check",
        "Lint a metrics page, a snapshot folder or a trace.",
        ("cli", "trace"),
    ),
    "bench": Entry(
        f"{_HERE}.bench",
        "Measure how an allocator's calls scale, in CPU time.",
    ),
    "replay": Entry(
        f"{_HERE}.replay",
        "Do a recorded trace again, check it, and time it.",
        ("cli", "trace"),
    ),
    "report": Entry(
        f"{_HERE}.report",
        "Draw a trace as one HTML page that needs no server.",
        ("cli", "trace", "report"),
    ),
    "simulate": Entry(
        f"{_HERE}.simulate",
        "Tell what other pool configurations would have done with a trace.",
        ("cli", "trace", "plot"),
    ),
    "completion": Entry(
        f"{_HERE}.completion",
        "Print the script that completes vqmon in a shell.",
        reads=False,
    ),
}
