"""Environment: Python, the platform, this distribution, and the variables that it reads."""

from __future__ import annotations

import difflib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Final

from veloxquant_exporters import __version__
from veloxquant_exporters.doctor.settings import Settings
from veloxquant_exporters.findings import Finding, printable
from veloxquant_exporters.missing import DISTRIBUTION

__all__ = ["VARIABLES", "find"]

VARIABLES: Final = (
    "VELOXQUANT_INSTRUMENT",
    "VELOXQUANT_OTEL_ATTRIBUTES",
    "VELOXQUANT_SNAPSHOT_DIR",
    "VELOXQUANT_TRACE_DIR",
    "VELOXQUANT_WORKER",
)
_PREFIX: Final = "VELOXQUANT_"
_OLDEST_PYTHON: Final = (3, 11)  # what mlx-lm 0.32 needs
_OLDEST_MACOS: Final = 14


def find(_settings: Settings) -> Iterator[Finding]:
    """The findings; see `checks`."""
    yield _python()
    yield from _platform()
    yield _distribution()
    yield from _variables(os.environ)


def _python() -> Finding:
    version = platform.python_version()
    text = f"{platform.python_implementation()} {version} at {printable(sys.executable)}"
    if sys.version_info < _OLDEST_PYTHON:
        return Finding(
            "problem",
            text,
            "Python 3.11 or newer is needed",
            "make an environment on a newer one: python3.12 -m venv .venv",
        )
    return Finding("ok", text)


def _platform() -> Iterator[Finding]:
    yield Finding("ok", f"{platform.platform()}, {platform.machine()}")
    if sys.platform != "darwin":
        return
    if platform.machine() != "arm64":
        yield Finding(
            "warning",
            "this Python is built for Intel",
            "MLX is for Apple silicon; an Intel Python runs there, translated, and finds no MLX",
            "install an arm64 Python, and make the environment anew with it",
        )
    release = platform.mac_ver()[0]
    if release and int(release.split(".")[0]) < _OLDEST_MACOS:
        yield Finding(
            "warning", f"macOS {release}", f"MLX needs macOS {_OLDEST_MACOS}", "update macOS"
        )


def _distribution() -> Finding:
    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return Finding(
            "note",
            f"{DISTRIBUTION} {__version__} runs from files that no package manager installed",
            "bounds of libraries are read from pyproject.toml, if it lies beside them",
            f"pip install '{DISTRIBUTION}[all]'",
        )
    if found.version != __version__:
        return Finding(
            "problem",
            f"installed is {DISTRIBUTION} {found.version}, and what runs is {__version__}",
            "two copies are within reach of this Python",
            f"pip install --force-reinstall --no-deps {DISTRIBUTION}",
        )
    how = "editable, from a checkout" if _is_editable(found) else "from a wheel"
    return Finding("ok", f"{DISTRIBUTION} {found.version}, {how}")


def _is_editable(found: metadata.Distribution) -> bool:
    try:
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        return bool(origin.get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return False


def _variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(environment):
        if not name.startswith(_PREFIX):
            continue
        if name in VARIABLES:
            yield Finding("ok", printable(f"{name}={environment[name]}"))
            continue
        near = difflib.get_close_matches(name, VARIABLES, 1)
        meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(VARIABLES)}"
        if name.startswith("VELOXQUANT_TEST_"):
            continue
        yield Finding(
            "warning",
            f"{printable(name)} is set, and nothing reads it",
            meant,
            f"unset {printable(name)}",
        )
