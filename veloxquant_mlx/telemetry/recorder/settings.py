"""Settings of a recorder, checked."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.memory.journal import HISTORY

__all__ = ["CAPACITY", "Settings"]

CAPACITY: Final = 65536
MAX_CAPACITY: Final = 1 << 22
FOLDER_VARIABLE: Final = "VELOXQUANT_TRACE_DIR"
# At least so far apart, when it was asked for.
ASKED_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What `record` was given; see there.

    Raises:
        ValueError: Out of range.
        ArgumentTypeError: Of the wrong type.
    """

    path: Path | None = None
    capacity: int = CAPACITY
    owners: bool = False
    folder: Path | None = None
    dump_pause_s: float = 60.0
    keep: int = 16
    max_bytes: int = 1 << 30
    flush_s: float = 0.25
    snapshot_s: float = 1.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("capacity", HISTORY, MAX_CAPACITY),
            ("keep", 1, 10_000),
            ("max_bytes", 1, 1 << 50),
        ):
            value = getattr(self, name)
            if type(value) is not int:
                raise ArgumentTypeError(f"{name} must be an int, got {value!r}")
            if not low <= value <= high:
                raise ValueError(f"{name} must be {low} to {high}, got {value}")
        if type(self.owners) is not bool:
            raise ArgumentTypeError(f"owners must be True or False, got {self.owners!r}")
        for name in ("dump_pause_s", "flush_s", "snapshot_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ArgumentTypeError(f"{name} must be a number of seconds, got {value!r}")
            if not 0 <= value <= 86_400:
                raise ValueError(f"{name} must be 0 to 86400 seconds, got {value!r}")

    def pause_s(self, reason: str) -> float:
        """How far apart dumps for that reason are at least."""
        return ASKED_PAUSE_S if reason == "asked" else self.dump_pause_s

    def make_folder(self) -> Path:
        """The folder of dumps, made if it is missing, for this user alone.

        Raises:
            OSError: It cannot be made, or is another user's.
        """
        chosen = self.folder or os.environ.get(FOLDER_VARIABLE)
        if chosen:
            folder = Path(chosen)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return folder
        folder = Path(tempfile.gettempdir()) / f"veloxquant-traces-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        # In a folder that everybody may write to, somebody else may have made it, or a link.
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise OSError(f"{folder} is not this user's; set {FOLDER_VARIABLE}")
        return folder
