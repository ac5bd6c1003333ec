"""Request: what is known of one request while it is served."""

from __future__ import annotations

import time

from veloxquant_mlx.telemetry.program_values import Operation, Outcome

__all__ = ["Request", "outcome_of"]


class Request:
    """One request. Changed by the thread that serves it only; times are monotonic, in ns.

    Attributes:
        operation: As OpenTelemetry's conventions name it.
        started_ns, first_ns, last_ns: Arrival, first and latest token; 0 where there is none yet.
        gap_ns: From the token before to the latest one; 0 at the first.
        n_prompt, n_cached: Prompt tokens, and those of them that a prompt cache had.
        n_generated: Tokens so far.
        outcome: None until it is known how it ends.
    """

    __slots__ = (
        "operation", "started_ns", "first_ns", "last_ns", "gap_ns", "ended_ns",
        "n_prompt", "n_cached", "n_generated", "outcome", "__weakref__",
    )  # fmt: skip

    def __init__(self, operation: Operation) -> None:
        self.operation: Operation = operation
        self.started_ns = time.perf_counter_ns()
        self.first_ns = self.last_ns = self.gap_ns = self.ended_ns = 0
        self.n_prompt = self.n_cached = self.n_generated = 0
        self.outcome: Outcome | None = None

    def token(self) -> None:
        """One more token is there."""
        now_ns = time.perf_counter_ns()
        if self.n_generated:
            self.gap_ns = now_ns - self.last_ns
        else:
            self.first_ns = now_ns
        self.last_ns = now_ns
        self.n_generated += 1

    def end(self, outcome: Outcome) -> None:
        """It ended like this, as far as is known now; a later word replaces an earlier one."""
        self.outcome = outcome
        self.ended_ns = time.perf_counter_ns()


def outcome_of(error: BaseException) -> Outcome:
    """How a request ended that raised `error`: a client that went away is no failure."""
    gone = (GeneratorExit, KeyboardInterrupt, ConnectionError, TimeoutError)
    return "cancelled" if isinstance(error, gone) else "failed"
