"""Names that a release had: whoever built a board or an alert on them must find them again."""

from __future__ import annotations

import re
from pathlib import Path

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import CATALOGUE
from veloxquant_mlx.telemetry.catalogue import SIDECAR_ROWS

HERE = Path(__file__).resolve().parent
Shape = tuple[str, frozenset[str]]


def released() -> dict[str, Shape]:
    """Type and labels by name, of the newest release that has a file."""
    newest = max(HERE.glob("names-*.txt"), key=lambda file: version_of(file.stem))
    rows = [row.split() for row in newest.read_text("utf-8").splitlines() if row[0] != "#"]
    return {row[0]: (row[1], frozenset(",".join(row[2:]).split(",")) - {""}) for row in rows}


def version_of(text: str) -> tuple[int, ...]:
    """The numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", text)))


def broken(old: dict[str, Shape], new: dict[str, Shape]) -> list[str]:
    """What a user of the old names would miss."""
    return [
        f"{name}: was {shape}, is {new.get(name, 'gone')}"
        for name, shape in old.items()
        if new.get(name) != shape
    ]


def today() -> dict[str, Shape]:
    """Type and labels by name, now."""
    return {
        row.name: (row.kind, frozenset(row.labels) | ({"pool"} if row.read_pool else set()))
        for row in (*CATALOGUE, *SIDECAR_ROWS)
    }


def test_F09_no_name_type_or_label_of_the_last_release_is_lost() -> None:
    """One to be renamed stays for a release beside its new name, and the changelog says so."""
    assert broken(released(), today()) == []


def test_F09_a_renamed_metric_is_noticed() -> None:
    """As are a changed type and a label that is gone."""
    now = today()
    changes: list[dict[str, Shape]] = [
        {},
        {"veloxquant_block_pool_blocks_in_use": ("counter", frozenset({"pool"}))},
        {"veloxquant_block_pool_blocks_in_use": ("gauge", frozenset())},
    ]
    for change in changes:
        changed = {k: v for k, v in now.items() if k != "veloxquant_block_pool_blocks_in_use"}
        (said,) = broken(released(), changed | change)
        assert said.startswith("veloxquant_block_pool_blocks_in_use: was")


def test_F09_the_names_of_to_prometheus_are_pinned() -> None:
    """The upstream contract: what the allocator's own text says is exported under the same names."""
    text = BlockPoolAllocator(PoolConfig(n_blocks=4)).stats.to_prometheus()
    upstream = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert upstream == {
        f"veloxquant_block_pool_{name}"
        for name in (
            "blocks_in_use", "blocks_total", "fragmentation", "peak_blocks_in_use",
            "allocations_total", "frees_total", "reused_total", "exhausted_total", "grown_total",
            "retired_total",
        )
    }  # fmt: skip
    assert upstream <= released().keys() <= today().keys()
