"""The program that a metrics page tells of, beside its pools; as far as the screens show it."""

from __future__ import annotations

from typing import Final

from veloxquant_exporters.top.page_series import Series
from veloxquant_mlx.telemetry.program import (
    AccountSnapshot,
    CacheCensus,
    ProgramSnapshot,
    PromptCacheSnapshot,
    RequestsSnapshot,
)

__all__ = ["read_program"]

P: Final = "veloxquant_program_"


def read_program(series: Series) -> ProgramSnapshot | None:
    """The watched program of a process; None if it is none."""
    if not any(name.startswith(P) for name in series.samples):
        return None
    alive = series.whole(P + "generation_thread_alive")
    return ProgramSnapshot(
        mlx_lm=series.labels(P + "info").get("mlx_lm", ""),
        hooks={hook: bool(ok) for hook, ok in series.by(P + "hook_ok", "hook").items()},
        hook_errors=series.by(P + "hook_errors_total", "hook"),
        caches=_caches(series),
        prompt_cache=_prompt_cache(series),
        requests=_requests(series),
        active_requests=series.by(P + "active_requests", "state"),
        generation_thread_alive=None if alive is None else bool(alive),
        weights_bytes=series.whole(P + "weights_bytes"),
        account=_account(series),
    )


def _account(series: Series) -> AccountSnapshot | None:
    excess = series.whole(P + "pool_excess_blocks")
    if excess is None:
        return None
    return AccountSnapshot(
        excess_blocks=excess,
        excess_blocks_total=series.whole(P + "pool_uncharged_blocks_total") or 0,
        enforced=bool(series.whole(P + "pool_enforced")),
    )


def _caches(series: Series) -> dict[str, CacheCensus] | None:
    objects = series.by(P + "caches", "kind")
    if not objects:
        return None
    held = series.by(P + "cache_slots_held", "kind")
    room = series.by(P + "cache_slots", "kind")
    n_bytes = series.by(P + "cache_bytes", "kind")
    waste = series.by(P + "cache_waste_bytes", "kind")
    return {
        kind: CacheCensus(
            n_objects=n,
            slots_held=held.get(kind, 0),
            slots_capacity=room.get(kind, 0),
            n_bytes=n_bytes.get(kind, 0),
            waste_bytes=waste.get(kind, 0),
        )
        for kind, n in objects.items()
    }


def _prompt_cache(series: Series) -> PromptCacheSnapshot | None:
    entries = series.by(P + "prompt_cache_entries", "kind")
    if not entries and P + "prompt_cache_lookup_tokens_total" not in series.samples:
        return None
    return PromptCacheSnapshot(
        entries=entries,
        tokens=series.by(P + "prompt_cache_tokens", "kind"),
        n_bytes=series.by(P + "prompt_cache_bytes", "kind"),
        lookups=series.by(P + "prompt_cache_lookups_total", "outcome"),
        lookup_tokens=series.whole(P + "prompt_cache_lookup_tokens_total") or 0,
        hit_tokens=series.whole(P + "prompt_cache_hit_tokens_total") or 0,
    )


def _requests(series: Series) -> dict[str, RequestsSnapshot] | None:
    finished: dict[str, dict[str, int]] = {}
    for labels, value in series.samples.get(P + "requests_total", ()):
        by_outcome = finished.setdefault(labels.get("operation", ""), {})
        by_outcome[labels.get("outcome", "")] = round(value)
    generated = series.by(P + "generated_tokens_total", "operation")
    operations = finished.keys() | generated.keys()
    if not operations:
        return None
    return {
        operation: RequestsSnapshot(
            finished=finished.get(operation, {}),
            generated_tokens=generated.get(operation, 0),
        )
        for operation in sorted(operations)
    }
