"""Snapshot folder: whether processes can publish into it and a sidecar can read it, and who may plant files."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from veloxquant_exporters.doctor.settings import Settings
from veloxquant_exporters.findings import Finding, Level, printable

__all__ = ["find"]

_MIN_FREE_BYTES: Final = 16 * 2**20
_OLD_S: Final = 3600.0


def find(settings: Settings) -> Iterator[Finding]:
    """The findings; see `checks`."""
    if not settings.snapshot_dir:
        yield Finding(
            "note",
            "no snapshot folder is named",
            "needed for a sidecar, which outlives the servers that it watches",
            "vqmon doctor --snapshot-dir DIR, or set VELOXQUANT_SNAPSHOT_DIR",
        )
        return
    path = Path(settings.snapshot_dir)
    shown = printable(str(path))
    try:
        found = path.stat()
    except FileNotFoundError:
        yield _absent(path)
        return
    except OSError as error:
        yield Finding(
            "problem",
            f"{shown} cannot be looked at: {error.strerror}",
            "",
            "name another folder, or let this user into the folders above it: chmod o+x",
        )
        return
    if not stat.S_ISDIR(found.st_mode):
        yield Finding("problem", f"{shown} is no folder", "", "name a folder")
        return
    yield Finding("ok", f"{shown}: {_described(found)}")
    yield from _access(path, found)
    yield from _strangers(path, found)
    yield from _room(path)
    if os.access(path, os.R_OK | os.X_OK):
        yield from _files(path)


def _absent(path: Path) -> Finding:
    above = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    shown = printable(str(path))
    if os.access(above, os.W_OK | os.X_OK):
        return Finding(
            "note",
            f"{shown} does not exist yet",
            "publish() makes it, for its own user and group",
            f"to share it with a sidecar of another user: install -d -m 2750 -g GROUP {shown}",
        )
    return Finding(
        "problem",
        f"{shown} does not exist, and this user may not make it in {printable(str(above))}",
        "nothing is published",
        f"sudo install -d -m 2770 -g GROUP {shown}",
    )


def _described(found: os.stat_result) -> str:
    owner, group = str(found.st_uid), str(found.st_gid)
    with suppress(ImportError, KeyError):
        import pwd

        owner = pwd.getpwuid(found.st_uid).pw_name
    with suppress(ImportError, KeyError):
        import grp

        group = grp.getgrgid(found.st_gid).gr_name
    return f"mode {stat.S_IMODE(found.st_mode):04o}, owner {owner}, group {group}"


def _access(path: Path, found: os.stat_result) -> Iterator[Finding]:
    shown = printable(str(path))
    if not os.access(path, os.R_OK | os.X_OK):
        yield Finding(
            "problem",
            f"this user cannot read {shown}",
            "a sidecar that runs as this user sees nothing",
            f"add the user to the folder's group, and: chmod g+rx {shown}",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        yield Finding(
            "note",
            f"this user cannot write into {shown}",
            "enough for a sidecar, which then leaves old files; a server could not publish",
            f"for a server: chmod g+w {shown}, with the server in its group",
        )
    if found.st_mode & stat.S_IWGRP and not found.st_mode & stat.S_ISGID:
        yield Finding(
            "note",
            f"{shown} is for a group, and new files get the group of who writes them",
            "a sidecar in the folder's group cannot read them then",
            f"chmod g+s {shown}",
        )


def _strangers(path: Path, found: os.stat_result) -> Iterator[Finding]:
    if not found.st_mode & stat.S_IWOTH:
        return
    shown = printable(str(path))
    if found.st_mode & stat.S_ISVTX:
        yield Finding(
            "warning",
            f"everyone may write into {shown}",
            "any user can plant files of made-up processes; the sticky bit keeps others' files safe",
            f"chmod o-w {shown}",
        )
    else:
        yield Finding(
            "problem",
            f"everyone may write into {shown}, and delete what others wrote",
            "any user can replace the snapshots of your servers",
            f"chmod o-w {shown}",
        )


def _room(path: Path) -> Iterator[Finding]:
    with suppress(OSError, AttributeError):
        space = os.statvfs(path)
        free = space.f_bavail * space.f_frsize
        full = free < _MIN_FREE_BYTES or (space.f_files and not space.f_favail)
        if full:
            yield Finding(
                "problem",
                f"{printable(str(path))} has {free // 2**20} MiB of room left",
                "snapshots are not written to a full disk; the last ones stay and look stale",
                "make room, or publish into a tmpfs, as /run is",
            )


def _files(path: Path) -> Iterator[Finding]:
    from veloxquant_exporters.check.snapshot_folder import folder_findings
    from veloxquant_exporters.sidecar.check import check_directory

    report = check_directory(path)
    found = list(folder_findings(report))
    if report.files:
        states = Counter(checked.state or "unreadable" for checked in report.files)
        counts = ", ".join(f"{n} {state}" for state, n in sorted(states.items()))
        level: Level = "ok" if states.keys() - {"unreadable"} else "note"
        yield Finding(level, f"snapshot files: {counts}")
    yield from (finding for finding in found if finding.level != "ok")
    left = _temporary(path)
    if left:
        yield Finding(
            "note",
            f"{len(left)} temporary files of writers that were killed",
            "a sidecar removes them after a minute",
            f"vqmon serve --snapshot-dir {printable(str(path))}",
        )


def _temporary(path: Path) -> list[str]:
    now = time.time()
    with suppress(OSError):
        return [
            entry.name
            for entry in os.scandir(path)
            if entry.name.endswith(".snapshot.json.tmp")
            and now - entry.stat(follow_symlinks=False).st_mtime > _OLD_S
        ]
    return []
