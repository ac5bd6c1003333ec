"""BatchWatch: who waits and who is served, and how many rows a decoding step has."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from veloxquant_mlx.serving.events import Listener, Seams
from veloxquant_mlx.serving.fork_lock import lock_of
from veloxquant_mlx.serving.request import Request
from veloxquant_mlx.serving.wrap_requests import is_servers
from veloxquant_mlx.telemetry.histogram import Histogram, HistogramSnapshot
from veloxquant_mlx.telemetry.program_values import ROW_BUCKETS, STATES

__all__ = ["BatchWatch", "ServerWatch"]


class BatchWatch(Listener):
    """Knows the batch generators, and the requests of those that no server runs."""

    def __init__(self, seams: Seams) -> None:
        self._generators: weakref.WeakKeyDictionary[Any, dict[int, Request]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = lock_of(self)
        self._n_streams = 0
        self._rows = Histogram(ROW_BUCKETS)
        self._started, self._read, self._token, self._finished = (
            seams.event(f"on_request_{what}") for what in ("started", "read", "token", "finished")
        )

    # -- generators -----------------------------------------------------------------------------

    def on_generator_made(self, generator: Any) -> None:
        """Remember it until it is gone."""
        self._remember(generator)

    def _remember(self, generator: Any) -> dict[int, Request]:
        requests: dict[int, Request] = {}
        with self._lock:
            self._generators[generator] = requests
        # One that is collected in a cycle is out of the dictionary before it is closed.
        weakref.finalize(generator, self._cancel_all, requests).atexit = False
        return requests

    def on_sequences_inserted(self, generator: Any, uids: list[int], segments: Any) -> None:
        """Without a server, each sequence is a request."""
        if is_servers():
            return
        requests = self._generators.get(generator)
        if requests is None:
            requests = self._remember(generator)
        for uid, parts in zip(uids, segments, strict=True):
            request = requests[uid] = Request("text_completion")
            request.n_prompt = sum(map(len, parts))
            self._started(request)
            self._read(request)

    def on_responses(self, generator: Any, prompts: list[Any], generated: list[Any]) -> None:
        """Count a step's rows, and the tokens of requests that no server counts."""
        if generated:
            with self._lock:
                self._rows.observe(len(generated))
        requests = self._generators.get(generator)
        if not requests:
            return
        for response in generated:
            request = requests.get(response.uid)
            if request is not None:
                request.token()
                self._token(request)
                if response.finish_reason is not None:
                    self._end(requests, response.uid, "ok")

    def on_sequences_removed(self, generator: Any, uids: list[int]) -> None:
        """What had not finished was cancelled."""
        requests = self._generators.get(generator) or {}
        for uid in [uid for uid in uids if uid in requests]:
            self._end(requests, uid, "cancelled")

    def on_generator_closed(self, generator: Any) -> None:
        """So was what is left in a generator that is closed."""
        self._cancel_all(self._generators.get(generator) or {})

    def _cancel_all(self, requests: dict[int, Request]) -> None:
        for uid in list(requests):
            self._end(requests, uid, "cancelled")

    def _end(self, requests: dict[int, Request], uid: int, outcome: Any) -> None:
        request = requests.pop(uid)
        request.end(outcome)
        self._finished(request)

    # -- sequences by themselves ----------------------------------------------------------------

    def on_stream_started(self) -> None:
        """Count it in."""
        with self._lock:
            self._n_streams += 1

    def on_stream_ended(self) -> None:
        """Count it out."""
        with self._lock:
            self._n_streams -= 1

    # -- what there is --------------------------------------------------------------------------

    def active(self) -> dict[str, int]:
        """Requests by state, read off the generators without waiting for them.

        Raises:
            Exception: Another mlx-lm keeps them in another way.
        """
        states = Counter(dict.fromkeys(STATES, 0))
        with self._lock:
            generators = list(self._generators)
            states["single"] = self._n_streams
        for generator in generators:
            states["queued"] += len(generator._unprocessed_sequences)  # noqa: SLF001
            states["prefill"] += len(generator._prompt_batch.uids)  # noqa: SLF001
            states["decode"] += len(generator._generation_batch.uids)  # noqa: SLF001
        return dict(states)

    def rows(self) -> HistogramSnapshot:
        """Rows of the decoding steps so far."""
        with self._lock:
            return self._rows.snapshot()


class ServerWatch(Listener):
    """Knows the server's queue and its generation thread."""

    def __init__(self) -> None:
        self._servers: list[weakref.ref[Any]] = []

    def on_server_made(self, server: Any) -> None:
        """Remember it until it is gone."""
        self._servers[:] = [ref for ref in self._servers if ref() is not None]
        self._servers.append(weakref.ref(server))

    def queued(self) -> int:
        """Requests that the generation thread has not taken yet."""
        return sum(server.requests.qsize() for server in self._all())

    def alive(self) -> bool | None:
        """Whether every server's generation thread runs; None where there is no server.

        It ends for good when an exception gets out of it; the server answers errors from then on.
        """
        threads = [server._generation_thread for server in self._all()]  # noqa: SLF001
        return all(thread.is_alive() for thread in threads) if threads else None

    def _all(self) -> list[Any]:
        return [server for ref in self._servers if (server := ref()) is not None]
