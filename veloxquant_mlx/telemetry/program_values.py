"""Label values and buckets of a watched program's metrics, all of them bounded."""

from __future__ import annotations

from typing import Final, Literal

__all__ = [
    "BETWEEN_BUCKETS_S",
    "CACHE_KINDS",
    "DURATION_BUCKETS_S",
    "ENTRY_TYPES",
    "EVICTION_REASONS",
    "FIRST_TOKEN_BUCKETS_S",
    "LOOKUP_OUTCOMES",
    "OPERATIONS",
    "OUTCOMES",
    "PER_TOKEN_BUCKETS_S",
    "ROW_BUCKETS",
    "SIZE_BUCKETS",
    "STATES",
    "Operation",
    "Outcome",
]

Operation = Literal["chat", "text_completion"]
Outcome = Literal["ok", "cancelled", "failed", "rejected"]

# As OpenTelemetry's conventions for generative AI name them.
OPERATIONS: Final[tuple[Operation, ...]] = ("chat", "text_completion")
OUTCOMES: Final[tuple[Outcome, ...]] = ("ok", "cancelled", "failed", "rejected")
# queued: not begun. prefill, decode: rows of batches. single: sequences that run without a batch.
STATES: Final[tuple[str, ...]] = ("queued", "prefill", "decode", "single")

# Classes of mlx-lm. What a program derives from them counts as its nearest one here.
CACHE_KINDS: Final[tuple[str, ...]] = (
    "KVCache",
    "RotatingKVCache",
    "QuantizedKVCache",
    "ConcatenateKVCache",
    "ChunkedKVCache",
    "BatchKVCache",
    "BatchRotatingKVCache",
    "ArraysCache",
    "CacheList",
    "other",
)

# Of the server's prompt cache.
ENTRY_TYPES: Final[tuple[str, ...]] = ("assistant", "user", "system")
LOOKUP_OUTCOMES: Final[tuple[str, ...]] = ("hit", "miss")
EVICTION_REASONS: Final[tuple[str, ...]] = (
    "replaced",
    "prefix",
    "entries",
    "bytes",
    "trimmed",
    "budget",
)

# As the same conventions advise, for their metrics of the same meaning.
DURATION_BUCKETS_S: Final = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_BUCKETS_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_BUCKETS_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
SIZE_BUCKETS: Final = tuple(4**power for power in range(14))
# Not theirs: small models on one machine do a token in less than a millisecond.
BETWEEN_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.0075, *PER_TOKEN_BUCKETS_S, 5.0, 10.0)
ROW_BUCKETS: Final = tuple(2**power for power in range(11))
