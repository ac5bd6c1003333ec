"""The checks of the doctor: one table, walked in order; a check that fails is a finding itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from veloxquant_exporters.doctor.settings import Settings
from veloxquant_exporters.findings import Finding, printable

__all__ = ["CHECKS", "Check", "examine"]

_HERE: Final = "veloxquant_exporters.doctor"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is looked at.

    Attributes:
        name: For a program.
        title: For a person.
        module: What has the function `find(settings)`, which gives findings. Loaded when it runs, as
            what it imports may be what is broken.
        wanted: Whether there is anything to look at.
    """

    name: str
    title: str
    module: str
    wanted: Callable[[Settings], object] = lambda _: True

    def find(self, settings: Settings) -> list[Finding]:
        """Its findings. Never raises."""
        findings: list[Finding] = []
        try:
            find: Callable[[Settings], Iterable[Finding]] = import_module(self.module).find
            findings.extend(find(settings))
        except Exception as error:  # noqa: BLE001 - of a sick environment nothing can be sure
            findings.append(_failed(self, error))
        return findings


CHECKS: Final = (
    Check("environment", "Environment", f"{_HERE}.environment"),
    Check("clashes", "Packages of the same name", f"{_HERE}.clashes"),
    Check("libraries", "Libraries", f"{_HERE}.libraries"),
    Check("device", "MLX", f"{_HERE}.device"),
    Check("ports", "Ports", f"{_HERE}.ports"),
    Check("folder", "Snapshot folder", f"{_HERE}.folder"),
    Check("pools", "Pools", f"{_HERE}.pools", lambda settings: settings.snapshot_dir),
    Check(
        "prometheus",
        "Prometheus",
        f"{_HERE}.prometheus",
        lambda settings: settings.prometheus is not None,
    ),
)


def examine(settings: Settings) -> Iterator[tuple[Check, list[Finding]]]:
    """Run the checks one after the other, and give each one's findings as it ends."""
    for check in CHECKS:
        if check.wanted(settings):
            yield check, check.find(settings)


def _failed(check: Check, error: Exception) -> Finding:
    text = printable(f"{type(error).__name__}: {error}")
    if isinstance(error, ImportError) and (error.name or "").startswith("veloxquant_mlx"):
        return Finding(
            "problem",
            f"this could not be checked, as veloxquant_mlx is not as it should be: {text}",
            "its files are another package's, or some are missing",
            "pip install --force-reinstall --no-deps veloxquant-mlx-monitor",
        )
    return Finding(
        "problem",
        f"the check {check.name!r} itself failed: {text}",
        "what it looks at is in a state that it does not know",
        "report it, with the output of: vqmon doctor --json",
    )
