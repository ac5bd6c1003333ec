"""Program source: where a snapshot's part on the watched program comes from.

`veloxquant_mlx.serving` registers itself here; nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Callable

from veloxquant_mlx.telemetry.program import ProgramSnapshot

__all__ = ["ProgramSource", "program_snapshot", "set_program_source"]

ProgramSource = Callable[[], ProgramSnapshot]
_source: list[ProgramSource] = []


def set_program_source(source: ProgramSource | None) -> None:
    """Let `source` tell of the watched program in each snapshot of this process.

    Args:
        source: Called by any thread that takes a snapshot. None: there is no such program.
    """
    _source[:] = [] if source is None else [source]


def program_snapshot() -> ProgramSnapshot | None:
    """The watched program now; None without one.

    Raises:
        Exception: What the source raises.
    """
    source = _source[:1]
    return source[0]() if source else None
