"""Document: a run as JSON, with what one has to know to read it later."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from veloxquant_exporters.bench.verdict import Verdict

__all__ = ["SCHEMA", "DocumentError", "document", "machine", "read", "write"]

SCHEMA: Final = "veloxquant-bench/1"


class DocumentError(ValueError):
    """A file is no run."""


def machine() -> dict[str, Any]:
    """What the numbers depend on; nothing that names the host."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def document(
    verdicts: Sequence[Verdict], target: str, took_s: float, root: Path | None = None
) -> dict[str, Any]:
    """A run as plain values.

    Args:
        verdicts: Its results.
        target: What was measured.
        took_s: Wall seconds of the whole run.
        root: A git checkout, whose commit is noted.
    """
    return {
        "schema": SCHEMA,
        "created_s": time.time(),
        "took_s": round(took_s, 2),
        "target": target,
        "commit": commit(root) if root else None,
        "machine": machine(),
        "ok": all(verdict.status != "fail" for verdict in verdicts),
        "benchmarks": {verdict.name: verdict.as_json() for verdict in verdicts},
    }


def commit(root: Path, rev: str = "HEAD") -> dict[str, Any] | None:
    """Id and time of a commit, and whether the tree differs from it; None without git."""
    try:
        shown = _git(root, "show", "-s", "--format=%H %ct", rev).split()
        dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"id": shown[0], "time_s": int(shown[1]), "dirty": dirty and rev == "HEAD"}


def write(found: dict[str, Any], path: Path) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", "utf-8")
    partial.replace(path)


def read(path: Path) -> dict[str, Any]:
    """A run, or a pytest-benchmark file.

    Raises:
        DocumentError: It is neither; the message names the file.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DocumentError(f"{path} is no benchmark run: {error}") from error
    if not isinstance(found, dict) or "benchmarks" not in found:
        raise DocumentError(f"{path} is no benchmark run: it has no 'benchmarks'")
    if "schema" in found and found["schema"] != SCHEMA:
        raise DocumentError(f"{path} has schema {found['schema']!r}, this reads {SCHEMA!r}")
    return found


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(  # noqa: S603 - git, with our own words
        ["git", "-C", str(root), *args],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
