"""The table of pools: as many columns as fit, the most telling ones first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.text import Text

from veloxquant_exporters.top.board import Board, PoolView
from veloxquant_exporters.top.panels.paint import bar, cell, heat, join, sparkline
from veloxquant_exporters.top.units import amount, count, duration, percent, rate

__all__ = ["SORTS", "pool_heat", "sorted_pools", "table"]

# Seconds after which a figure is shown as old.
OLD_S: Final = 10.0

SORTS: Final[dict[str, Callable[[PoolView], tuple[float | str, ...]]]] = {
    "in use": lambda pool: (-pool.usage, *pool.key),
    "name": lambda pool: pool.key,
    "waste": lambda pool: (-(pool.waste or 0.0), *pool.key),
    "alloc/s": lambda pool: (-(pool.rates.allocations if pool.rates else 0.0), *pool.key),
    "failed": lambda pool: (
        -(pool.rates.exhaustions if pool.rates else 0.0),
        -pool.exhausted,
        *pool.key,
    ),
}


@dataclass(frozen=True, slots=True)
class _Column:
    """A column.

    Attributes:
        title: Its head.
        width: Columns of the terminal.
        priority: Columns of a lower one are there before it.
        draw: The cell of a pool in a width.
        left: Whether its head stands at the left.
    """

    title: str
    width: int
    priority: int
    draw: Callable[[PoolView, int], Text]
    left: bool = False


def sorted_pools(board: Board, sort: str) -> list[PoolView]:
    """The pools in an order of `SORTS`."""
    return sorted(board.pools, key=SORTS[sort])


def pool_heat(pool: PoolView) -> str:
    """Style of its use: of what it can come to, as a pool that grows may well be full now."""
    if pool.limit is None:
        return "green"
    return heat(pool.in_use / pool.limit if pool.limit else 0.0)


def table(
    pools: Sequence[PoolView], width: int, *, selected: tuple[str, str] | None = None
) -> list[Text]:
    """The head and a row for each pool.

    Args:
        pools: In their order.
        width: Columns of the terminal.
        selected: The key of the pool that is marked.
    """
    columns = _columns(pools, width)
    head = join([" ", *(cell(c.title, c.width, right=not c.left, style="bold") for c in columns)])
    rows = [head]
    for pool in pools:
        row = join([" ", *(column.draw(pool, column.width) for column in columns)])
        if pool.age_s > OLD_S:
            row.stylize("dim")
        if pool.key == selected:
            row = Text("▸", style="bold") + row[1:]
            row.stylize("reverse", 0, columns[0].width + 2)
        rows.append(row)
    return rows


def _columns(pools: Sequence[PoolView], width: int) -> list[_Column]:
    several = len({pool.process for pool in pools}) > 1 or any(pool.process for pool in pools)
    longest = max([len("pool"), *(len(_name(pool)) for pool in pools)])
    process = max([len("process"), *(len(pool.process) for pool in pools)])
    wanted = [
        _Column("pool", min(longest, 12), 0, lambda p, w: cell(_name(p), w), left=True),
        _Column("process", min(process, 10), 0, lambda p, w: cell(p.process, w), left=True),
        _Column("in use", 13, 0, _usage, left=True),
        _Column("blocks", 11, 1, _blocks),
        _Column("waste", 5, 2, _waste),
        _Column("alloc/s", 7, 3, _allocations),
        _Column("free/s", 6, 6, _frees),
        _Column("fail/s", 6, 4, _failed),
        _Column("p50", 6, 9, lambda p, w: _seconds(p.latency("allocate").p50_s, w)),
        _Column("p99", 6, 5, lambda p, w: _seconds(p.latency("allocate").p99_s, w)),
        _Column("owners", 6, 7, lambda p, w: cell(amount(p.owners), w, right=True)),
        _Column("oldest", 7, 8, lambda p, w: _seconds(p.oldest_owner_s, w)),
        _Column("lately", 12, 10, _lately, left=True),
    ]
    if not several:
        del wanted[1]
    left = width - 1
    taken: list[_Column] = []
    for column in sorted(wanted, key=lambda column: column.priority):
        if column.width + 1 > left:
            break
        taken.append(column)
        left -= column.width + 1
    if not taken:  # not even the name fits: its beginning then
        taken = [replace(wanted[0], width=max(1, width - 2))]
        wanted[0] = taken[0]
    growths = {"pool": longest, "process": process, "in use": 25, "lately": 40}
    shown = []
    for column in (column for column in wanted if column in taken):
        more = min(left, max(0, growths.get(column.title, 0) - column.width))
        shown.append(replace(column, width=column.width + more))
        left -= more
    return shown


def _seconds(seconds: float | None, width: int) -> Text:
    return cell(duration(seconds), width, right=True)


def _name(pool: PoolView) -> str:
    return f"{pool.name} ({pool.n_pools})" if pool.n_pools > 1 else pool.name


def _usage(pool: PoolView, width: int) -> Text:
    style = pool_heat(pool)
    shown = cell(percent(pool.usage), 5, right=True, style=style)
    return bar(pool.usage, width - 5, style) + shown


def _blocks(pool: PoolView, width: int) -> Text:
    whole = f"{count(pool.in_use)}/{count(pool.n_blocks)}"
    if len(whole) > width:
        whole = f"{amount(pool.in_use)}/{amount(pool.n_blocks)}"
    return cell(whole, width, right=True)


def _waste(pool: PoolView, width: int) -> Text:
    bad = pool.waste is not None and pool.waste > 0.4 and pool.usage > 0.7
    return cell(percent(pool.waste), width, right=True, style="yellow" if bad else "")


def _allocations(pool: PoolView, width: int) -> Text:
    return cell(rate(pool.rates.allocations if pool.rates else None), width, right=True)


def _frees(pool: PoolView, width: int) -> Text:
    return cell(rate(pool.rates.frees if pool.rates else None), width, right=True)


def _failed(pool: PoolView, width: int) -> Text:
    value = pool.rates.exhaustions if pool.rates else None
    return cell(rate(value), width, right=True, style="bold red" if value else "")


def _lately(pool: PoolView, width: int) -> Text:
    return Text(sparkline(pool.past, width).ljust(width), style="cyan")
