"""`vqmon demo`: the options; what it does is in `veloxquant_exporters.demo`."""

from __future__ import annotations

import click

from veloxquant_exporters.cli.completing import folders

__all__ = ["command"]


@click.command("demo")
@click.option(
    "--once",
    is_flag=True,
    help="End with a summary when all requests are served. Without it, traffic goes on until Ctrl-C.",
)
@click.option(
    "--requests",
    "n_requests",
    type=click.IntRange(min=1),
    default=36,
    show_default=True,
    help="Requests to serve; without --once, in each round.",
)
@click.option(
    "--at-once",
    "n_at_once",
    type=click.IntRange(1, 64),
    default=6,
    show_default=True,
    help="Requests generated side by side, a token each in turn.",
)
@click.option(
    "--blocks",
    "n_blocks",
    type=click.IntRange(min=2),
    show_default="room for 2048 tokens",
    help="Blocks in the pool. A smaller pool lets more requests wait.",
)
@click.option(
    "--block-size",
    type=click.IntRange(1, 4096),
    default=16,
    show_default=True,
    help="Token slots of a block.",
)
@click.option(
    "--step",
    type=click.IntRange(1, 4096),
    default=256,
    show_default="256, as in mlx-lm",
    help="Tokens by which a cache grows. Smaller steps leave fewer slots empty.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9464,
    show_default=True,
    help="Serve /metrics on this port of 127.0.0.1; 0 takes a free one.",
)
@click.option(
    "--model",
    "model_name",
    metavar="PATH_OR_ID",
    shell_complete=folders,
    help="A model folder or a Hugging Face id that mlx_lm.load takes, instead of the tiny Llama.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Same seed, same requests and same random weights.",
)
@click.option("--plain", is_flag=True, help="Plain lines, also on a terminal.")
def command(
    once: bool,
    n_requests: int,
    n_at_once: int,
    n_blocks: int | None,
    block_size: int,
    step: int,
    port: int,
    model_name: str | None,
    seed: int,
    plain: bool,
) -> int:
    """Serve simulated requests through one pool, and watch it.

    Builds a small Llama with random weights (its text is noise, its memory behaves like any
    model's) or loads --model, and serves requests of mixed lengths through one block pool. A
    request that does not fit waits for room. Shows a live table, and serves the same numbers to
    Prometheus.

    Ctrl-C ends it: with exit code 0, or 130 where --once was not done yet.

    Example: vqmon demo --once --requests 12
    """
    from veloxquant_exporters.demo import Settings, run

    settings = Settings(
        once=once,
        n_requests=n_requests,
        n_at_once=n_at_once,
        n_blocks=n_blocks,
        block_size=block_size,
        step=step,
        port=port,
        model_name=model_name,
        seed=seed,
        plain=plain,
    )
    return run(settings)
