"""ProgramSnapshot: the program that `vqmon run` watches, beside its pools: caches, requests, weights.

All of it is optional in a `ProcessSnapshot`, and every field has a default: a file of an older
writer reads as a program that tells less, and an older reader passes over what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

__all__ = [
    "AccountSnapshot",
    "CacheCensus",
    "ProgramSnapshot",
    "PromptCacheSnapshot",
    "RequestsSnapshot",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCensus:
    """The live cache objects of one kind. Shapes only: no array was evaluated for it.

    Attributes:
        n_objects: Objects; a model has one for each of its layers, or one for each layer and batch.
        slots_held: Token slots up to each object's write position, times its rows. Of a batch that
            includes the padding of its shorter rows, which only its arrays know.
        slots_capacity: Token slots that the arrays have room for, times rows.
        n_bytes: Bytes of the arrays by their shapes. Copies that share a buffer count twice.
        waste_bytes: Bytes of the slots that are not held.
    """

    n_objects: int = 0
    slots_held: int = 0
    slots_capacity: int = 0
    n_bytes: int = 0
    waste_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCacheSnapshot:
    """The server's prompt caches: KV caches of earlier requests, kept for the next of their prefix.

    Attributes:
        entries, tokens, n_bytes: Kept now, by type of entry (assistant, user, system).
        max_entries, max_bytes: The limits; None where there is none.
        lookups: So far, by outcome: hit (some prefix was found) or miss.
        lookup_tokens: Prompt tokens that were looked up so far.
        hit_tokens: Those of them that an entry had.
        insertions: Entries put in so far.
        evictions: Entries taken out so far, by reason.
    """

    entries: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    n_bytes: Mapping[str, int] = field(default_factory=dict)
    max_entries: int | None = None
    max_bytes: int | None = None
    lookups: Mapping[str, int] = field(default_factory=dict)
    lookup_tokens: int = 0
    hit_tokens: int = 0
    insertions: int = 0
    evictions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsSnapshot:
    """Requests, by operation (chat, text_completion): the names of OpenTelemetry's conventions.

    Attributes:
        finished: So far, by outcome (ok, cancelled, failed, rejected).
        prompt_tokens: Of requests whose prompt was read, so far.
        cached_tokens: Those of them that the prompt cache had.
        generated_tokens: So far, of unfinished requests too.
        duration: Seconds from arrival to the end, by outcome.
        first_token: Seconds from arrival to the first token.
        per_token: Seconds a token after the first, one observation a request that went well.
        between_tokens: Seconds from one token to the next, one observation a token.
        prompt_sizes, generated_sizes: Tokens of a request.
    """

    finished: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    duration: Mapping[str, HistogramSnapshot] = field(default_factory=dict)
    first_token: HistogramSnapshot | None = None
    per_token: HistogramSnapshot | None = None
    between_tokens: HistogramSnapshot | None = None
    prompt_sizes: HistogramSnapshot | None = None
    generated_sizes: HistogramSnapshot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountSnapshot:
    """What a pool that only keeps account of the program's caches cannot tell of itself.

    Attributes:
        pool: Its label.
        excess_blocks: Blocks that caches take up beyond what the pool could be charged.
        excess_blocks_total: Blocks by which that rose, all together.
        enforced: Whether requests are sent away that arrive over budget.
    """

    pool: str = ""
    excess_blocks: int = 0
    excess_blocks_total: int = 0
    enforced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSnapshot:
    """One watched program at one moment.

    Attributes:
        mlx_lm: Its version; "" in a program that has not imported it.
        hooks: By name: True where it is in place, False where this mlx-lm lacks what it stands on.
            Hooks of modules that the program has not imported are absent.
        hook_errors: Exceptions of ours that were caught, by hook. The program never saw them.
        caches: By kind, all kinds once the census is on; None without the census.
        prompt_cache: None in a program that has none.
        requests: By operation; None where requests are not watched.
        active_requests: By state (queued, prefill, decode, single).
        decode_batch: Rows a decoding step had, one observation a step.
        generation_thread_alive: Of the server; None in a program that has none.
        weights_bytes: Bytes of the parameters of the models that are loaded; None before the first.
        account: Of the pool that the caches are charged to; None without one.
    """

    mlx_lm: str = ""
    hooks: Mapping[str, bool] = field(default_factory=dict)
    hook_errors: Mapping[str, int] = field(default_factory=dict)
    caches: Mapping[str, CacheCensus] | None = None
    prompt_cache: PromptCacheSnapshot | None = None
    requests: Mapping[str, RequestsSnapshot] | None = None
    active_requests: Mapping[str, int] = field(default_factory=dict)
    decode_batch: HistogramSnapshot | None = None
    generation_thread_alive: bool | None = None
    weights_bytes: int | None = None
    account: AccountSnapshot | None = None

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of all caches; None without the census."""
        return None if self.caches is None else sum(one.n_bytes for one in self.caches.values())
