"""Worktrees: other commits of this repository, side by side, for as long as a block lasts."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ROOT", "RevisionError", "checkout", "resolve"]

ROOT = Path(__file__).resolve().parent.parent.parent


class RevisionError(ValueError):
    """Git does not know a revision, or cannot check it out."""


def resolve(rev: str, root: Path = ROOT) -> str:
    """The full id of a commit.

    Raises:
        RevisionError: There is none; a shallow clone is named as a possible reason.
    """
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}")
    except (OSError, subprocess.CalledProcessError) as error:
        shallow = (root / ".git" / "shallow").exists()
        hint = "; this clone is shallow, fetch its history with git fetch --unshallow"
        raise RevisionError(f"git knows no commit {rev!r} here{hint * shallow}") from error


@contextmanager
def checkout(revs: list[str], root: Path = ROOT) -> Iterator[list[Path]]:
    """Folders with `revs` checked out, in that order; gone when the block ends.

    Raises:
        RevisionError: As `resolve`.
    """
    commits = [resolve(rev, root) for rev in revs]
    scratch = Path(tempfile.mkdtemp(prefix="veloxquant-compare-"))
    folders = [scratch / f"{place}-{commit[:12]}" for place, commit in enumerate(commits)]
    try:
        for folder, commit in zip(folders, commits, strict=True):
            _git(root, "worktree", "add", "--quiet", "--detach", str(folder), commit)
        yield folders
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        _git(root, "worktree", "prune")


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *args], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
