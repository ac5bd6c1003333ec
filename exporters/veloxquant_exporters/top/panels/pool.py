"""One pool in full: streams, operations, rates, owners, holders."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from veloxquant_exporters.top.board import Board, Latency, PoolView
from veloxquant_exporters.top.panels.alerts import alert_rows
from veloxquant_exporters.top.panels.paint import bar, cell, clean, heat, join, rule, sparkline
from veloxquant_exporters.top.panels.pools import pool_heat
from veloxquant_exporters.top.units import amount, count, duration, gigabytes, percent, rate

__all__ = ["detail", "summary"]


def summary(pool: PoolView, width: int) -> list[Text]:
    """The most telling lines first, so that it may be cut at any of them."""
    return [
        rule(_title(pool), width, _config(pool)),
        *_streams(pool, width),
        *_operations(pool),
        _rates(pool),
        *_owners(pool),
        *_blocks(pool),
        _lately(pool, width),
    ]


def detail(board: Board, pool: PoolView, width: int) -> list[Text]:
    """All there is to tell of a pool, with its holders and alerts."""
    rows = summary(pool, width)
    rows += [rule("top holders", width), *_holders(pool)]
    about = [alert for alert in board.alerts if _concerns(alert.process, alert.pool, pool)]
    rows += [rule("alerts", width, "as the rules of this version judge"), *alert_rows(about, width)]
    return rows


def _concerns(process: str, name: str, pool: PoolView) -> bool:
    return process == pool.process and name in ("", pool.name)


def _title(pool: PoolView) -> str:
    return f"{pool.name} of {pool.process}" if pool.process else pool.name


def _config(pool: PoolView) -> str:
    size = f"blocks of {pool.block_size} tokens, " if pool.block_size else ""
    if not pool.may_grow:
        return f"{size}does not grow"
    return size + ("grows without limit" if pool.limit is None else f"grows to {pool.limit:,}")


def _label(text: str) -> Text:
    return cell(text, 10, style="dim")


def _streams(pool: PoolView, width: int) -> list[Text]:
    bar_width = max(6, min(24, width - 56))
    heads = ("in use", bar_width + 5), ("blocks", 13), ("free", 7), ("waste", 6), ("failed", 7)
    head = [_label("stream")]
    head += [cell(heads[0][0], heads[0][1], style="dim")]
    head += [cell(title, size, right=True, style="dim") for title, size in heads[1:]]
    rows = [join(head)]
    for stream in pool.streams:
        share = stream.in_use / stream.managed if stream.managed else 0.0
        style = heat(share) if not pool.may_grow else pool_heat(pool)
        failed = sum(stream.exhausted.values())
        rows.append(
            join(
                [
                    cell(stream.name, 10),
                    bar(share, bar_width, style) + cell(percent(share), 5, right=True),
                    cell(f"{amount(stream.in_use)}/{amount(stream.managed)}", 13, right=True),
                    cell(amount(stream.free), 7, right=True),
                    cell(percent(stream.waste), 6, right=True),
                    cell(amount(failed), 7, right=True, style="red" if failed else ""),
                ]
            )
        )
    return rows


def _operations(pool: PoolView) -> list[Text]:
    titles = ("calls/s", "p50", "p99", "calls")
    rows = [join([_label("operation"), *(cell(t, 8, right=True, style="dim") for t in titles)])]
    for view in pool.operations:
        timed = view.latency
        figures = (rate(view.calls_per_s), duration(timed.p50_s), duration(timed.p99_s))
        row = [cell(view.operation, 10), *(cell(text, 8, right=True) for text in figures)]
        row.append(cell(amount(view.calls), 8, right=True))
        rows.append(join([*row, Text(_when(timed), style="dim")]))
    wait = pool.lock_wait
    row = [cell("lock wait", 10), cell("", 8)]
    row += [cell(duration(q), 8, right=True) for q in (wait.p50_s, wait.p99_s)]
    rows.append(join([*row, cell("", 8), Text(_when(wait), style="dim")]))
    return rows


def _when(timed: Latency) -> str:
    if timed.p99_s is None:
        return "none timed yet"
    return "last minute" if timed.lately else "since start"


def _rates(pool: PoolView) -> Text:
    found = pool.rates
    if found is None:
        return join([_label("rates /s"), "known from the second reading on"])
    named = {
        "alloc": found.allocations,
        "free": found.frees,
        "fail": found.exhaustions,
        "grow": found.grown,
        "retire": found.retired,
    }
    text = ", ".join(f"{name} {rate(value)}" for name, value in named.items())
    return join([_label("rates /s"), text])


def _owners(pool: PoolView) -> list[Text]:
    parts = [f"{count(pool.owners)} active"]
    if pool.owners:
        parts.append(f"the oldest for {duration(pool.oldest_owner_s)}")
    if pool.cached_blocks:
        parts.append(f"{count(pool.cached_blocks)} blocks kept by prompt caches")
    if pool.idle_blocks:
        parts.append(f"{count(pool.idle_blocks)} blocks idle for 5m")
    rows = [join([_label("owners"), ", ".join(parts)])]
    held = pool.lifetime
    if held.p50_s is not None:
        text = f"p50 {duration(held.p50_s)}  p99 {duration(held.p99_s)}  {_when(held)}"
        rows.append(join([_label("held for"), text]))
    return rows


def _blocks(pool: PoolView) -> list[Text]:
    faults = f"{count(pool.rejected)} blocks refused, {count(pool.violations)} invariants broken"
    style = "red" if pool.rejected or pool.violations else ""
    text = f"peak {count(pool.peak)}, {count(pool.partial)} partly filled"
    rows = [join([_label("blocks"), text]), join([_label("integrity"), Text(faults, style=style)])]
    if pool.formats:
        stored = f"  stored in {gigabytes(pool.storage_bytes)}" * (pool.storage_bytes is not None)
        formats = "  ".join(f"{clean(tag)} {n:,}" for tag, n in sorted(pool.formats.items()))
        rows.append(join([_label("formats"), formats + stored]))
    return rows


def _lately(pool: PoolView, width: int) -> Text:
    return join([_label("lately"), Text(sparkline(pool.past, max(10, width - 12)), "cyan")])


def _holders(pool: PoolView) -> Sequence[Text]:
    if not pool.holders:
        text = f"not told: snapshots and pages count owners ({pool.owners:,} here) and name none"
        return [Text(text, style="dim")]
    columns = {
        "blocks": [count(holder.blocks) for holder in pool.holders],
        "share": [percent(holder.blocks / max(pool.in_use, 1)) for holder in pool.holders],
        "for": [duration(holder.age_s) for holder in pool.holders],
    }
    heads = [cell(title, 9, right=True, style="dim") for title in columns]
    rows = [join([cell("owner", 24, style="dim"), *heads])]
    for holder, *figures in zip(pool.holders, *columns.values(), strict=True):
        rows.append(join([cell(holder.owner, 24), *(cell(f, 9, right=True) for f in figures)]))
    return rows
