"""Plain lines, for logs and pipes: no escape codes, a line every two seconds, a summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

import click

from veloxquant_exporters.demo.screen import POOL_NAME, Frame, megabytes

__all__ = ["PlainScreen", "print_summary"]

EVERY_S = 2.0


class PlainScreen:
    """Says what is served, then prints a line when the last one is two seconds old."""

    def __init__(self, look: Callable[[], Frame]) -> None:
        self._look = look
        self._last_s = time.monotonic()

    def __enter__(self) -> Self:
        _print_head(self._look())
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def tick(self) -> None:
        """Print a line if it is time."""
        now_s = time.monotonic()
        if now_s - self._last_s >= EVERY_S:
            self._last_s = now_s
            click.echo(line_of(self._look()))


def line_of(frame: Frame) -> str:
    """A frame as one line of `name=value`."""
    now, pool = frame.progress, frame.figures
    free = ",".join(f"{stream}:{n}" for stream, n in pool.free.items())
    return (
        f"t={frame.elapsed_s:.0f}s round={frame.round} served={frame.served}/{frame.n_requests} "
        f"active={len(now.active)} waiting={now.waiting} tokens={now.output_tokens} "
        f"blocks={pool.in_use}/{pool.n_blocks} free={free} fill={pool.fill:.0%} "
        f"exhausted={pool.exhausted} mlx_active={pool.mlx_active_bytes / 1e6:.1f}MB "
        f"mlx_peak={pool.mlx_peak_bytes / 1e6:.1f}MB"
    )


def _print_head(frame: Frame) -> None:
    """Say what is served, and where its metrics are."""
    click.echo(f"model: {frame.title}")
    if frame.note:
        click.echo(f"note: {frame.note}")
    click.echo(f"pool: {POOL_NAME}, {frame.figures.n_blocks} blocks of {frame.block_size} tokens")
    click.echo(f"metrics: {frame.url}")


def print_summary(frame: Frame, mean_fill: float) -> None:
    """Say how it went."""
    now, pool = frame.progress, frame.figures
    left = len(now.active) + now.waiting
    speed = now.output_tokens / max(frame.elapsed_s, 0.1)
    rows = {
        "model": frame.title + f": {frame.note}" * bool(frame.note),
        "requests": f"{now.served:,} served in {frame.elapsed_s:.1f} s"
        + f", {left:,} not finished" * bool(left),
        "tokens": f"{now.prompt_tokens:,} of prompts, {now.output_tokens:,} generated"
        f" ({speed:,.0f} a second)",
        "blocks": f"{pool.peak:,} of {pool.n_blocks:,} at the peak, {pool.reuse:.0%} reused,"
        f" {pool.in_use:,} still in use",
        "fill": f"{mean_fill:.0%} of the token slots allocated held a token, on average",
        "exhausted": f"{pool.exhausted:,} times a request did not fit, and waited to start anew",
        "MLX memory": f"{megabytes(pool.mlx_active_bytes)} active now,"
        f" {megabytes(pool.mlx_peak_bytes)} at the peak",
    }
    click.echo("")
    for name, text in rows.items():
        click.echo(f"{name:<11} {text}")
