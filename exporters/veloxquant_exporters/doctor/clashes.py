"""Clashes: another distribution's files under our import names, whoever came last."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from veloxquant_exporters import __version__
from veloxquant_exporters.doctor.settings import Settings
from veloxquant_exporters.findings import Finding, printable
from veloxquant_exporters.missing import DISTRIBUTION, PEER

__all__ = ["find"]

OURS: Final = "veloxquant_mlx"
_ANEW: Final = f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
_MEND: Final = f"pip uninstall -y {PEER} && {_ANEW}"
_MAX_NAMED: Final = 3


def find(_settings: Settings) -> Iterator[Finding]:
    """The findings; see `checks`."""
    found = [*_peer(), *_files(), *_imported(), *_exporters()]
    yield from found
    if all(finding.level in ("ok", "note") for finding in found):
        yield Finding("ok", f"{OURS} is imported from {printable(str(_place() or '?'))}")


def _peer() -> Iterator[Finding]:
    """The package on the index that has our import name."""
    try:
        version = metadata.version(PEER)
    except metadata.PackageNotFoundError:
        return
    yield Finding(
        "problem",
        f"the package {PEER} {version} is installed beside {DISTRIBUTION}",
        f"both are imported as {OURS}: the one installed last overwrites files of the other, and "
        "uninstalling either breaks both",
        _MEND,
    )


def _files() -> Iterator[Finding]:
    """Our files as they were installed, against those that are there."""
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        return
    missing: list[str] = []
    changed: list[str] = []
    for file in files:
        if file.parts[0] != OURS or file.suffix != ".py" or file.hash is None:
            continue
        try:
            content = file.read_binary()
        except OSError:
            missing.append(str(file))
            continue
        digest = hashlib.new(file.hash.mode, content).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            changed.append(str(file))
    for names, how in ((missing, "missing"), (changed, "not as they were installed")):
        if names:
            yield Finding(
                "problem",
                f"{len(names)} files of {OURS} are {how}: {_some(names)}",
                "another package of the same import name was installed or removed after this one",
                _ANEW,
            )


def _place() -> Path | None:
    """Where `import veloxquant_mlx` finds its package, without importing it."""
    try:
        spec = importlib.util.find_spec(OURS)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent


def _imported() -> Iterator[Finding]:
    """Whose package Python finds first, and whether it is of this version."""
    place = _place()
    if place is None:
        yield Finding(
            "problem",
            f"{OURS} cannot be imported",
            f"it is installed with {DISTRIBUTION}, and is not there",
            _ANEW,
        )
        return
    here = Path(__file__).resolve().parents[2]
    # Beside us in a wheel; one folder up in a checkout.
    if place.parent not in (here, here.parent):
        yield Finding(
            "problem",
            f"{OURS} is imported from {printable(str(place))}, and this command runs from "
            f"{printable(str(here))}",
            "a folder that comes earlier on sys.path has a package of that name",
            f"leave that folder, or take it off PYTHONPATH; then: {_ANEW}",
        )
        return
    version = _version(place)
    if version != __version__:
        yield Finding(
            "problem",
            f"{OURS} in {printable(str(place))} is version {version or 'unknown'}, not {__version__}",
            "its files are those of another package or release",
            _MEND,
        )


def _version(place: Path) -> str:
    """The version as the package's own file says, which is not run for that."""
    try:
        text = (place / "__init__.py").read_text("utf-8")
    except (OSError, ValueError):
        return ""
    _, found, rest = text.partition('\n__version__ = "')
    return printable(rest.partition('"')[0]) if found else ""


def _exporters() -> Iterator[Finding]:
    """A package at the top that has the name of a folder of ours."""
    try:
        spec = importlib.util.find_spec("exporters")
    except (ImportError, ValueError, AttributeError):
        return
    if spec is None or spec.origin is None:
        return  # none, or the folder of a checkout, which is no package
    owners = metadata.packages_distributions().get("exporters", [])
    who = f"of the package {', '.join(sorted(set(owners)))}" if owners else "of no package"
    yield Finding(
        "note",
        f"there is a top-level package `exporters`, {who}: {printable(spec.origin)}",
        "it is none of ours; ours is imported as veloxquant_exporters",
        "in your code: from veloxquant_exporters import ..., never from exporters",
    )


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
