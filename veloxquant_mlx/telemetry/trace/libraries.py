"""Libraries: what reading and writing traces need, loaded when a trace is read or written."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["load_library"]


def load_library(name: str) -> Any:
    """Import `name`, which the extra `trace` brings.

    Raises:
        ImportError: It is not there; one line says how to get it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"traces need {name}: {error}. Try: pip install 'veloxquant-mlx-monitor[trace]'",
            name=error.name or name,
            path=error.path,
        ) from error
