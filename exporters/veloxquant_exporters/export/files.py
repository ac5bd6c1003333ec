"""Puts an export on disk: files whole and together or not at all, and nothing of the user's lost."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from veloxquant_exporters.export.errors import ExportError

__all__ = ["Exported", "Status", "write_files"]

Status = Literal["written", "replaced", "unchanged"]
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Exported:
    """What became of one file.

    Attributes:
        path: Where it is.
        status: "written" if it is new, "replaced" if another text stood there, "unchanged" if
            the same did.
    """

    path: Path
    status: Status


def write_files(directory: Path, files: Mapping[str, str], *, force: bool) -> list[Exported]:
    """Write each text under its path within the folder, which is made if need be.

    Args:
        directory: The folder.
        files: Texts by path, with forward slashes.
        force: Replace files that hold another text.

    Raises:
        ExportError: A file holds another text and `force` is not given, or the system refuses
            one, as on a full disk: then nothing is written, or only folders are made.
    """
    states: dict[str, Status] = {
        name: _state(directory / name, text) for name, text in files.items()
    }
    differing = [name for name, state in states.items() if state == "replaced"]
    if differing and not force:
        more = len(differing) - _SHOWN
        raise ExportError(
            f"{directory} holds other versions of {', '.join(differing[:_SHOWN])}"
            + (f" and {more} more" if more > 0 else "")
            + ". Nothing was written: export to another folder, or replace them with --force"
        )
    _write_all({directory / name: files[name] for name in files if states[name] != "unchanged"})
    return [Exported(directory / name, state) for name, state in states.items()]


def _state(path: Path, text: str) -> Status:
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        # A link to nowhere is somebody's too, and would be replaced.
        return "replaced" if path.is_symlink() else "written"
    except OSError as error:
        raise ExportError(f"{path} is in the way: {error.strerror}") from error
    return "unchanged" if found == text.encode() else "replaced"


def _write_all(texts: Mapping[Path, str]) -> None:
    """All under temporary names, then renamed: who reads the folder never sees half a file.

    Nor half a set, unless this is killed among the renames: alerts read what records make.
    """
    staged: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            with _told(path):
                staged[path] = _stage(path, text)
        for path in texts:
            with _told(path):
                staged[path].replace(path)
            del staged[path]
    finally:
        for temporary in staged.values():
            with suppress(OSError):
                temporary.unlink()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn the system's refusal into a line about `path`."""
    try:
        yield
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}") from error


def _stage(path: Path, text: str) -> Path:
    """Write to a temporary file beside `path`, whose name no `*.yaml` or `*.json` matches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as partial:
            partial.write(text.encode())
            partial.flush()
            # Renamed before it is on the disk, it could be empty after a power cut: rules without
            # one, and no error.
            os.fsync(handle)
        # mkstemp's file is its owner's alone; Grafana and Prometheus run as somebody else.
        Path(name).chmod(0o644)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    return Path(name)
