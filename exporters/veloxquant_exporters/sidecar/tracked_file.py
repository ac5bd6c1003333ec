"""TrackedFile: what the sidecar knows of one snapshot file between two looks at it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from veloxquant_exporters.sidecar.snapshot_files import Signature, read_file
from veloxquant_exporters.sidecar.state import State, judge
from veloxquant_mlx.telemetry.identity import liveness
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.snapshot_json import Header

__all__ = ["TrackedFile"]

# A file that old, from where no pid can be asked, is not taken for live at first sight: it shows
# itself within an interval if it is. Only a hint, as clocks step.
OLD_S: Final = 60.0


@dataclass(slots=True)
class TrackedFile:
    """One file and its process.

    Attributes:
        path: Where it is.
        seen: The version that `header` is of.
        header: Its first line.
        modified_s: Its time of modification, for the order among files only.
        moved_s: When its sequence last moved, by the reader's monotonic clock.
        state: As judged last.
        since_s: When that state began, by the same clock.
        snapshot: The last one decoded, None if it could not be.
        decoded: The version that `snapshot` is of.
        hidden: Its time is over and it could not be removed: it is kept out of everything.
    """

    path: str
    seen: Signature
    header: Header
    modified_s: float
    moved_s: float
    state: State
    since_s: float
    snapshot: ProcessSnapshot | None = None
    decoded: Signature | None = None
    hidden: bool = False

    @classmethod
    def at_first_sight(
        cls, path: str, seen: Signature, header: Header, now: float, age_s: float, namespace: str
    ) -> TrackedFile:
        """A file not known before; its state is still to be judged."""
        old = age_s > max(OLD_S, 10 * header.interval_s)
        untold = old and liveness(header.identity, namespace) == "unknown"
        moved_s = now - age_s if untold else now
        return cls(path, seen, header, seen[1] / 1e9, moved_s, "live", now)

    @property
    def ended(self) -> bool:
        """No more can come of it, by what is known."""
        return self.state in ("stopped", "dead")

    @property
    def rank(self) -> tuple[bool, bool, float, str]:
        """Among files of one name, the highest counts: one that runs, then the newest."""
        header = self.header
        return self.state == "live", not self.ended, header.born_s, header.identity.random_id

    def renew(self, seen: Signature, header: Header, now: float) -> None:
        """Take in another version of the file."""
        same = header.identity.random_id == self.header.identity.random_id
        if not same or header.sequence != self.header.sequence:
            self.moved_s = now
        self.seen, self.header, self.modified_s, self.hidden = seen, header, seen[1] / 1e9, False

    def judge(self, now: float, namespace: str, retention_s: float) -> None:
        """Tell its state anew."""
        state = judge(self.header, now - self.moved_s, namespace, retention_s)
        if state != self.state:
            self.state, self.since_s = state, now

    def decode(self) -> ProcessSnapshot | None:
        """The snapshot under its label; read only when the file has changed.

        Raises:
            UnreadableError: It cannot be read; said once a version, None after that.
            FileNotFoundError: It is gone.
        """
        if self.decoded == self.seen:
            return self.snapshot
        self.snapshot, self.decoded = None, self.seen
        file, self.decoded = read_file(self.path)
        # The writer may have gone on since the last look.
        self.snapshot = replace(file.snapshot, process=file.header.process)
        return self.snapshot
