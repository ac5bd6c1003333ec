"""Libraries: what is installed against the bounds that this distribution was tested within."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from veloxquant_exporters.doctor.settings import Settings
from veloxquant_exporters.doctor.versions import Requirement, parse_requirement
from veloxquant_exporters.findings import Finding
from veloxquant_exporters.missing import DISTRIBUTION, backend_extra

__all__ = ["find"]

_USES: Final = {
    "cli": "the command itself",
    "prometheus": "metrics pages and the sidecar",
    "otel": "pushing over OTLP",
    "top": "vqmon top",
    "trace": "recording, reading and replaying traces",
    "plot": "pictures of benchmarks and simulations",
    "mlx": "the process that serves the model; a sidecar needs none",
}
_BACKENDS: Final = ("apple", "cpu", "cuda", "cuda12")


def find(_settings: Settings) -> Iterator[Finding]:
    """The findings; see `checks`."""
    requirements = _requirements()
    if not requirements:
        yield Finding(
            "note",
            "the bounds of libraries are not known here",
            "there is neither an installation nor a pyproject.toml",
            f"pip install {DISTRIBUTION}",
        )
        return
    fits: list[str] = []
    for extra, wanted in _by_extra(requirements).items():
        have = {need.name: version for need in wanted if (version := _installed(need.name))}
        for need in wanted:
            if need.name not in have:
                continue
            fault = _misfit(need, have[need.name])
            if fault is None:
                fits.append(f"{need.name} {have[need.name]}")
            else:
                yield fault
        if missing := [need.name for need in wanted if need.name not in have]:
            yield _missing(extra, missing)
    if fits:
        yield Finding("ok", f"within their bounds: {', '.join(dict.fromkeys(fits))}")


def _requirements() -> list[Requirement]:
    """What the installation says it needs, else what the checkout says."""
    try:
        texts = [(text, "") for text in metadata.distribution(DISTRIBUTION).requires or ()]
    except metadata.PackageNotFoundError:
        texts = list(_of_checkout())
    found = (parse_requirement(text, extra) for text, extra in texts)
    return [need for need in found if need is not None and need.extra not in ("", "all")]


def _of_checkout() -> Iterator[tuple[str, str]]:
    path = Path(__file__).resolve().parents[3] / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return
    if project.get("name") == DISTRIBUTION:
        for extra, texts in project["optional-dependencies"].items():
            yield from ((text, extra) for text in texts)


def _by_extra(requirements: Iterable[Requirement]) -> dict[str, list[Requirement]]:
    """Each library once, under the first extra that asks for it; the MLX backends as one."""
    found: dict[str, list[Requirement]] = {extra: [] for extra in _USES}
    seen: set[str] = {DISTRIBUTION}
    order = {extra: place for place, extra in enumerate(_USES)}
    for need in sorted(requirements, key=lambda need: (order.get(need.extra, 99), need.name)):
        extra = "mlx" if need.extra in _BACKENDS else need.extra
        if need.name not in seen:
            seen.add(need.name)
            found.setdefault(extra, []).append(need)
    return found


def _installed(name: str) -> str:
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return ""


def _misfit(need: Requirement, version: str) -> Finding | None:
    side = need.side(version)
    if side == "within":
        return None
    what = f"{need.name} {version} is {side} the bounds {need.text}"
    if side == "below":
        why = "what is called there does not exist yet, or is another"
        return Finding("problem", what, why, f"pip install '{need.name}{need.text}'")
    why = "it was never tried with this version"
    return Finding("warning", what, why, f"pip install '{need.name}{need.text}'")


def _missing(extra: str, names: list[str]) -> Finding:
    brings = backend_extra() if extra == "mlx" else extra
    return Finding(
        "note",
        f"not installed: {', '.join(names)}",
        f"needed for {_USES.get(extra, extra)}",
        f"pip install '{DISTRIBUTION}[{brings}]'",
    )
