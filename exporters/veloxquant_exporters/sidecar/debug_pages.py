"""The last snapshots of processes as JSON, for a person who asks what happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote

from veloxquant_exporters.http import HttpServer, Request, Response, Route, text_response
from veloxquant_exporters.sidecar.directory_source import DirectorySource
from veloxquant_exporters.sidecar.snapshot_files import UnreadableError, read_bytes
from veloxquant_exporters.sidecar.tracked_file import TrackedFile

__all__ = ["DEBUG_PATH", "DebugPages", "SidecarServer", "debug_routes"]

DEBUG_PATH: Final = "/debug/last"
# Files of one name in one answer: a process that dies again and again leaves many.
MAX_FILES: Final = 4


class DebugPages:
    """Answers under `/debug/last`.

    Args:
        source: The folder.
        clock: As the source's.
    """

    def __init__(self, source: DirectorySource, clock: Callable[[], float]) -> None:
        self._source = source
        self._clock = clock

    def index(self, request: Request) -> Response:
        """The processes, and where the last snapshot of each is."""
        return _json([self._row(file) for file in self._source.files()])

    def last(self, request: Request) -> Response:
        """`/debug/last/<process>`: its last snapshots, the one that counts first, then by age.

        The server hands the name over as the query.
        """
        process = unquote(request.query)
        found = [self._whole(file) for file in self._source.files(process)[:MAX_FILES]]
        files = [file for file in found if file is not None]
        if not files:
            return text_response(404, f"no snapshot of this process; {DEBUG_PATH} lists them")
        return _json({"process": process, "files": files})

    def _row(self, file: TrackedFile) -> dict[str, Any]:
        header = file.header
        return {
            "process": header.process,
            "state": file.state,
            "pid": header.identity.pid,
            "random_id": header.identity.random_id,
            "sequence": header.sequence,
            "seconds_quiet": round(self._clock() - file.moved_s, 3),
        }

    def _whole(self, file: TrackedFile) -> dict[str, Any] | None:
        try:
            content = json.loads(read_bytes(file.path))
        except (OSError, UnreadableError, ValueError, RecursionError):
            return None
        return {**self._row(file), "file": content}


class SidecarServer(HttpServer):
    """An `HttpServer` that hands every path below `/debug/last/` to one route."""

    def answer(
        self, request: Request, wanted: Callable[[], bool], done: Callable[[Response], None]
    ) -> None:
        """See `connection.Server`."""
        if request.path.startswith(f"{DEBUG_PATH}/"):
            name = request.path.removeprefix(f"{DEBUG_PATH}/")
            request = replace(request, path=f"{DEBUG_PATH}/", query=name)
        super().answer(request, wanted, done)


def debug_routes(pages: DebugPages) -> dict[str, Route]:
    """The routes that a `SidecarServer` needs."""
    return {DEBUG_PATH: Route(pages.index), f"{DEBUG_PATH}/": Route(pages.last)}


def _json(value: object) -> Response:
    body = json.dumps(value, indent=1).encode()
    return Response(200, body, "application/json", (("cache-control", "no-store"),))
