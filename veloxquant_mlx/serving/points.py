"""The table of what is wrapped in mlx-lm: where, for which hook, and which events it gives.

Whoever wants more of mlx-lm adds a row here and an event to `Listener`; there is no other patch.
"""

from __future__ import annotations

from typing import Final

from veloxquant_mlx.serving import wrap_batches as batches
from veloxquant_mlx.serving import wrap_caches as caches
from veloxquant_mlx.serving import wrap_models as models
from veloxquant_mlx.serving import wrap_requests as requests
from veloxquant_mlx.serving.patcher import PatchPoint
from veloxquant_mlx.serving.wrap_batches import after, argument

__all__ = ["POINTS", "TESTED_VERSIONS"]

# Of mlx-lm; tests/test_serving_versions.py runs a census and a generation with each.
TESTED_VERSIONS: Final = ("0.32.0", "0.32.1", "0.32.2")

_CACHE: Final = "mlx_lm.models.cache"
_GENERATE: Final = "mlx_lm.generate"
_SERVER: Final = "mlx_lm.server"
_UTILS: Final = "mlx_lm.utils"

_REQUEST: Final = (
    "on_request_started",
    "on_request_read",
    "on_request_token",
    "on_request_finished",
)
_SEQUENCE: Final = ("on_sequence_started", "on_sequence_token", "on_sequence_ended")

_merged = after("on_batch_merged", lambda e, a, k, _: e(a[0], argument(a, k, 3, "caches")))
_copied = after("on_batch_copied", lambda e, a, _, copy: e(a[0], copy))
_split = after("on_batch_split", lambda e, a, k, new: e(a[0], new, argument(a, k, 1, "indices")))
_extended = after("on_batch_extended", lambda e, a, k, _: e(a[0], argument(a, k, 1, "batch")))
_generating = after("on_batch_generating", lambda e, a, _, batch: e(a[0], batch))
_extracted = after("on_row_extracted", lambda e, a, k, row: e(a[0], argument(a, k, 1, "idx"), row))
_processed = after("on_prompt_processed", lambda e, a, _, __: e(a[0]))
_stepped = after("on_step", lambda e, a, _, __: e(a[0]))
_made = after("on_generator_made", lambda e, a, _, __: e(a[0]))
_inserted = after(
    "on_sequences_inserted", lambda e, a, k, uids: e(a[0], uids, argument(a, k, 1, "segments"))
)
_responded = after("on_responses", lambda e, a, _, two: e(a[0], two[0], two[1]))
_removed = after("on_sequences_removed", lambda e, a, k, _: e(a[0], argument(a, k, 1, "uids")))
_closed = after("on_generator_closed", lambda e, a, _, __: e(a[0]))


def _batches(name: str, make: object, event: str, *classes: str) -> tuple[PatchPoint, ...]:
    return tuple(
        PatchPoint("batches", _GENERATE, f"{cls}.{name}", make, (event,))  # type: ignore[arg-type]
        for cls in classes
    )


_PROMPT, _GENERATION = "PromptProcessingBatch", "GenerationBatch"

POINTS: Final[tuple[PatchPoint, ...]] = (
    PatchPoint(
        "cache_census", _CACHE, "_BaseCache.__new__", caches.new_cache, ("on_cache_created",)
    ),
    PatchPoint(
        "caches_made", _CACHE, "make_prompt_cache", caches.make_prompt_cache, ("on_caches_made",)
    ),
    PatchPoint("caches_loaded", _CACHE, "load_prompt_cache", caches.load_prompt_cache,
               ("on_caches_loaded",)),
    # The server's prompt cache.
    PatchPoint("prompt_cache", _CACHE, "LRUPromptCache.__init__", caches.prompt_cache_init,
               ("on_prompt_cache_opened",)),
    PatchPoint("prompt_cache", _CACHE, "LRUPromptCache.fetch_nearest_cache",
               caches.prompt_cache_fetch, ("on_prompt_cache_fetched",)),
    PatchPoint("prompt_cache", _CACHE, "LRUPromptCache.insert_cache", caches.prompt_cache_insert,
               ("on_prompt_cache_changed",)),
    PatchPoint("prompt_cache", _CACHE, "LRUPromptCache.trim_to", caches.prompt_cache_trim, ()),
    PatchPoint("prompt_cache", _CACHE, "PromptTrie.add", caches.trie_add,
               ("on_entry_inserted", "on_entry_removed")),
    PatchPoint("prompt_cache", _CACHE, "PromptTrie.pop", caches.trie_pop, ("on_entry_removed",)),
    PatchPoint("prompt_cache", _CACHE, "PromptTrie.pop_prefixes", caches.trie_pop_prefixes,
               ("on_entry_removed",)),
    # Batches.
    *_batches("__init__", _merged, "on_batch_merged", _PROMPT),
    *_batches("_copy", _copied, "on_batch_copied", _PROMPT),
    *_batches("split", _split, "on_batch_split", _PROMPT),
    *_batches("extend", _extended, "on_batch_extended", _PROMPT, _GENERATION),
    *_batches("filter", batches.batch_filter, "on_batch_filtered", _PROMPT, _GENERATION),
    *_batches("generate", _generating, "on_batch_generating", _PROMPT),
    *_batches("extract_cache", _extracted, "on_row_extracted", _PROMPT, _GENERATION),
    *_batches("prompt", _processed, "on_prompt_processed", _PROMPT),
    *_batches("_step", _stepped, "on_step", _GENERATION),
    PatchPoint("batch_generator", _GENERATE, "BatchGenerator.__init__", _made,
               ("on_generator_made",)),
    PatchPoint("batch_generator", _GENERATE, "BatchGenerator.insert_segments", _inserted,
               ("on_sequences_inserted",)),
    PatchPoint("batch_generator", _GENERATE, "BatchGenerator._next", _responded,
               ("on_responses",)),
    PatchPoint("batch_generator", _GENERATE, "BatchGenerator.remove", _removed,
               ("on_sequences_removed",)),
    PatchPoint("batch_generator", _GENERATE, "BatchGenerator.close", _closed,
               ("on_generator_closed",)),
    # Requests.
    PatchPoint("streams", _GENERATE, "stream_generate", requests.stream_generate,
               ("on_stream_started", "on_stream_ended")),
    PatchPoint("sequences", _GENERATE, "generate_step", requests.generate_step, _SEQUENCE),
    PatchPoint("sequences", _GENERATE, "speculative_generate_step", requests.generate_step,
               _SEQUENCE),
    PatchPoint("server", _SERVER, "ResponseGenerator._run_generate", requests.run_generate, ()),
    PatchPoint("server", _SERVER, "ResponseGenerator.__init__", requests.server_init,
               ("on_server_made",)),
    PatchPoint("requests", _SERVER, "ResponseGenerator.generate", requests.server_generate,
               _REQUEST),
    PatchPoint("http", _SERVER, "APIHandler.handle_completion", requests.handle_completion,
               ("admit",)),
    # Models.
    PatchPoint("weights", _UTILS, "load_model", models.load_model, ("on_model_loaded",)),
    PatchPoint("weights", _UTILS, "load_adapters", models.load_adapters, ("on_model_loaded",)),
)  # fmt: skip
