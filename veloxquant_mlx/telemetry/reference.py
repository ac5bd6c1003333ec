"""Reference: docs/metrics.md, written from the catalogue.

python -m veloxquant_mlx.telemetry.reference docs/metrics.md           # write it
python -m veloxquant_mlx.telemetry.reference --check docs/metrics.md   # 1 if it would change
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Final

from veloxquant_mlx.memory.incidents import EXHAUSTION_REASONS, GROW_OUTCOMES, REJECTION_REASONS
from veloxquant_mlx.telemetry.catalogue import CATALOGUE, Metric
from veloxquant_mlx.telemetry.generated_page import write_or_check
from veloxquant_mlx.telemetry.histogram import (
    BLOCK_BUCKETS,
    DURATION_BUCKETS_NS,
    LIFETIME_BUCKETS_NS,
    RATIO_BUCKETS,
)
from veloxquant_mlx.telemetry.meters import CHECKS, DROP_REASONS, ERROR_REASONS
from veloxquant_mlx.telemetry.program_values import (
    BETWEEN_BUCKETS_S,
    CACHE_KINDS,
    DURATION_BUCKETS_S,
    ENTRY_TYPES,
    EVICTION_REASONS,
    FIRST_TOKEN_BUCKETS_S,
    OPERATIONS,
    OUTCOMES,
    PER_TOKEN_BUCKETS_S,
    ROW_BUCKETS,
    SIZE_BUCKETS,
    STATES,
)
from veloxquant_mlx.telemetry.snapshot import FORMATS
from veloxquant_mlx.telemetry.snapshot import OPERATIONS as POOL_OPERATIONS
from veloxquant_mlx.telemetry.table import MAX_POOLS

__all__ = ["main", "render"]

HEAD: Final = """\
<!-- Written by `python -m veloxquant_mlx.telemetry.reference docs/metrics.md` from the catalogue
     (veloxquant_mlx/telemetry/catalogue.py). Change it there. -->

# Metrics

Every metric, by its Prometheus name, with the OpenTelemetry instrument that tells the same. Both
are read off one snapshot of the pool, taken under its lock; no exporter keeps counts of its own.

- Series of a pool carry the label `pool`; from a sidecar all carry `process` as well. Owners are
  never a label. At most {max_pools} pools are told apart; the rest are summed as `pool="other"`
  (`veloxquant_block_pool_pools` says how many), a pool keeping its label for as long as it is
  watched.
- Counters of a name never fall, whatever becomes of its pools: the next pool of a name goes on
  where the last one ended, and what a pool still held when it ended counts as freed. The series of
  a pool that is gone, or no longer watched, are absent.
- Rates are left to the query: no gauge holds a throughput, so nothing lingers when a pool idles.
- Levels are raw counts; divide them in the query. `token_slots_used` is the fill that caches tell
  the pool, so `1 - used / allocated` is waste; `fragmentation` is not.
- **Sampled and weighted** histograms come from one call in N, with N few at first, about 20 samples
  a second after, 2,039 calls at most and jittered. A sample counts as all the calls since the one
  before, so that counts and sums are those of all calls. Calls of 4,096 blocks and more are each
  observed. Ages and lifetimes may lag by the time between two snapshots.
- Values beyond the last bucket are counted in `+Inf`.

## One waiver

`veloxquant_block_pool_blocks_total` is a gauge that ends in `_total`. `promtool check metrics` says
so, and it is right; the name is fixed by the contract of `AllocationStats.to_prometheus()`. Use
`veloxquant_block_pool_blocks_managed`. It is the only complaint that the checks let pass.
"""

PROGRAM: Final = "veloxquant_program_"
ABOUT_PROGRAMS: Final = """\
Of a program of mlx-lm that `vqmon run` runs; any other process has none of these. They are read off
plain attributes and shapes: no array is evaluated. [serving.md](serving.md) tells more.

"""


def render() -> str:
    """The whole page."""
    pool = [metric for metric in CATALOGUE if metric.read_pool is not None]
    program = [metric for metric in CATALOGUE if metric.name.startswith(PROGRAM)]
    process = [m for m in CATALOGUE if m.read_process is not None and m not in program]
    others = [metric for metric in CATALOGUE if metric not in (*pool, *process, *program)]
    sections = {
        "Pool": _table(pool),
        "Process and telemetry": _table(process),
        "Watched program": ABOUT_PROGRAMS + _table(program),
        "Exporter and benchmarks": _table(others),
        "Label values": _labels(),
        "Buckets": _buckets(),
    }
    body = [f"## {title}\n\n{section}" for title, section in sections.items()]
    return "\n".join([HEAD.format(max_pools=MAX_POOLS), *body])


def _table(metrics: Iterable[Metric]) -> str:
    lines = [
        "| Prometheus | type | labels | unit | OpenTelemetry | instrument | meaning |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(metric) for metric in metrics]
    return "\n".join(lines) + "\n"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.all_labels) or "-"
    otel, instrument = "-", "-"
    if metric.otel is not None:
        pairs = ", ".join(f"{key}={value}" for key, value in metric.attributes.items())
        otel = f"`{metric.otel}`" + (f" `{{{pairs}}}`" if pairs else "")
        observable = "" if metric.instrument == "histogram" else "observable "
        instrument = f"{observable}{metric.instrument}"
    unit = f"`{metric.ucum}`"
    help_text = metric.help.replace("|", "\\|")
    return f"| `{metric.name}` | {metric.kind} | {labels} | {unit} | {otel} | {instrument} | {help_text} |"


def _labels() -> str:
    values = (
        ("`stream`", ("k", "v", "kv")),
        ("`format`", FORMATS),
        ("`operation`", POOL_OPERATIONS),
        ("`outcome`", GROW_OUTCOMES),
        ("`reason` of exhaustions", EXHAUSTION_REASONS),
        ("`reason` of rejected blocks", REJECTION_REASONS),
        ("`reason` of collect errors", ERROR_REASONS),
        ("`reason` of dropped events", DROP_REASONS),
        ("`check`", CHECKS),
        ("`kind` of caches", CACHE_KINDS),
        ("`kind` of prompt cache entries", ENTRY_TYPES),
        ("`reason` of evictions", EVICTION_REASONS),
        ("`operation` of requests", OPERATIONS),
        ("`outcome` of requests", OUTCOMES),
        ("`state` of requests", STATES),
    )
    lines = ["| label | values |", "|---|---|"]
    lines += [f"| {label} | {', '.join(f'`{x}`' for x in choices)} |" for label, choices in values]
    return "\n".join(lines) + "\n"


def _buckets() -> str:
    rows = {
        "durations and waits, seconds": [bound / 1e9 for bound in DURATION_BUCKETS_NS],
        "lifetimes and idle times, seconds": [bound / 1e9 for bound in LIFETIME_BUCKETS_NS],
        "blocks": BLOCK_BUCKETS,
        "ratios": RATIO_BUCKETS,
        "requests' durations, seconds": DURATION_BUCKETS_S,
        "times to the first token, seconds": FIRST_TOKEN_BUCKETS_S,
        "times per output token, seconds": PER_TOKEN_BUCKETS_S,
        "times between tokens, seconds": BETWEEN_BUCKETS_S,
        "tokens of a request": SIZE_BUCKETS,
        "rows of a decoding step": ROW_BUCKETS,
    }
    lines = ["| of | upper bounds, inclusive |", "|---|---|"]
    lines += [
        f"| {of} | {', '.join(f'{bound:g}' for bound in bounds)} |" for of, bounds in rows.items()
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it byte for byte; returns the exit status."""
    return write_or_check(
        render,
        arguments,
        description="Write docs/metrics.md from the catalogue.",
        stale="{path} is not what the catalogue says; write it anew",
    )


if __name__ == "__main__":
    sys.exit(main())
