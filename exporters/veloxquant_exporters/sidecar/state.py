"""State: is the process behind a snapshot file live, stale, stopped or dead?"""

from __future__ import annotations

from typing import Final, Literal

from veloxquant_mlx.telemetry.identity import liveness
from veloxquant_mlx.telemetry.snapshot_json import Header

__all__ = ["QUIET_INTERVALS", "STATES", "State", "judge"]

State = Literal["live", "stale", "stopped", "dead"]
STATES: Final[tuple[State, ...]] = ("live", "stale", "stopped", "dead")

# With half an interval between looks, a death shows within three intervals.
QUIET_INTERVALS: Final = 2.5


def judge(header: Header, quiet_s: float, namespace: str, retention_s: float) -> State:
    """The state of the process that wrote `header`.

    Its clock is not asked, and its pid only where reader and writer share a PID namespace.

    Args:
        header: What it wrote last.
        quiet_s: Seconds since the sequence moved, by the reader's monotonic clock.
        namespace: The reader's PID namespace, see `own_namespace`.
        retention_s: A process that lives and has been quiet for this long hangs, and counts as
            dead.
    """
    if header.state == "stopped":
        return "stopped"
    lives = liveness(header.identity, namespace)
    if lives == "gone":
        return "dead"
    if quiet_s <= QUIET_INTERVALS * header.interval_s:
        return "live"
    if lives == "alive" and quiet_s <= retention_s:
        return "stale"
    return "dead"
