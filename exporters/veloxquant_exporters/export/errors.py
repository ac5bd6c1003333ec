"""The error of an export that cannot be done."""

from __future__ import annotations

__all__ = ["ExportError"]


class ExportError(Exception):
    """Nothing was written, or not all of it; the text says why, and what is allowed."""
