"""RequestWatch: counts requests, tokens and the times between them."""

from __future__ import annotations

from typing import Final

from veloxquant_mlx.serving.events import Listener
from veloxquant_mlx.serving.fork_lock import lock_of
from veloxquant_mlx.serving.request import Request
from veloxquant_mlx.telemetry.histogram import Histogram
from veloxquant_mlx.telemetry.program import RequestsSnapshot
from veloxquant_mlx.telemetry.program_values import (
    BETWEEN_BUCKETS_S,
    DURATION_BUCKETS_S,
    FIRST_TOKEN_BUCKETS_S,
    OPERATIONS,
    OUTCOMES,
    PER_TOKEN_BUCKETS_S,
    SIZE_BUCKETS,
)

__all__ = ["RequestWatch"]

_NS: Final = 1_000_000_000


def _times(bounds_s: tuple[float, ...]) -> Histogram:
    return Histogram(tuple(round(bound * _NS) for bound in bounds_s), _NS)


class _Operation:
    """The counts of one operation."""

    def __init__(self) -> None:
        self.finished: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.duration = {outcome: _times(DURATION_BUCKETS_S) for outcome in OUTCOMES}
        self.first_token = _times(FIRST_TOKEN_BUCKETS_S)
        self.per_token = _times(PER_TOKEN_BUCKETS_S)
        self.between = _times(BETWEEN_BUCKETS_S)
        self.prompt_sizes = Histogram(SIZE_BUCKETS)
        self.generated_sizes = Histogram(SIZE_BUCKETS)

    def finish(self, request: Request) -> None:
        outcome = request.outcome or "failed"
        self.finished[outcome] += 1
        self.cached_tokens += request.n_cached
        self.duration[outcome].observe(request.ended_ns - request.started_ns)
        if request.n_prompt:
            self.prompt_sizes.observe(request.n_prompt)
        if request.n_generated:
            self.generated_sizes.observe(request.n_generated)
        if outcome == "ok" and request.n_generated > 1:
            elapsed_ns = request.last_ns - request.first_ns
            self.per_token.observe(elapsed_ns // (request.n_generated - 1))

    def snapshot(self) -> RequestsSnapshot:
        return RequestsSnapshot(
            finished=dict(self.finished),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            duration={outcome: one.snapshot() for outcome, one in self.duration.items()},
            first_token=self.first_token.snapshot(),
            per_token=self.per_token.snapshot(),
            between_tokens=self.between.snapshot(),
            prompt_sizes=self.prompt_sizes.snapshot(),
            generated_sizes=self.generated_sizes.snapshot(),
        )


class RequestWatch(Listener):
    """Counts by operation. Requests run on threads of their own, so there is a lock.

    A batch generator that is collected ends its requests, in the middle of anything: it is reentrant.
    """

    def __init__(self) -> None:
        self._lock = lock_of(self)
        self._operations = {name: _Operation() for name in OPERATIONS}

    def on_request_read(self, request: Request) -> None:
        """Count its prompt."""
        with self._lock:
            self._operations[request.operation].prompt_tokens += request.n_prompt

    def on_request_token(self, request: Request) -> None:
        """Count a token."""
        operation = self._operations[request.operation]
        with self._lock:
            operation.generated_tokens += 1
            if request.gap_ns:
                operation.between.observe(request.gap_ns)
            else:
                operation.first_token.observe(request.first_ns - request.started_ns)

    def on_request_finished(self, request: Request) -> None:
        """Count its end."""
        with self._lock:
            self._operations[request.operation].finish(request)

    def snapshot(self) -> dict[str, RequestsSnapshot]:
        """By operation, all from one moment."""
        with self._lock:
            return {name: one.snapshot() for name, one in self._operations.items()}
