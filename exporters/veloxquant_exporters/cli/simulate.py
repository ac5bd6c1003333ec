"""`vqmon simulate`: the options; what it does is in `veloxquant_exporters.simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from veloxquant_exporters.findings import printable
from veloxquant_mlx.telemetry.trace.schema import ALLOCATE_OP

if TYPE_CHECKING:
    from rich.console import Console

    from veloxquant_exporters.simulate import Advice, Result
    from veloxquant_mlx.memory.pool_config import PoolConfig
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["command"]


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic in newer ones
    """Whole numbers by comma, e.g. 8,16,32."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """As a tuple."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part.replace("_", "")) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not whole numbers by comma, e.g. 8,16,32", param, ctx)


class Switches(click.ParamType):  # type: ignore[type-arg]  # as above
    """on, off, or both."""

    name = "switches"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[bool, ...]:
        """As a tuple."""
        if isinstance(value, tuple):
            return value
        words = ["on", "off"] if value == "both" else value.split(",")
        if not set(words) <= {"on", "off"}:
            self.fail(f"{value!r} is neither on, off nor both", param, ctx)
        return tuple(word == "on" for word in words)


# Of the allocations: a prompt now and then ends anywhere, also where blocks are asked for whole.
WHOLE = 0.9
NUMBERS, SWITCHES = Numbers(), Switches()


@click.command("simulate")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--block-size",
    "block_sizes",
    type=NUMBERS,
    metavar="SIZES",
    default="8,16,32,64",
    show_default=True,
    help="Token slots of a block, by comma.",
)
@click.option(
    "--n-blocks",
    type=NUMBERS,
    metavar="NUMBERS",
    default=(),
    show_default="as many token slots as recorded",
    help="Blocks of the pool at the beginning, by comma.",
)
@click.option(
    "--separate-kv",
    type=SWITCHES,
    metavar="on|off|both",
    default=(),
    show_default="as recorded",
    help="Whether keys and values have blocks of their own.",
)
@click.option(
    "--grow",
    type=SWITCHES,
    metavar="on|off|both",
    default=(),
    show_default="as recorded",
    help="Whether the pool may grow.",
)
@click.option(
    "--max-blocks",
    type=NUMBERS,
    metavar="NUMBERS",
    default=(),
    show_default="as many token slots as recorded",
    help="Blocks that it may grow to, by comma.",
)
@click.option(
    "--bytes-per-slot",
    type=click.IntRange(min=1),
    help="Bytes of one token slot, for sizes in bytes: of one layer's keys, heads x head size x "
    "bytes a number. Default: as the recorded pool's storage tells.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    show_default="one a core",
    help="Processes at most.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw a picture into this file: .svg, .png or .pdf.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    trace: Path,
    block_sizes: tuple[int, ...],
    n_blocks: tuple[int, ...],
    separate_kv: tuple[bool, ...],
    grow: tuple[bool, ...],
    max_blocks: tuple[int, ...],
    bytes_per_slot: int | None,
    jobs: int | None,
    plot_path: Path | None,
    as_json: bool,
) -> int:
    """Tell what other pool configurations would have done with a trace.

    Runs each configuration through the recorded calls on a real allocator, and says how much it
    would have held, wasted and refused, and which one to take. A request that finds no room is
    taken to be rejected. `vqmon run` and `record` make traces.

    \b
    Exit codes: 0 done, 1 the file is no trace or cannot be read, 2 wrong usage.

    \b
    Example: vqmon simulate chat.vqtrace
    Example: vqmon simulate chat.vqtrace --block-size 16,32 --separate-kv both --grow both
    Example: vqmon simulate chat.vqtrace --n-blocks 512,1024 --plot sizes.svg
    """  # noqa: D301 - \b is click's mark for lines that stay as they are
    from veloxquant_exporters.simulate import Grid, GridError, advise
    from veloxquant_exporters.simulate.workers import WorkerError
    from veloxquant_mlx.telemetry.trace import TraceError, load_trace

    if plot_path is not None and plot_path.suffix not in (".svg", ".png", ".pdf"):
        raise click.UsageError(f"--plot: {plot_path} must end in .svg, .png or .pdf")
    if plot_path is not None:
        import matplotlib  # noqa: F401, ICN001 - before the work, if it is missing

        plot_path.parent.stat()  # the same
    try:
        loaded = load_trace(trace)
        grid = Grid(block_sizes, n_blocks, separate_kv, grow, max_blocks)
        results = _run(trace, loaded, grid.configs(loaded.header.config), jobs)
    except GridError as error:
        raise click.UsageError(str(error)) from error
    except (TraceError, WorkerError) as error:
        raise click.ClickException(str(error)) from error
    advice = advise(results)
    bytes_per_slot = bytes_per_slot or _recorded_bytes(loaded)
    if plot_path is not None:
        from veloxquant_exporters.simulate.plot import plot

        plot(results, advice, loaded.duration_ns, bytes_per_slot, plot_path)
    if as_json:
        from veloxquant_exporters.simulate.table import as_json as to_json

        click.echo(json.dumps(to_json(results, advice, bytes_per_slot), indent=1))
    else:
        _show(loaded, results, advice, bytes_per_slot)
    return 0


def _run(
    path: Path, trace: Trace, configs: tuple[PoolConfig, ...], jobs: int | None
) -> list[Result]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from veloxquant_exporters.simulate import simulate_all

    console = Console(stderr=True)
    columns = (
        TextColumn(f"{len(configs)} configurations"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=max(1, trace.n_calls * len(configs)))
        return simulate_all(
            path, trace, configs, jobs=jobs, progress=lambda n: bar.update(task, completed=n)
        )


def _show(trace: Trace, results: list[Result], advice: Advice, bytes_per_slot: int | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has no width
        console.width = 140
    # Printed by click: rich takes the end of a pipe for an error of its own.
    with console.capture() as shown:
        _print(console, trace, results, advice, bytes_per_slot)
    click.echo(shown.get(), nl=False)


def _print(
    console: Console,
    trace: Trace,
    results: list[Result],
    advice: Advice,
    bytes_per_slot: int | None,
) -> None:
    from veloxquant_exporters.simulate.table import as_table, config_text, span_text

    more = f", {trace.n_lost} lost in recording" if trace.n_lost else ""
    more += ", cut at its end" if trace.cut else ""
    console.print(
        f"pool {printable(trace.header.pool)}: {trace.n_calls} calls of {trace.n_owners} owners in "
        f"{span_text(trace.duration_ns)}{more}",
        markup=False,
        soft_wrap=True,
    )
    console.print(as_table(results, advice, bytes_per_slot))
    if trace.header.opening.holdings:
        console.print(
            "The trace begins with blocks in use: each configuration begins by handing these out.",
            markup=False,
            soft_wrap=True,
        )
    size = trace.header.config.block_size
    if any(result.config.block_size > size for result in results) and _asks_whole(trace):
        console.print(
            "The program asks for whole blocks. It would ask less often of larger ones, whose "
            "rounding is less than is said here.",
            markup=False,
            soft_wrap=True,
        )
    console.print(f"Recommended: {config_text(advice.best.config)}", markup=False, soft_wrap=True)
    for reason in advice.reasons:
        console.print(f"  {reason}", markup=False, soft_wrap=True)
    if bytes_per_slot is None:
        console.print(
            "  Sizes are in token slots; --bytes-per-slot makes them bytes.", markup=False
        )


def _asks_whole(trace: Trace) -> bool:
    asked = (trace.operation == ALLOCATE_OP) & (trace.tokens > 0)
    whole = trace.tokens[asked] % trace.header.config.block_size == 0
    return bool(len(whole)) and float(whole.mean()) > WHOLE


def _recorded_bytes(trace: Trace) -> int | None:
    """Bytes of a slot as the pool's storage had them; None without a storage."""
    from veloxquant_mlx.telemetry.snapshot_json import SnapshotFormatError, pool_from_dict

    for snapshot in reversed(trace.snapshots):
        try:
            pool = pool_from_dict(snapshot.document)
        except SnapshotFormatError:  # a newer version's, or not to be believed
            continue
        held, stored = pool.blocks_in_use, pool.storage.get("in_use", 0)
        if held and stored:
            return stored // (held * trace.header.config.block_size) or None
    return None
