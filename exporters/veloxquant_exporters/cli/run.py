"""`vqmon run`: the options; what it does is in `veloxquant_exporters.run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import click

from veloxquant_exporters.cli.completing import files, folders
from veloxquant_exporters.cli.times import Time

__all__ = ["command"]

DEFAULT_PORT: Final = 9464


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    show_default="9464, or none where --snapshot-dir or --otlp-endpoint is given",
    help="Serve /metrics on this port; 0 takes a free one.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help='What to listen on: this machine only, or "::" for every interface.',
)
@click.option(
    "--snapshot-dir",
    "directory",
    metavar="DIR",
    shell_complete=folders,
    envvar="VELOXQUANT_SNAPSHOT_DIR",
    show_envvar=True,
    help="Publish snapshots into this folder, for vqmon serve.",
)
@click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="Push over OTLP, to a collector as in http://localhost:4318.",
)
@click.option(
    "--otlp-interval",
    "otlp_interval_s",
    type=Time(),
    metavar="TIME",
    show_default="60s, or OTEL_METRIC_EXPORT_INTERVAL",
    help="How often to push.",
)
@click.option(
    "--pool",
    "pool_text",
    metavar="SETTINGS",
    help="Charge plain KV caches to a pool, each request as an owner: blocks=N and, if wanted, "
    "block-size=N, separate-kv=yes|no, grow=yes|no, max-blocks=N, name=TEXT.",
)
@click.option(
    "--enforce",
    is_flag=True,
    help="With --pool: answer 503 to requests that arrive when it is over its budget.",
)
@click.option("--no-census", is_flag=True, help="Do not keep count of the live caches.")
@click.option("--quiet", is_flag=True, help="Do not say where the metrics are.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=files)
def command(
    port: int | None,
    host: str,
    directory: str | None,
    otlp_endpoint: str | None,
    otlp_interval_s: float | None,
    pool_text: str | None,
    enforce: bool,
    no_census: bool,
    quiet: bool,
    program: tuple[str, ...],
) -> Callable[[], Any]:
    """Run a program that uses mlx-lm, and watch its memory.

    The program runs in this process as it would by itself: its arguments, input and output,
    signals, exit code and results stay as they are. Every KV cache, the server's prompt cache, all
    requests and the loaded weights are counted, whatever the program is.

    \b
    Example:
      vqmon run -- python -m mlx_lm server --model mlx-community/Llama-3.2-3B-Instruct-4bit
      vqmon run --port 9500 -- mlx_lm.generate --model M --prompt hello
      vqmon run --snapshot-dir /run/vqmon -- python serve.py
      vqmon run --pool blocks=65536,block-size=16 --enforce -- mlx_lm.server --model M

    The pool of --pool is an account, not a limit: a model call never fails for it. Over its budget
    the server's prompt cache is emptied, oldest first, and what is still in excess is counted.

    The exit code is the program's; 1 if an output could not be started, 2 for a command that
    cannot be run here.
    """  # noqa: D301 - \b is click's mark for lines that stay as they are
    from veloxquant_exporters.run import CommandError, OutputSettings, parse_command, start_outputs
    from veloxquant_exporters.run.outputs import OutputError
    from veloxquant_mlx.serving import watch

    try:
        parsed = parse_command(program)
    except CommandError as error:
        raise click.UsageError(str(error)) from None
    if port is None and directory is None and otlp_endpoint is None:
        port = DEFAULT_PORT
    accounting = _accounting(pool_text, enforce)
    settings = OutputSettings(
        port=port,
        host=host,
        directory=directory,
        otlp_endpoint=otlp_endpoint,
        otlp_interval_s=otlp_interval_s,
    )
    try:
        outputs = start_outputs(settings)
    except OutputError as error:
        raise click.ClickException(str(error)) from None
    if not quiet:
        _say(f"vqmon: metrics at {', '.join(outputs.places)}")
    watched = watch(census=not no_census, accounting=accounting)

    def run() -> None:
        from veloxquant_exporters.run import execute

        execute(parsed, shared={point.module for point in watched.patcher.points})

    # Outside of click, which would catch what the program raises.
    return run


def _say(text: str) -> None:
    """Write a line to stderr if there is one, past its buffer: what fails shall not be tried anew."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            os.write(sys.stderr.fileno(), f"{text}\n".encode(errors="backslashreplace"))


def _accounting(text: str | None, enforce: bool) -> Any:
    """What charges the program to a pool of these settings; None without them."""
    from veloxquant_mlx.serving.accounting import PoolSettings, account_for

    if text is None:
        if enforce:
            raise click.UsageError("--enforce needs --pool blocks=...: the budget to enforce")
        return None
    try:
        return account_for(PoolSettings.parse(text), enforce=enforce)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--pool") from None
