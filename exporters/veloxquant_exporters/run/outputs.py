"""Outputs: where a watched program's metrics go, all started before the program is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veloxquant_exporters.fetch import without_password

__all__ = ["OutputError", "OutputSettings", "Outputs", "start_outputs"]


class OutputError(RuntimeError):
    """An output cannot be had; the text says why, in one line. Nothing is left running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSettings:
    """What was asked for.

    Attributes:
        port, host: Where to serve the metrics page; port None: nowhere.
        directory: Folder to publish snapshots into for a sidecar, or None.
        otlp_endpoint: URL of a collector, or None.
        otlp_interval_s: Seconds between pushes; None follows the environment.
    """

    port: int | None = None
    host: str = "127.0.0.1"
    directory: str | None = None
    otlp_endpoint: str | None = None
    otlp_interval_s: float | None = None


class Outputs:
    """What runs, and in words where it can be had. Ends with the process, or by `close`."""

    def __init__(self, stack: ExitStack, places: tuple[str, ...], port: int | None) -> None:
        self._stack = stack
        self.places = places
        self.port = port

    def close(self) -> None:
        """Stop all of them."""
        self._stack.close()


def start_outputs(settings: OutputSettings) -> Outputs:
    """Start what is asked for.

    Raises:
        OutputError: One cannot be had: a port is taken, a folder cannot be written to, ...
        ImportError: A library is missing that an extra would bring.
    """
    places: list[str] = []
    port: int | None = None
    with ExitStack() as stack:
        if settings.port is not None:
            server = _served(settings.port, settings.host)
            stack.callback(server.stop)
            places.append(server.url)
            port = server.port
        if settings.directory is not None:
            stack.callback(_published(settings.directory))
            places.append(settings.directory)
        if settings.otlp_endpoint is not None:
            stack.callback(_pushed(settings.otlp_endpoint, settings.otlp_interval_s))
            places.append(without_password(settings.otlp_endpoint))
        return Outputs(stack.pop_all(), tuple(places), port)
    raise AssertionError


def _served(port: int, host: str) -> Any:
    from veloxquant_exporters.prometheus import start_http_server

    try:
        return start_http_server(port, host)
    except OSError as error:
        raise OutputError(str(error)) from None


def _published(directory: str) -> Callable[[], None]:
    from veloxquant_mlx.telemetry.publisher import publish, stop_publishing
    from veloxquant_mlx.telemetry.worker_slot import make_directory

    try:
        make_directory(Path(directory))
        with tempfile.TemporaryFile(dir=directory):
            pass
        # One that the environment asked for waits until a pool is used; a program may have none.
        stop_publishing()
        publish(directory)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot publish into {directory}: {reason}") from None
    return stop_publishing


def _pushed(endpoint: str, interval_s: float | None) -> Callable[[], None]:
    from veloxquant_exporters.opentelemetry.pipeline import OtlpPipeline

    try:
        return OtlpPipeline(endpoint, interval_s=interval_s).close
    except ValueError as error:
        raise OutputError(str(error)) from None
