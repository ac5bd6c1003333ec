"""Table: the results as text, as JSON, and how sizes and times are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from veloxquant_exporters.simulate.advice import Advice
from veloxquant_exporters.simulate.result import Result

if TYPE_CHECKING:
    from veloxquant_mlx.memory.pool_config import PoolConfig

__all__ = ["as_json", "as_table", "config_text", "size_text", "span_text"]

COLUMNS = (
    ("block size", "right"),
    ("blocks", "right"),
    ("streams", "left"),
    ("grow", "left"),
    ("peak blocks", "right"),
    ("peak memory", "right"),
    ("rounding", "right"),
    ("unfilled", "right"),
    ("refused", "right"),
    ("first after", "right"),
    ("grown", "right"),
)


def as_table(results: Sequence[Result], advice: Advice, bytes_per_slot: int | None) -> Table:
    """A row for each configuration; the recorded one and the recommended one are marked."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="left")
    for title, justify in COLUMNS:
        table.add_column(title, justify="left" if justify == "left" else "right")
    for n, result in enumerate(results):
        mark = "*" if result is advice.best else "recorded" if n == 0 else ""
        mark = "* recorded" if result is advice.best and n == 0 else mark
        style = "bold" if result is advice.best else None
        table.add_row(mark, *_cells(result, bytes_per_slot), style=style)
    return table


def _cells(result: Result, bytes_per_slot: int | None) -> tuple[str, ...]:
    config = result.config
    first = result.first_exhausted_ns
    return (
        str(config.block_size),
        str(config.n_blocks),
        "k, v" if config.separate_kv else "kv",
        _grow_text(config),
        str(result.peak_blocks),
        size_text(result.peak_slots, bytes_per_slot),
        f"{result.rounding:.1%}",
        "?" if result.unfilled is None else f"{result.unfilled:.1%}",
        str(result.n_exhausted),
        "" if first is None else span_text(first),
        str(result.grown_blocks),
    )


def _grow_text(config: PoolConfig) -> str:
    if not config.grow_on_exhaustion:
        return "no"
    return "yes" if config.max_blocks is None else f"to {config.max_blocks}"


def config_text(config: PoolConfig) -> str:
    """The configuration as one writes it in Python."""
    limit = "" if config.max_blocks is None else f", max_blocks={config.max_blocks}"
    return (
        f"PoolConfig(block_size={config.block_size}, n_blocks={config.n_blocks}, "
        f"separate_kv={config.separate_kv}, grow_on_exhaustion={config.grow_on_exhaustion}{limit})"
    )


def size_text(slots: int, bytes_per_slot: int | None) -> str:
    """Bytes where they are known, else token slots."""
    if bytes_per_slot is None:
        return f"{slots} slots"
    n: float = slots * bytes_per_slot
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def span_text(ns: int) -> str:
    """How long after the beginning."""
    seconds = ns / 1e9
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"


def as_json(
    results: Sequence[Result], advice: Advice, bytes_per_slot: int | None
) -> dict[str, Any]:
    """All of it, for a program; sizes in slots and, where they are known, in bytes."""
    return {
        "recommended": list(results).index(advice.best),
        "reasons": list(advice.reasons),
        "bytes_per_slot": bytes_per_slot,
        "results": [
            {
                **asdict(result),
                "config": {
                    name: getattr(result.config, name)
                    for name in (
                        "block_size",
                        "n_blocks",
                        "separate_kv",
                        "grow_on_exhaustion",
                        "max_blocks",
                    )
                },
                "peak_slots": result.peak_slots,
                "peak_bytes": result.bytes_of(result.peak_slots, bytes_per_slot),
                "managed_bytes": result.bytes_of(result.managed_slots, bytes_per_slot),
            }
            for result in results
        ],
    }
