"""Program source: where a snapshot's part on the watched program comes from.

`veloxquant_mlx.serving` registers itself here; nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Callable

from veloxquant_mlx.telemetry.program import ProgramSnapshot

__all__ = ["ProgramSource", "program_snapshot", "refresh_program", "set_program_source"]

ProgramSource = Callable[[], ProgramSnapshot]
_source: list[ProgramSource] = []
_refresh: list[Callable[[], None]] = []


def set_program_source(
    source: ProgramSource | None, refresh: Callable[[], None] | None = None
) -> None:
    """Let `source` tell of the watched program in each snapshot of this process.

    Args:
        source: Called by any thread that takes a snapshot. None: there is no such program.
        refresh: Called before that, and before the pools are read: brings a pool up to date that
            keeps account of the program.
    """
    _source[:] = [] if source is None else [source]
    _refresh[:] = [] if refresh is None else [refresh]


def refresh_program() -> None:
    """Let pools that keep account of the watched program be up to date.

    Raises:
        Exception: What the hook raises.
    """
    for refresh in _refresh[:1]:
        refresh()


def program_snapshot() -> ProgramSnapshot | None:
    """The watched program now; None without one.

    Raises:
        Exception: What the source raises.
    """
    source = _source[:1]
    return source[0]() if source else None
