"""What to say when a library is not there: which extra brings it. Imports no library."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["DISTRIBUTION", "PEER", "backend_extra", "explain"]

DISTRIBUTION: Final = "veloxquant-mlx-monitor"
PEER: Final = "veloxquant-mlx"  # which has the import name veloxquant_mlx, too

# By import name. What is not listed is no extra's to bring: its absence is a fault, and shows itself.
LIBRARIES: Final = {
    "click": "click",
    "rich": "rich",
    "textual": "Textual",
    "psutil": "psutil",
    "prometheus_client": "prometheus-client",
    "h11": "h11",
    "opentelemetry": "the OpenTelemetry SDK",
    "msgpack": "msgpack",
    "zstandard": "zstandard",
    "numpy": "NumPy",
    "matplotlib": "matplotlib",
    "bokeh": "Bokeh",
    "mlx": "MLX",
    "mlx_lm": "mlx-lm",
}


def explain(error: ImportError, who: str, extras: Iterable[str]) -> str | None:
    """One line that says what is missing and how to get it; None when no extra would help.

    Args:
        error: What an import raised.
        who: What needs the library, as the line shall name it.
        extras: The extras that hold all that `who` needs; "mlx" stands for the MLX backend.
    """
    while isinstance(error.__cause__, ImportError):  # a package that says itself what it lacks
        error = error.__cause__
    library = _library(error)
    # Its files import what ours do not, so that another library may be what is missing at first.
    if (library or _is_ours(error)) and _peer_is_installed():
        return f"{who} needs veloxquant_mlx, which the package {PEER} has overwritten. Try: vqmon doctor"
    if library is None:
        return None
    lacks = "is not installed" if isinstance(error, ModuleNotFoundError) else f"fails: {error}"
    wanted = ",".join(backend_extra() if extra == "mlx" else extra for extra in extras)
    return f"{who} needs {library}, which {lacks}. Try: pip install '{DISTRIBUTION}[{wanted}]'"


def backend_extra() -> str:
    """The extra that brings MLX to this platform."""
    return "apple" if (sys.platform, platform.machine()) == ("darwin", "arm64") else "cpu"


def _is_ours(error: ImportError) -> bool:
    return (error.name or "").partition(".")[0] == "veloxquant_mlx"


def _peer_is_installed() -> bool:
    from importlib import metadata

    try:
        metadata.distribution(PEER)
    except metadata.PackageNotFoundError:
        return False
    return True


def _library(error: ImportError) -> str | None:
    top = (error.name or "").partition(".")[0]
    if top in LIBRARIES:
        return LIBRARIES[top]
    # An extension that does not load names itself alone: `core` of mlx, without a backend.
    parts = Path(error.path or "").parts
    return next((shown for name, shown in LIBRARIES.items() if name in parts), None)
