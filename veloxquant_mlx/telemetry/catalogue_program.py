"""Rows of the catalogue on a watched program: its hooks, caches, prompt cache and requests.

Where OpenTelemetry's conventions for generative AI have a metric, its OpenTelemetry name is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from veloxquant_mlx.telemetry.catalogue_row import (
    Instrument,
    Metric,
    ReadProcess,
    Sample,
    Value,
)
from veloxquant_mlx.telemetry.program import (
    AccountSnapshot,
    CacheCensus,
    ProgramSnapshot,
    PromptCacheSnapshot,
    RequestsSnapshot,
)

__all__ = ["PROGRAM_ROWS"]

P: Final = "veloxquant_program_"
O: Final = "veloxquant.program."  # noqa: E741 - as in the pool's rows
_GEN_AI: Final = {"operation": "gen_ai.operation.name"}
_PROVIDER: Final = {"gen_ai.provider.name": "mlx_lm"}
_T = TypeVar("_T")


# -- how values are read ---------------------------------------------------------------------------


def _program(read: Callable[[ProgramSnapshot], Iterable[Sample]]) -> ReadProcess:
    """What a program tells; any other process has no such series."""
    return lambda process: [] if process.program is None else read(process.program)


def _number(read: Callable[[ProgramSnapshot], Value | None]) -> ReadProcess:
    return _program(lambda program: [] if (value := read(program)) is None else [((), value)])


def _by(read: Callable[[ProgramSnapshot], Mapping[str, Value]]) -> ReadProcess:
    return _program(lambda program: [((key,), value) for key, value in read(program).items()])


def _caches(read: Callable[[CacheCensus], int]) -> ReadProcess:
    return _by(lambda program: {kind: read(one) for kind, one in (program.caches or {}).items()})


def _account(read: Callable[[AccountSnapshot], int]) -> ReadProcess:
    """Only of a program whose caches are charged to a pool."""
    return _number(lambda program: None if program.account is None else read(program.account))


def _kept(read: Callable[[PromptCacheSnapshot], Mapping[str, int] | int | None]) -> ReadProcess:
    def samples(program: ProgramSnapshot) -> Iterable[Sample]:
        found = None if program.prompt_cache is None else read(program.prompt_cache)
        if found is None:
            return []
        return (
            [((k,), n) for k, n in found.items()] if isinstance(found, Mapping) else [((), found)]
        )

    return _program(samples)


def _requests(
    read: Callable[[RequestsSnapshot], Mapping[str, Value] | Value | None],
) -> ReadProcess:
    """By operation, and by what `read` gives a mapping of."""

    def samples(program: ProgramSnapshot) -> Iterable[Sample]:
        for operation, requests in (program.requests or {}).items():
            found = read(requests)
            if isinstance(found, Mapping):
                yield from (((operation, key), value) for key, value in found.items())
            elif found is not None:
                yield (operation,), found

    return _program(samples)


def _present(**values: _T | None) -> dict[str, _T]:
    return {key: value for key, value in values.items() if value is not None}


# -- rows ------------------------------------------------------------------------------------------


def _gauge(
    name: str,
    help: str,  # noqa: A002 - as Prometheus calls it
    read: ReadProcess,
    *,
    labels: tuple[str, ...] = (),
    otel: str | None = None,
    instrument: Instrument = "updowncounter",
    ucum: str = "1",
) -> Metric:
    return Metric(
        name=P + name,
        kind="gauge",
        help=help,
        labels=labels,
        otel=None if otel is None else O + otel,
        instrument=None if otel is None else instrument,
        ucum=ucum,
        attribute_names={label: O + label for label in labels},
        read_process=read,
    )


def _counter(
    name: str,
    help: str,  # noqa: A002
    read: ReadProcess,
    *,
    otel: str,
    ucum: str,
    labels: tuple[str, ...] = (),
) -> Metric:
    return Metric(
        name=f"{P}{name}_total",
        kind="counter",
        help=help,
        labels=labels,
        otel=O + otel,
        instrument="counter",
        ucum=ucum,
        attribute_names={**{label: O + label for label in labels}, **_GEN_AI},
        read_process=read,
    )


def _histogram(
    name: str,
    help: str,  # noqa: A002
    read: ReadProcess,
    *,
    otel: str,
    ucum: str = "s",
    labels: tuple[str, ...] = (),
    names: Mapping[str, str] | None = None,
) -> Metric:
    return Metric(
        name=P + name,
        kind="histogram",
        help=help,
        labels=labels,
        otel=otel,
        instrument="histogram",
        ucum=ucum,
        attributes=_PROVIDER if otel.startswith("gen_ai.") else {},
        attribute_names={**{label: O + label for label in labels}, **_GEN_AI, **(names or {})},
        read_process=read,
    )


_PROGRAM: Final = (
    _gauge("info", "1, with the version of mlx-lm as a label; empty before it is imported.",
           _program(lambda p: [((p.mlx_lm,), 1)]), labels=("mlx_lm",)),
    _gauge("hook_ok",
           "1 where a hook is in place, 0 where this mlx-lm lacks what it stands on; absent for "
           "what the program has not imported.",
           _by(lambda p: {hook: int(ok) for hook, ok in p.hooks.items()}), labels=("hook",),
           otel="hook.state", instrument="gauge"),
    _counter("hook_errors", "Exceptions in hooks, caught; the program never saw them.",
             _by(lambda p: p.hook_errors), otel="hook.errors", ucum="{error}", labels=("hook",)),
    _gauge("generation_thread_alive",
           "1 while the server's generation thread runs. An exception in a model call ends it for "
           "good, and all requests fail from then on.",
           _number(lambda p: _flag(p.generation_thread_alive)), otel="generation_thread.alive",
           instrument="gauge"),
    _gauge("weights_bytes", "Bytes of the parameters of the loaded models, by their shapes.",
           _number(lambda p: p.weights_bytes), otel="weights.usage", ucum="By"),
)  # fmt: skip


def _flag(value: bool | None) -> int | None:
    return None if value is None else int(value)


_CACHES: Final = (
    _gauge("caches", "Live cache objects by kind: one for each layer of a sequence or batch.",
           _caches(lambda c: c.n_objects), labels=("kind",), otel="cache.count", ucum="{cache}"),
    _gauge("cache_slots", "Token slots that the caches' arrays have room for, times rows.",
           _caches(lambda c: c.slots_capacity), labels=("kind",), otel="cache.slot.committed",
           ucum="{token}"),
    _gauge("cache_slots_held",
           "Token slots up to the caches' write position, times rows; in batches with the padding "
           "of shorter rows.",
           _caches(lambda c: c.slots_held), labels=("kind",), otel="cache.slot.usage",
           ucum="{token}"),
    _gauge("cache_bytes",
           "Bytes of the caches' arrays by their shapes. Copies that share a buffer count twice, "
           "and what is not evaluated yet counts already.",
           _caches(lambda c: c.n_bytes), labels=("kind",), otel="cache.usage", ucum="By"),
    _gauge("cache_waste_bytes", "Bytes of slots that hold no token.",
           _caches(lambda c: c.waste_bytes), labels=("kind",), otel="cache.waste", ucum="By"),
)  # fmt: skip

_PROMPT_CACHE: Final = (
    _gauge("prompt_cache_entries", "Entries of the server's prompt cache, by type.",
           _kept(lambda c: c.entries), labels=("kind",), otel="prompt_cache.count",
           ucum="{entry}"),
    _gauge("prompt_cache_tokens", "Tokens of the entries of the prompt cache, by type.",
           _kept(lambda c: c.tokens), labels=("kind",), otel="prompt_cache.token.count",
           ucum="{token}"),
    _gauge("prompt_cache_bytes",
           "Bytes of the entries of the prompt cache, by type, as mlx-lm reckons them; they are "
           "part of cache_bytes.",
           _kept(lambda c: c.n_bytes), labels=("kind",), otel="prompt_cache.usage", ucum="By"),
    _gauge("prompt_cache_entries_limit", "Entries that the prompt cache keeps at most.",
           _kept(lambda c: c.max_entries), otel="prompt_cache.limit", ucum="{entry}"),
    _counter("prompt_cache_lookups", "Look-ups in the prompt cache; a hit found some prefix.",
             _kept(lambda c: c.lookups), otel="prompt_cache.lookups", ucum="{lookup}",
             labels=("outcome",)),
    _counter("prompt_cache_lookup_tokens", "Prompt tokens that were looked up.",
             _kept(lambda c: c.lookup_tokens), otel="prompt_cache.lookup_tokens", ucum="{token}"),
    _counter("prompt_cache_hit_tokens", "Prompt tokens that the prompt cache had.",
             _kept(lambda c: c.hit_tokens), otel="prompt_cache.hit_tokens", ucum="{token}"),
    _counter("prompt_cache_insertions", "Entries put into the prompt cache.",
             _kept(lambda c: c.insertions), otel="prompt_cache.insertions", ucum="{entry}"),
    _counter("prompt_cache_evictions",
             "Entries that left the prompt cache, by reason: replaced (same tokens anew), prefix "
             "(a longer one has all of it), entries and bytes (over a limit, the oldest goes), "
             "trimmed (room for the batch), budget (the pool of --pool is full).",
             _kept(lambda c: c.evictions), otel="prompt_cache.evictions", ucum="{entry}",
             labels=("reason",)),
)  # fmt: skip

_ACCOUNT: Final = (
    _gauge("pool_excess_blocks",
           "Blocks that plain KV caches take up beyond what the pool of --pool could be charged.",
           _account(lambda a: a.excess_blocks), otel="pool.block.excess", ucum="{block}"),
    _counter("pool_uncharged_blocks",
             "Blocks by which that excess rose, once the prompt cache had nothing left to evict.",
             _account(lambda a: a.excess_blocks_total), otel="pool.uncharged_blocks",
             ucum="{block}"),
    _gauge("pool_enforced",
           "1 where requests are answered 503 that arrive over the budget (--enforce), else 0.",
           _account(lambda a: int(a.enforced)), otel="pool.enforced", instrument="gauge"),
)  # fmt: skip

_REQUESTS: Final = (
    _counter("requests", "Requests that ended: ok, cancelled (the client left), failed, or rejected (answered 503 "
             "over the budget of --enforce).",
             _requests(lambda r: r.finished), otel="requests", ucum="{request}",
             labels=("operation", "outcome")),
    _counter("prompt_tokens", "Prompt tokens of requests, cached ones too.",
             _requests(lambda r: r.prompt_tokens), otel="prompt_tokens", ucum="{token}",
             labels=("operation",)),
    _counter("cached_prompt_tokens",
             "Prompt tokens of ended requests that the prompt cache had.",
             _requests(lambda r: r.cached_tokens), otel="cached_prompt_tokens", ucum="{token}",
             labels=("operation",)),
    _counter("generated_tokens", "Tokens generated, counted as they reach the client.",
             _requests(lambda r: r.generated_tokens), otel="generated_tokens", ucum="{token}",
             labels=("operation",)),
    _gauge("active_requests",
           "Requests by state: queued, prefill and decode (rows of batches), single (sequences "
           "that run without a batch).",
           _by(lambda p: p.active_requests), labels=("state",), otel="request.active",
           ucum="{request}"),
    _histogram("decode_batch_rows", "Rows of a decoding step, by step.",
               _number(lambda p: p.decode_batch), otel=O + "decode_batch.rows", ucum="{row}"),
    _histogram("request_duration_seconds", "Seconds from a request's arrival to its end.",
               _requests(lambda r: r.duration), otel="gen_ai.server.request.duration",
               labels=("operation", "outcome")),
    _histogram("time_to_first_token_seconds", "Seconds from arrival to the first token.",
               _requests(lambda r: r.first_token), otel="gen_ai.server.time_to_first_token",
               labels=("operation",)),
    _histogram("time_per_output_token_seconds",
               "Seconds a token after the first, one observation a request that went well.",
               _requests(lambda r: r.per_token), otel="gen_ai.server.time_per_output_token",
               labels=("operation",)),
    _histogram("time_between_tokens_seconds",
               "Seconds from one token of a request to its next, one observation a token.",
               _requests(lambda r: r.between_tokens), otel=O + "time_between_tokens",
               labels=("operation",)),
    _histogram("request_tokens", "Tokens of an ended request: input (its prompt) and output.",
               _requests(lambda r: _present(input=r.prompt_sizes, output=r.generated_sizes)),
               otel="gen_ai.client.token.usage", ucum="{token}", labels=("operation", "kind"),
               names={"kind": "gen_ai.token.type"}),
)  # fmt: skip


PROGRAM_ROWS: Final = (*_PROGRAM, *_CACHES, *_PROMPT_CACHE, *_ACCOUNT, *_REQUESTS)
