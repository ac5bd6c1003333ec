"""Logs of the sidecar: lines of text, or of JSON, on stderr."""

from __future__ import annotations

import json
import logging
import time
from typing import Final

__all__ = ["FORMATS", "LEVELS", "set_up_logging"]

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = f"{_stamp(record.created)} {record.levelname.lower()} {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def set_up_logging(level: str, form: str) -> None:
    """Log to stderr from now on; for a program, not for a library.

    Args:
        level: One of `LEVELS`.
        form: One of `FORMATS`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _stamp(seconds: float) -> str:
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{seconds % 1:.3f}"[2:] + "Z"
    )
