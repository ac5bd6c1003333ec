"""The landing page: what is served here, and how the pools are doing, for a person with a browser."""

from __future__ import annotations

from html import escape
from typing import Final

from veloxquant_exporters import __version__
from veloxquant_exporters.sources import SnapshotSource
from veloxquant_mlx.telemetry import PoolSnapshot

__all__ = ["LANDING_HEADERS", "landing_page"]

LANDING_HEADERS: Final = (
    ("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'"),
    ("cache-control", "no-store"),
)

_HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>VeloxQuant block pools</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .25rem 1rem .25rem 0; text-align: right }
td:first-child, th:first-child { text-align: left } tr { border-bottom: 1px solid #8884 }
:root { color-scheme: light dark }
</style></head><body>
"""
_COLUMNS: Final = ("Pool", "In use", "Managed", "Used", "Owners", "Allocations", "Exhausted")


def landing_page(source: SnapshotSource) -> bytes:
    """The page in UTF-8; reads the source once."""
    rows = [
        (f"{process.process} / {pool.name}" if process.process else pool.name, pool)
        for process in source.read().processes
        for pool in process.pools
    ]
    parts = [
        _HEAD,
        "<h1>VeloxQuant block pools</h1>\n<ul>",
        '<li><a href="/metrics">/metrics</a>: for Prometheus, as text or OpenMetrics</li>',
        '<li><a href="/-/healthy">/-/healthy</a>: the server answers</li>',
        '<li><a href="/-/ready">/-/ready</a>: scrapes get through</li>',
        "</ul>",
        _table(rows) if rows else "<p>No pool is watched yet: call <code>instrument(pool)</code>.",
        f"<p><small>veloxquant-mlx-monitor {escape(__version__)}</small></p></body></html>\n",
    ]
    return "\n".join(parts).encode("utf-8", "backslashreplace")


def _table(rows: list[tuple[str, PoolSnapshot]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    lines = [_row(label, pool) for label, pool in rows]
    return "\n".join(["<table>", f"<tr>{head}</tr>", *lines, "</table>"])


def _row(label: str, pool: PoolSnapshot) -> str:
    used = f"{pool.blocks_in_use / pool.n_blocks:.0%}" if pool.n_blocks else "-"
    cells = (
        escape(label),
        f"{pool.blocks_in_use:,}",
        f"{pool.n_blocks:,}",
        used,
        f"{pool.owners_active:,}",
        f"{pool.n_allocations:,}",
        f"{pool.n_exhausted:,}",
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
