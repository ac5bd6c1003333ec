"""Served: what a watched model server tells of its requests, reckoned from traffic on its pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from dashboards.drill.stage import Stage
from dashboards.drill.traffic import Call
from dashboards.drill.worker import Worker
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.telemetry.histogram import Histogram
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.program import (
    AccountSnapshot,
    CacheCensus,
    ProgramSnapshot,
    PromptCacheSnapshot,
    RequestsSnapshot,
)
from veloxquant_mlx.telemetry.program_values import (
    BETWEEN_BUCKETS_S,
    DURATION_BUCKETS_S,
    FIRST_TOKEN_BUCKETS_S,
    OUTCOMES,
    PER_TOKEN_BUCKETS_S,
    ROW_BUCKETS,
    SIZE_BUCKETS,
    Outcome,
)

__all__ = ["ServedRequests", "ServingWorker"]

# Of a prompt, so much is what another one began with.
SHARED: Final = 0.55
# Rows that a batch has room for; the rest of the requests waits.
MOST_ROWS: Final = 24
PROMPT_CACHE_ENTRIES: Final = 48
KV_BYTES_A_TOKEN: Final = 32 * 1024
PROMPT_TOKENS: Final = 600


class ServedRequests:
    """Counts what traffic does, as the hooks in a server would.

    Args:
        stage: For its clock and chance.
        take: How a request takes blocks.
        end: How it ends.
    """

    def __init__(self, stage: Stage, take: Any, end: Call) -> None:
        self.stage = stage
        self._take, self._end = take, end
        self._began_s: dict[str, float] = {}
        self._held: dict[str, int] = {}
        self.finished: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self.prompt = self.cached = self.generated = 0
        self.lookups = {"hit": 0, "miss": 0}
        self.evictions = {"entries": 0, "prefix": 0, "budget": 0}
        self._excess = self._excess_total = 0
        self.duration = {outcome: Histogram(DURATION_BUCKETS_S) for outcome in self.finished}
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS_S)
        self.between = Histogram(BETWEEN_BUCKETS_S)
        self.per_token = Histogram(PER_TOKEN_BUCKETS_S)
        self.rows = Histogram(ROW_BUCKETS)
        self.sizes = {kind: Histogram(SIZE_BUCKETS) for kind in ("input", "output")}

    def take(self, pool: BlockPoolAllocator, owner: str, n_tokens: int) -> None:
        """See `Traffic`: the first time for the prompt, then for what is generated."""
        begins = owner not in self._began_s
        if begins:
            self._began_s[owner] = self.stage.now_s
        try:
            self._take(pool, owner, n_tokens)
        except BlockPoolExhaustedError:
            self._finish(owner, "failed")
            raise
        self._held[owner] = self._held.get(owner, 0) + n_tokens
        if begins:
            self._prompt(n_tokens)
        else:
            self._generate(n_tokens)

    def end(self, pool: BlockPoolAllocator, owner: str) -> None:
        """See `Traffic`; now and then the client has left."""
        self._finish(owner, "cancelled" if self.stage.random.random() < 0.03 else "ok")
        self._end(pool, owner)

    def snapshot(self, weights_bytes: int, n_layers: int = 36) -> ProgramSnapshot:
        """The program now."""
        n_running = min(len(self._began_s), MOST_ROWS)
        entries = min(PROMPT_CACHE_ENTRIES, self.finished["ok"])
        kept = entries * PROMPT_TOKENS
        held = sum(self._held.values())
        room = int(held * 1.05) + 32 * n_running
        return ProgramSnapshot(
            mlx_lm="0.32.2",
            hooks={"cache": True, "server": True, "batch": True},
            hook_errors={"cache": 0, "server": 0, "batch": 0},
            caches={
                "KVCache": _census(kept, int(kept * 1.05), n_layers * entries),
                "BatchKVCache": _census(held, room, n_layers),
            },
            prompt_cache=PromptCacheSnapshot(
                entries={"user": entries - entries // 4, "system": entries // 4},
                tokens={"user": kept - kept // 4, "system": kept // 4},
                n_bytes={
                    "user": (kept - kept // 4) * KV_BYTES_A_TOKEN,
                    "system": kept // 4 * KV_BYTES_A_TOKEN,
                },
                max_entries=PROMPT_CACHE_ENTRIES,
                lookups=dict(self.lookups),
                lookup_tokens=self.prompt,
                hit_tokens=self.cached,
                insertions=self.finished["ok"],
                evictions=dict(self.evictions),
            ),
            requests={
                "chat": RequestsSnapshot(
                    finished=dict(self.finished),
                    prompt_tokens=self.prompt,
                    cached_tokens=self.cached,
                    generated_tokens=self.generated,
                    duration={key: one.snapshot() for key, one in self.duration.items()},
                    first_token=self.first_token.snapshot(),
                    per_token=self.per_token.snapshot(),
                    between_tokens=self.between.snapshot(),
                    prompt_sizes=self.sizes["input"].snapshot(),
                    generated_sizes=self.sizes["output"].snapshot(),
                )
            },
            active_requests={
                "queued": len(self._began_s) - n_running,
                "prefill": min(2, n_running),
                "decode": max(0, n_running - 2),
                "single": 0,
            },
            decode_batch=self.rows.snapshot(),
            generation_thread_alive=True,
            weights_bytes=weights_bytes,
            account=self._account(),
        )

    # -- inside ---------------------------------------------------------------------------------

    def _account(self) -> AccountSnapshot:
        """Over the budget while requests wait, as if their caches were there already."""
        before, self._excess = self._excess, 40 * max(0, len(self._began_s) - MOST_ROWS)
        rise = max(0, self._excess - before)
        self._excess_total += rise
        self.evictions["budget"] += rise > 0
        return AccountSnapshot(
            pool="chat",
            excess_blocks=self._excess,
            excess_blocks_total=self._excess_total,
            enforced=True,
        )

    def _prompt(self, n_tokens: int) -> None:
        chance = self.stage.random
        hit = chance.random() < 0.7
        n_cached = int(n_tokens * SHARED * chance.uniform(0.8, 1.2)) if hit else 0
        self.lookups["hit" if hit else "miss"] += 1
        self.prompt += n_tokens
        self.cached += n_cached
        self.sizes["input"].observe(n_tokens)
        wait_s = max(0, len(self._began_s) - MOST_ROWS) * 0.25
        self.first_token.observe(wait_s + (n_tokens - n_cached) / chance.uniform(900, 1500))

    def _generate(self, n_tokens: int) -> None:
        n_rows = min(len(self._began_s), MOST_ROWS)
        pace_s = (0.018 + 0.0009 * n_rows) * self.stage.random.uniform(0.9, 1.2)
        self.generated += n_tokens
        self.between.observe(pace_s, n_tokens)
        self.per_token.observe(pace_s)
        self.rows.observe(n_rows, n_tokens)

    def _finish(self, owner: str, outcome: Outcome) -> None:
        began_s = self._began_s.pop(owner, None)
        n_tokens = self._held.pop(owner, 0)
        self.finished[outcome] += 1
        if began_s is not None:
            self.duration[outcome].observe(self.stage.now_s - began_s)
        if outcome == "ok":
            self.sizes["output"].observe(n_tokens // 3)
            full = self.finished["ok"] > PROMPT_CACHE_ENTRIES
            self.evictions["entries" if self.stage.random.random() < 0.6 else "prefix"] += full


class ServingWorker(Worker):
    """A worker whose program is watched too: set `requests` once there is traffic."""

    requests: ServedRequests | None = None

    def snapshot(self) -> ProcessSnapshot:
        """The process now with its program, whose prompt cache lies outside of the pool."""
        found = super().snapshot()
        if self.requests is None:
            return found
        program = self.requests.snapshot(self.memory.weights)
        kept = sum(program.prompt_cache.n_bytes.values()) if program.prompt_cache else 0
        more = {
            name: getattr(found, name) + kept
            for name in ("mlx_active_bytes", "mlx_peak_bytes", "footprint_bytes", "resident_bytes")
        }
        return replace(found, program=program, **more)


def _census(held: int, room: int, n_objects: int) -> CacheCensus:
    return CacheCensus(
        n_objects=n_objects,
        slots_held=held,
        slots_capacity=room,
        n_bytes=room * KV_BYTES_A_TOKEN,
        waste_bytes=(room - held) * KV_BYTES_A_TOKEN,
    )
